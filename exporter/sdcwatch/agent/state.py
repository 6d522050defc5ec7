"""One agent a node and user, decided by a lock in the spool, and `agent.json`, which says what has been scraped.

The lock, not the port, decides: a port may be busy for other reasons. Ranks read both files (a halt waits for scrapes
that came after its event); only the agent that holds the lock writes them. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from sdcwatch import durable
from sdcwatch.errors import SpoolError
from sdcwatch.spool.folders import read_regular
from sdcwatch.spool.reader import is_locked

SCHEMA = 1
LOCK_FILE = "agent.lock"
STATE_FILE = "agent.json"
SCRAPES_KEPT = 16
_LOCK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class AgentState:
    """What `agent.json` says.

    Attributes:
        started: unix seconds.
        outlives_ranks: the agent goes on when the job ends, so nobody has to wait for a scrape.
        scrapes: unix seconds of the newest scrapes, newest last; each saw all that was written before its time.
        alive: the agent holds its lock now.
    """

    pid: int
    host: str
    port: int
    started: float
    outlives_ranks: bool
    scrapes: tuple[float, ...]
    alive: bool


def read_state(user_root: Path) -> AgentState | None:
    """The newest agent's state, dead or alive; None where there never was one or the file cannot be read."""
    with contextlib.suppress(SpoolError, KeyError, TypeError, ValueError):
        record = durable.read_json(user_root / STATE_FILE)
        if record is not None and record["schema"] == SCHEMA:
            return AgentState(
                pid=int(record["pid"]),
                host=str(record["host"]),
                port=int(record["port"]),
                started=float(record["started"]),
                outlives_ranks=bool(record["outlives_ranks"]),
                scrapes=tuple(float(when) for when in record["scrapes"]),
                alive=agent_is_alive(user_root),
            )
    return None


def agent_is_alive(user_root: Path) -> bool:
    """True when some process holds the agent's lock."""
    return is_locked(user_root / LOCK_FILE)


class AgentLock:
    """The right to be this node's agent for this user, held until `release` or the end of the process.

    Raises:
        SpoolError: another agent holds it; the message names its process.
    """

    def __init__(self, user_root: Path) -> None:
        path = user_root / LOCK_FILE
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SpoolError(f"cannot open {path}: {error.strerror or error}") from error
        deadline = time.monotonic() + _LOCK_SECONDS  # a reader that looks whether we live holds it for an instant
        while True:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() < deadline:
                    time.sleep(0.01)
                    continue
                owner = (read_regular(path, 64) or b"").decode(errors="replace").strip() or "unknown"
                os.close(self._handle)
                raise SpoolError(
                    f"another agent (process {owner}) already serves {user_root}; there is one a node and user: "
                    "stop that one first, or give this one a --spool-dir of its own"
                ) from None
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Gives the lock back; idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class StateFile:
    """`agent.json`, kept by the agent that holds the lock. Scrapes of an earlier agent are carried over."""

    def __init__(self, user_root: Path, *, host: str, port: int, outlives_ranks: bool) -> None:
        before = read_state(user_root)
        self._path = user_root / STATE_FILE
        self._record = {
            "schema": SCHEMA,
            "pid": os.getpid(),
            "host": host,
            "port": port,
            "started": time.time(),
            "outlives_ranks": outlives_ranks,
        }
        self._scrapes = list(before.scrapes if before else ())[-SCRAPES_KEPT:]
        self._lock = threading.Lock()
        self._write()

    @property
    def last_scrape(self) -> float | None:
        """Unix seconds of the newest scrape, or None."""
        return self._scrapes[-1] if self._scrapes else None

    def scraped(self, when: float) -> None:
        """Records a scrape that read the spool at `when` (unix seconds) and whose answer has been sent."""
        with self._lock:
            self._scrapes = sorted([*self._scrapes, when])[-SCRAPES_KEPT:]
            # A full disk must not turn a scrape that worked into an error; a halt then waits out its grace.
            with contextlib.suppress(SpoolError):
                self._write()

    def _write(self) -> None:
        durable.replace_json(self._path, {**self._record, "scrapes": self._scrapes})
