"""A run as one HTML file: no script, nothing loaded from elsewhere, dark and light as the reader's system is.

Every text of the spool is escaped: names of jobs and nodes come from people and machines. Flow: facts -> **page**.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from html import escape
from importlib import resources

from sdcwatch._version import __version__
from sdcwatch.event import Event
from sdcwatch.run_report import chart
from sdcwatch.run_report.facts import CheckFacts, RunFacts


def html(run: RunFacts, *, now: float) -> str:
    """The whole file.

    Args:
        now: unix seconds, for the footer.
    """
    kind, sentence = _verdict(run)
    style = resources.files("sdcwatch.run_report").joinpath("style.css").read_text(encoding="utf-8")
    epochs = f"{len(run.epochs)} {'life' if len(run.epochs) == 1 else 'lives'}"
    overhead = "unknown" if run.overhead is None else f"{100 * run.overhead:.1f} %"
    numbers = (
        ("newest step", run.steps), ("checked up to", run.checked), ("verified up to", run.verified),
        ("clean checkpoint", run.clean_checkpoint), ("events", len(run.events)), ("time in checks", overhead),
    )  # fmt: skip
    cells = "".join(f"<div><dt>{name}</dt><dd>{_number(value)}</dd></div>" for name, value in numbers)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(run.job)}: sdcwatch report</title><style>{style}</style></head><body><main>
<h1>{escape(run.job)}</h1>
<div class="soft">{run.world_size} ranks, {epochs}, state: {escape(run.state)}</div>
<section class="verdict {kind}">{sentence}</section>
<dl class="numbers">{cells}</dl>
<section><h2>Steps</h2>{chart.steps(run) or '<p class="soft">No step was recorded.</p>'}</section>
<section><h2>What was checked, and what was not</h2>{_coverage(run.checks)}</section>
<section><h2>Faults</h2>{_events(run.events)}{_heals(run.heals)}</section>
<section><h2>Checkpoints</h2>{_checkpoints(run)}</section>
<footer>sdcwatch {escape(__version__)}, {_when(now)}.
Buffers, and what every replica computes wrong alike, are in no check.</footer>
</main></body></html>
"""


def _verdict(run: RunFacts) -> tuple[str, str]:
    proven = [e for e in run.events if e.kind == "attributed"]
    if proven:
        who = sorted({f"{i.node} ({i.gpu_uuid})" for e in proven for r in e.suspects if (i := e.identity_of(r))})
        return "bad", f"Silent data corruption was proven on {escape(', '.join(who))}."
    differed = [e for e in run.events if e.kind == "inconclusive"]
    if differed:
        return "warn", "The replicas differed, and nobody could be named."
    if run.events:
        return "warn", "The replicas differed because of software, not of a machine."
    if not any(check.ran for check in run.checks):
        return "warn", "No check ran: nothing is known about this run."
    return "", "No fault was seen by the checks below, on the steps on which they ran."


def _coverage(checks: Sequence[CheckFacts]) -> str:
    rows = []
    for check in checks:
        skips = ", ".join(f"{count:,} {escape(reason)}" for reason, count in check.skipped.items()) or "none"
        off = '<span class="pill off">off</span>' if check.enabled is False else ""
        missed = f"{_bytes(check.uncovered)} out of reach" if check.uncovered else ""
        never = "" if check.ran or check.enabled is False else '<span class="pill">never ran</span>'
        rows.append(
            [f"<code>{check.name}</code> {off}{never}", f"{check.ran:,}", skips, _bytes(check.covered), missed,
             f"{check.seconds:,.1f} s"]
        )  # fmt: skip
    return _table(("check", "n:ran", "skipped, and why", "n:covers", "does not reach", "n:time"), rows)


def _events(events: Sequence[Event]) -> str:
    if not events:
        return '<p class="soft">None.</p>'
    rows = []
    for event in events:
        clean = event.last_clean_step
        window = f"steps {clean + 1:,} to {event.step:,}" if clean is not None else f"up to step {event.step:,}"
        who = ", ".join(f"rank {r} on {i.node}" for r in event.suspects if (i := event.identity_of(r))) or "nobody"
        rows.append(
            [f"{event.step:,}", _when(event.time), f'<span class="pill {event.kind}">{event.kind}</span>',
             f"<code>{event.check}</code>", escape(who),
             f"{escape(event.sentence)}<br><small>{escape(event.id)}; may be contaminated: {window}; "
             f"{event.action}</small>"]
        )  # fmt: skip
    return _table(("n:step", "time", "verdict", "check", "named", "proof"), rows)


def _heals(heals: dict[str, int]) -> str:
    if not heals:
        return ""
    return f"<p>Heals: {', '.join(f'{count} {escape(outcome)}' for outcome, count in sorted(heals.items()))}.</p>"


def _checkpoints(run: RunFacts) -> str:
    if not run.checkpoints:
        return '<p class="soft">None is known; name their folder with <code>--checkpoints</code>.</p>'
    rows = [
        [
            _number(c.step),
            f'<span class="pill {c.trust}">{c.trust}</span>',
            f'<code class="path">{escape(c.name)}</code>',
        ]
        for c in run.checkpoints
    ]
    return _table(("n:step", "trust", "name"), rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    classes = [' class="n"' if head.startswith("n:") else "" for head in heads]
    top = "".join(f"<th{c}>{head.removeprefix('n:')}</th>" for head, c in zip(heads, classes, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{c}>{cell}</td>" for cell, c in zip(row, classes, strict=True)) + "</tr>\n"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table>"


def _number(value: object) -> str:
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else escape(str(value))


def _when(time: float) -> str:
    return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _bytes(size: int) -> str:
    for unit, most in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= most:
            return f"{size / most:.1f} {unit}"
    return f"{size} B"
