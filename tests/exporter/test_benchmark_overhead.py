"""The benchmark's own arithmetic: what a cadence costs, from steps in which other things were measured."""

from __future__ import annotations

import random

import pytest

from benchmarks.overhead import parts_of, share

COSTS = {"gradient_checksum": 0.02, "optimizer": 0.03, "allreduce_conservation": 0.08}


def every(checks: int, conservation: int) -> dict[str, int]:
    return {"gradient_checksum": checks, "weight_checksum": checks, "allreduce_conservation": conservation}


def test_a_cadence_costs_its_parts_as_often_as_they_come() -> None:
    """Measured while the cadence changed, some steps disturbed by others: no bias."""
    rng = random.Random(5)
    steps = []
    for count in range(60):
        parts = parts_of(count, every(1, 10) if count < 14 else every(2, 20))
        disturbed = rng.uniform(0.1, 0.5) if rng.random() < 0.15 else rng.gauss(0.0, 0.001)
        steps.append((parts, 1.0, 1.004 + sum(COSTS[part] for part in parts) + disturbed))
    assert share(steps, every(2, 20)) == pytest.approx(0.004 + 0.05 / 2 + 0.08 / 20, abs=0.002)
    assert share(steps, every(4, 40)) == pytest.approx(0.004 + 0.05 / 4 + 0.08 / 40, abs=0.002)


def test_a_part_that_was_never_measured_is_no_number() -> None:
    """A cadence with conservation cannot be priced from steps without it."""
    steps = [(parts_of(count, every(1, 0)), 1.0, 1.05) for count in range(20)]
    with pytest.raises(ValueError, match="allreduce_conservation"):
        share(steps, every(1, 10))
