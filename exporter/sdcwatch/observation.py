"""The rows that ranks exchange: what each check measured on one rank at one step.

A row is a frozen record that packs into a fixed number of bytes (8 a field, a presence mask and a CRC), so that one
`all_gather_into_tensor` moves a whole group's observations. It never holds tensors, names or text: identities are
exchanged once, at start. Standard library only. Flow: checks -> **observation** -> exchange -> verdict.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any, TypeVar

#: Raised when the layout of a row changes; rows of another version are transport faults, never mismatches.
ROW_VERSION = 2

#: Groups of neighbouring parameters that have a conservation checksum of their own.
CONSERVATION_GROUPS = 4

_MASK64 = (1 << 64) - 1


def u64() -> Any:
    """A field that holds an unsigned 64-bit digest, or None where it was not measured."""
    return field(default=None, metadata={"code": "Q"})


def i64() -> Any:
    """A field that holds a signed 64-bit count, or None where it was not measured."""
    return field(default=None, metadata={"code": "q"})


def f64() -> Any:
    """A field that holds a float64, or None where it was not measured."""
    return field(default=None, metadata={"code": "d"})


class RowError(ValueError):
    """Bytes that are no row: wrong length, version or CRC. A transport fault, never a verdict on a rank."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank measured at the end of the reducing backward of `step`. Digests are uint64 fingerprints.

    The optimizer fields describe the newest `optimizer.step` *before* this backward (`optimizer_step_of` is the
    training step in which it ran; None in the first row). "Now" means the end of this backward, before the
    optimizer runs.
    """

    rank: int | None = i64()
    instance: int | None = u64()  # digest of (instance id, gpu uuid, host) of the sender
    epoch: int | None = u64()
    step: int | None = i64()
    error: int | None = i64()  # 0, or an ErrorCode: our own code failed on this rank and its numbers are void
    time: float | None = f64()  # unix seconds, the sender's clock
    environment: int | None = u64()  # digest of environment (GPU model, driver, torch, flags ...)
    schema: int | None = u64()  # digest of parameter names, shapes, dtypes, requires_grad
    hyperparameters: int | None = u64()  # digest of param_groups without their tensors
    loss_scale: float | None = f64()  # GradScaler's scale where one is known
    compile_count: int | None = i64()  # compile / autotune counter
    optimizer_steps: int | None = i64()  # optimizer.step calls since start: a rank that skipped one lags
    local_norm: float | None = f64()  # L2 norm of the local gradient before the reduce
    local_nonfinite: int | None = i64()  # 1 when the local gradient holds Inf or NaN
    reduced: int | None = u64()  # fingerprint of the gradient after the all-reduce
    reduced_nonfinite: int | None = i64()
    weights_now: int | None = u64()
    versions_now: int | None = i64()  # sum of parameters' `_version`
    optimizer_step_of: int | None = i64()
    gradient_begin: int | None = u64()  # gradient as optimizer.step began (after clip and unscale)
    weights_begin: int | None = u64()
    weights_end: int | None = u64()
    state_begin: int | None = u64()  # optimizer state
    state_end: int | None = u64()
    versions_begin: int | None = i64()
    versions_end: int | None = i64()
    batch_bytes: int | None = i64()  # size of this rank's packed micro-batches; None: no replay possible
    batch_signature: int | None = u64()  # digest of input structure, shapes and dtypes, autocast, number of batches
    free_memory: int | None = i64()  # bytes on the device that an audit may use
    replay_ready: int | None = i64()  # 1 when this rank can audit this step; else a negative SkipReason code
    conservation: int | None = i64()  # 1 where the sums below were measured; else a negative SkipReason code
    gradient_edits: int | None = i64()  # moves of the gradients' version counters between the two sums
    unfinished: int | None = i64()  # backwards of this epoch whose reduce DDP could not finish
    # By group of parameters: weighted sum of the local gradients before the reduce, of the reduced gradient on this
    # rank, and the L2 norm of the rounding errors that this rank's share of the average may bring.
    local_sum_0: float | None = f64()
    local_sum_1: float | None = f64()
    local_sum_2: float | None = f64()
    local_sum_3: float | None = f64()
    reduced_sum_0: float | None = f64()
    reduced_sum_1: float | None = f64()
    reduced_sum_2: float | None = f64()
    reduced_sum_3: float | None = f64()
    reduce_noise_0: float | None = f64()
    reduce_noise_1: float | None = f64()
    reduce_noise_2: float | None = f64()
    reduce_noise_3: float | None = f64()


@dataclass(frozen=True, slots=True)
class AuditRow:
    """What one rank measured while it replayed its own micro-batch and that of the rank it serves.

    Edge (r, h(r)): `self_digest` of r against `served_digest` of h(r). `original` is what the real backward gave.
    """

    rank: int | None = i64()
    instance: int | None = u64()
    epoch: int | None = u64()
    step: int | None = i64()
    error: int | None = i64()
    round: int | None = i64()  # 0: self and next node; 1: the tie-break on a third node
    original: int | None = u64()  # O of this rank
    self_digest: int | None = u64()  # S of this rank
    served_rank: int | None = i64()  # whose micro-batch this rank replayed for it
    served_digest: int | None = u64()  # N for `served_rank`
    batch_sent: int | None = u64()  # digest of the packed micro-batch (with RNG and seeds) before transit
    batch_received: int | None = u64()  # digest of what arrived from `served_rank`
    batch_unchanged: int | None = i64()  # 1: no batch was written to between its loss and its backward's end
    weights_now: int | None = u64()  # weights the replay ran on
    first_difference: int | None = i64()  # index of the first parameter where O and S differ; None: equal


R = TypeVar("R", Row, AuditRow)


class ErrorCode:
    """Why a row's numbers are void."""

    NONE = 0
    CHECK = 1  # an exception in a check of ours


class SkipReason:
    """Why a check did not run, as exported in `sdc_skips_total{reason}`; codes are the row's wire form."""

    NAMES = (
        "join", "collective", "batch", "comm_hook", "oom", "nondeterministic", "undefined", "budget", "error",
        "disabled", "unhooked",
    )  # fmt: skip

    @classmethod
    def code(cls, name: str) -> int:
        return -1 - cls.NAMES.index(name)

    @classmethod
    def name(cls, code: int) -> str:
        return cls.NAMES[-1 - code]


def _codes(kind: type[Any]) -> str:
    return "".join(f.metadata["code"] for f in dataclasses.fields(kind))


def size_words(kind: type[Row] | type[AuditRow]) -> int:
    """Length of a packed row in 64-bit words (what the exchange's int64 tensor holds a rank)."""
    return len(dataclasses.fields(kind)) + 3


def pack(row: Row | AuditRow) -> bytes:
    """Packs a row: version, presence mask, one 8-byte word a field, CRC-32 of all before it.

    Digests are taken modulo 2**64. Counts must fit an int64: `struct.error` otherwise, a mistake of ours.
    """
    mask = 0
    values: list[int | float] = []
    for position, f in enumerate(dataclasses.fields(row)):
        value = getattr(row, f.name)
        code = f.metadata["code"]
        if value is None:
            values.append(0.0 if code == "d" else 0)
            continue
        mask |= 1 << position
        values.append(float(value) if code == "d" else int(value) & _MASK64 if code == "Q" else int(value))
    body = struct.pack(f"<QQ{_codes(type(row))}", ROW_VERSION, mask, *values)
    return body + struct.pack("<Q", zlib.crc32(body))


def unpack(kind: type[R], data: bytes | memoryview) -> R:
    """Reads one row back.

    Raises:
        RowError: wrong length, version or CRC.
    """
    layout = _LAYOUTS[kind]
    if len(data) != layout.size:
        raise RowError(f"row of {len(data)} bytes, expected {layout.size}")
    version, mask, *values, crc = layout.unpack(data)
    if zlib.crc32(data[:-8]) != crc:
        raise RowError("row's CRC does not match")
    if version != ROW_VERSION:
        raise RowError(f"row of version {version}, this build reads {ROW_VERSION}")
    for position in _absent(len(values), mask):
        values[position] = None
    return kind(*values)


@functools.lru_cache(maxsize=256)
def _absent(count: int, mask: int) -> tuple[int, ...]:
    """Positions that a presence mask leaves out; the ranks of a step share one mask or a few."""
    return tuple(position for position in range(count) if not mask >> position & 1)


_LAYOUTS: dict[Any, struct.Struct] = {kind: struct.Struct(f"<QQ{_codes(kind)}Q") for kind in (Row, AuditRow)}
