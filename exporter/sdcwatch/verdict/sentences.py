"""Words for ranks, nodes and digests, so that every verdict reads like a sentence a person would say.

Only text; no decision is taken here. Flow: verdict modules -> **sentences** -> event, training log.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from sdcwatch.verdict.group import Group

_MAX_NODES = 4
_MAX_RANKS = 8
_MAX_LISTED = 64

CHECK_WORDS = {
    "gradient_norm": "the comparison of gradient norms",
    "gradient_checksum": "the comparison of reduced gradients",
    "allreduce_conservation": "the check that the reduced gradient is the average",
    "weight_checksum": "the comparison of weights and optimizer state",
    "replay": "the replay of a step on another node",
    "checkpoint": "the comparison with the checkpoint",
}


def who(group: Group, ranks: Sequence[int]) -> str:
    """`rank 2 on node-3`, `ranks 4 and 5 on node-c`, `rank 1 on a and rank 2 on b`."""
    if len(ranks) == group.size and group.size > 1 and group.ranks == tuple(range(group.size)):
        return f"all {group.size} ranks"
    by_node: dict[str, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(group.nodes[rank], []).append(group.ranks[rank])
    parts = [f"{_ranks(on_node)} on {node}" for node, on_node in list(by_node.items())[:_MAX_NODES]]
    if len(by_node) > _MAX_NODES:
        parts.append(f"ranks on {len(by_node) - _MAX_NODES} more nodes")
    return listing(parts)


def listing(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(parts) <= 1:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def others(group: Group, ranks: Sequence[int]) -> str:
    """`the 3 other ranks`, `the other rank`."""
    count = group.size - len(ranks)
    return "the other rank" if count == 1 else f"the {count} other ranks"


def capital(text: str) -> str:
    """The text with its first letter upper case."""
    return text[:1].upper() + text[1:]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _MAX_RANKS:
        return f"{len(ranks)} ranks ({ranks[0]} to {ranks[-1]})"
    return f"ranks {listing([str(rank) for rank in ranks])}"


def digest_text(value: Hashable) -> str:
    """A digest as 16 hex digits (JSON numbers lose bits above 2^53); `none` where nothing was measured."""
    if value is None:
        return "none"
    return f"{value:016x}" if isinstance(value, int) else str(value)


def spread(values: Sequence[Hashable]) -> list[dict[str, object]]:
    """Which ranks hold which value, the most common first, bounded for an event.

    Each element: `value`, `num_ranks`, `ranks` (at most 64 of them).
    """
    holders: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    ordered = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
    return [
        {"value": digest_text(value), "num_ranks": len(ranks), "ranks": ranks[:_MAX_LISTED]}
        for value, ranks in ordered[:_MAX_RANKS]
    ]
