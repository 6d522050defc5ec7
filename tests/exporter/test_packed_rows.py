"""Rows read by column mean what row objects mean, damage stays in its slot, and healthy groups need no row objects."""

from __future__ import annotations

import math
import struct
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sdcwatch import packed_rows
from sdcwatch.observation import Row, RowError, pack, size_words, unpack
from sdcwatch.packed_rows import PackedRows, measured, unpack_rows
from sdcwatch.testing.simulated_group import group_of, healthy_row
from sdcwatch.verdict import History, judge, judge_sets, plan_audit

GROUP = group_of(2, 2, 2)
SIZE = 8 * size_words(Row)


def packed(rows: list[Row]) -> PackedRows[Row]:
    """The rows as an exchange returns them."""
    return unpack_rows(Row, b"".join(map(pack, rows)), len(rows))


def healthy(step: int) -> list[Row]:
    """Healthy rows of the group."""
    return [healthy_row(GROUP, rank, step, 0) for rank in range(GROUP.size)]


def _value(code: str) -> st.SearchStrategy[Any]:
    if code == "d":
        return st.sampled_from([None, 0.0, -0.0, 1.0, 1.07, math.inf, math.nan, 1e300])
    return st.sampled_from([None, 0, 1, 2, 7, 1 << 40] if code == "Q" else [None, 0, 1, 2, 3, -1, -6])


FAULT = st.sampled_from(fields(Row)).flatmap(
    lambda f: st.tuples(
        st.just(f.name),
        st.one_of(st.sets(st.integers(0, 5), min_size=1), st.just(set(range(6)))),
        _value(f.metadata["code"]),
    )
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(FAULT, max_size=2), min_size=2, max_size=4))
def test_columns_are_judged_as_row_objects_are(story: list[list[tuple[str, set[int], Any]]]) -> None:
    """Whatever ranks send in whichever field, bytes and row objects give one judgement, one history and one plan."""
    by_column = by_row = History.initial()
    for step, faults in enumerate(story):
        rows = healthy(step)
        for name, ranks, value in faults:
            rows = [replace(row, **{name: value}) if rank in ranks else row for rank, row in enumerate(rows)]
        whole = packed(rows)
        assert whole.sound
        assert repr(plan_audit(by_column, GROUP, whole)) == repr(plan_audit(by_row, GROUP, rows))
        first, by_column = judge(by_column, GROUP, step, whole)
        second, by_row = judge(by_row, GROUP, step, rows)
        assert repr(first) == repr(second)
        assert repr(by_column) == repr(by_row)
        assert repr(measured(whole, "time")) == repr(measured(rows, "time"))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.integers(0, 5 * SIZE - 1), st.integers(1, 255), min_size=1, max_size=3))
def test_damage_becomes_the_error_of_its_own_slot(flips: dict[int, int]) -> None:
    """A damaged byte anywhere, the unused half of a CRC's word as well, makes its row and no other an error."""
    data = bytearray(b"".join(map(pack, healthy(1)[:5])))
    for position, flip in flips.items():
        data[position] ^= flip
    rows = unpack_rows(Row, bytes(data), 5)
    damaged = {position // SIZE for position in flips}
    assert not rows.sound
    assert {slot for slot, row in enumerate(rows) if isinstance(row, RowError)} == damaged
    assert [rows[slot] for slot in range(5) if slot not in damaged] == [
        row for slot, row in enumerate(healthy(1)[:5]) if slot not in damaged
    ]


def test_the_same_damage_in_two_rows_does_not_cancel() -> None:
    """One CRC over all rows still fails where two rows, or all of them, are damaged in the same way."""
    for slots in ((0, 1), (0, 4), (2, 3), tuple(range(6))):
        for word in (2, 20, size_words(Row) - 1):
            data = bytearray(b"".join(map(pack, healthy(1))))
            for slot in slots:
                data[slot * SIZE + 8 * word] ^= 1
            rows = unpack_rows(Row, bytes(data), 6)
            assert [slot for slot, row in enumerate(rows) if isinstance(row, RowError)] == list(slots)


def test_rows_of_another_version_or_length_are_errors() -> None:
    """A whole row of another version, and an exchange that is cut short, are faults and not read by column."""
    body = struct.pack("<Q", 99) + pack(healthy(0)[0])[8:-8]
    other = body + struct.pack("<Q", packed_rows.zlib.crc32(body))
    assert not unpack_rows(Row, other * 2, 2).sound
    assert all(isinstance(row, RowError) for row in unpack_rows(Row, other * 2, 2))
    short = unpack_rows(Row, b"".join(map(pack, healthy(0)))[:-8], 6)
    assert not short.sound
    assert [isinstance(row, RowError) for row in short] == [False] * 5 + [True]
    assert not unpack_rows(Row, b"", 0).sound


def test_a_healthy_group_of_thousands_needs_one_row_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchange to verdict of 1,024 healthy ranks reads columns, and makes the first rank's row at most."""
    made = []

    def counting(kind: Any, data: Any) -> Any:
        made.append(1)
        return unpack(kind, data)

    monkeypatch.setattr(packed_rows, "unpack", counting)
    group, history = group_of(*[8] * 128), History.initial()
    for step in range(2):
        made.clear()
        rows = packed([healthy_row(group, rank, step, 0) for rank in range(group.size)])
        judgement, history = judge(history, group, step, rows)
        assert dict(judgement.checks)["weight_checksum"] == "clean"
        assert not judgement.verdicts
        assert plan_audit(history, group, rows).run
        assert len(measured(rows, "time")) == group.size
        assert len(made) <= 1


def test_a_fault_among_thousands_is_named() -> None:
    """One rank of 1,024 whose optimizer step goes wrong is the suspect, read by column."""
    group, history = group_of(*[8] * 128), History.initial()
    for step in range(3):
        rows = [healthy_row(group, rank, step, 0) for rank in range(group.size)]
        if step == 2:
            rows[1000] = replace(rows[1000], weights_end=1, weights_now=1)
        judgement, history = judge(history, group, step, packed(rows))
    assert [verdict.suspects for verdict in judgement.verdicts] == [(1000,)]


def test_replica_sets_are_judged_by_column() -> None:
    """Sets of a sharded job give the same judgement from bytes as from row objects, with a fault in one of them."""
    parts = tuple(GROUP.part(ranks) for ranks in ((0, 2, 4), (1, 3, 5)))
    by_column = by_row = (History.initial(), History.initial())
    for step in range(3):
        rows = healthy(step)
        if step == 2:
            rows[3] = replace(rows[3], weights_end=1, weights_now=1)
        first, by_column = judge_sets(by_column, parts, step, packed(rows))
        second, by_row = judge_sets(by_row, parts, step, rows)
        assert first == second
        assert by_column == by_row
    assert first.verdicts


def test_slices_and_equality_are_those_of_a_list() -> None:
    """Rows in bytes compare, slice and count from the end as the list of their rows does."""
    rows = healthy(1)
    whole = packed(rows)
    assert whole == rows
    assert whole[-2:] == rows[-2:]
    assert whole[-1] == rows[-1]
    assert len(whole) == 6
    with pytest.raises(IndexError):
        whole[6]


def test_a_sum_that_is_no_number_on_every_rank_is_a_fault() -> None:
    """NaN equals nothing, and still all ranks that reduced to NaN hold a wrong result, read by column as well."""
    history = History.initial()
    _, history = judge(history, GROUP, 0, packed(healthy(0)))
    judgement, _ = judge(history, GROUP, 1, packed([replace(row, reduced_sum_0=math.nan) for row in healthy(1)]))
    (verdict,) = judgement.verdicts
    assert (verdict.check, verdict.evidence["ranks"]) == ("allreduce_conservation", [0, 1, 2, 3, 4, 5])
