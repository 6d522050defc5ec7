"""The few collectives of ours: rows, agreement, and the transit of micro-batches on audits.

Each is issued from the training thread, on DDP's own group, only after DDP's collectives of the same backward have
finished. Nothing here decides anything: `verdict` does. A collective that fails raises as DDP's own would (a dead
peer ends the run exactly as without us); what arrives damaged becomes a `RowError` in its slot, which blames nobody.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sdcwatch.observation import R, Row, RowError, pack, unpack
from sdcwatch.packed_rows import PackedRows, unpack_rows
from sdcwatch.watch.draft import Draft, sent

# torch 2.13 renamed it and warns about the old name; older releases only have that one.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Exchange:
    """Collectives of one replica group.

    Args:
        group: DDP's own process group.
        device: where the group's backend wants its tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def rows(self, row: R | Draft[R]) -> PackedRows[R]:
        """All-gathers one row a rank; the answer is in rank order, damaged ones as `RowError`.

        One host read brings all rows, and with them what this rank measured on its device: a draft is then settled.
        """
        draft = row if isinstance(row, Draft) else Draft(row)
        mine = draft.words(self.device)
        out = torch.empty(mine.numel() * (self.size + 1), dtype=torch.int64, device=self.device)
        out[-mine.numel() :] = mine
        _all_gather(out[: -mine.numel()], mine, group=self.group)
        data = to_bytes(out)
        end = len(data) - 8 * mine.numel()
        draft.settle(data[end:])
        return unpack_rows(draft.kind, data[:end], self.size)

    def agree(self, code: int, digest: int) -> tuple[bool, int]:
        """`agree_on_most` without numbers beside."""
        return self.agree_on_most(code, digest, ())[:2]

    def agree_on_most(self, code: int, digest: int, wanted: Sequence[int]) -> tuple[bool, int, tuple[int, ...]]:
        """One MAX over (code, -code, digest, -digest) and the numbers wanted.

        Args:
            code: this rank's verdict code, small and not negative.
            digest: 63-bit digest of what this rank concluded.
            wanted: small numbers, as many on every rank.

        Returns:
            Whether all ranks concluded the same, the highest code among them, and the highest of each number.
        """
        value = sent(torch.tensor([code, -code, digest, -digest, *wanted], dtype=torch.int64), self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        highest, lowest, top, bottom, *most = value.tolist()
        return highest == -lowest and top == -bottom, highest, tuple(most)

    def transit(self, payload: bytes, routes: Mapping[int, int], sizes: Sequence[int]) -> dict[int, bytes]:
        """Moves whole payloads between ranks in one `all_to_all_single`.

        Args:
            payload: this rank's packed micro-batches.
            routes: receiver -> the rank whose payload it gets; the same on all ranks.
            sizes: payload bytes of every rank, from the rows.

        Returns:
            What this rank received, by sender (at most one entry).
        """
        send = [len(payload) if routes.get(to) == self.rank else 0 for to in range(self.size)]
        source = routes.get(self.rank)
        receive = [sizes[origin] if origin == source else 0 for origin in range(self.size)]
        flat = torch.frombuffer(bytearray(payload * sum(1 for n in send if n) or b"\0"), dtype=torch.uint8)
        inbound = flat[: sum(send)].to(self.device)
        out = torch.empty(sum(receive), dtype=torch.uint8, device=self.device)
        dist.all_to_all_single(out, inbound, receive, send, group=self.group)
        return {} if source is None else {source: to_bytes(out)}

    def everyone(self, value: Any) -> list[Any]:
        """All-gathers one small picklable object a rank (start-up only)."""
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.group)
        return out


def last_rows(row: Row, *, epoch: str, rank: int, size: int, timeout: timedelta) -> list[Row | RowError | None]:
    """Swaps the rows of the last step through the rendezvous store: no collective, peers may be gone.

    Returns:
        Rows in rank order; None for a peer that did not write within `timeout`.
    """
    store = dist.distributed_c10d.PrefixStore(f"sdcwatch/{epoch}/last", dist.distributed_c10d._get_default_store())
    store.set(str(rank), pack(row).hex())
    try:
        store.wait([str(r) for r in range(size)], timeout)
    except (RuntimeError, ValueError):
        present = [r for r in range(size) if r == rank or store.check([str(r)])]
    else:
        present = list(range(size))
    return [_read(Row, bytes.fromhex(store.get(str(r)).decode())) if r in present else None for r in range(size)]


def to_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor (one device-to-host copy at most)."""
    host = tensor.cpu()
    return ctypes.string_at(host.data_ptr(), host.numel() * host.element_size()) if host.numel() else b""


def _read(kind: Any, data: bytes) -> Any:
    try:
        return unpack(kind, data)
    except RowError as error:
        return error
