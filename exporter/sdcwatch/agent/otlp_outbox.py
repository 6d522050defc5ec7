"""Which events of this node's journals have not been taken by the collector yet.

The journals are the queue: nothing is copied, so nothing can be lost that is not lost from them. What was taken is
kept by event id in `agent-otlp.json`, because ids survive torn lines, expired files and a second reporter on the same
node, and offsets do not. Standard library only. Flow: spool -> **otlp_outbox** -> otlp.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdcwatch import durable
from sdcwatch.errors import SpoolError
from sdcwatch.spool.reader import iter_journal, iter_ranks

SCHEMA = 1
CURSOR_FILE = "agent-otlp.json"
#: Most ids that are kept in the file; a journal with more events than that would send its oldest ones again.
MAX_SENT = 65536
#: Seconds after which an event that the collector refused is tried again: it may have been set up wrongly.
ASIDE_SECONDS = 600.0
_LONGEST_ID = 128


@dataclass(frozen=True, slots=True)
class Waiting:
    """One event that waits. `time` is its own, in unix seconds; `line` is a journal line as written."""

    id: str
    time: float
    line: bytes
    event: dict[str, Any]


class Outbox:
    """The events of one spool that still have to be sent, each id once.

    Attributes:
        since: unix seconds at which this spool was first pushed; survives the agent.
    """

    def __init__(self, user_root: Path) -> None:
        self._root = user_root
        self._path = user_root / CURSOR_FILE
        self._sent: dict[str, None] = {}  # in the order of sending
        self._aside: dict[str, float] = {}  # monotonic seconds until which an event is not given
        self._drained: dict[Path, tuple[int, int]] = {}
        self.since = time.time()
        # A file that cannot be read costs repetitions, never an event: whoever receives them knows them by their ids.
        with contextlib.suppress(SpoolError, KeyError, TypeError, ValueError):
            record = durable.read_json(self._path)
            if record is not None and record["schema"] == SCHEMA:
                self._sent = dict.fromkeys(str(one) for one in record["sent"])
                self.since = float(record["since"])
        with contextlib.suppress(SpoolError):
            self._save()

    def waiting(self, limit: int, limit_bytes: int) -> list[Waiting]:
        """Events that were not delivered yet, the oldest first.

        Args:
            limit: most events; those left off come back from a later call.
            limit_bytes: most bytes of journal lines, but always one event.
        """
        found: dict[str, Waiting] = {}
        size = 0
        seen: set[Path] = set()
        for files in iter_ranks(self._root):
            path = files.journal
            version = _version(path)
            if version is None:
                continue
            seen.add(path)
            if self._drained.get(path) == version:
                continue
            drained = True
            for when, line, event in iter_journal(path):
                one = _id(line, event)
                if one in self._sent:
                    continue
                drained = False
                if one in found or time.monotonic() < self._aside.get(one, 0.0):
                    continue
                size += len(line)
                if found and (len(found) >= limit or size > limit_bytes):
                    return _oldest_first(found)
                found[one] = Waiting(one, when, line, event)
            if drained:
                self._drained[path] = version
        for path in self._drained.keys() - seen:
            del self._drained[path]
        return _oldest_first(found)

    def delivered(self, events: Sequence[Waiting]) -> None:
        """Never gives these again, also not to a later agent.

        Raises:
            SpoolError: this could not be written; it holds for this agent's life all the same.
        """
        self._sent.update(dict.fromkeys(event.id for event in events))
        self._save()

    def set_aside(self, event: Waiting) -> None:
        """Does not give this one again for `ASIDE_SECONDS`, so that it does not stand in the way of others."""
        self._aside[event.id] = time.monotonic() + ASIDE_SECONDS

    def _save(self) -> None:
        kept = list(self._sent)[-MAX_SENT:]
        durable.replace_json(self._path, {"schema": SCHEMA, "since": self.since, "sent": kept})


def _id(line: bytes, event: dict[str, Any]) -> str:
    own = event.get("id")
    if isinstance(own, str) and 0 < len(own) <= _LONGEST_ID:
        return own.encode("utf-8", errors="replace").decode()
    return hashlib.sha256(line).hexdigest()


def _version(path: Path) -> tuple[int, int] | None:
    try:
        facts = os.lstat(path)
    except OSError:
        return None
    return facts.st_size, facts.st_mtime_ns


def _oldest_first(found: dict[str, Waiting]) -> list[Waiting]:
    return sorted(found.values(), key=lambda waiting: waiting.time)
