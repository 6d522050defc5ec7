"""A few random schedules of the whole service; the campaign runs a thousand (`make campaign-remediation`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from sdcwatch_remediation.testing.schedules import describe, run


@pytest.mark.parametrize(("seed", "road"), [(1, "handover"), (3, "slurm"), (4, "hyperpod"), (5, "eks")])
def test_nothing_is_replaced_twice_or_wrongly_whatever_happens(seed: int, road: str, tmp_path: Path) -> None:
    """Faults, forgeries, provider faults, kills, restarts, two processes: every case ends, and none ends wrongly."""
    result = run(seed, tmp_path)
    assert result.problems == [], describe(result)
    assert result.road == road
    assert result.ends
