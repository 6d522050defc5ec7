"""The rows of one exchange, kept as the bytes they came in and read by column: no row object for 16,384 healthy ranks.

A column is a stride through the bytes; "all ranks sent the same" is one comparison of bytes, and one CRC over the whole
exchange stands for the CRC of each row. A row object is made only where somebody asks for it, as a fault does. It
judges nothing. Standard library only. Flow: exchange -> **packed rows** -> verdict.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
import sys
import zlib
from collections.abc import Sequence
from typing import Any, Generic, overload

from sdcwatch.observation import ROW_VERSION, AuditRow, R, Row, RowError, size_words, unpack

_FIELDS: dict[Any, dict[str, tuple[int, str]]] = {
    kind: {f.name: (position, f.metadata["code"]) for position, f in enumerate(dataclasses.fields(kind))}
    for kind in (Row, AuditRow)
}


class PackedRows(Sequence[R | RowError], Generic[R]):
    """Rows that lie one behind another, as a sequence of rows; a damaged one is its `RowError`.

    Args:
        kind: `Row` or `AuditRow`.
        data: what the exchange returned, `count` rows of 8-byte words.
        count: number of ranks.

    Attributes:
        sound: every row is whole: length, version and CRC are right. Only then may columns be read.
    """

    __slots__ = ("_count", "_data", "_kind", "_made", "_mask", "_masks", "_stride", "sound")

    def __init__(self, kind: type[R], data: bytes, count: int) -> None:
        self._kind: Any = kind
        self._data = data
        self._count = count
        self._stride = size_words(kind)
        self._made: dict[int, R | RowError] = {}
        self._masks: tuple[int, ...] = ()
        self._mask = 0
        self.sound = self._is_sound()
        if self.sound:
            # Ranks of a healthy group measured the same, so that one mask stands for all.
            raw = self._raw(1, "Q").tobytes()
            self._mask = int.from_bytes(raw[:8], "little")
            if raw != raw[:8] * count:
                self._masks = tuple(memoryview(raw).cast("Q"))

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> R | RowError: ...

    @overload
    def __getitem__(self, index: slice) -> list[R | RowError]: ...

    def __getitem__(self, index: int | slice) -> R | RowError | list[R | RowError]:
        if isinstance(index, slice):
            return [self[position] for position in range(self._count)[index]]
        slot = range(self._count)[index]
        if slot not in self._made:
            size = 8 * self._stride
            try:
                self._made[slot] = unpack(self._kind, self._data[slot * size : (slot + 1) * size])
            except RowError as error:
                self._made[slot] = error
        return self._made[slot]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def uniform(self, name: str) -> bool:
        """Whether the bytes of a field are the same on every rank, or absent on every rank."""
        position, code = _FIELDS[self._kind][name]
        present = {mask >> position & 1 for mask in set(self._masks)} or {self._mask >> position & 1}
        if len(present) > 1:
            return False
        if present == {0}:
            return True
        raw = self._raw(2 + position, code).tobytes()
        return raw == raw[:8] * self._count

    def column(self, name: str) -> tuple[Any, ...]:
        """A field of all ranks, index = slot; None where a rank did not measure it."""
        position, code = _FIELDS[self._kind][name]
        words = self._raw(2 + position, code)
        if self._masks:
            pairs = zip(words.tolist(), self._masks, strict=True)
            return tuple([value if mask >> position & 1 else None for value, mask in pairs])
        if not self._mask >> position & 1:
            return (None,) * self._count
        raw = words.tobytes()
        if raw == raw[:8] * self._count:
            return (words[0],) * self._count
        return tuple(words.tolist())

    def take(self, slots: Sequence[int]) -> PackedRows[R]:
        """The rows of some slots alone, in their order."""
        size = 8 * self._stride
        return PackedRows(self._kind, b"".join([self._data[s * size : (s + 1) * size] for s in slots]), len(slots))

    def _raw(self, word: int, code: str) -> memoryview[Any]:
        return memoryview(self._data).cast(code)[word :: self._stride]  # type: ignore[call-overload,no-any-return]

    def _is_sound(self) -> bool:
        count, stride = self._count, self._stride
        if sys.byteorder != "little" or not count or len(self._data) != 8 * stride * count:
            return False
        if zlib.crc32(self._data) != _whole_crc(8 * stride, count):
            return False
        upper_halves = memoryview(self._data).cast("I")[2 * stride - 1 :: 2 * stride]  # a CRC fills 32 bits of its word
        version = struct.pack("<Q", ROW_VERSION)
        return upper_halves.tobytes() == bytes(4 * count) and self._raw(0, "Q").tobytes() == version * count


@functools.lru_cache(maxsize=64)
def _whole_crc(size: int, count: int) -> int:
    """CRC-32 over any `count` whole rows of `size` bytes, each of which ends with its own CRC.

    A CRC is linear, and a message followed by its CRC leaves a state that no longer depends on the message. So this
    number is one for all healthy exchanges, and an exchange with one damaged row never has it; with several damaged
    rows it has it as seldom as a damaged row has its own CRC, once in 2**32.
    """
    body = bytes(size - 8)
    return zlib.crc32((body + struct.pack("<Q", zlib.crc32(body))) * count)


def unpack_rows(kind: type[R], data: bytes, count: int) -> PackedRows[R]:
    """Reads `count` rows that lie one behind another; a damaged one becomes its `RowError`."""
    return PackedRows(kind, data, count)


def columnar(rows: Sequence[object]) -> PackedRows[Row] | None:
    """The rows as columns, where they came whole from one exchange; else None."""
    return rows if isinstance(rows, PackedRows) and rows.sound and len(rows) else None


def measured(rows: Sequence[object], name: str) -> list[Any]:
    """A field of all rows that could be read, without the ranks that did not measure it."""
    packed = columnar(rows)
    found = packed.column(name) if packed else [getattr(row, name) for row in rows if isinstance(row, Row)]
    return [value for value in found if value is not None]
