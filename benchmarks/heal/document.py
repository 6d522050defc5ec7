"""The generated part of docs/healing.md: what was lived through, and how each run ended. Flow: main -> **document**."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.campaign.journal import ROOT
from benchmarks.heal.cases import BEGINS, FAULT, KILL, STEPS
from benchmarks.heal.lived import Result

DOCUMENT = ROOT / "docs" / "healing.md"
BEGIN, END = "<!-- campaign: begin -->\n", "<!-- campaign: end -->\n"
_TITLES = {
    FAULT: "Every place of the injector",
    BEGINS: "A fault that begins between two audits, with checkpoints before the next",
    KILL: "kill -9",
}
_TOLD = {
    FAULT: (
        "`once` is right when repeated. After a halt the bad node is replaced: the next life has no fault. "
        "*Repeated* counts steps that\na later life began again, *healed* those computed again in place. "
        "*Resumed after*: the step of the checkpoint that was chosen."
    ),
    BEGINS: (
        "A gradient of rank 1 is wrong from the step given on, and the next audit shows it. What was written in "
        "between may hold it and is never\nchosen, nor is an older one that no audit has verified. Where the job is "
        'killed before that audit, only a verified checkpoint is safe\n(`last_clean(folder, "verified")`); '
        "`resume_point` takes the newest checked one."
    ),
    KILL: (
        "All named processes get SIGKILL at once, when the first of them is there; two ranks a node (one where a heal "
        "overwrites). The job is\nstarted again. A checkpoint whose write was cut has no manifest. The halts are those "
        "of `optimizer_weight`, whose newest checkpoint is wrong."
    ),
}


def write(results: Sequence[Result], seconds: float) -> None:
    """Puts the tables into docs/healing.md.

    Args:
        results: of all cases, in their order; all as they must be.
        seconds: what the cases took, added up.
    """
    text = DOCUMENT.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    DOCUMENT.write_text(f"{head}{BEGIN}{tables(results, seconds)}{END}{tail}", encoding="utf-8")


def tables(results: Sequence[Result], seconds: float) -> str:
    """Markdown."""
    fine = [r for r in results if not r.trouble]
    equal, blind = sum(r.equal for r in results), sum(r.case.blind for r in results)
    again = [r for r in results if r.resumed]
    wrong = [r for r in again if r.case.faults and not r.case.blind]
    sizes = sorted({r.case.size for r in results})
    parts = [
        f"Written by `make campaign-heal`, which goes on after a kill: {len(results)} runs, "
        f"{' and '.join(map(str, sizes))} ranks, {sum(r.lives for r in results)} lives, "
        f"{seconds / 60:.0f} minutes of runs.\n"
        f"Each run: {STEPS} steps, accumulation of 4, clipping, dropout, batch norm, AdamW; audits every 3 steps, a "
        "checkpoint every 2. *Equal*: parameters,\noptimizer state and rank 0's buffers, to the bit.\n\n"
        f"- {len(fine)} of {len(results)} runs ended as they must: {equal} equal to a clean run, {blind} not (above), "
        "none hung, no healthy rank was named.\n"
        f"- {len(again)} runs resumed; none of the {len(wrong)} whose fault was seen began its second life from a "
        "checkpoint of the faulty step or a later one.\n"
    ]
    for section, title in _TITLES.items():
        rows: dict[tuple[str, str, str], list[Result]] = {}
        for r in results:
            if r.case.section == section:
                rows.setdefault((r.case.name, r.case.when, r.case.on_fault), []).append(r)
        if rows:
            parts += [f"\n### {title}\n\n{_TOLD[section]} Where ranks differ, both are given.\n\n", *_table(rows)]
    return "".join(parts)


def _table(rows: dict[tuple[str, str, str], list[Result]]) -> list[str]:
    lines = [
        "| fault | when | `on_fault` | ranks | equal | healed | lives | repeated | resumed after | seen as |\n",
        "|---|---|---|---|---|---|---|---|---|---|\n",
    ]
    for (name, when, on_fault), group in rows.items():
        cells = [
            name,
            when,
            on_fault,
            _each([r.case.size for r in group]),
            _each(["yes" if r.equal else "**no**" for r in group]),
            _each([r.healed for r in group]),
            _each([r.lives for r in group]),
            _each([r.repeated for r in group]),
            _each([_resumed(r) for r in group]),
            _seen(group),
        ]
        lines.append(f"| {' | '.join(cells)} |\n")
    return lines


def _each(values: list[Any]) -> str:
    return " / ".join(map(str, values)) if len(set(values)) > 1 else str(values[0])


def _resumed(result: Result) -> str:
    return ", ".join("start" if step is None else str(step) for step in result.resumed) or "-"


def _seen(group: list[Result]) -> str:
    if group[0].case.rot:
        return "bytes that are not the manifest's"
    if group[0].outliers:
        return "calibration outlier: an alert; nothing is verified any more"
    events = list(dict.fromkeys(event for r in group for event in r.events))
    return "; ".join(events) or ("-" if group[0].case.kill else "nothing")
