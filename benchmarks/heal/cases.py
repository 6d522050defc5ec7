"""What the campaign lives through: one `Case` a run. Pure values. Flow: **cases** -> lived -> document.

Audits run on steps 0, 3, 6, 9 where a case says nothing else, and a checkpoint is written after 1, 3, 5, 7, 9, 11.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

STEPS = 12
REPLAY_EVERY = 3
#: A step without an audit, after which a checkpoint is written; and one with an audit.
BETWEEN, AUDITED = 5, 6

COMPUTE = ("forward", "backward", "local_gradient", "input_batch")
REDUCE = ("reduced_gradient", "reduced_gradient_some", "reduced_gradient_all")
STATE = ("optimizer_weight", "weights_at_rest", "optimizer_state", "optimizer_state_at_rest")
#: More lives than any run has.
MOST = 99
FAULT, BEGINS, KILL = "fault", "begins", "kill"


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        section: `fault`, `begins` (a fault that begins between two audits, a checkpoint before the next) or `kill`.
        name, when, on_fault, size: what the table says.
        faults: fields of `Fault`, of the first `bad_lives` lives: then the bad node is replaced.
        kill: `{"during", "ranks", "step"}`, see `traps`.
        rot: the first life ends early, as a preempted one, and its newest checkpoint rots before the second.
        trust: what a resume asks of a checkpoint, beyond what the latch asks.
        blind: nothing is there that could prove this fault; its final weights are wrong. Otherwise they must be right.
    """

    section: str
    name: str
    when: str
    on_fault: str
    size: int
    faults: tuple[dict[str, Any], ...] = ()
    kill: dict[str, Any] | None = None
    ranks_per_node: int = 1
    replay_every: int = REPLAY_EVERY
    rot: bool = False
    trust: str = "checked"
    bad_lives: int = 1
    blind: bool = False

    @property
    def key(self) -> str:
        """Its name in the journal."""
        return "|".join((self.section, self.name, self.when, self.on_fault, str(self.size)))


def all_cases(sizes: Sequence[int]) -> list[Case]:
    """All of them, in the order of the tables."""
    found: list[Case] = []
    for on_fault in ("heal", "halt"):
        for size in sizes:
            found += of_faults(on_fault, size)
    for size in sizes:
        found += of_beginnings(size)
        found += of_kills(size)
    return found


def of_faults(on_fault: str, size: int) -> Iterator[Case]:
    """Every place of the injector, and a checkpoint's bytes."""
    for place in (*STATE, *REDUCE):
        yield from _twice(place, on_fault, size, _fault(place), "transient" if place in STATE else "once")
    # What one rank passes on: in the first half of a collective all ranks come to hold it, in the second only some.
    for name, place, rank, hop in (
        ("ring_forward, first half", "ring_forward", 1, 0),
        ("ring_forward, second half", "ring_forward", 1, size - 1),
        ("tree_forward, up", "tree_forward", 1, 0),
        ("tree_forward, down", "tree_forward", 0, 0),
    ):
        yield from _twice(name, on_fault, size, {**_fault(place), "rank": rank, "hop": hop}, "once")
    for place in COMPUTE:
        once = {**_fault(place), "mode": "once"}
        yield Case(FAULT, place, "once, audited step", on_fault, size, ({**once, "step": AUDITED},))
        yield Case(FAULT, place, "once, between audits", on_fault, size, (once,), blind=True)
        yield Case(FAULT, place, "persistent", on_fault, size, (_fault(place),))
    yield Case(FAULT, "checkpoint bytes", "persistent", on_fault, size, rot=True)


def _fault(place: str) -> dict[str, Any]:
    # Before a batch norm a bias has a gradient of rounding noise: what is wrong there alike on all ranks no sum shows.
    alike = place in ("reduced_gradient_all", "ring_forward", "tree_forward")
    return {"location": place, "rank": 1, "pattern": "scale", "parameter": int(not alike), "step": BETWEEN}


def _twice(name: str, on_fault: str, size: int, fault: dict[str, Any], mode: str) -> Iterator[Case]:
    yield Case(FAULT, name, "once", on_fault, size, ({**fault, "mode": mode},))
    yield Case(FAULT, name, "persistent", on_fault, size, (fault,))


def of_beginnings(size: int) -> Iterator[Case]:
    """A persistent compute fault begins after one audit; checkpoints are written before the next one shows it."""
    for every, steps in ((4, (5, 6, 7)), (6, (1, 2, 4))):
        for step in steps:
            fault = {**_fault("backward"), "step": step}
            when = f"at step {step}, audits every {every}"
            yield Case(BEGINS, "backward", when, "halt", size, (fault,), replay_every=every)
    # Nothing has seen the fault when the job dies: what is only checked may be wrong, what is verified is not.
    kill = {"during": "check", "ranks": list(range(size)), "step": 7}
    killed = "at step 5, audits every 4, kill -9 at 7"
    for name, more in (
        ("resumed elsewhere from a verified one", {"trust": "verified"}),
        ("resumed elsewhere", {"blind": True}),
        ("resumed on the bad node", {"blind": True, "bad_lives": MOST}),
    ):
        when = f"{killed}, {name}"
        yield Case(BEGINS, "backward", when, "halt", size, (_fault("backward"),), kill, replay_every=4, **more)


def of_kills(size: int) -> Iterator[Case]:
    """SIGKILL at one rank, all ranks, a node. Two ranks a node: with 3 ranks the second node has one, with 4 two."""
    everybody, node = list(range(size)), list(range(2, size))
    some = {"one rank": [1], "all ranks": everybody, "a node": node}
    reduce = {**_fault("reduced_gradient"), "mode": "once"}
    weight = {**_fault("optimizer_weight"), "mode": "transient"}
    yield from _kills("check", some, "heal", size, ())
    yield from _kills("heal", some, "heal", size, (reduce,))
    # A majority of nodes is needed to overwrite one, so here each rank is a node.
    given = {"the rank overwritten": [1], "the rank copied from": [0], "all ranks": everybody}
    yield from _kills("heal that overwrites", given, "heal", size, (weight,), ranks_per_node=1)
    written = {"the writing rank": [0], "its node": [0, 1], "all ranks": everybody}
    yield from _kills("checkpoint write", written, "heal", size, ())
    # The checkpoint before this halt holds the wrong weights.
    yield from _kills("halt, before its latch", some, "halt", size, (weight,))
    tainting = {"the tainting rank": [0], "its node": [0, 1], "all ranks": everybody}
    yield from _kills("halt, before it taints", tainting, "halt", size, (weight,))


def _kills(
    during: str,
    victims: dict[str, list[int]],
    on_fault: str,
    size: int,
    faults: tuple[dict[str, Any], ...],
    ranks_per_node: int = 2,
) -> Iterator[Case]:
    for who, dead in victims.items():
        kill = {"during": during, "ranks": dead, "step": BETWEEN}
        yield Case(
            KILL, f"kill -9 of {who}", f"during a {during}", on_fault, size, faults, kill, ranks_per_node=ranks_per_node
        )
