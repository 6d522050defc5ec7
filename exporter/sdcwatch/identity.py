"""Who this rank is: taken once at start, stamped on every event and every series.

Sources, first that is set: the agent's `node.json`, settings (`SDCWATCH_*`), Kubernetes, Slurm, HyperPod's file, the
host name; the instance metadata service only where nothing else names the instance (`node_sources.py`). Two sources
that are set and differ refuse the start, because a page must never name the wrong machine. Standard library only; the
device's own name comes in from `device_name.py`.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sdcwatch import node_sources
from sdcwatch.errors import ConfigurationError, IdentityError
from sdcwatch.settings import Settings

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Identity:
    """One rank's identity. `instance` and `cluster` are empty outside a cloud; `gpu_uuid` is never empty."""

    job: str
    cluster: str
    node: str
    instance: str
    host: str
    gpu_uuid: str
    rank: int
    local_rank: int
    #: The GPU that a MIG slice lies on; empty for a whole GPU.
    gpu_parent: str = ""

    @property
    def node_key(self) -> str:
        """What tells two nodes apart: the instance id where there is one, else node and host name."""
        return self.instance or f"{self.node}/{self.host}"

    def labels(self) -> dict[str, str]:
        """The identity labels of a rank series (docs/contracts.md)."""
        return {
            "training_job": self.job,
            "training_cluster": self.cluster,
            "training_node": self.node,
            "training_instance": self.instance,
            "gpu_uuid": self.gpu_uuid,
            "rank": str(self.rank),
        }

    def record(self) -> dict[str, str]:
        """What the spool keeps beside this rank's files: the labels, and what is no label."""
        return self.labels() | ({"gpu_parent": self.gpu_parent} if self.gpu_parent else {})


@dataclass(frozen=True, slots=True)
class Machine:
    """What one machine is called. `instance` and `cluster` are empty outside a cloud."""

    node: str
    instance: str
    cluster: str
    host: str


def job_name(settings: Settings, environ: Mapping[str, str]) -> str:
    """The job's name, or an error: a default that two jobs share would merge their series.

    Raises:
        ConfigurationError: nothing names the job.
    """
    torchrun = environ.get("TORCHELASTIC_RUN_ID", "")
    name = settings.job or environ.get("SLURM_JOB_NAME") or ("" if torchrun == "none" else torchrun)
    if not name:
        raise ConfigurationError(
            "this job has no name: set SDCWATCH_JOB=<name> (or pass job=, or torchrun --rdzv-id); "
            "two jobs must never share one, since their series would merge"
        )
    return name


def machine(settings: Settings, environ: Mapping[str, str], told: Mapping[str, str] | None = None) -> Machine:
    """What this machine is called.

    Args:
        told: what the agent's `node.json` says; None for the agent itself.

    Raises:
        ConfigurationError: a name with characters that no inventory uses.
        IdentityError: two sources contradict each other.
    """
    agent, host = told or {}, socket.gethostname()
    pod, hyperpod = node_sources.pod_node(environ), node_sources.hyperpod()
    nodes = {
        "node.json": agent.get("node"),
        "SDCWATCH_NODE": settings.node,
        **({f"the pod's {pod[0]}": pod[1]} if pod else {}),
        "SLURMD_NODENAME": environ.get("SLURMD_NODENAME"),
    }
    node = _one("node", nodes) or host
    instances = {
        "node.json": agent.get("instance"),
        "SDCWATCH_INSTANCE": settings.instance,
        f"the node name {node}": node_sources.instance_of_node(node),
        str(node_sources.RESOURCE_CONFIG): hyperpod.get("instance"),
    }
    instance = _one("instance", instances) or node_sources.imds_instance(environ) or ""
    clusters = {
        "node.json": agent.get("cluster"),
        "SDCWATCH_CLUSTER": settings.cluster,
        str(node_sources.RESOURCE_CONFIG): hyperpod.get("cluster"),
    }
    cluster = _one("cluster", clusters) or ""
    for what, value in (("node", node), ("instance", instance), ("cluster", cluster)):
        if value and not _NAME.fullmatch(value):
            raise ConfigurationError(
                f"{what} {value!r} is no name an inventory could hold: letters, digits, . _ - only"
            )
    return Machine(node, instance, cluster, host)


def take(
    settings: Settings,
    *,
    rank: int,
    local_rank: int,
    device_uuid: str | None,
    device_parent: str = "",
    environ: Mapping[str, str] | None = None,
) -> Identity:
    """Collects this rank's identity.

    Args:
        settings: job, cluster, node, instance and gpu_uuid as configured.
        rank, local_rank: as torchrun or Slurm numbers them.
        device_uuid: the device's own UUID (`GPU-...` or `MIG-...`), None on a CPU.
        device_parent: the GPU that a MIG slice lies on.

    Raises:
        ConfigurationError: no job name, or a name with characters that no inventory uses.
        IdentityError: two sources contradict each other.
    """
    environ = os.environ if environ is None else environ
    here = machine(settings, environ, _node_file(settings.spool_dir))
    gpu = settings.gpu_uuid or device_uuid or f"CPU-{here.instance or here.node}-{local_rank}"
    return Identity(
        job=job_name(settings, environ),
        cluster=here.cluster,
        node=here.node,
        instance=here.instance,
        host=here.host,
        gpu_uuid=gpu,
        rank=rank,
        local_rank=local_rank,
        gpu_parent=device_parent if gpu == device_uuid else "",
    )


def _node_file(spool_dir: str) -> dict[str, str]:
    path = Path(spool_dir) / str(os.getuid()) / "node.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise IdentityError(f"{path} cannot be read: {error}; restart the node agent or remove the file") from error
    if not isinstance(content, dict):
        raise IdentityError(f"{path} holds no identity; restart the node agent or remove the file")
    return {k: v for k, v in content.items() if isinstance(v, str)}


def _one(what: str, sources: Mapping[str, str | None]) -> str | None:
    found = {source: value for source, value in sources.items() if value}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{source} says {value}" for source, value in found.items())
        raise IdentityError(f"two sources name this {what} differently: {listed}; correct one of them")
    return next(iter(found.values()), None)
