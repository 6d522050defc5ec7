"""The steps of a run as an inline SVG: what is proven, where a fault may have been at work, events, checkpoints.

Pure text; colours come from the page's style sheet. Flow: facts -> **chart** -> page.
"""

from __future__ import annotations

from html import escape

from sdcwatch.run_report.facts import RunFacts

WIDTH, LEFT, RIGHT = 960, 120, 24
_ROWS = {"verified": 24, "checked": 60, "contaminated": 96, "events": 132, "checkpoints": 168}
_HEIGHT = 226


def steps(run: RunFacts) -> str:
    """The picture; empty text where no step ran."""
    last = max([run.steps or 0, *(e.step for e in run.events), *(c.step or 0 for c in run.checkpoints)])
    if last <= 0:
        return ""

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * max(0.0, min(step, last)) / last

    parts = [
        f'<text class="label" x="{LEFT - 14}" y="{y + 15}" text-anchor="end">{name}</text>'
        f'<rect class="track" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="20" rx="4"/>'
        for name, y in _ROWS.items()
    ]
    for tick in _ticks(last):  # under the bars, which they would cut
        parts.append(
            f'<line class="tick" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{_ROWS["verified"] - 6}" y2="194"/>'
            f'<text class="tick" x="{x(tick):.1f}" y="212" text-anchor="middle">{tick:,}</text>'
        )
    for name, through in (("verified", run.verified), ("checked", run.checked)):
        if through:
            parts.append(_bar(name, x(0), x(through), _ROWS[name], f"{name} up to step {through}"))
    for event in run.events:
        if event.kind == "software":
            continue
        clean = event.last_clean_step
        since = "no step is known to be clean" if clean is None else f"clean up to step {clean}"
        window = f"{event.check} at step {event.step}: {since}"
        parts.append(_bar("bad", x(clean or 0), x(event.step), _ROWS["contaminated"], window))
    for event in run.events:
        title = escape(f"step {event.step}, {event.check}, {event.kind}: {event.sentence}")
        y = _ROWS["events"] + 10
        parts.append(
            f'<path class="event {event.kind}" d="M{x(event.step):.1f} {y - 9}l9 9-9 9-9-9z">'
            f"<title>{title}</title></path>"
        )
    for found in run.checkpoints:
        if found.step is not None:
            y, title = _ROWS["checkpoints"] + 10, escape(f"{found.name}: step {found.step}, {found.trust}")
            place = x(found.step)
            parts.append(
                f'<circle class="{found.trust}" cx="{place:.1f}" cy="{y}" r="6"><title>{title}</title></circle>'
            )
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {_HEIGHT}" role="img" aria-label="steps of the run">\n{body}\n</svg>'


def _bar(kind: str, start: float, end: float, y: int, title: str) -> str:
    width = max(end - start, 3.0)
    place = f'x="{min(start, WIDTH - RIGHT - width):.1f}" y="{y}" width="{width:.1f}" height="20"'
    return f'<rect class="{kind}" {place} rx="4"><title>{escape(title)}</title></rect>'


def _ticks(last: int) -> list[int]:
    raw = max(1, last // 6)
    size = 10 ** (len(str(raw)) - 1)
    every = next(size * n for n in (1, 2, 5, 10) if size * n >= raw)
    return list(range(0, last + 1, every))
