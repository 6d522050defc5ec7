"""A few random schedules of the whole service; the campaign runs a thousand (`make campaign-remediation`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from sdcwatch_remediation.testing.schedule_events import Happenings
from sdcwatch_remediation.testing.schedule_judge import problems
from sdcwatch_remediation.testing.schedule_world import REPLACE
from sdcwatch_remediation.testing.schedules import describe, run

#: A schedule on the HyperPod API alone, in mode auto.
HYPERPOD_AUTO = 4


@pytest.mark.parametrize(("seed", "road"), [(1, "handover"), (3, "slurm"), (4, "hyperpod"), (5, "eks")])
def test_nothing_is_replaced_twice_or_wrongly_whatever_happens(seed: int, road: str, tmp_path: Path) -> None:
    """Faults, forgeries, provider faults, kills, restarts, two processes: every case ends, and none ends wrongly."""
    result = run(seed, tmp_path)
    assert result.problems == [], describe(result)
    assert result.road == road
    assert result.ends


@pytest.mark.parametrize("seconds", [0.0, 20.0, 70.0], ids=["within the lease", "after it", "longer than any answer"])
@pytest.mark.parametrize("moment", ["commit", "call", "answer"])
def test_a_second_process_amid_a_replace_call_never_makes_another(moment: str, seconds: float, tmp_path: Path) -> None:
    """The first one stands still around its call while the second takes over and moves the case as far as it can."""
    world = Happenings(HYPERPOD_AUTO, tmp_path)
    assert (world.result.road, world.result.mode) == ("hyperpod", "auto")
    first, second = world.processes
    for process in world.processes:
        process.open()
    try:
        world.fault(persistence="persistent")
        world.deliver(world.bodies[-1])
        world.drain()
        here = {"commit": "committed reserve", "call": f"call {REPLACE}", "answer": f"answer {REPLACE}"}[moment]
        for _ in range(20):
            world.advance(5.0)
            world.round(first)
            while not world.result.points[here] and world.turn():
                pass
            if world.result.points[here]:
                break
        assert first.tasks, "the first process stands where it was to stand"
        for _ in range(3):
            world.advance(seconds)
            world.round(second)
            while second.tasks:
                if second.tasks[0].step():
                    second.tasks.pop(0)
        world.drain()
        world.rest()
        assert list(problems(world)) == []
        assert len(world.simulator.calls(REPLACE)) == 1
        assert dict(world.result.ends) == {"closed replaced": 1}
    finally:
        world.close()
