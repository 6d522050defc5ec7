"""One rank's row while some of its numbers still lie on a device: packed there, so that nobody waits for them.

The host packs what it knows and leaves zeros for the rest; the device writes its words into the zeros and corrects the
CRC. A CRC is linear over bits: what one bit changes in it does not depend on the others, so the correction is a parity
of table entries. The words that leave are those that `observation.pack` would have given, bit for bit. Numbers in host
memory, where reading costs nothing, and those on another device than the collective's (gloo, with a model on a GPU) are
read before. It measures and judges nothing. Flow: row_fields -> **draft** -> exchange, which reads all ranks' rows.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Generic

import torch

from sdcwatch.checks.gradients import stacked
from sdcwatch.fingerprint import on_host
from sdcwatch.observation import ErrorCode, R, RowError, pack, size_words, unpack

_WORD = 64
_CRC = 32


class Draft(Generic[R]):
    """A row, and what of it is not read yet.

    Args:
        row: the row; of the unread fields only that they are there counts.
        unread: field -> 0-d tensor: uint64 digests and counts as int64 (the same bits), numbers of any float type.

    Attributes:
        kind: `Row` or `AuditRow`.
    """

    def __init__(self, row: R, unread: Mapping[str, torch.Tensor] | None = None) -> None:
        self.kind: type[R] = type(row)
        self._row: R = row
        self._unread = dict(unread or {})

    @classmethod
    def of(cls, kind: type[R], values: Mapping[str, Any]) -> Draft[R]:
        """The draft of a row from its fields, some of which are 0-d tensors.

        Raises:
            TypeError: no such field.
        """
        unread = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        return cls(kind(**{**values, **dict.fromkeys(unread, 0)}), unread)

    @property
    def row(self) -> R:
        """The row in numbers; a host read where no exchange has settled it."""
        if self._unread:
            names = self._names()
            read = _as_words([self._unread[name] for name in names]).tolist()
            codes = {f.name: f.metadata["code"] for f in dataclasses.fields(self._row)}
            layout = "".join(codes[name] for name in names)
            values = struct.unpack(f"<{layout}", struct.pack(f"<{len(read)}q", *read))
            self._row = dataclasses.replace(self._row, **dict(zip(names, values, strict=True)))
            self._unread = {}
        return self._row

    def _names(self) -> list[str]:
        return sorted(self._unread, key=lambda name: not self._unread[name].is_floating_point())

    def words(self, device: torch.device) -> torch.Tensor:
        """The packed row as an int64 tensor on `device`: what `pack` gives once everything is known."""
        if all(map(on_host, self._unread.values())) or any(v.device != device for v in self._unread.values()):
            return sent(torch.frombuffer(bytearray(pack(self.row)), dtype=torch.int64), device)
        known = torch.frombuffer(bytearray(pack(self._row)), dtype=torch.int64)
        names = self._names()
        values = _as_words([self._unread[name] for name in names])
        kind: Any = self.kind
        places, table, shifts = _tables(kind, tuple(names), device)
        words = sent(known, device).index_copy_(0, places, values)
        bits = ((values.unsqueeze(1) >> shifts) & 1).to(torch.int32).view(-1, 1)
        parity = (bits * table).sum(0) & 1
        words[-1] ^= (parity << shifts[:_CRC]).sum()
        return words

    def settle(self, data: bytes) -> None:
        """Takes what `words` gave, as bytes that the host has read."""
        if not self._unread:
            return
        try:
            self._row = unpack(self.kind, data)
        except RowError:  # a device that packs wrongly sends a row that nobody can read, and so it is here
            self._row = dataclasses.replace(self._row, **dict.fromkeys(self._unread), error=ErrorCode.CHECK)
        self._unread = {}


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small host tensor on `device`, without waiting for what the device is doing."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def _as_words(values: list[torch.Tensor]) -> torch.Tensor:
    """0-d tensors, floats first, as the 64-bit words of a row: (n,) int64 on the first one's device."""
    there = [value.to(values[0].device) for value in values]
    floats = [value for value in there if value.is_floating_point()]
    counts = there[len(floats) :]
    parts = [stacked(floats).view(torch.int64)] if floats else []
    return torch.cat([*parts, torch.stack(counts)] if counts else parts)


@lru_cache(maxsize=64)
def _tables(kind: Any, names: tuple[str, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the words of some fields stand; the CRC's bits that each of their bits flips; and the shifts 0 to 63."""
    fields = [f.name for f in dataclasses.fields(kind)]
    places = [2 + fields.index(name) for name in names]
    body = bytearray(8 * (size_words(kind) - 1))
    nothing = zlib.crc32(body)
    flips = []
    for place in places:
        for bit in range(_WORD):
            at = 8 * place + bit // 8
            body[at] = 1 << bit % 8
            flips.append(zlib.crc32(body) ^ nothing)
            body[at] = 0
    table = (torch.tensor(flips).unsqueeze(1) >> torch.arange(_CRC)) & 1
    return torch.tensor(places, device=device), table.to(device, torch.int32), torch.arange(_WORD, device=device)
