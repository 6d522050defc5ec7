"""One thing that a doctor looked at: the record that `diagnosis` and `doctor` share, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "fail", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: Status
    """`fail`: because of this a proven fault would not be acted on. `unknown`: it could not be told from here."""
    detail: str
    fix: str
    """What to do; empty where it passes."""
