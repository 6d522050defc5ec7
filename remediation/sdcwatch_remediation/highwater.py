"""Remember outside the database how far it had come, so that an older or another one is noticed at the next start.

What it does: keeps the database's id and its newest audit line in a small file, replaced whole and synced; says at a
start whether the database in hand is the one that the file knows, and not behind it.
What it never does: repair or thaw anything, or stop a service because the file cannot be written (`doctor` says so).
Its place: `service` asks it at its start, `store` raises it before every outside action, `worker` after every round.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path

from sdcwatch_remediation.errors import ConfigError

log = logging.getLogger(__name__)


class HighWater:
    """One file; `path` empty: none is kept, and nothing is ever found."""

    def __init__(self, path: str) -> None:
        """Read what the file knows.

        Raises:
            ConfigError: the file is there and is not one of this service.
        """
        self.path = path
        self.problem = ""
        """Why the file could not be written last time; empty when it could."""
        self._id, self._line = _read(Path(path)) if path else ("", 0)

    def differs(self, database_id: str, line: int, *, pinned: bool) -> str:
        """Return why a database is not the one that was used last, or empty.

        Args:
            database_id: its id.
            line: its newest audit line.
            pinned: whether the configuration names this very id, so that another one before it was given up.
        """
        if not self._id:
            return ""
        if self._id != database_id:
            if pinned:
                return ""
            return (
                f"the database is {database_id}, the one used here before was {self._id} ({self.path}): bring that "
                "one back; if this one is meant, remove the file and restart"
            )
        if line < self._line:
            return (
                f"the database ends at audit line {line}, the service had come to line {self._line} ({self.path}): it "
                "is an older copy; bring the newer one back, or look at what was done since, remove the file, restart"
            )
        return ""

    def rise(self, database_id: str, line: int) -> None:
        """Write down that the database has come to this audit line; does nothing where the file says so already."""
        if not self.path or (database_id == self._id and line <= self._line):
            return
        text = json.dumps({"schema": 1, "database_id": database_id, "audit_line": line}) + "\n"
        new = f"{self.path}.{os.getpid()}.new"
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self.path)
        except OSError as error:
            if not self.problem:
                log.error("%s cannot be written (%s): an older database would not be noticed", self.path, error)
            self.problem = str(error)
            with contextlib.suppress(OSError):
                os.unlink(new)
            return
        self.problem = ""
        self._id, self._line = database_id, line


def _read(path: Path) -> tuple[str, int]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        found = tree["database_id"], tree["audit_line"]
        if tree["schema"] != 1 or not isinstance(found[0], str) or type(found[1]) is not int:
            raise ValueError("not of schema 1")
    except FileNotFoundError:
        return "", 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}): it says how far the database had come; see that the database is the "
            "newest one, then remove the file"
        ) from error
    return found
