"""What many schedules came to: totals, and what was met in which state.

What it does: adds up results (as JSON objects, one a schedule) and draws them as Markdown; `write_block` puts a text
between the two marks of its name in a document.
What it never does: run a schedule, or leave a seed with a problem out.
Its place: the campaign `make campaign-remediation`; `docs/remediation-proof.md` holds its table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sdcwatch_remediation.simulator.faults import MENU
from sdcwatch_remediation.states import STATES

_KINDS = ("kills", "provider's faults", "alerts again", "resolves", "people", "others", "forged or lies", "restarts")


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up results.

    Args:
        results: `schedule_world.Result`s as JSON objects.
    """
    totals: dict[str, Counter[str]] = {
        name: Counter() for name in ("ends", "happened", "points", "killed", "modes", "roads", "tempers")
    }
    for result in results:
        for name in ("ends", "happened", "points", "killed"):
            totals[name].update(result[name])
        totals["modes"][result["mode"]] += 1
        totals["roads"][result["road"]] += 1
        totals["tempers"][result["temper"]] += 1
    seeds = [result["seed"] for result in results]
    return {
        "schedules": len(results),
        "seeds": [min(seeds, default=0), max(seeds, default=0)],
        "bad": {result["seed"]: result["problems"] for result in results if result["problems"]},
        "reached_replace": sum(result["asked"] > 0 for result in results),
        "replacements": sum(result["asked"] for result in results),
        "turns": sum(result["turns"] for result in results),
        "never_killed_at": sorted(set(totals["points"]) - set(totals["killed"])),
        **{name: dict(counts.most_common()) for name, counts in totals.items()},
    }


def kind_of(what: str) -> str:
    """Return the column of one thing that happened."""
    if what == "kill":
        return "kills"
    if what == "restart":
        return "restarts"
    if what.partition(" ")[0] in MENU or what.endswith(("(scontrol)", "(kubernetes)")):
        return "provider's faults"
    if what in ("alert again", "alert twice at once"):
        return "alerts again"
    if what == "alert resolved":
        return "resolves"
    if what in ("forged alert", "agent lies", "event names two"):
        return "forged or lies"
    if what.startswith(("others ", "others: ", "instance ")):
        return "others"
    return "faults" if what == "fault" or what.startswith("known-answer") else "people"


def table(found: dict[str, Any]) -> str:
    """Return totals, and how often what happened in which state, as Markdown."""
    counts: Counter[tuple[str, str]] = Counter()
    for key, count in found["happened"].items():
        what, _, state = key.partition(" @ ")
        counts[(state, kind_of(what))] += count
    killed, points = len(found["killed"]), len(found["points"])
    lines = [
        f"{found['schedules']:,} schedules (seeds {found['seeds'][0]} to {found['seeds'][1]}): "
        f"**{len(found['bad'])} with a problem**. {found['reached_replace']:,} reached a replacement, "
        f"{found['replacements']:,} instances were asked to be replaced, each once. "
        f"{_listed(found['roads'])}; {_listed(found['modes'])}. {found['turns']:,} turns.",
        "",
        f"{sum(found['killed'].values()):,} kills, at {killed} of {points} named moments of the service's own work"
        + (f" (not at: {', '.join(f'`{name}`' for name in found['never_killed_at'])})." if killed < points else "."),
        "",
        f"Cases ended as: {_listed(found['ends'])}.",
        "",
        "| furthest case then | " + " | ".join(_KINDS) + " |",
        "|---|" + "---:|" * len(_KINDS),
    ]
    for state in ("no case", *STATES):
        row = [counts[(state, kind)] for kind in _KINDS]
        if any(row):
            lines.append(f"| {state} | " + " | ".join(f"{count:,}" if count else "" for count in row) + " |")
    met: Counter[str] = Counter()
    for key, count in found["happened"].items():
        what = key.partition(" @ ")[0]
        if kind_of(what) == "provider's faults":
            met[what] += count
    lines += ["", f"Faults of the provider, of Slurm and of Kubernetes: {_listed(dict(met.most_common()))}."]
    return "\n".join(lines)


def _listed(counts: dict[str, int] | Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in dict(counts).items())


def write_block(document: Path, name: str, text: str) -> None:
    """Put a text between `<!-- NAME -->` and `<!-- end of NAME -->`.

    Raises:
        ValueError: the document has no such marks.
    """
    old = document.read_text(encoding="utf-8")
    first, last = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    if first not in old or last not in old:
        raise ValueError(f"{document} has no marks for {name}")
    head, _, rest = old.partition(first)
    tail = rest.partition(last)[2]
    document.write_text(f"{head}{first}{text.rstrip()}\n{last}{tail}", encoding="utf-8")
