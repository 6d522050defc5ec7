"""Results on disk, one line each, so that a campaign that was killed goes on where it was.

The first line says what product was measured; results of another one are set aside. Flow: main -> **journal**.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "benchmarks" / "out"


#: Parts that take no part in a check: the agent beside the ranks, commands, reports, other libraries' one-liners.
ELSEWHERE = ("acceptance", "agent", "cli.py", "doctor", "integrations", "launch", "preflight", "run_report")


def product_digest() -> str:
    """SHA-256 over the sources of the training side: what the results are true of."""
    digest = hashlib.sha256()
    package = ROOT / "exporter" / "sdcwatch"
    for file in sorted(package.rglob("*.py")):
        if file.relative_to(package).parts[0] in ELSEWHERE:
            continue
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class Journal:
    """The results so far.

    Args:
        name: file stem in `folder`.
        made: what the results belong to (product digest, seed); a file that says otherwise is renamed to `.old`.
        folder: where the file stands; `benchmarks/out` where not given.
    """

    def __init__(self, name: str, made: dict[str, Any], folder: Path | None = None) -> None:
        self.path = (folder or OUT) / f"{name}.jsonl"
        self.results: dict[str, Any] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        head = _read(lines[0]) if lines else None
        if head != {"made": made}:
            if lines:
                self.path.replace(self.path.with_suffix(".jsonl.old"))
            lines = []
        for line in lines[1:]:
            entry = _read(line)  # a line that was cut by a kill is run again
            if entry is not None:
                self.results[entry["key"]] = entry["result"]
        if not lines:
            self.path.write_text(json.dumps({"made": made}) + "\n")

    def add(self, key: str, result: Any) -> None:
        """Keeps one result."""
        self.results[key] = result
        with self.path.open("a") as file:
            file.write("\n" if not _ends_whole(self.path) else "")
            file.write(json.dumps({"key": key, "result": result}) + "\n")


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def _read(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
