"""Parameters and optimizer state of a few ranks, overwritten from a rank of the majority.

Bytes travel as bytes, in pieces of bounded size, and only the ranks that are overwritten write anything; version
counters do not move, since no code of the user's wrote. A rank on which packing or writing fails still takes part in
every piece, and says so when the ranks agree afterwards. It does not decide who is right: `plan` did.
Flow: healer -> **overwrite**.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from sdcwatch.checks.weights import state_fingerprint, state_tensors
from sdcwatch.fingerprint import can_fingerprint, combine, digest_bytes, read_digests, unread_fingerprint
from sdcwatch.watch.exchange import Exchange

#: Bytes that one broadcast moves: the only extra memory, apart from a copy of a tensor that is not contiguous.
PIECE = 16 << 20

Trouble = Callable[[BaseException], None]


def overwrite(
    exchange: Exchange,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    *,
    source: int,
    targets: Sequence[int],
    trouble: Trouble,
    piece: int = PIECE,
) -> bool:
    """Makes the state of `targets` that of `source`, and checks it. Collective.

    Args:
        source: rank of the group whose state is taken.
        targets: ranks of the group that are written.
        trouble: told what went wrong on this rank.
        piece: bytes of one broadcast.

    Returns:
        Whether all ranks now hold the same parameters and optimizer state; the same answer on all ranks. False, with
        nothing written, where their layouts differ or no memory is left.
    """
    tensors: list[torch.Tensor] = []
    layout, ready, buffer = 0, 1, None
    try:
        state = state_tensors(optimizer, parameters)
        tensors = [t for t in (*parameters, *state) if t is not None and _movable(t)]
        layout = _layout(tensors)
        buffer = torch.empty(piece, dtype=torch.uint8, device=exchange.device)
    except Exception as error:  # our border: the ranks agree not to begin
        trouble(error)
        ready = 0
    agreed, _ = exchange.agree(ready, layout)
    if not agreed or not ready or buffer is None:
        return False
    fine = _move(exchange, tensors, buffer, source, exchange.rank in set(targets), trouble)
    held = 0
    try:
        found = (unread_fingerprint(parameters), state_fingerprint(optimizer, parameters))
        held = combine(read_digests(dict(enumerate(found))).values()) >> 1
    except Exception as error:  # our border
        trouble(error)
        fine = False
    agreed, highest = exchange.agree(int(not fine), held)
    return agreed and not highest


def _move(
    exchange: Exchange,
    tensors: Sequence[torch.Tensor],
    buffer: torch.Tensor,
    source: int,
    written: bool,
    trouble: Trouble,
) -> bool:
    """Sends all bytes round, piece by piece; whether this rank packed and wrote all of its own."""
    fine, origin = True, dist.get_global_rank(exchange.group, source)
    for run in _pieces(tensors, buffer.numel()):
        size = sum(length for _, _, length in run)
        try:
            if exchange.rank == source:
                _pack(run, buffer)
        except Exception as error:  # our border: the peers wait in the broadcast below
            trouble(error)
            fine = False
        dist.broadcast(buffer[:size], origin, group=exchange.group)
        try:
            if written:
                _unpack(run, buffer)
        except Exception as error:  # our border
            trouble(error)
            fine = False
    return fine


Run = list[tuple[torch.Tensor, int, int]]


def _pieces(tensors: Sequence[torch.Tensor], size: int) -> Iterator[Run]:
    """Cuts the tensors' bytes into runs of at most `size`: (tensor, first byte, number of bytes)."""
    run: Run = []
    free = size
    for tensor in tensors:
        start, total = 0, tensor.numel() * tensor.element_size()
        while start < total:
            length = min(total - start, free)
            run.append((tensor, start, length))
            start, free = start + length, free - length
            if not free:
                yield run
                run, free = [], size
    if run:
        yield run


def _pack(run: Run, buffer: torch.Tensor) -> None:
    place = 0
    for tensor, start, length in run:
        buffer[place : place + length].copy_(_bytes(tensor.data.contiguous())[start : start + length])
        place += length


def _unpack(run: Run, buffer: torch.Tensor) -> None:
    place = 0
    for tensor, start, length in run:
        # through .data: no version counter moves
        whole = tensor.data.contiguous()
        _bytes(whole)[start : start + length].copy_(buffer[place : place + length])
        if whole.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(whole)
        place += length


def _bytes(contiguous: torch.Tensor) -> torch.Tensor:
    return contiguous.view(-1).view(torch.uint8)


def _movable(tensor: torch.Tensor) -> bool:
    return can_fingerprint(tensor) and bool(tensor.numel())


def _layout(tensors: Sequence[torch.Tensor]) -> int:
    """63 bits of shapes and dtypes: ranks whose state has another form must not begin."""
    return digest_bytes("\n".join(f"{t.dtype}{tuple(t.shape)}" for t in tensors).encode()) >> 1
