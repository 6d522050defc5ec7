"""Writes the table of docs/identity.md from the rows that the test plays; `--check` says whether it is up to date."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sdcwatch_remediation.testing import identity

TARGET = Path(__file__).with_name("identity.md")
_BLOCK = re.compile(r"(<!-- generated: table -->\n).*?(<!-- end -->)", re.DOTALL)


def text(old: str) -> str:
    """The file with its table written anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}{identity.table()}\n{found[2]}", old)


def main() -> int:
    """Writes or checks the file."""
    old = TARGET.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        if old == text(old):
            return 0
        print(f"{TARGET} is out of date: run python docs/build_identity.py", file=sys.stderr)
        return 1
    TARGET.write_text(text(old), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
