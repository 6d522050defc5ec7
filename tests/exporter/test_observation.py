"""Rows: what is packed comes back, and bytes that are no row are a transport fault, whatever is wrong with them."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sdcwatch.observation import ROW_VERSION, AuditRow, Row, RowError, SkipReason, pack, size_words, unpack

VALUES = {
    "q": st.integers(-(2**63), 2**63 - 1),
    "Q": st.integers(0, 2**64 - 1),
    "d": st.floats(allow_nan=True, allow_infinity=True, width=64),
}


def rows(kind: type[Any]) -> st.SearchStrategy[Any]:
    fields = {f.name: st.none() | VALUES[f.metadata["code"]] for f in dataclasses.fields(kind)}
    return st.builds(kind, **fields)


ANY_ROW = rows(Row) | rows(AuditRow)


@settings(max_examples=150, deadline=None)
@given(row=ANY_ROW)
def test_any_row_comes_back_bit_for_bit(row: Row | AuditRow) -> None:
    """Every field, absent or at the ends of its range, NaN and signed zero included."""
    data = pack(row)
    back = unpack(type(row), data)
    assert len(data) == size_words(type(row)) * 8
    assert pack(back) == data
    for field in dataclasses.fields(row):
        before, after = getattr(row, field.name), getattr(back, field.name)
        if isinstance(before, float):
            assert struct.pack("<d", before) == struct.pack("<d", after)
        else:
            assert before == after


def test_absent_is_not_zero() -> None:
    """What was not measured stays None, next to a measured zero."""
    back = unpack(Row, pack(Row(rank=0, reduced=0, local_norm=0.0)))
    assert (back.rank, back.reduced, back.local_norm) == (0, 0, 0.0)
    assert back.step is None
    assert back.weights_now is None
    assert back.loss_scale is None


@pytest.mark.parametrize("kind", [Row, AuditRow])
def test_a_flipped_bit_anywhere_is_a_row_error(kind: type[Any]) -> None:
    """All bits of the row, its mask, version and CRC, one after the other."""
    data = pack(kind(rank=3, step=7, epoch=2**63 + 1))
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(RowError):
            unpack(kind, bytes(damaged))


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_are_a_row_error(data: bytes) -> None:
    """Never another exception, which would escape the exchange."""
    with pytest.raises(RowError):
        unpack(Row, data)


@pytest.mark.parametrize("change", [lambda d: d[:-8], lambda d: d + bytes(8), lambda d: b"", lambda d: d[:-1]])
def test_another_length_is_a_row_error_that_says_both(change: Any) -> None:
    """Truncated, longer and empty."""
    with pytest.raises(RowError, match=f"expected {size_words(Row) * 8}"):
        unpack(Row, change(pack(Row(rank=1))))


def test_the_other_kind_of_row_is_a_row_error() -> None:
    """A row and an audit row differ in length, so neither reads as the other."""
    with pytest.raises(RowError):
        unpack(AuditRow, pack(Row(rank=1)))


def test_another_version_is_a_row_error_that_names_it() -> None:
    """A valid CRC does not make the row of another build readable."""
    body = struct.pack("<Q", ROW_VERSION + 1) + pack(Row(rank=1))[8:-8]
    with pytest.raises(RowError, match=f"version {ROW_VERSION + 1}"):
        unpack(Row, body + struct.pack("<Q", zlib.crc32(body)))


def test_skip_reasons_travel_as_negative_numbers() -> None:
    """Every reason has its own code, and none can be taken for `ready` (1) or zero."""
    codes = [SkipReason.code(name) for name in SkipReason.NAMES]
    assert len(set(codes)) == len(codes)
    assert max(codes) < 0
    assert [SkipReason.name(code) for code in codes] == list(SkipReason.NAMES)
