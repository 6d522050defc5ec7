"""How the commands show cases and findings to a person: tables that never break an id.

What it does: draws a table where it fits the terminal, and one block of lines a row where it does not; away from a
terminal every row is one line. Colour stands beside words, never alone, and `NO_COLOR` turns it off (rich's own rule).
What it never does: pass on what a terminal would obey: control characters become visible, and `[...]` stays text.
Its place: under `cli` and `doctor`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

#: Away from a terminal nobody wraps: a row is one line, for grep and for logs.
ANY_WIDTH = 100_000

_STATE_STYLES = {
    "awaiting_approval": "yellow",
    "recommended": "yellow",
    "frozen": "yellow",
    "closed": "green",
    "failed": "red",
    "refused": "red",
}
_STATUS_STYLES = {"pass": "green", "fail": "bold red", "unknown": "yellow"}


def console() -> Console:
    """Return the console for standard output as it is now."""
    return Console(width=None if sys.stdout.isatty() else ANY_WIDTH, highlight=False)


def clean(value: Any, style: str = "") -> Text:
    """Return a value as text that a terminal only shows: no control character, no markup."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))
    return Text(shown, style=style)


def rows(out: Console, columns: Sequence[str], lines: Sequence[Sequence[Any]], *, title: str = "") -> None:
    """Show rows as one table, or as blocks of lines where the table would have to break a cell.

    Args:
        out: where to.
        columns: their names.
        lines: one sequence of values a row; a `Text` is taken as it is.
        title: shown above.
    """
    cells = [[value if isinstance(value, Text) else clean(value) for value in line] for line in lines]
    table = Table(*columns, title=title or None, title_justify="left")
    for column in table.columns:
        column.no_wrap = True
    for line in cells:
        table.add_row(*line)
    # Each cell has a blank on both sides and a line before it; rich itself would shorten cells to fit.
    widths = [max([len(name), *(line[n].cell_len for line in cells)]) for n, name in enumerate(columns)]
    if sum(widths) + 3 * len(widths) + 1 <= out.width:
        out.print(table)
        return
    if title:
        out.print(Text(title, style="bold"), soft_wrap=True)
    width = max(len(name) for name in columns)
    for line in cells:
        for name, cell in zip(columns, line, strict=True):
            if cell.plain:
                out.print(Text.assemble((f"{name:<{width}}  ", "dim"), cell), soft_wrap=True)
        out.print()


def cases(out: Console, found: Sequence[dict[str, Any]]) -> None:
    """List cases."""
    if not found:
        out.print("no cases")
        return
    columns = ("case", "state", "outcome", "node", "instance", "job", "opened", "reason")
    lines = [
        (
            case["id"],
            _state(case["state"]),
            case["outcome"],
            case["node_name"],
            case["instance_id"],
            case["job"],
            when(case["opened_at"]),
            case["reason"],
        )
        for case in found
    ]
    rows(out, columns, lines)


def case(out: Console, found: dict[str, Any]) -> None:
    """Show one case whole."""
    head = Text.assemble((str(found["id"]), "bold"), ": ", _state(found["state"]), " ", clean(found["outcome"]))
    out.print(head, soft_wrap=True)
    names = ("node_name", "instance_id", "gpu_uuid", "job", "reason", "held_by", "approved_by", "replacement")
    for name in names:
        if found[name]:
            out.print(Text.assemble((f"{name.replace('_', ' '):<12}  ", "dim"), clean(found[name])), soft_wrap=True)
    gates = [
        (
            gate["name"],
            gate["action"],
            clean("yes", "green") if gate["passed"] else clean("NO", "bold red"),
            gate["reason"],
        )
        for gate in found["gates"]
    ]
    rows(out, ("gate", "action", "passed", "reason"), gates, title="gates")
    steps = [(when(line["time"]), line["step"], json.dumps(line["detail"])[:300]) for line in found["timeline"]]
    rows(out, ("time", "step", "detail"), steps, title="timeline")
    if found["request"]:
        out.print(Text(f"request {found['request_sha256']}:"), soft_wrap=True)
        out.print(clean_json(found["request"]), soft_wrap=True)


def decided(out: Console, found: dict[str, Any]) -> None:
    """Say what became of a decision about one case."""
    held = f", held by {found['held_by']}" if found["held_by"] else ""
    text = Text.assemble((str(found["id"]), "bold"), " is ", _state(found["state"]), clean(held))
    out.print(text, soft_wrap=True)


def findings(out: Console, found: Sequence[dict[str, Any]]) -> None:
    """Show what a doctor found, one line each, with what to do."""
    width = max((len(str(one["name"])) for one in found), default=0)
    for one in found:
        status = str(one["status"])
        head = clean(f"{status:<7}", _STATUS_STYLES.get(status, ""))
        line = Text.assemble(head, " ", clean(f"{one['name']:<{width}}"), "  ", clean(one["detail"]))
        if one["fix"]:
            line.append_text(Text.assemble(" -> ", clean(one["fix"], "bold")))
        out.print(line, soft_wrap=True)


def clean_json(value: Any) -> Text:
    """Return a value as indented JSON; every character in it is ASCII."""
    return Text(json.dumps(value, indent=2))


def when(seconds: float) -> str:
    """Return unix seconds as UTC, to the second."""
    return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def _state(name: Any) -> Text:
    return clean(name, _STATE_STYLES.get(str(name), ""))
