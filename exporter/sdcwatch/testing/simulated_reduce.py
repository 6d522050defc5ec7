"""A ring and a tree all-reduce on tensors of one process, with one send gone wrong: who ends up holding what?

It shows what no comparison of replicas may forget: a rank that passes on a wrong chunk keeps the right one, and those
behind it hold the wrong one. It is no collective; `places` uses it to corrupt what a real one handed back. Flow:
local values -> **ring**, **tree** -> values by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

#: Called with (sender, how many sends it made before, the values sent as a flat tensor of its own); writes in place.
Wire = Callable[[int, int, torch.Tensor], None]


class _Sends:
    """Counts each rank's sends and hands a copy of what is sent to the wire."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._made: dict[int, int] = {}

    def send(self, sender: int, value: torch.Tensor) -> torch.Tensor:
        sent = value.clone()
        self._wire(sender, self._made.get(sender, 0), sent)
        self._made[sender] = self._made.get(sender, 0) + 1
        return sent


def ring(values: Sequence[torch.Tensor], wire: Wire) -> list[torch.Tensor]:
    """A ring all-reduce (sum): reduce-scatter, then all-gather, one chunk a rank.

    Args:
        values: each rank's flat tensor, equal shapes.
        wire: may change what is sent; every rank sends `ring_sends(size)` times.

    Returns:
        What each rank holds at the end, index = rank.
    """
    size = len(values)
    held = [list(v.clone().tensor_split(size)) for v in values]
    sends = _Sends(wire)
    for phase in range(size - 1):
        moved = [(r, (r - phase) % size) for r in range(size)]
        arrived = [(r, chunk, sends.send(r, held[r][chunk])) for r, chunk in moved]
        for r, chunk, value in arrived:
            held[(r + 1) % size][chunk] = held[(r + 1) % size][chunk] + value
    for phase in range(size - 1):
        moved = [(r, (r + 1 - phase) % size) for r in range(size)]
        arrived = [(r, chunk, sends.send(r, held[r][chunk])) for r, chunk in moved]
        for r, chunk, value in arrived:
            held[(r + 1) % size][chunk] = value
    return [torch.cat(chunks) for chunks in held]


def ring_sends(size: int) -> int:
    """How often each rank of a ring sends."""
    return 2 * (size - 1)


def tree(values: Sequence[torch.Tensor], wire: Wire) -> list[torch.Tensor]:
    """A binary-tree all-reduce (sum): up to rank 0, and down again; rank r's children are 2r+1 and 2r+2.

    Args:
        values: each rank's flat tensor, equal shapes.
        wire: may change what is sent; rank r sends `tree_sends(size, r)` times.

    Returns:
        What each rank holds at the end, index = rank.
    """
    size = len(values)
    held = [v.clone() for v in values]
    sends = _Sends(wire)
    for r in range(size - 1, 0, -1):
        held[(r - 1) // 2] = held[(r - 1) // 2] + sends.send(r, held[r])
    for r in range(1, size):
        held[r] = sends.send((r - 1) // 2, held[(r - 1) // 2])
    return held


def tree_sends(size: int, rank: int) -> int:
    """How often this rank of a tree sends: once to its parent, once to each child."""
    return int(rank > 0) + sum(1 for child in (2 * rank + 1, 2 * rank + 2) if child < size)
