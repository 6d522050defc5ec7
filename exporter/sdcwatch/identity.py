"""Who this rank is: taken once at start, stamped on every event and every series.

Sources, first that is set: the agent's `node.json`, settings (`SDCWATCH_*`), Slurm, the host name. Two sources that
are set and differ refuse the start, because a page must never name the wrong machine. Never asks the network.
Standard library only; the device's own facts come in through `environment.py`.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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


def take(
    settings: Settings, *, rank: int, local_rank: int, device_uuid: str | None, environ: Mapping[str, str] | None = None
) -> Identity:
    """Collects this rank's identity.

    Args:
        settings: job, cluster, node, instance and gpu_uuid as configured.
        rank, local_rank: as torchrun or Slurm numbers them.
        device_uuid: the device's own UUID (`GPU-...`), None on a CPU.

    Raises:
        ConfigurationError: no job name, or a name with characters that no inventory uses.
        IdentityError: two sources contradict each other.
    """
    environ = os.environ if environ is None else environ
    host = socket.gethostname()
    told = _node_file(settings.spool_dir)
    node = _one(
        "node",
        {
            "node.json": told.get("node"),
            "SDCWATCH_NODE": settings.node,
            "SLURMD_NODENAME": environ.get("SLURMD_NODENAME"),
        },
    )
    instance = _one("instance", {"node.json": told.get("instance"), "SDCWATCH_INSTANCE": settings.instance}) or ""
    cluster = _one("cluster", {"node.json": told.get("cluster"), "SDCWATCH_CLUSTER": settings.cluster}) or ""
    node = node or host
    for what, value in (("node", node), ("instance", instance), ("cluster", cluster)):
        if value and not _NAME.fullmatch(value):
            raise ConfigurationError(
                f"{what} {value!r} is no name an inventory could hold: letters, digits, . _ - only"
            )
    gpu = settings.gpu_uuid or device_uuid or f"CPU-{instance or node}-{local_rank}"
    return Identity(
        job=job_name(settings, environ),
        cluster=cluster,
        node=node,
        instance=instance,
        host=host,
        gpu_uuid=gpu,
        rank=rank,
        local_rank=local_rank,
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
