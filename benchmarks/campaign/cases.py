"""The list of faults: a full cross of place, pattern, mode, precision and world size, and rows of their own.

Pure: the same seed gives the same list. Layouts, ranks, parameters and optimizers go round, so that each meets each.
Flow: **cases** -> pool -> training -> score.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sdcwatch.testing import LOCATIONS, PATTERNS

#: World size -> ranks on each node.
LAYOUTS: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((1, 1), (2,), (1, 1)),
    3: ((1, 1, 1), (2, 1), (1, 1, 1)),
    4: ((1, 1, 1, 1), (2, 2), (2, 1, 1)),
    5: ((1, 1, 1, 1, 1), (2, 2, 1), (3, 1, 1)),
}
PRECISIONS = ("fp32", "bf16 autocast")
#: The injector's `once` is the row of one training run with `call=0`.
MODES = ("persistent", "intermittent", "transient")
COMPUTE = ("forward", "backward")
#: Places whose faults only a replay can show.
REPLAYED = ("input_batch", *COMPUTE, "local_gradient")
REDUCE = ("ring_forward", "tree_forward", "reduced_gradient", "reduced_gradient_some", "reduced_gradient_all")
SEED = 20260504

#: Rows of the table beside the cross.
CROSS, OTHER_RUN, OFF_AUDIT, FROM_START, ON_DISK = (
    "cross",
    "one run only",
    "between audits",
    "from step 0",
    "on disk",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One injected fault and the run around it.

    Attributes:
        group: the part of the list that it belongs to.
        nodes: ranks on each node; rank numbers go node by node.
        steps, replay_every, conservation_every: length and cadences of the run (the gradient and weight checks run at
            every step).
    """

    group: str
    world: int
    nodes: tuple[int, ...]
    precision: str
    optimizer: str
    location: str
    pattern: str
    mode: str
    rank: int
    step: int
    parameter: int
    seed: int
    call: int | None = None
    hop: int = 0
    steps: int = 5
    replay_every: int = 3
    conservation_every: int = 10

    @property
    def key(self) -> str:
        """What the journal knows this case by."""
        return "|".join(str(getattr(self, f.name)) for f in dataclasses.fields(self))

    @property
    def node_of(self) -> tuple[int, ...]:
        """Node number of each rank."""
        return tuple(node for node, count in enumerate(self.nodes) for _ in range(count))

    @property
    def fault(self) -> dict[str, Any]:
        """The fields of `sdcwatch.testing.Fault`."""
        names = ("location", "pattern", "mode", "rank", "step", "parameter", "seed", "call", "hop")
        return {name: getattr(self, name) for name in names}


def _cadences(location: str) -> dict[str, int]:
    if location in REPLAYED:
        return {"steps": 5, "replay_every": 2}
    return {"steps": 5, "replay_every": 3, "conservation_every": 1 if location in REDUCE else 10}


class _Rounds:
    """Goes through layouts, ranks and the rest, each world on its own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._made = itertools.count()
        self._of: dict[int, Iterator[int]] = {world: itertools.count() for world in LAYOUTS}

    def case(self, group: str, world: int, **fields: Any) -> Case:
        number = next(self._of[world])
        layouts = LAYOUTS[world]
        own: dict[str, Any] = {
            "nodes": layouts[number % len(layouts)],
            "rank": number // len(layouts) % world,
            "parameter": number % 4,
            "optimizer": ("adamw", "sgd")[number // 2 % 2],
            "precision": PRECISIONS[number % 2],
            "hop": number // 5,
            "seed": self._seed + next(self._made),
        }
        return Case(group=group, world=world, **{**own, **_cadences(fields["location"]), **fields})


def fault_list(seed: int = SEED) -> list[Case]:
    """All cases that run on ranks, in an order in which any beginning is a fair sample."""
    rounds, cases = _Rounds(seed), []
    for location, pattern, mode, precision, world in itertools.product(LOCATIONS, PATTERNS, MODES, PRECISIONS, LAYOUTS):
        fields = {"location": location, "pattern": pattern, "mode": mode, "precision": precision}
        cases.append(rounds.case(CROSS, world, step=2, **fields))
    some = ("bit_flip", "percent", "strided", "stuck_at")
    for location, pattern, world in itertools.product(COMPUTE, some, LAYOUTS):
        fields = {"location": location, "pattern": pattern}
        for call in (0, 1, 2) if world > 2 else ():
            cases.append(rounds.case(OTHER_RUN, world, step=2, mode="transient", call=call, **fields))
        cases.append(rounds.case(OFF_AUDIT, world, step=3, mode="transient", **fields))
        cases.append(rounds.case(FROM_START, world, step=0, mode="persistent", **fields))
    for location, pattern, world in itertools.product(("optimizer_weight", "weights_at_rest"), some, LAYOUTS):
        fields = {"location": location, "pattern": pattern}
        cases.append(rounds.case(FROM_START, world, step=0, mode="persistent", **fields))
    random.Random(seed).shuffle(cases)
    return cases


def quick_list(seed: int = SEED) -> list[Case]:
    """Some dozen cases: every place at 3 and 4 ranks, two patterns each, and two each of the other moments."""
    cases = fault_list(seed)
    found = []
    for location, world in itertools.product(LOCATIONS, (3, 4)):
        fits = [c for c in cases if (c.group, c.location, c.world, c.mode) == (CROSS, location, world, "persistent")]
        found += fits[:2]
    for group in (OTHER_RUN, FROM_START):
        some = [c for c in cases if c.group == group and c.location in COMPUTE and c.world == 4]
        fits = [c for c in some if len(c.nodes) > 2 and c.precision == "fp32" and not c.call]
        found += fits[:2]
    return found
