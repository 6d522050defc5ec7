"""What the agent counts about itself. Counts start at 0 with each agent. Standard library only."""

from __future__ import annotations

import threading
from collections import Counter


class Tally:
    """Counters of one agent; safe to add to from any thread.

    Attributes:
        dropped: series refused, by reason (catalog.DROP_REASONS).
        refused: requests refused, by reason (catalog.REFUSED_REASONS).
        pushed: OTLP requests, by signal and what became of them (catalog.PUSH_SIGNALS, catalog.PUSH_RESULTS).
        parse_errors: lines of rank files that could not be read.
        expired: files of dead epochs that were removed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.dropped: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.pushed: Counter[tuple[str, str]] = Counter()
        self.parse_errors = 0
        self.expired = 0

    def drop(self, reason: str, amount: int = 1) -> None:
        with self._lock:
            self.dropped[reason] += amount

    def refuse(self, reason: str) -> None:
        with self._lock:
            self.refused[reason] += 1

    def push(self, signal: str, result: str) -> None:
        with self._lock:
            self.pushed[signal, result] += 1

    def unreadable(self, lines: int) -> None:
        with self._lock:
            self.parse_errors += lines

    def expire(self, files: int) -> None:
        with self._lock:
            self.expired += files
