"""Prints /etc/sdcwatch/node.env of a HyperPod node: who this machine is, from HyperPod's own resource file.

    python3 hyperpod_node_env.py > /etc/sdcwatch/node.env

Run it as root in the life-cycle script. It asks no network, and prints nothing
rather than a guess. Standard library only.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

RESOURCES = Path("/opt/ml/config/resource_config.json")
_INSTANCE = re.compile(r"i-[0-9a-f]{8,17}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?", re.ASCII)


class UnknownNode(Exception):
    """The file does not say who this machine is; the message says what was looked for."""


def environment(resources: Any, addresses: list[str], node: str) -> str:
    """The file's text.

    Args:
        resources: the decoded resource file.
        addresses: this machine's own addresses.
        node: its Slurm NodeName, which on HyperPod is its host name.

    Raises:
        UnknownNode: none or several instances have one of these addresses, or a name has an odd form.
    """
    try:
        cluster = resources["ClusterConfig"]["ClusterName"]
        found = [
            (instance["InstanceId"], instance["CustomerIpAddress"])
            for group in resources["InstanceGroups"]
            for instance in group["Instances"]
            if instance.get("CustomerIpAddress") in addresses
        ]
    except (KeyError, TypeError) as error:
        raise UnknownNode(f"the resource file has no {error}") from error
    if len(found) != 1:
        raise UnknownNode(f"{len(found)} instances have one of the addresses {', '.join(addresses)}")
    ((instance_id, address),) = found
    if not (_INSTANCE.fullmatch(instance_id) and _NAME.fullmatch(cluster) and _NAME.fullmatch(node)):
        raise UnknownNode(f"instance {instance_id!r}, cluster {cluster!r} or node {node!r} is no name")
    lines = {
        "SDCWATCH_AGENT_HOST": str(ipaddress.ip_address(address)),
        "SDCWATCH_NODE": node,
        "SDCWATCH_INSTANCE": instance_id,
        "SDCWATCH_CLUSTER": cluster,
    }
    return "".join(f"{name}={value}\n" for name, value in lines.items())


def own_addresses() -> list[str]:
    """The addresses that this host's name resolves to, and the one that its default route uses."""
    found = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.254.254.254", 9))  # a datagram socket only chooses a route; nothing is sent
        found.add(str(probe.getsockname()[0]))
    return sorted(found)


def main() -> int:
    """0: printed; 1: this machine could not be found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--resources", type=Path, default=RESOURCES, help=f"default: {RESOURCES}")
    parser.add_argument("--address", help="this machine's address in the cluster (default: its own)")
    arguments = parser.parse_args()
    try:
        addresses = [arguments.address] if arguments.address else own_addresses()
        text = environment(json.loads(arguments.resources.read_text(encoding="utf-8")), addresses, socket.gethostname())
    except (OSError, ValueError, UnknownNode) as error:
        print(f"hyperpod_node_env: {error}", file=sys.stderr)
        return 1
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
