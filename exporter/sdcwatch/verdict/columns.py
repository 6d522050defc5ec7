"""The rows of one step read by column; where every rank agrees, one comparison of bytes says so.

It holds a step's rows only while they are judged and decides nothing. Flow: intake -> **columns** -> verdict modules.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any

from sdcwatch.observation import Row
from sdcwatch.packed_rows import columnar
from sdcwatch.verdict.group import Group
from sdcwatch.verdict.partition import UNIFORM, Partition, labels


class Columns:
    """Columns of a group's rows; index = rank."""

    __slots__ = ("_cache", "_group", "_packed", "_rows", "_uniform")

    def __init__(self, rows: Sequence[Row], group: Group) -> None:
        self._rows = rows
        self._group = group
        self._packed = columnar(rows)
        self._cache: dict[str, tuple[Any, ...]] = {}
        self._uniform: dict[str, bool] = {}

    @property
    def rows(self) -> Sequence[Row]:
        """The rows themselves, in rank order; reading all of them costs more than reading columns."""
        return self._rows

    def column(self, name: str) -> tuple[Any, ...]:
        """One field of all ranks as they sent it; None where a rank did not measure it."""
        if name not in self._cache:
            packed = self._packed
            self._cache[name] = packed.column(name) if packed else tuple(map(attrgetter(name), self._rows))
        return self._cache[name]

    def uniform(self, name: str) -> bool:
        """Whether all ranks hold the same value, or none measured the field."""
        if name not in self._uniform:
            packed = self._packed
            self._uniform[name] = packed.uniform(name) if packed else len(set(self.values(name))) <= 1
        return self._uniform[name]

    def distinct(self, name: str) -> set[Any]:
        """The values that ranks hold."""
        return {getattr(self._rows[0], name)} if self.uniform(name) else set(self.column(name))

    def values(self, name: str) -> tuple[Hashable, ...]:
        """One field of all ranks. Floats come as exact text, so that equal NaN bits count as equal."""
        column = self.column(name)
        if name == "loss_scale":
            return tuple([None if v is None else float(v).hex() for v in column])
        if name == "environment" and None in column:
            pairs = zip(column, self._group.environments, strict=True)
            return tuple([known if v is None else v for v, known in pairs])
        return column

    def labels(self, name: str) -> Partition:
        """Partition of the ranks by one field."""
        unknown = name == "environment" and self._rows[0].environment is None
        return UNIFORM if self.uniform(name) and not unknown else labels(self.values(name))

    def absent(self, name: str) -> bool:
        """Whether no rank measured the field."""
        if getattr(self._rows[0], name) is not None:
            return False
        return not self.labels(name)

    def partial(self, name: str) -> bool:
        """Whether some ranks measured the field and others did not."""
        if self.uniform(name):
            return False
        column = self.values(name)
        return None in column and any(v is not None for v in column)

    def complete(self, name: str) -> bool:
        """Whether every rank measured the field."""
        return not self.absent(name) and not self.partial(name)

    def same(self, name: str) -> bool:
        """Whether every rank measured the field and all hold the same value."""
        return not self.absent(name) and not self.labels(name)

    def integers(self, name: str) -> tuple[int | None, ...]:
        """An integer field of all ranks."""
        return self.column(name)

    def moved(self, begin: Sequence[int | None], end: str) -> list[int] | None:
        """How far a counter moved from `begin` to field `end`, a rank; None where a rank did not measure it."""
        last = self.integers(end)
        first = begin[0] if begin else None
        if len(begin) == len(last) and first is not None and self.uniform(end) and begin.count(first) == len(begin):
            return None if last[0] is None else [last[0] - first] * len(last)
        if len(begin) != len(last) or None in begin or None in last:
            return None
        return [b - a for a, b in zip(begin, last, strict=True) if a is not None and b is not None]
