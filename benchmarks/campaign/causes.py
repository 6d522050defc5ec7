"""Why a fault was missed: one of a few known limits, or none of them, which is a bug.

Pure. Flow: score -> **causes** -> guarantees, document.
"""

from __future__ import annotations

from typing import Any

from benchmarks.campaign.cases import REDUCE, REPLAYED, Case
from benchmarks.campaign.score import CLEAR, MISSED

UNKNOWN = "unknown: a bug"
ONE_NODE = "one node: there is no other to replay on"
BETWEEN = "struck only between two audits"
BELOW = "the same wrong sum on all ranks, below the bound of `allreduce_conservation`"
CANCELLED = "the same wrong sum on all ranks, several elements that cancelled in the weighted sum of that step"
EDGES = "struck on an audited step, in a replay that this rank did not run"
CAUSES = (ONE_NODE, BETWEEN, BELOW, CANCELLED, EDGES, UNKNOWN)


def cause(case: Case, result: dict[str, Any]) -> str | None:
    """Why this case was missed; None where it was not."""
    if result["outcome"] != MISSED:
        return None
    if case.location in REPLAYED:
        if len(case.nodes) < 2:
            return ONE_NODE
        if not any(step % case.replay_every == 0 for step in result["struck"]):
            return BETWEEN
        if case.call == 2 and not _serves(case):
            return EDGES
    if case.location in REDUCE:
        times = result["times_bound"]
        if times is not None and times < CLEAR:
            return BELOW
        if result["elements"] > 1:
            return CANCELLED
    return UNKNOWN


def _serves(case: Case) -> bool:
    """Whether this rank replays for another one, on the node before its own."""
    node = case.node_of[case.rank]
    local = case.node_of[: case.rank].count(node)
    before = case.nodes[(node - 1) % len(case.nodes)]
    return local < before
