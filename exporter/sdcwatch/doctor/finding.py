"""What one question of the doctor found: a line for a person, a record for a program.

Pure. Flow: node_checks, path_checks, drill -> **finding** -> command.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["pass", "fail", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line.

    Attributes:
        name: stable name of the question.
        status: `unknown`: it could not be asked, which is no failure.
        detail: what was found, one sentence.
        fix: what to do next; empty where it passed.
        seconds: of a drill's hop: time from the sending of the drill until it was seen there.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""
    seconds: float | None = None

    def record(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return asdict(self)

    def line(self) -> str:
        """As a person reads it."""
        took = "" if self.seconds is None else f" after {self.seconds:.1f} s"
        text = f"{self.status:<8}{self.name:<18}{self.detail}{took}"
        return f"{text}\n{'':<26}-> {self.fix}" if self.fix and self.status != "pass" else text


def passed(name: str, detail: str) -> Finding:
    """It is wired."""
    return Finding(name, "pass", detail)


def failed(name: str, detail: str, fix: str) -> Finding:
    """It is not wired; `fix` says what to do."""
    return Finding(name, "fail", detail, fix)


def unknown(name: str, detail: str, fix: str) -> Finding:
    """It could not be asked; `fix` says how it can."""
    return Finding(name, "unknown", detail, fix)
