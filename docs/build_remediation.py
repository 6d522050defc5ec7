"""Writes the generated parts of docs/remediation.md; `--check` says whether they are up to date (status 1: not)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sdcwatch_remediation import catalog, config, states

TARGET = Path(__file__).with_name("remediation.md")
_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _metrics() -> str:
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in catalog.CATALOG:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows)


PARTS = {
    "settings": config.reference_table,
    "diagram": lambda: f"```mermaid\n{states.mermaid()}\n```",
    "states": states.reference_table,
    "metrics": _metrics,
}
"""The generated parts by name."""


def text(old: str) -> str:
    """The file with every generated part written anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}{PARTS[found[2]]()}\n{found[3]}", old)


def main() -> int:
    """Writes or checks the file."""
    old = TARGET.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        if old == text(old):
            return 0
        print(f"{TARGET} is out of date: run python docs/build_remediation.py", file=sys.stderr)
        return 1
    TARGET.write_text(text(old), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
