"""The budget: cadences stretch by what was measured, replay first, the same on all ranks, and it is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sdcwatch.settings import Settings
from sdcwatch.watch.budget import MOST_CHECKS, MOST_CONSERVATION, MOST_REPLAY, Budget, Cadences, Costs, Stretch, least
from sdcwatch.watch.clock import Clock

SETTINGS = Settings(check_every=1, conservation_every=10, replay_every=200, max_overhead=0.02)

MOST = Stretch(MOST_CHECKS, MOST_CONSERVATION, MOST_REPLAY)


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (Costs(step=1.0, checks=0.01, conservation=0.05, replay=0.5), Stretch()),
        (Costs(step=1.0, checks=0.01, conservation=0.05, replay=1.5), Stretch(replay=1)),
        (Costs(step=1.0, checks=0.01, conservation=0.12, replay=1.5), Stretch(conservation=1, replay=1)),
        (Costs(step=1.0, checks=0.03, conservation=0.05, replay=0.5), Stretch(checks=1, conservation=1, replay=0)),
        (Costs(step=1.0, checks=9.0, conservation=9.0, replay=900.0), MOST),
    ],
    ids=["fits", "replay first", "then conservation", "then all", "nothing fits"],
)  # fmt: skip
def test_the_least_stretch_that_fits_is_taken_and_replay_gives_way_first(costs: Costs, expected: Stretch) -> None:
    """Checks of every step stay as they are while stretching the costly ones is enough."""
    found = least(SETTINGS, costs, SETTINGS.max_overhead)
    assert found == expected
    if expected != MOST:
        assert costs.share(Cadences.of(SETTINGS, found)) <= SETTINGS.max_overhead


def test_stretched_cadences_stay_multiples_of_the_check_cadence() -> None:
    """An audit is judged together with the gradient checks, so it may only fall on a checked backward."""
    settings = dataclasses.replace(SETTINGS, check_every=3, conservation_every=10, replay_every=0)
    for checks in range(4):
        cadences = Cadences.of(settings, Stretch(checks, 1, 2))
        assert cadences.conservation % cadences.checks == 0
        assert cadences.replay == 0, "off stays off"


def feed(budget: Budget, spent: dict[str, float], steps: int, *, checks: float, step: float) -> None:
    """`steps` intervals that take `step` seconds without us and `checks` seconds of checks."""
    for number in range(steps):
        spent["gradient_checksum"] += checks
        feed.now += step + checks  # type: ignore[attr-defined]
        budget.interval(feed.now, checked=True, conserved=False, audited=number == 0)  # type: ignore[attr-defined]


def test_a_stretch_comes_from_medians_and_is_given_back_only_with_room_to_spare() -> None:
    """One slow step moves nothing; cadences do not swing between two values."""
    feed.now = 0.0  # type: ignore[attr-defined]
    spent = {"gradient_checksum": 0.0, "replay": 0.0}
    budget = Budget(dataclasses.replace(SETTINGS, conservation_every=0, replay_every=0), spent)
    feed(budget, spent, 6, checks=0.01, step=1.0)
    assert budget.wanted(Stretch()) == Stretch(), "too little was seen"
    feed(budget, spent, 12, checks=0.01, step=1.0)
    feed(budget, spent, 1, checks=5.0, step=1.0)
    assert budget.wanted(Stretch()) == Stretch()
    feed(budget, spent, 40, checks=0.03, step=1.0)
    assert budget.wanted(Stretch()) == Stretch(checks=1)
    feed(budget, spent, 40, checks=0.016, step=1.0)
    assert budget.wanted(Stretch(checks=1)) == Stretch(checks=1), "it would fit, but only just"
    feed(budget, spent, 40, checks=0.005, step=1.0)
    assert budget.wanted(Stretch(checks=1)) == Stretch()


def test_a_share_just_inside_the_budget_leaves_no_room_for_what_a_clock_does_not_see() -> None:
    """Hooks' dispatch and emptied caches cost, too: what our own clock saw must stay clear of the bound."""
    for seen, expected in ((0.0185, Stretch(checks=1)), (0.0175, Stretch())):
        feed.now = 0.0  # type: ignore[attr-defined]
        spent = {"gradient_checksum": 0.0}
        budget = Budget(dataclasses.replace(SETTINGS, conservation_every=0, replay_every=0), spent)
        feed(budget, spent, 20, checks=seen, step=1.0)
        assert budget.wanted(Stretch()) == expected


def test_no_budget_stretches_nothing() -> None:
    """0 is off, whatever the checks cost."""
    feed.now = 0.0  # type: ignore[attr-defined]
    spent = {"gradient_checksum": 0.0}
    budget = Budget(dataclasses.replace(SETTINGS, max_overhead=0), spent)
    feed(budget, spent, 60, checks=3.0, step=1.0)
    assert budget.wanted(Stretch()) == Stretch()


class Tape:
    """A device's time line that is some marks behind the host."""

    def __init__(self) -> None:
        self.marks: Iterator[int] = iter(range(100))
        self.reached = -1

    def mark(self) -> int:
        return next(self.marks)

    def passed(self, mark: int) -> bool:
        return mark <= self.reached

    def between(self, begin: int, end: int) -> float:
        return float(end - begin)


def test_work_on_a_device_is_counted_once_it_has_passed_and_never_waited_for() -> None:
    """Nested work counts for the inner name alone; nothing is reported before the device came to it."""
    tape, spent = Tape(), []
    clock = Clock(torch.device("cpu"), lambda check, seconds: spent.append((check, seconds)), tape)
    with clock.timed("gradient_checksum"), clock.timed("replay"):
        pass  # marks 0, 1, 2, 3
    assert spent == []
    tape.reached = 2
    clock.collect()
    assert spent == [("replay", 1.0)]
    tape.reached = 3
    clock.collect()
    assert spent == [("replay", 1.0), ("gradient_checksum", 2.0)]


def _train(rank: int, size: int, spool: str, steps: int) -> dict[str, Any]:
    from sdcwatch import Monitor
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    monitor = Monitor(
        ddp, optimizer, loss_fn=lambda model, batch: model(batch).square().mean(), spool_dir=spool, node=f"n{rank}",
        max_overhead=0.02, replay_every=4, conservation_every=2,
    )  # fmt: skip
    ran = []
    for step in range(steps):
        with monitor.step(step) as s:
            s.loss(torch.full((2, 8), (rank + step) / 100)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert monitor._epoch is not None
        ran.append(monitor._epoch.cadences)
    metrics = monitor._epoch.reporter.metrics
    every = {check: metrics.get("sdc_check_every", check=check) for check in ("gradient_checksum", "replay")}
    monitor.close()
    weights = [p.detach().clone().tolist() for p in ddp.parameters()]
    return {"ran": ran, "every": every, "verdicts": monitor.verdicts, "weights": weights}


def test_ranks_stretch_to_the_same_cadences_at_the_same_step_and_say_so(
    ranks: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A step of microseconds cannot afford a check a step: real ranks agree to check less often, and run on clean."""
    results = ranks(_train, 3, str(tmp_path / "spool"), 60)
    assert results[0]["ran"] == results[1]["ran"] == results[2]["ran"]
    first, last = results[0]["ran"][0], results[0]["ran"][-1]
    assert first == Cadences(1, 2, 4)
    assert last.checks > 1
    assert last.replay > 4
    assert results[0]["every"] == {"gradient_checksum": last.checks, "replay": last.replay}
    assert all(result["verdicts"] == () for result in results)
    assert results[0]["weights"] == results[1]["weights"] == results[2]["weights"]
    assert "to keep to max_overhead=0.02, cadences are now" in capfd.readouterr().err
