"""The benchmark's own arithmetic: what a cadence costs, from steps in which other things were measured."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.model import TINY, Transformer, batch_of, loss_fn
from benchmarks.overhead import CPU, MIXED, Watched, parts_of, pooled, share, spread

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


def test_a_spread_holds_its_share_and_narrows_with_more_pairs() -> None:
    """No resample lacks a part, however rare it is."""
    rng = random.Random(3)
    cadence = every(1, 10)
    steps = [(parts_of(n, cadence), 1.0, 1.05 + rng.gauss(0.0, 0.02)) for n in range(320)]
    low, high = spread(steps, cadence)
    assert low < share(steps, cadence) < high
    few_low, few_high = spread(steps[:20], cadence)
    assert high - low < (few_high - few_low) / 2


def test_pairs_of_several_rounds_are_pooled_by_rank() -> None:
    """All pairs count, in order; bits are the same only where they were in every round."""

    def run(second: float, same: bool) -> dict[str, Any]:
        return {
            "seconds": [(1.0, second)], "processor": [(1.0, second)], "parts": [frozenset()], "verdicts": [],
            "same_bits": same, "every": every(1, 10),
        }  # fmt: skip

    first, second = pooled([[run(1.1, True), run(1.2, True)], [run(1.3, True), run(1.4, False)]])
    assert first["seconds"] == [(1.0, 1.1), (1.0, 1.3)]
    assert (first["same_bits"], second["same_bits"]) == (True, False)
    assert second["processor"] == [(1.0, 1.2), (1.0, 1.4)]


#: Whose seconds grow where a part is measured, and only there.
SPENT = {"gradient_checksum": "gradient_checksum", "optimizer": "weight_checksum"}


def measured(rank: int, size: int, spool: str) -> list[tuple[frozenset[str], frozenset[str]]]:
    """(foretold, seen) of twelve steps of a real monitor."""
    torch.manual_seed(0)
    run = Watched(Transformer(TINY), replay_every=0, spool_dir=spool, **MIXED)
    epoch = run.monitor._epoch
    assert epoch is not None
    spent, found = epoch.reporter.seconds, []
    for _ in range(12):
        foretold, before = parts_of(run.count, run.every()), dict(spent)
        run.step(loss_fn, batch_of(TINY, 32, CPU, seed=rank))
        grown = frozenset(part for part, check in SPENT.items() if spent[check] > before[check])
        found.append((foretold & SPENT.keys(), grown))
    run.monitor.close()
    return found


def test_parts_are_foretold_as_a_real_monitor_measures_them(ranks: Any, tmp_path: Path) -> None:
    """The optimizer's part lies a step before the others; a price by the wrong step would be no price."""
    for found in ranks(measured, 2, str(tmp_path)):
        assert [foretold for foretold, _ in found] == [grown for _, grown in found]
        assert {grown for _, grown in found} == {frozenset(), *(frozenset({part}) for part in SPENT)}
