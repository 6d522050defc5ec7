"""Who agrees with whom: partitions of ranks by the value they hold, and the strict majority rule.

Pure and blind to meaning: no rank is a reference, only equality counts. Flow: rows -> **partition** -> verdicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from sdcwatch.verdict.group import Group

#: Label of each rank, equal where the value is equal; the empty tuple means that all ranks hold the same value.
Partition = tuple[int, ...]

UNIFORM: Partition = ()


def labels(values: Sequence[Hashable]) -> Partition:
    """Labels values in order of first appearance; `UNIFORM` when there is only one."""
    if len(set(values)) <= 1:
        return UNIFORM
    seen: dict[Hashable, int] = {}
    return tuple([seen.setdefault(value, len(seen)) for value in values])


def product(*parts: Partition) -> Partition:
    """The coarsest partition that tells apart whatever any of `parts` tells apart."""
    real = [part for part in parts if part]
    if len(real) <= 1:
        return real[0] if real else UNIFORM
    return labels(list(zip(*real, strict=True)))


def splits(before: Partition, after: Partition) -> bool:
    """Whether two ranks that were together in `before` are apart in `after`."""
    if not after:
        return False
    if not before:
        return True
    return len(set(zip(before, after, strict=True))) > len(set(before))


def majority(part: Partition, group: Group) -> tuple[int, ...] | None:
    """The ranks that hold the value of a strict majority of ranks AND of nodes; None when no value has both.

    A node counts for a value when more than half of its ranks hold it.
    """
    if not part:
        return tuple(range(group.size))
    value, count = Counter(part).most_common(1)[0]
    if 2 * count <= group.size:
        return None
    order = group.node_order
    held = sum(1 for node in order if 2 * sum(part[r] == value for r in group.members(node)) > len(group.members(node)))
    if 2 * held <= len(order):
        return None
    return tuple(rank for rank, label in enumerate(part) if label == value)


def outside(part: Partition, group: Group) -> tuple[int, ...]:
    """Ranks outside the majority; all ranks where none is; nobody when all agree."""
    if not part:
        return ()
    inside = majority(part, group)
    if inside is None:
        return tuple(range(group.size))
    held = set(inside)
    return tuple(rank for rank in range(group.size) if rank not in held)


def leavers(before: Partition, after: Partition, group: Group) -> tuple[int, ...]:
    """Ranks that left the group which they shared, in `before`, with all of what is the majority in `after`.

    Empty when no majority is, when the majority itself came from different groups, or when only ranks that were
    apart already moved.
    """
    inside = majority(after, group)
    if inside is None:
        return ()
    origins = {before[rank] for rank in inside} if before else {0}
    if len(origins) != 1:
        return ()
    (origin,) = origins
    held = set(inside)
    return tuple(r for r in range(group.size) if r not in held and (not before or before[r] == origin))


def sizes(part: Partition, size: int) -> tuple[int, ...]:
    """How many ranks share each rank's value."""
    if not part:
        return (size,) * size
    counts = Counter(part)
    return tuple([counts[label] for label in part])
