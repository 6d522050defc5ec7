"""The verdict function alone, on simulated groups of up to 16,384 ranks: clean steps, and faults with one right answer.

Counted apart from the comparisons on real ranks. One process, no torch. Flow: **simulated** -> guarantees, document.
"""

from __future__ import annotations

import random
import time
from typing import Any

from sdcwatch.testing.simulated_group import SimulatedGroup, backward_fault, group_of

#: (nodes, ranks on each node) -> clean steps; the larger, the fewer.
GROUPS = (
    ((1, 1, 1), 400),
    ((4, 4, 4), 300),
    ((8,) * 8, 200),
    ((8,) * 64, 60),
    ((8,) * 512, 12),
    ((8,) * 2048, 4),
)
#: Of these, what a quick campaign judges.
QUICK = GROUPS[:4]
_FAULTS = ("weights", "state", "at rest", "reduced", "backward")


def run(layout: tuple[int, ...], steps: int, seed: int) -> dict[str, Any]:
    """Judges clean steps of one group, each fifth with an audit, and then one fault of each kind."""
    group = group_of(*layout)
    chance = random.Random(seed + group.size)
    begin = time.perf_counter()
    simulated = SimulatedGroup(group)
    comparisons = false = 0
    for step in range(steps):
        judgement = simulated.audit() if step % 5 == 0 else simulated.step()
        comparisons += sum(1 for _, result in judgement.checks if result == "clean")
        false += len([v for v in judgement.verdicts if v.new])
    wrong, right = 0, 0
    for kind in _FAULTS:
        bad = chance.randrange(group.size)
        verdicts = _fault(layout, kind, bad)
        named = {rank for v in verdicts for rank in v.suspects}
        expected = {bad} if kind in ("weights", "state", "backward") and len(layout) >= 3 else set()
        wrong += bool(named - {bad})
        right += bool(verdicts) and named == expected
    return {
        "ranks": group.size,
        "nodes": len(layout),
        "steps": steps,
        "comparisons": comparisons,
        "rank_rows": comparisons * group.size,
        "false": false,
        "faults": len(_FAULTS),
        "right": right,
        "wrong": wrong,
        "seconds": round(time.perf_counter() - begin, 2),
    }


def _fault(layout: tuple[int, ...], kind: str, bad: int) -> list[Any]:
    group = SimulatedGroup(group_of(*layout))
    group.audit()
    group.steps(2)
    if kind == "backward":
        return [v for v in group.audit(backward_fault(group.group, bad)).verdicts if v.new]
    faults: dict[str, dict[str, dict[int, int]]] = {
        "weights": {"weights_end": {bad: 3}, "weights_now": {bad: 3}},
        "state": {"state_end": {bad: 3}},
        "at rest": {"weights_now": {bad: 3}},
        "reduced": {"reduced": {bad: 3}},
    }
    return [v for v in group.step(faults[kind]).verdicts if v.new]
