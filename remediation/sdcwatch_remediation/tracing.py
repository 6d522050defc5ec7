"""One case as one trace: from the event, over every state that the case was in, to its end.

What it does: makes spans of a closed case and its audit timeline. Ids are those of W3C Trace Context, derived from the
case's id, so that anybody can compute them and a trace that is sent twice is the same trace.
What it never does: measure, send, or change a case. It holds no OpenTelemetry type.
Its place: `trace_export` sends what it makes, once a case has ended.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sdcwatch_remediation.cases import Case
from sdcwatch_remediation.states import INITIAL, STATES
from sdcwatch_remediation.store import AuditLine

PHASES = {
    "received": "alerted",
    "proving": "proof",
    "unproven": "proof",
    "settling": "settled",
    "observed": "observed",
    "recommended": "recommended",
    "awaiting_approval": "approval",
    "containing": "quarantine",
    "quarantining": "quarantine",
    "replacing": "replace",
    "proving_replacement": "proven",
    "handing_over": "handed_over",
    "handed_over": "handed_over",
    "resuming": "resumed",
    "suspected": "suspected",
    "rejected": "rejected",
    "giving_back": "given_back",
    "not_given_back": "given_back",
    "frozen": "frozen",
}
"""The span that shows a state; states that follow one another under one name are one span."""

ROOT, DETECTED = "case", "detected"
"""The whole of it; and its first part, from the event's own time until the alert was durable here."""

LONGEST_TEXT = 1000
"""Characters of an audit line's detail that travel; the audit log has it whole."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One audit line inside a span."""

    name: str
    time: float
    detail: str
    """JSON, cut at `LONGEST_TEXT`."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span; times are unix seconds, ids are lower-case hex."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for the root."""
    start: float
    end: float
    attributes: dict[str, str]
    marks: tuple[Mark, ...] = ()
    ok: bool | None = None
    """Whether the case reached what it was for; None where that is not for this span to say."""
    message: str = ""


def trace_id(case_id: str) -> str:
    """Return the W3C trace id of a case: 32 hex digits."""
    return hashlib.sha256(f"sdcwatch trace {case_id}".encode()).hexdigest()[:32]


def span_id(case_id: str, name: str, number: int = 0) -> str:
    """Return the W3C parent id of a case's span: 16 hex digits. `number` counts earlier spans of that name."""
    return hashlib.sha256(f"sdcwatch span {case_id} {name} {number}".encode()).hexdigest()[:16]


def traceparent(case_id: str) -> str:
    """Return the `traceparent` header value that makes something a part of a case's trace."""
    return f"00-{trace_id(case_id)}-{span_id(case_id, ROOT)}-01"


def spans(case: Case, timeline: Sequence[AuditLine]) -> list[Span]:
    """Return the spans of a closed case, the root first, the others in order; each begins where the one before ends.

    Args:
        case: a case that has ended.
        timeline: its audit lines, oldest first; lines after the end are left out.
    """
    assert case.closed_at is not None
    found = [_root(case)]
    parent, trace = found[0].span_id, found[0].trace_id
    if case.event_time:
        opened = max(case.opened_at, found[0].start)
        told = {"sdcwatch.event_id": case.event_id}
        detected = span_id(case.id, DETECTED)
        found.append(Span(DETECTED, trace, detected, parent, found[0].start, opened, told))
    seen: dict[str, int] = {}
    for name, states, start, end, marks in _phases(case, timeline):
        number = seen[name] = seen.get(name, -1) + 1
        told = {"sdcwatch.states": ",".join(states)}
        found.append(Span(name, trace, span_id(case.id, name, number), parent, start, end, told, tuple(marks)))
    return found


def _root(case: Case) -> Span:
    assert case.closed_at is not None
    told = {
        "sdcwatch.case_id": case.id,
        "sdcwatch.event_id": case.event_id,
        "sdcwatch.state": case.state,
        "sdcwatch.outcome": case.outcome,
        "sdcwatch.reason": case.reason[:LONGEST_TEXT],
        "sdcwatch.replacement": case.replacement,
        "sdcwatch.approved_by": case.approved_by,
        "training_cluster": case.cluster,
        "training_instance": case.instance_id,
        "training_node": case.node_name,
        "training_job": case.job,
        "gpu_uuid": case.gpu_uuid,
    }
    # A rank's clock may run ahead of ours; the trace must not end before it begins.
    start = min(case.event_time or case.opened_at, case.opened_at)
    ok = {"closed": True, "failed": False, "expired": False}.get(case.state)
    return Span(
        name=ROOT,
        trace_id=trace_id(case.id),
        span_id=span_id(case.id, ROOT),
        parent_id="",
        start=start,
        end=max(case.closed_at, start),
        attributes={key: value for key, value in told.items() if value},
        ok=ok,
        message="" if ok is not False else f"{case.state}: {case.reason}"[:LONGEST_TEXT],
    )


def _phases(case: Case, timeline: Sequence[AuditLine]) -> Iterator[tuple[str, list[str], float, float, list[Mark]]]:
    name, states, start, marks = PHASES[INITIAL], [INITIAL], case.opened_at, list[Mark]()
    for line in timeline:
        step, when = str(line["step"]), float(line["time"])
        if step not in STATES:
            marks.append(Mark(step, when, json.dumps(line["detail"], sort_keys=True)[:LONGEST_TEXT]))
            continue
        following = PHASES.get(step)  # None: the end
        if following == name:
            states.append(step)
            continue
        yield name, states, start, max(when, start), marks
        if following is None:
            return
        name, states, start, marks = following, [step], max(when, start), []
