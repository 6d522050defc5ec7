"""Audits before and during: may this step be audited, is the replay calibrated, and what did it measure.

All ranks decide the same from the same rows, *before* anything is replayed. Flow: rows -> **plan_audit** -> replay ->
**gather** -> edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sdcwatch.observation import AuditRow, Row, RowError, SkipReason
from sdcwatch.verdict.columns import Columns
from sdcwatch.verdict.gradient import all_nonfinite
from sdcwatch.verdict.group import Group
from sdcwatch.verdict.history import Calibration, History
from sdcwatch.verdict.intake import audit_fault, readable

#: Calibration keys kept, a rank; beyond it only the newest audit's are kept, and the rest calibrates again.
_MAX_KEYS = 16
_MAX_PROFILES = 4


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """Whether an audit runs at this step.

    Attributes:
        run: all ranks replay now.
        reason: why not, a skip reason; None when it runs.
        calibrating: edges (owner, server) that only calibrate and cannot accuse in this audit.
    """

    run: bool
    reason: str | None = None
    calibrating: tuple[tuple[int, int], ...] = ()


def plan_audit(history: History, group: Group, rows: Sequence[Row | RowError | None]) -> AuditPlan:
    """Decides, the same on every rank, whether the group audits this step; one rank that cannot stops all."""
    if len(group.node_order) < 2:
        return AuditPlan(False, "disabled")
    good = readable(group, rows)
    if good is None:
        return AuditPlan(False, "error")
    columns = Columns(good, group)
    reason = _not_ready(columns) or _not_comparable(columns) or _no_room(group, columns)
    known = history.calibration
    profile = _profile(columns)
    if reason is None and any(pair in known.nondeterministic for pair in set(zip(*profile, strict=True))):
        reason = "nondeterministic"
    if reason is not None:
        return AuditPlan(False, reason)
    if profile in known.complete:
        return AuditPlan(True)
    return AuditPlan(True, None, tuple(key[:2] for key in edge_keys(group, profile) if key not in known.edges))


def _not_ready(columns: Columns) -> str | None:
    states = columns.distinct("replay_ready")
    if states == {1}:
        return None
    # The reason that stands first in the list of reasons, so that all ranks say the same one.
    codes = [code for code in states if code is not None and -len(SkipReason.NAMES) <= code < 0]
    return SkipReason.name(max(codes)) if codes else "disabled"


def _not_comparable(columns: Columns) -> str | None:
    if columns.labels("environment") or columns.labels("schema"):
        return "disabled"
    if all_nonfinite(columns) or columns.labels("weights_now"):
        return "undefined"
    return None


def _no_room(group: Group, columns: Columns) -> str | None:
    sizes = columns.integers("batch_bytes")
    if None in sizes:
        return "batch"
    for rank, free in enumerate(columns.integers("free_memory")):
        needed = sum(sizes[owner] or 0 for owner in group.served_by(rank))
        if free is not None and free < needed:
            return "oom"
    return None


Profile = tuple[tuple[int | None, ...], tuple[int | None, ...]]
EdgeKey = tuple[int, int, int | None, int | None, int | None]


def _profile(columns: Columns) -> Profile:
    return columns.integers("batch_signature"), columns.integers("compile_count")


def edge_keys(group: Group, profile: Profile) -> Iterator[EdgeKey]:
    """The calibration key of each edge, by its owner: anything that could change the kernels is part of it."""
    signatures, counts = profile
    for owner in range(group.size):
        server = group.helper(owner)
        if server is not None:
            yield owner, server, signatures[owner], counts[owner], counts[server]


@dataclass(frozen=True, slots=True)
class Measured:
    """What an audit measured, index = rank; `served` is by the rank's helper and None where nobody served it.

    Attributes:
        faults: ranks whose audit row is not what they sent now.
        void: why nothing may be compared; None when it may.
    """

    original: tuple[int | None, ...] = ()
    own: tuple[int | None, ...] = ()
    served: tuple[int | None, ...] = ()
    first_difference: tuple[int | None, ...] = ()
    faults: tuple[int, ...] = ()
    void: str | None = None

    @property
    def measured(self) -> frozenset[int]:
        """Owners of the edges that were measured at both ends."""
        if None not in self.own and None not in self.served:
            return frozenset(range(len(self.own)))
        pairs = enumerate(zip(self.own, self.served, strict=True))
        return frozenset(owner for owner, pair in pairs if None not in pair)


def gather(group: Group, columns: Columns, audit: Sequence[Any]) -> Measured:
    """Reads the rows of one audit.

    Slot i belongs to rank i modulo the group's size: a rank that serves several owners sends one row for each, the
    further ones after the first round of all ranks.
    """
    size = group.size
    if any(row is None or (isinstance(row, AuditRow) and row.error) for row in audit):
        return Measured(void="error")
    steps = columns.integers("step")
    faults = {slot % size for slot, row in enumerate(audit) if audit_fault(group, steps[slot % size], slot, row)}
    if len(audit) < size:
        faults.update(range(len(audit), size))
    served: list[int | None] = [None] * size
    transit_ok = True
    for slot, row in enumerate(audit):
        if slot % size in faults or row.served_rank is None:
            continue
        owner = row.served_rank
        if not 0 <= owner < size or group.helper(owner) != slot % size:
            faults.add(slot % size)
        elif owner not in faults:
            served[owner] = row.served_digest
            transit_ok = transit_ok and row.batch_received == audit[owner].batch_sent
    if faults:
        return Measured(faults=tuple(sorted(faults)))
    first = audit[:size]
    return Measured(
        original=tuple([row.original for row in first]),
        own=tuple([row.self_digest for row in first]),
        served=tuple(served),
        first_difference=tuple([row.first_difference for row in first]),
        void=_void(columns, audit, first, transit_ok),
    )


def _void(columns: Columns, audit: Sequence[AuditRow], first: Sequence[AuditRow], transit_ok: bool) -> str | None:
    if not transit_ok or any(row.batch_unchanged != 1 or row.batch_sent is None for row in first):
        return "batch"
    if columns.labels("environment") or columns.labels("schema"):
        return "disabled"
    weights = {row.weights_now for row in audit}
    if not columns.absent("weights_now"):
        weights |= columns.distinct("weights_now")
    if len(weights) != 1 or None in weights or all_nonfinite(columns):
        return "undefined"
    return None


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Which measurements of one audit may accuse, and what the audit adds to the calibration.

    Attributes:
        edges: owners whose edge was calibrated before this audit.
        shown: ranks whose O was shown to equal S before this audit.
        failed: owners whose edge only calibrates in this audit, and failed.
        after: the calibration that follows.
    """

    edges: frozenset[int]
    shown: frozenset[int]
    failed: frozenset[int]
    after: Calibration


def calibrate(before: Calibration, group: Group, columns: Columns, seen: Measured) -> Calibrated:
    """Sorts the measurements of one audit into those that may accuse and those that calibrate."""
    profile = _profile(columns)
    everyone = frozenset(range(group.size))
    measured = seen.measured
    if profile in before.complete and len(measured) == group.size:
        return Calibrated(everyone, everyone, frozenset(), before)
    signatures, counts = profile
    keys = {key[0]: key for key in edge_keys(group, profile) if key[0] in measured}
    edges = frozenset(owner for owner, key in keys.items() if key in before.edges)
    fresh = [owner for owner in keys if owner not in edges]
    failed = frozenset(owner for owner in fresh if seen.own[owner] != seen.served[owner])
    originals = {rank: (rank, signatures[rank], counts[rank]) for rank in everyone}
    shown = frozenset(rank for rank, key in originals.items() if key in before.originals)
    equal = {
        key for rank, key in originals.items() if seen.own[rank] is not None and seen.original[rank] == seen.own[rank]
    }
    new_edges = before.edges | {keys[owner] for owner in fresh if owner not in failed}
    new_originals = before.originals | equal
    complete = before.complete
    if all(k in new_edges for k in edge_keys(group, profile)) and all(k in new_originals for k in originals.values()):
        complete = (*(known for known in complete if known != profile), profile)[-_MAX_PROFILES:]
    limit = _MAX_KEYS * group.size
    after = Calibration(
        edges=new_edges if len(new_edges) <= limit else frozenset(k for k in keys.values() if k in new_edges),
        originals=new_originals if len(new_originals) <= limit else frozenset(equal),
        nondeterministic=before.nondeterministic,
        complete=complete,
    )
    return Calibrated(edges, shown, failed, after)
