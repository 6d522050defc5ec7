"""Random schedules of everything that can happen to the service, on a virtual clock, repeatable by their seed.

What it does: `run(seed)` chooses what happens in a `schedule_world` and has it judged. Most schedules are `aimed`: one
true fault is rung for at once and the way to its replacement is kept open, so that kills, provider's faults, repeated
alerts and other people meet the act; `mixed` and `wild` ones let more get in the way.
What it never does: choose by anything but the seed.
Its place: the campaign `make campaign-remediation`, and a few seeds of it in the core tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from sdcwatch_remediation.testing.schedule_events import Happenings
from sdcwatch_remediation.testing.schedule_judge import problems
from sdcwatch_remediation.testing.schedule_world import Result

TEMPERS = {"aimed": 7, "mixed": 2, "wild": 1}
"""How many of ten schedules are of each temper."""
STEPS = {"aimed": 40, "mixed": 50, "wild": 50}

ROUNDS = 16
"""Rounds after the steps of an aimed one, with a kill at work that leads to the act in many of them."""

_WEIGHTS = {
    # what:       aimed, mixed, wild
    "round": (34, 26, 20),
    "time": (22, 16, 12),
    "again": (6, 5, 4),
    "decide": (9, 7, 5),
    "unhold": (5, 4, 1),
    "provider": (6, 6, 5),
    "kill": (9, 8, 5),
    "restart": (2, 2, 1),
    "forge": (1, 1, 1),
    "lie": (1, 1, 1),
    "others": (1, 2, 2),
    "owner": (2, 2, 2),
    "stop": (3, 3, 2),
    "fault": (0, 1, 2),
    "other job": (1, 1, 1),
    "two named": (0, 1, 1),
    "long time": (0, 1, 2),
}
_SHORT = (0.5, 5.0, 5.0, 11.0, 11.0, 16.0, 20.0, 40.0)
_LONG = (61.0, 300.0, 1900.0)


def run(seed: int, folder: Path) -> Result:
    """Run one schedule in an empty folder and judge it."""
    world = Happenings(seed, folder)
    world.result.temper = world.random.choices(list(TEMPERS), list(TEMPERS.values()))[0]
    menu = _menu(world)
    column = list(TEMPERS).index(world.result.temper)
    weights = [_WEIGHTS[name][column] for name in menu]
    try:
        for process in world.processes:
            process.open()
        _begin(world)
        for _ in range(STEPS[world.result.temper]):
            name = world.random.choices(list(menu), weights)[0]
            world.result.trace.append(f"{world.clock():.3f} {name}")
            menu[name]()
            if world.random.random() < 0.6:
                world.drain()
            for _ in range(world.random.randrange(20)):
                world.turn()
            for process in world.processes:
                if not process.up and world.random.random() < 0.5:
                    process.open()
        if world.result.temper == "aimed":
            world.go_on(ROUNDS)
        world.rest()
        world.result.problems += problems(world)
    finally:
        world.close()
    return world.result


def _begin(world: Happenings) -> None:
    """Let the first fault happen: one node, persistent, or twice transient where that is needed."""
    if world.result.temper != "aimed" and world.random.random() < 0.4:
        # Alone, so that no true fault of the same job freezes what the lie would lead to.
        world.fault(lie=True, persistence="persistent")
        world.deliver(world.bodies[-1])
        for _ in range(8):
            world.advance(5.0)
            world.round()
            world.drain()
    elif world.result.temper != "aimed":
        world.fault()
    elif world.random.random() < 0.8:
        world.fault(persistence="persistent")
        world.deliver(world.bodies[-1])
    else:
        world.fault(persistence="transient")
        world.deliver(world.bodies[-1])
        for _ in range(6):
            world.advance(5.0)
            world.round()
            world.drain()
        world.fault(persistence="transient", again=next(iter(world.blamed)))


def _menu(world: Happenings) -> dict[str, Callable[[], None]]:
    aimed = world.result.temper == "aimed"
    return {
        "round": lambda: world.rounds() if world.random.random() < 0.3 else world.round(),
        "time": lambda: world.advance(world.random.choice(_SHORT)),
        "again": world.again,
        "decide": lambda: world.decide(yes=0.92 if aimed else 0.7),
        "unhold": world.unhold,
        "provider": world.provider_fault,
        "kill": world.kill,
        "restart": world.restart,
        "forge": world.forge,
        "lie": lambda: world.fault(lie=True),
        "others": world.others_act,
        "owner": world.owner,
        "stop": world.stop,
        "fault": world.fault,
        "other job": lambda: world.fault(job="other"),
        "two named": lambda: world.fault(suspects=2),
        "long time": lambda: world.advance(world.random.choice(_LONG)),
    }


def describe(result: Result) -> str:
    """Return one result as one JSON line."""
    return json.dumps(
        {
            "seed": result.seed,
            "mode": result.mode,
            "road": result.road,
            "temper": result.temper,
            "problems": result.problems,
            "ends": dict(result.ends),
        }
    )
