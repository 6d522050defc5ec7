"""The rows of one step read by column, with one pass over all of them when every rank agrees.

It holds a step's rows only while they are judged and decides nothing. Flow: intake -> **columns** -> verdict modules.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter

from sdcwatch.observation import Row
from sdcwatch.verdict.group import Group
from sdcwatch.verdict.partition import UNIFORM, Partition, labels

#: All that must be equal on every rank of a healthy group; version counters may differ by a constant.
COMPARED = (
    "step",
    "environment",
    "schema",
    "hyperparameters",
    "loss_scale",
    "compile_count",
    "optimizer_steps",
    "optimizer_step_of",
    "reduced",
    "reduced_nonfinite",
    "weights_now",
    "gradient_begin",
    "weights_begin",
    "weights_end",
    "state_begin",
    "state_end",
)


class Columns:
    """Columns of a group's rows; index = rank."""

    __slots__ = ("_cache", "_compared_equal", "_group", "_rows")

    def __init__(self, rows: Sequence[Row], group: Group) -> None:
        self._rows = rows
        self._group = group
        # With a single pass over composite keys a healthy group of 16,384 ranks needs no per-field work at all.
        self._compared_equal = len(set(map(attrgetter(*COMPARED), rows))) == 1
        self._cache: dict[str, tuple[Hashable, ...]] = {}

    @property
    def rows(self) -> Sequence[Row]:
        """The rows themselves, in rank order."""
        return self._rows

    def values(self, name: str) -> tuple[Hashable, ...]:
        """One field of all ranks. Floats come as exact text, so that equal NaN bits count as equal."""
        if name not in self._cache:
            column = tuple(map(attrgetter(name), self._rows))
            if name == "loss_scale":
                column = tuple([None if v is None else float(v).hex() for v in column])
            elif name == "environment" and None in column:
                pairs = zip(column, self._group.environments, strict=True)
                column = tuple([known if v is None else v for v, known in pairs])
            self._cache[name] = column
        return self._cache[name]

    def labels(self, name: str) -> Partition:
        """Partition of the ranks by one field."""
        unknown = name == "environment" and self._rows[0].environment is None
        if self._compared_equal and name in COMPARED and not unknown:
            return UNIFORM
        return labels(self.values(name))

    def absent(self, name: str) -> bool:
        """Whether no rank measured the field."""
        if getattr(self._rows[0], name) is not None:
            return False
        return not self.labels(name)

    def partial(self, name: str) -> bool:
        """Whether some ranks measured the field and others did not."""
        if self._compared_equal and name in COMPARED:
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
        return tuple(map(attrgetter(name), self._rows))

    def moved(self, begin: Sequence[int | None], end: str) -> list[int] | None:
        """How far a counter moved from `begin` to field `end`, a rank; None where a rank did not measure it."""
        last = self.integers(end)
        if len(begin) != len(last) or None in begin or None in last:
            return None
        return [b - a for a, b in zip(begin, last, strict=True) if a is not None and b is not None]
