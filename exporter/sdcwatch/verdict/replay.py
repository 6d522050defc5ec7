"""The replay check of one audit: void or not, calibrating or not, and what the edge table says.

Only calibrated edges accuse; a replay that does not reproduce itself is a skip. Flow: audit rows -> **replay** ->
engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sdcwatch.observation import AuditRow, Row, RowError
from sdcwatch.verdict.audit import Calibrated, Measured, calibrate, gather
from sdcwatch.verdict.columns import Columns
from sdcwatch.verdict.edges import PERSISTENT, EdgeView, Finding, needs_third, one_stands_out, read_table
from sdcwatch.verdict.group import Group
from sdcwatch.verdict.history import Calibration, History, transport_topic
from sdcwatch.verdict.intake import audit_fault, readable
from sdcwatch.verdict.outcome import Outcome, lasting
from sdcwatch.verdict.records import (
    ATTRIBUTED,
    BACKWARD_COMPUTE,
    CLEAN,
    CODE,
    DIFFERS,
    INCONCLUSIVE,
    REPLAY,
    SOFTWARE,
    TRANSPORT,
    Verdict,
)
from sdcwatch.verdict.sentences import capital, digest_text, who

AuditRows = Sequence[AuditRow | RowError | None]

_STRENGTH = {SOFTWARE: 0, INCONCLUSIVE: 1, ATTRIBUTED: 2}
_MAX_EDGES = 32


def tie_breaks(
    history: History, group: Group, rows: Sequence[Row | RowError | None], audit_rows: AuditRows
) -> tuple[tuple[int, int], ...]:
    """Which micro-batches a third node must re-run before this audit can be judged.

    Returns:
        (owner, third rank) pairs: at most one, and none when the table needs no third node or there is none.
    """
    good = readable(group, rows)
    if good is None:
        return ()
    columns = Columns(good, group)
    seen = gather(group, columns, audit_rows)
    if seen.faults or seen.void:
        return ()
    owner = needs_third(group, _view(seen, calibrate(history.calibration, group, columns, seen)))
    third = None if owner is None else group.third(owner)
    return () if owner is None or third is None else ((owner, third),)


def judge_replay(
    history: History, group: Group, step: int, columns: Columns, audit: AuditRows, tie: AuditRows | None
) -> Outcome:
    """Judges the audit of one step."""
    seen = gather(group, columns, audit)
    topic = transport_topic(REPLAY)
    if seen.faults:
        verdict = transport_fault(history, group, step, REPLAY, seen.faults)
        return Outcome("skipped:error", (verdict,), history.with_open(topic, (verdict,)))
    history = history.with_open(topic, ())
    if seen.void:
        return Outcome(f"skipped:{seen.void}", (), history)
    found = calibrate(history.calibration, group, columns, seen)
    view = _view(seen, found)
    owner = needs_third(group, view)
    third = None if owner is None else _third_digest(group, columns, audit, tie or (), owner)
    finding = read_table(group, view, third)
    if finding is not None:
        after = replace(history, calibration=found.after)
        return _differs(after, group, step, seen, view, finding)
    outliers = one_stands_out(group, found.failed) or ()
    if found.failed:
        off = not outliers and 2 * len(found.failed) >= len(seen.measured)
        calibration = _switch_off(found, columns) if off else found.after
        return Outcome("skipped:nondeterministic", (), replace(history, calibration=calibration), None, outliers)
    everyone = len(seen.measured) == group.size
    audited = step if everyone and not history.tainted and _originals_speak_alike(seen) else history.audited
    after = replace(history, calibration=found.after, audited=audited).with_open(REPLAY, ())
    return Outcome(CLEAN, (), after)


def transport_fault(history: History, group: Group, step: int, check: str, slots: tuple[int, ...]) -> Verdict:
    """The verdict on rows that are not what their ranks sent; it names nobody and never contains."""
    before = history.opened(transport_topic(check))
    known = {rank for event in before for rank in event.differing}
    if before and known.issuperset(slots):
        return lasting(before, step)[-1]
    what = "rows of the replay" if check == REPLAY else "rows"
    return Verdict(
        step=step,
        check=check,
        kind=INCONCLUSIVE,
        differing=tuple(sorted(slots)),
        path=TRANSPORT,
        last_clean_step=history.checked,
        sentence=f"The {what} in the slots of {who(group, slots)} are not what those ranks sent at step {step}: a "
        "transport fault, which blames nobody.",
        evidence={"slots": list(slots[:_MAX_EDGES]), "num_slots": len(slots)},
    )


def _view(seen: Measured, found: Calibrated) -> EdgeView:
    equal = seen.own == seen.served
    failing = frozenset() if equal else frozenset(r for r in found.edges if seen.own[r] != seen.served[r])
    return EdgeView(
        judged=found.edges,
        failing=failing,
        original=seen.original,
        own=seen.own,
        served=seen.served,
        shown=found.shown,
        first_difference=seen.first_difference,
        unsure=found.failed,
    )


def _originals_speak_alike(seen: Measured) -> bool:
    """Whether all originals equal their own replay, or none does (a compiled step), so that S and N speak for them.

    Where some do, an original that does not may be the fault that this audit was to find, calibrated or not.
    """
    return len({o == s for o, s in zip(seen.original, seen.own, strict=True)}) == 1


def _third_digest(group: Group, columns: Columns, audit: AuditRows, tie: AuditRows, owner: int) -> int | None:
    third, owned = group.third(owner), audit[owner]
    for row in tie:
        if not isinstance(row, AuditRow) or row.rank != third or row.served_rank != owner or third is None:
            continue
        sound = not row.error and row.round == 1 and not audit_fault(group, columns.integers("step")[third], third, row)
        if sound and isinstance(owned, AuditRow):
            same_input = (row.batch_received, row.weights_now) == (owned.batch_sent, owned.weights_now)
            return row.served_digest if same_input else None
    return None


def _switch_off(found: Calibrated, columns: Columns) -> Calibration:
    signatures, counts = columns.integers("batch_signature"), columns.integers("compile_count")
    pairs = frozenset((signatures[owner], counts[owner]) for owner in found.failed)
    return replace(found.after, nondeterministic=found.after.nondeterministic | pairs)


def _differs(history: History, group: Group, step: int, seen: Measured, view: EdgeView, finding: Finding) -> Outcome:
    verdict = Verdict(
        step=step,
        check=REPLAY,
        kind=finding.kind,
        suspects=finding.suspects,
        differing=finding.differing,
        candidates=finding.candidates,
        persistence=finding.persistence,
        path=CODE if finding.kind == SOFTWARE else BACKWARD_COMPUTE,
        contains=finding.contains,
        last_clean_step=history.audited,
        trust_needed="verified",
        sentence=capital(finding.sentence),
        evidence=_evidence(group, seen, view, finding),
    )
    before = history.opened(REPLAY)
    verdicts = lasting(before, step) if _is_same(before, verdict) else (*lasting(before, step), verdict)
    tainted = history.tainted or any(v.contains for v in verdicts)
    return Outcome(DIFFERS, verdicts, replace(history, tainted=tainted).with_open(REPLAY, verdicts))


def _is_same(before: tuple[Verdict, ...], now: Verdict) -> bool:
    """Whether an audit says no more than the open events already do.

    Every audit runs on another micro-batch, so a later one may know more: other ranks, or a stronger proof, is a new
    event; the open one keeps its kind.
    """

    def strength(verdict: Verdict) -> tuple[int, bool]:
        return _STRENGTH[verdict.kind], verdict.persistence == PERSISTENT

    return any(set(e.differing).issuperset(now.differing) and strength(e) >= strength(now) for e in before)


def _evidence(group: Group, seen: Measured, view: EdgeView, finding: Finding) -> dict[str, object]:
    shown = sorted(view.failing or finding.differing)[:_MAX_EDGES]
    return {
        "row": finding.row,
        "num_failing": len(view.failing),
        "num_judged": len(view.judged),
        "first_parameter": finding.first_parameter,
        "edges": [
            {
                "owner": owner,
                "server": group.helper(owner),
                "original": digest_text(seen.original[owner]),
                "self": digest_text(seen.own[owner]),
                "served": digest_text(seen.served[owner]),
                "original_comparable": owner in view.shown,
            }
            for owner in shown
        ],
    }
