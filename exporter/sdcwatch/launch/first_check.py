"""The known-answer test before the first life of a launcher, where `sdcwatch run --preflight-first` asks for it.

A machine that fails it leaves the job before a step is trained; one that could not be judged starts, and that is said.
It runs once, not before each restart: after a latch `halt_wait` judges the machine again. Flow: run -> **first_check**
-> launcher.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence

from sdcwatch.errors import EXIT_HALTED
from sdcwatch.launch import launcher
from sdcwatch.launch.halt_wait import PREFLIGHT_MOST_SECONDS, judged

#: The end of a check's output that is read; its judgement is the last line.
_OUTPUT_BYTES = 65536


def refusal(command: Sequence[str], signals: launcher.Signals, say: Callable[[str], None]) -> int | None:
    """Runs the health check; None when the launcher may start, else the status with which `sdcwatch run` ends.

    Args:
        command: the check; what its status and last line prove is `halt_wait.judged`.
        signals: one that asks to end ends the check, too.
        say: writes to the log.
    """
    with tempfile.TemporaryFile() as output:
        try:
            child = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            say(f"preflight before the first step: unknown (cannot start {command[0]}: {error.strerror}); starting")
            return None
        status, detail = _ended(child, signals)
        if signals.ended_by is not None:
            return 128 + signals.ended_by
        output.seek(max(0, output.seek(0, 2) - _OUTPUT_BYTES))
        printed = output.read(_OUTPUT_BYTES).decode(errors="replace").strip()
    outcome = "unknown" if status is None else judged(status, printed)
    if outcome == "fail":
        say(
            f"preflight before the first step: fail ({detail}); nothing is started and this node leaves the job: "
            f"take it out of service, then submit again\n{printed}"
        )
        return EXIT_HALTED
    say(f"preflight before the first step: {outcome} ({detail}); starting")
    return None


def _ended(child: subprocess.Popen[bytes], signals: launcher.Signals) -> tuple[int | None, str]:
    """Waits for the check, bounded: its exit status (None: it had to be ended), and a few words."""
    until = time.monotonic() + PREFLIGHT_MOST_SECONDS
    while child.poll() is None and signals.ended_by is None and time.monotonic() < until:
        launcher.pause(signals, 0.05)
    if child.poll() is None:
        launcher.end(child, kill_after=2.0)
        return None, f"ended after at most {PREFLIGHT_MOST_SECONDS:g} s"
    return launcher.status_of(child), f"exited {launcher.status_of(child)}"
