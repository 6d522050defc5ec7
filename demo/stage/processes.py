"""The processes that the demo starts: each with its own log, each ended by its own process id.

It never ends anything by name. Every process leads a session of its own; what those started in turn (torchrun's ranks)
is found through /proc before the end begins, so that nothing stays behind even when a parent dies first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


class DemoError(Exception):
    """The demo cannot go on; the message says what to do."""


@dataclass(slots=True)
class Started:
    """One process and where its words go."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def status(self) -> int | None:
        """Exit status, or None while it runs."""
        return self.process.poll()

    def tail(self, lines: int = 12) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


class Processes:
    """Starts processes and ends all of them, newest first."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._started: list[Started] = []
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Started:
        """Starts one process; its stdout and stderr go to `<logs>/<name>.log`."""
        log = self._logs / f"{name}.log"
        with open(log, "ab") as stream:
            process = subprocess.Popen(
                list(command),
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )
        self._started.append(Started(name, process, log))
        return self._started[-1]

    def died(self) -> list[Started]:
        """Processes that ended with a status other than 0."""
        return [s for s in self._started if s.status not in (None, 0)]

    def end(self, some: Sequence[Started], patience: float = 15.0) -> None:
        """SIGTERM to each, then SIGKILL to whatever of them and their descendants is left after `patience` seconds."""
        family = {
            pid: _born(pid) for s in some if s.status is None for pid in (s.process.pid, *descendants(s.process.pid))
        }
        for one in some:
            if one.status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.process.pid, signal.SIGTERM)
        until = time.monotonic() + patience
        while time.monotonic() < until and any(s.status is None for s in some):
            time.sleep(0.05)
        for pid, born in family.items():
            if born is not None and _born(pid) == born:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for one in some:
            one.process.wait()

    def end_all(self) -> None:
        """Ends everything that still runs, newest first in signals, all within one patience."""
        self.end(list(reversed(self._started)))


def descendants(pid: int) -> list[int]:
    """Process ids of all children, their children, and so on (Linux)."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def _born(pid: int) -> str | None:
    """When a process started, in clock ticks: tells it from a later one with the same id. None for a dead one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def check_port(address: str, port: int, name: str) -> None:
    """Refuses a port that somebody else listens on.

    Raises:
        DemoError: names the flag that chooses another one.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise DemoError(
                f"{address}:{port} cannot be used ({error.strerror}): choose another with --{name}-port N "
                f"or DEMO_{name.upper()}_PORT=N"
            ) from None
