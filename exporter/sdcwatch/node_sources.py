"""Who is this machine? What Kubernetes, Slurm, HyperPod and EC2 say, each read in its own form.

Reads an environment, a file and, only on an EC2 machine that nothing else named, the instance metadata service, for a
second at most and past every proxy. Decides nothing: `identity.py` compares what was found. Standard library only.

Forms: Kubernetes' downward API gives `spec.nodeName`; on HyperPod with EKS that is `hyperpod-` and the instance id.
HyperPod writes `/opt/ml/config/resource_config.json` on each of its machines (SageMaker guide, life-cycle
configuration). IMDSv2 is described in the EC2 user guide, "Use the Instance Metadata Service".
"""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: HyperPod's file: ClusterConfig.ClusterName, and InstanceGroups[].Instances[] with InstanceId and CustomerIpAddress.
RESOURCE_CONFIG = Path("/opt/ml/config/resource_config.json")
#: The firmware of an EC2 machine names its maker here; a laptop's names another, and is never asked over a network.
VENDOR_FILE = Path("/sys/devices/virtual/dmi/id/sys_vendor")
IMDS = "http://169.254.169.254"
#: Seconds for each of the two requests; in a container whose hop limit is 1 there is no answer at all.
IMDS_SECONDS = 0.5

#: Where pods are usually given `spec.nodeName`; read only in a pod, since the names are common words.
_POD_NODE_NAMES = ("NODE_NAME", "K8S_NODE_NAME", "KUBE_NODE_NAME", "MY_NODE_NAME")
_INSTANCE = re.compile(r"i-[0-9a-f]{8,17}", re.ASCII)
_CONFIG_BYTES = 64 << 20


def pod_node(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """(variable, node name) where this is a pod that was told its node's name."""
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return None
    return next(((name, environ[name]) for name in _POD_NODE_NAMES if environ.get(name)), None)


def instance_of_node(node: str | None) -> str | None:
    """The instance id in a HyperPod node's name in Kubernetes, `hyperpod-i-...`; None in any other name."""
    rest = (node or "").removeprefix("hyperpod-")
    return rest if node and rest != node and _INSTANCE.fullmatch(rest) else None


def hyperpod(path: Path = RESOURCE_CONFIG, addresses: Sequence[str] | None = None) -> dict[str, str]:
    """`instance` and `cluster` of this machine from HyperPod's file; empty where it does not say.

    Only the entry with one of this machine's own addresses counts: entries of peers may be of instances that were
    replaced since. A file that is not there, cannot be read, or has no or several such entries says nothing.
    """
    try:
        if path.stat().st_size > _CONFIG_BYTES:
            return {}
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        own = set(own_addresses() if addresses is None else addresses)
        found = [
            str(entry["InstanceId"])
            for group in content["InstanceGroups"]
            for entry in group["Instances"]
            if entry.get("CustomerIpAddress") in own
        ]
        cluster = str(content["ClusterConfig"]["ClusterName"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {"instance": found[0], "cluster": cluster} if len(found) == 1 and _INSTANCE.fullmatch(found[0]) else {}


def own_addresses() -> list[str]:
    """Addresses that this host's name resolves to, and the one that its default route uses. Nothing is sent."""
    found: set[str] = set()
    try:
        found |= {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("10.254.254.254", 9))  # a datagram socket only chooses a route
            found.add(str(probe.getsockname()[0]))
    except OSError:
        pass  # a host without a name or a route: what was found until here is all there is
    return sorted(found)


def imds_instance(environ: Mapping[str, str], vendor_file: Path = VENDOR_FILE) -> str | None:
    """This EC2 machine's instance id over IMDSv2; None where this is no such machine, or nothing answers in time.

    `AWS_EC2_METADATA_DISABLED` and `AWS_EC2_METADATA_SERVICE_ENDPOINT` mean what they mean to the AWS SDKs.
    """
    endpoint = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "").rstrip("/")
    if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true" or not (endpoint or _is_ec2(vendor_file)):
        return None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    base = endpoint or IMDS
    try:
        asked = urllib.request.Request(
            f"{base}/latest/api/token", method="PUT", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        )
        with opener.open(asked, timeout=IMDS_SECONDS) as answer:
            token = answer.read(256).decode("ascii")
        asked = urllib.request.Request(
            f"{base}/latest/meta-data/instance-id", headers={"X-aws-ec2-metadata-token": token}
        )
        with opener.open(asked, timeout=IMDS_SECONDS) as answer:
            found = answer.read(64).decode("ascii").strip()
    except (OSError, ValueError):
        return None
    return found if _INSTANCE.fullmatch(found) else None


def _is_ec2(vendor_file: Path) -> bool:
    try:
        return vendor_file.read_text(encoding="utf-8", errors="replace").strip() == "Amazon EC2"
    except OSError:
        return False
