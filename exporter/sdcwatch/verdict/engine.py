"""From the rows of one step to a judgement: the pure heart of sdcwatch.

It reads frozen rows and a frozen history and returns new ones; it measures nothing, talks to nobody and never raises on
what a rank sent. Flow: exchange -> **judge** -> second collective -> **combine** -> contain, event, metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sdcwatch.observation import Row, RowError
from sdcwatch.verdict.columns import Columns
from sdcwatch.verdict.conservation import judge_conservation
from sdcwatch.verdict.gradient import NormHint, gradient_differs, judge_gradient, judge_norms
from sdcwatch.verdict.group import Group
from sdcwatch.verdict.history import History, transport_topic
from sdcwatch.verdict.intake import Intake, receive
from sdcwatch.verdict.outcome import Outcome
from sdcwatch.verdict.partition import sizes
from sdcwatch.verdict.records import (
    ALLREDUCE_CONSERVATION,
    CLEAN,
    CONTAINS_FROM,
    GRADIENT_CHECKSUM,
    GRADIENT_NORM,
    INCONCLUSIVE,
    REPLAY,
    ROW_CHECKS,
    TRANSPORT,
    WEIGHT_CHECKSUM,
    Judgement,
    Verdict,
    digest_of,
    severity,
)
from sdcwatch.verdict.replay import AuditRows, judge_replay, transport_fault
from sdcwatch.verdict.weights import judge_weights


def judge(
    history: History,
    group: Group,
    step: int,
    rows: Sequence[Row | RowError | None],
    audit: AuditRows | None = None,
    tie: AuditRows | None = None,
    *,
    audit_reason: str | None = None,
) -> tuple[Judgement, History]:
    """Judges one exchange of a group.

    Args:
        history: what the previous exchange of this epoch returned; `History.initial()` at first.
        group: the epoch's membership.
        step: this rank's own step number; the group's is the most common one among the rows.
        rows: one row a rank, index = slot; `RowError` for bytes that are no row, None for a row that never came.
        audit: audit rows where replay ran, slot i from rank i modulo the group's size; None where it did not.
        tie: rows of the third node where `tie_breaks` asked for one.
        audit_reason: on an audit step without audit rows, the skip reason from `plan_audit`.

    Returns:
        The judgement and the history to give to the next call.
    """
    intake = receive(history, group, step, rows)
    if not intake.rows:
        return _nothing_to_compare(history, group, intake, audit is not None or audit_reason is not None)
    step = intake.step
    columns = Columns(intake.rows, group)
    before = _without_gap(history.with_open(transport_topic(GRADIENT_CHECKSUM), ()), columns)
    weights = judge_weights(before, group, step, columns, gradient_differs(columns))
    completed = _completed(before, columns)
    current, clean_before = _advance(weights, columns, completed)
    gradient = judge_gradient(current, group, step, columns, clean_before)
    conservation, gradient = judge_conservation(gradient, group, step, columns, clean_before)
    norms = judge_norms(group, columns)
    outcomes = {GRADIENT_CHECKSUM: gradient, WEIGHT_CHECKSUM: weights}
    after = gradient.history
    if conservation is not None:
        outcomes[ALLREDUCE_CONSERVATION] = conservation
        after = conservation.history
    if audit is not None:
        outcomes[REPLAY] = judge_replay(after, group, step, columns, audit, tie)
        after = outcomes[REPLAY].history
    elif audit_reason is not None:
        outcomes[REPLAY] = Outcome(f"skipped:{audit_reason}", (), after)
    own_steps = tuple([own or 0 for own in columns.integers("step")]) if columns.labels("step") else ()
    return _judgement(group, step, outcomes, norms), replace(after, step=step, steps=own_steps)


def combine(judgement: Judgement, agreed: bool, highest_code: int, *, lasting: bool = False) -> Judgement:
    """The judgement that all ranks act on after the second collective.

    Args:
        judgement: this rank's own.
        agreed: the MAX over (code, -code, digest, -digest) showed that all ranks hold the same.
        highest_code: the highest code of any rank.
        lasting: the previous exchange already ended without agreement, so that this is the same event.

    Returns:
        The judgement itself, or one that is the same on all ranks: inconclusive, nobody named, and containing when
        any rank's own would have contained.
    """
    if agreed:
        return judgement
    contains = highest_code >= CONTAINS_FROM
    verdict = Verdict(
        step=judgement.step,
        check=GRADIENT_CHECKSUM,
        kind=INCONCLUSIVE,
        candidates=tuple(range(judgement.size)),
        path=TRANSPORT,
        contains=contains,
        new=not lasting,
        sentence=f"The ranks read different verdicts from the same exchange at step {judgement.step}, so nobody can be "
        "named.",
        evidence={"highest_code": highest_code},
    )
    return replace(
        judgement,
        verdicts=(verdict,),
        code=severity((verdict,)),
        digest=digest_of(judgement.step, (verdict,)),
        calibration_outliers=(),
    )


def _nothing_to_compare(history: History, group: Group, intake: Intake, due: bool) -> tuple[Judgement, History]:
    """Rows that are faulty or void are counted, never judged; the gradient was not seen clean at this step."""
    verdicts: tuple[Verdict, ...] = ()
    after = replace(history, gradient_clean_since=None, step=intake.step, steps=())
    if intake.faults:
        verdicts = (transport_fault(history, group, intake.step, GRADIENT_CHECKSUM, intake.faults),)
        after = after.with_open(transport_topic(GRADIENT_CHECKSUM), verdicts)
    checks = tuple((check, "skipped:error") for check in (*ROW_CHECKS, *((REPLAY,) if due else ())))
    judgement = Judgement(
        verdicts=verdicts,
        checks=checks,
        group_sizes={},
        code=severity(verdicts),
        digest=digest_of(intake.step, verdicts),
        step=intake.step,
        size=group.size,
    )
    return judgement, after


def _without_gap(history: History, columns: Columns) -> History:
    """Forgets that gradients were clean when an optimizer step ran whose gradient no exchange of ours showed."""
    ran = columns.rows[0].optimizer_step_of
    if ran is None or ran == history.optimizer_step_of or ran == history.step:
        return history
    return replace(history, gradient_clean_since=None)


def _completed(history: History, columns: Columns) -> int | None:
    """The newest step that is known to be over: the state of these rows is the state after it."""
    known = [step for step in (history.step, columns.rows[0].optimizer_step_of) if step is not None]
    return max(known) if known else None


def _advance(weights: Outcome, columns: Columns, completed: int | None) -> tuple[History, int | None]:
    """Moves the newest checked step, and says how far the state is clean whatever this step's gradient shows."""
    history = weights.history
    if history.open or history.spoiled:
        return history, history.checked
    if not columns.complete("weights_now"):
        return history, completed
    if weights.result != CLEAN or completed is None:
        return history, history.checked
    checked = completed if history.checked is None else max(history.checked, completed)
    return replace(history, checked=checked), checked


def _judgement(group: Group, step: int, outcomes: dict[str, Outcome], norms: NormHint) -> Judgement:
    verdicts = tuple(verdict for outcome in outcomes.values() for verdict in outcome.verdicts)
    checks = ((GRADIENT_NORM, norms.result), *((check, outcome.result) for check, outcome in outcomes.items()))
    parts = {check: outcome.partition for check, outcome in outcomes.items()}
    replay = outcomes.get(REPLAY)
    return Judgement(
        verdicts=verdicts,
        checks=checks,
        group_sizes={check: sizes(part, group.size) for check, part in parts.items() if part is not None},
        code=severity(verdicts, checks),
        digest=digest_of(step, verdicts),
        step=step,
        size=group.size,
        deviations=norms.deviations,
        nonfinite_origin=norms.origin,
        calibration_outliers=replay.outliers if replay is not None else (),
    )
