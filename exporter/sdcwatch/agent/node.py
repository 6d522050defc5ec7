"""Which machine this agent speaks for, and `node.json`, from which the ranks on it learn the same.

Asks no network and reads no inventory: a name is what the operator, Slurm or the host says. Standard library only.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sdcwatch import durable
from sdcwatch.errors import ConfigurationError
from sdcwatch.settings import Settings

SCHEMA = 1
NODE_FILE = "node.json"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Node:
    """Identity of one machine. `cluster` and `instance` are empty outside a cloud."""

    cluster: str
    node: str
    instance: str
    host: str

    def labels(self) -> dict[str, str]:
        """The identity labels of an agent series."""
        return {"training_cluster": self.cluster, "training_node": self.node, "training_instance": self.instance}


def take(settings: Settings, environ: Mapping[str, str] | None = None) -> Node:
    """The node's identity: settings first, then Slurm's name, then the host's.

    Raises:
        ConfigurationError: a name with characters that no inventory uses.
    """
    slurm = (os.environ if environ is None else environ).get("SLURMD_NODENAME")
    host = socket.gethostname()
    node = Node(settings.cluster, settings.node or slurm or host, settings.instance or "", host)
    for what, value in (("cluster", node.cluster), ("node", node.node), ("instance", node.instance)):
        if value and not _NAME.fullmatch(value):
            raise ConfigurationError(
                f"{what} {value!r} is no name an inventory could hold: letters, digits, . _ - only"
            )
    return node


def write(user_root: Path, node: Node) -> None:
    """Writes `node.json`, whole or not at all.

    Raises:
        SpoolError: the spool cannot be written.
    """
    record = {"schema": SCHEMA, "cluster": node.cluster, "node": node.node, "instance": node.instance}
    durable.replace_json(user_root / NODE_FILE, {**record, "host": node.host, "time": time.time()})
