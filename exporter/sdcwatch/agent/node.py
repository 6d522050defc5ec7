"""Which machine this agent speaks for, and `node.json`, from which the ranks on it learn the same.

A name is what the operator, Kubernetes, Slurm, HyperPod or the host says (`sdcwatch.identity`). Standard library only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sdcwatch import durable
from sdcwatch.identity import machine
from sdcwatch.settings import Settings

SCHEMA = 1
NODE_FILE = "node.json"


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
    """The node's identity, from the sources that ranks use, `node.json` apart: that one is written from it.

    Raises:
        ConfigurationError: a name with characters that no inventory uses.
        IdentityError: two sources contradict each other.
    """
    here = machine(settings, os.environ if environ is None else environ)
    return Node(here.cluster, here.node, here.instance, here.host)


def write(user_root: Path, node: Node) -> None:
    """Writes `node.json`, whole or not at all.

    Raises:
        SpoolError: the spool cannot be written.
    """
    record = {"schema": SCHEMA, "cluster": node.cluster, "node": node.node, "instance": node.instance}
    durable.replace_json(user_root / NODE_FILE, {**record, "host": node.host, "time": time.time()})
