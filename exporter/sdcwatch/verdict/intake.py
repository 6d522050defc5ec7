"""Are these rows what the ranks sent? Whatever is not is a transport fault or void, and blames nobody.

Checks slot, rank, instance, epoch and step of every row before anything is compared. Flow: exchange -> **intake** ->
columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from sdcwatch.observation import AuditRow, Row, RowError
from sdcwatch.packed_rows import columnar
from sdcwatch.verdict.columns import Columns
from sdcwatch.verdict.group import Group
from sdcwatch.verdict.history import History


@dataclass(frozen=True, slots=True)
class Intake:
    """Rows that may be compared, or why there are none.

    Attributes:
        rows: one row a rank in rank order; empty when they must not be compared.
        step: the group's step number (the most common one).
        faults: slots whose row is not what its rank sent now.
        void: ranks whose row is missing or carries an error code.
    """

    rows: Sequence[Row]
    step: int
    faults: tuple[int, ...] = ()
    void: tuple[int, ...] = ()


def receive(history: History, group: Group, step: int, rows: Sequence[Row | RowError | None]) -> Intake:
    """Checks the rows of one exchange; index = slot."""
    if len(rows) != group.size:
        return Intake((), step, faults=tuple(range(group.size)))
    if columnar(rows) or set(map(type, rows)) == {Row}:
        whole = cast("Sequence[Row]", rows)
        if _all_in_order(group, Columns(whole, group), step):
            return Intake(whole, step)
    good = [row for row in rows if isinstance(row, Row)]
    step = _group_step(good, step)
    faults = [slot for slot, row in enumerate(rows) if _is_fault(history, group, step, slot, row)]
    if faults:
        return Intake((), step, faults=tuple(faults))
    void = tuple(slot for slot, row in enumerate(rows) if row is None or (isinstance(row, Row) and row.error))
    return Intake((), step, void=void) if void else Intake(tuple(good), step)


def readable(group: Group, rows: Sequence[Row | RowError | None]) -> Sequence[Row] | None:
    """All rows, in rank order, where each of them came whole and without an error code; else None."""
    if columnar(rows) and len(rows) == group.size:
        whole = cast("Sequence[Row]", rows)
        if Columns(whole, group).distinct("error") <= {0, None}:
            return whole
    good = [row for row in rows if isinstance(row, Row) and not row.error]
    return good if len(good) == group.size else None


def _all_in_order(group: Group, columns: Columns, step: int) -> bool:
    return (
        columns.distinct("epoch") == {group.epoch}
        and columns.distinct("step") == {step}
        and columns.distinct("error") <= {0, None}
        and columns.column("rank") == group.ranks
        and columns.column("instance") == group.instances
    )


def _group_step(rows: Sequence[Row], step: int) -> int:
    counts = Counter(row.step for row in rows if row.step is not None)
    if not counts:
        return step
    most = max(counts.values())
    return min(value for value, count in counts.items() if count == most)


def _is_fault(history: History, group: Group, step: int, slot: int, row: Row | RowError | None) -> bool:
    if row is None:
        return False
    if (
        isinstance(row, RowError)
        or row.rank != group.ranks[slot]
        or row.instance != group.instances[slot]
        or row.epoch != group.epoch
    ):
        return True
    if row.step == step:
        return False
    if row.step is None or history.step is None:
        return row.step is None
    # A rank's own step numbers only rise: a number that it has sent before is an old row, not another numbering.
    sent = history.steps[slot] if history.steps else history.step
    return row.step <= sent


def audit_fault(group: Group, step: int | None, slot: int, row: object) -> bool:
    """Whether an audit row in `slot` (rank = slot modulo the group's size) is not what that rank sent now.

    Args:
        step: what that rank's own row called this step; ranks may number theirs differently.
    """
    rank = slot % group.size
    return not isinstance(row, AuditRow) or (row.rank, row.instance, row.epoch, row.step) != (
        rank,
        group.instances[rank],
        group.epoch,
        step,
    )
