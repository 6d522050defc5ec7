"""A real Slurm controller with three emulated nodes, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sdcwatch_remediation.testing.slurm import SlurmCluster


@pytest.fixture
def slurm(require: Callable[[str], Path]) -> Iterator[SlurmCluster]:
    """Three idle nodes n1 to n3, each with four CPUs, under one controller on loopback."""
    with SlurmCluster(require("slurmctld")) as cluster:
        yield cluster
