"""A launcher (torchrun, srun, a script) as a child process in a process group of its own, and the signals it is passed.

Forwards what a scheduler sends, remembers whether that asked to end, and can end a launcher that outstays a halt. It
knows nothing of latches. Linux and macOS. Flow: `sdcwatch run` -> **launcher** -> training processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from sdcwatch.errors import ConfigurationError

#: Signals that ask a job to end, and signals that only tell it something (often: "write a checkpoint").
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TELLING = (signal.SIGUSR1, signal.SIGUSR2)

#: Seconds between SIGTERM and SIGKILL for a launcher that outstays a halt; torchrun gives its workers 30.
KILL_AFTER_SECONDS = 60.0
#: The same once the launcher had workers and has none left: there is nothing that it could still end. A torchrun that
#: waits in its store for peers does not hear SIGTERM, and a store that lives on would take in those that start anew.
ALONE_SECONDS = 5.0


class Signals:
    """Signals received by this process, forwarded to the launcher that runs at that moment.

    Attributes:
        ended_by: number of the first signal that asked to end, or None.
    """

    def __init__(self) -> None:
        self.ended_by: int | None = None
        self._child: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def caught(self) -> Iterator[Signals]:
        """Installs the handlers (main thread only) and puts back what stood there before."""
        before = {number: signal.signal(number, self._handle) for number in (*ENDING, *TELLING)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def follow(self, child: subprocess.Popen[bytes] | None) -> None:
        """Names the child that gets the signals from now on. One that asked to end before is passed on at once."""
        self._child = child
        if child is not None and self.ended_by is not None:
            send(child, self.ended_by)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in ENDING and self.ended_by is None:
            self.ended_by = number
        if self._child is not None:
            send(self._child, number)


def send(child: subprocess.Popen[bytes], number: int) -> None:
    """Sends a signal to the child's whole process group, unless the child has ended."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)


def start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts the launcher as leader of a new session, so that signals reach it once: from us.

    Raises:
        ConfigurationError: the program is not there or cannot be run.
    """
    try:
        return subprocess.Popen(list(command), env=dict(environment), start_new_session=True)
    except OSError as error:
        raise ConfigurationError(f"cannot start {command[0]!r}: {error.strerror}; check the words after --") from error


def status_of(child: subprocess.Popen[bytes]) -> int:
    """The child's exit status as a shell reports it: 128 + number for one that a signal ended."""
    code = child.returncode
    return 128 - code if code < 0 else int(code)


def workers(child: subprocess.Popen[bytes]) -> bool | None:
    """Whether the launcher has living child processes; None where this machine does not say (no /proc)."""
    found = None
    with contextlib.suppress(OSError):
        for listed in Path(f"/proc/{child.pid}/task").glob("*/children"):  # each thread has its own
            found = any(map(_lives, listed.read_text().split())) or bool(found)
    return found


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def end(child: subprocess.Popen[bytes], *, kill_after: float = KILL_AFTER_SECONDS, had_workers: bool = False) -> None:
    """SIGTERM to the group, SIGKILL later; returns when the child has ended.

    Args:
        kill_after: seconds until SIGKILL.
        had_workers: the child is a launcher whose workers are what matters: SIGKILL comes `ALONE_SECONDS`
            after the last of them ended.
    """
    send(child, signal.SIGTERM)
    began = alone = time.monotonic()
    while True:
        try:
            child.wait(timeout=0.1)
            return
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if not had_workers or workers(child) is not False:
            alone = now
        if now - began >= kill_after or now - alone >= ALONE_SECONDS:
            send(child, signal.SIGKILL)
            child.wait()
            return


def pause(signals: Signals, seconds: float) -> None:
    """Sleeps, but at most a tenth of a second past a signal that asks to end."""
    until = time.monotonic() + seconds
    while signals.ended_by is None and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))
