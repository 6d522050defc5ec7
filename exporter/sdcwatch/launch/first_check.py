"""The known-answer test before the first life of a launcher, where `sdcwatch run --preflight-first` asks for it.

A machine that fails it leaves the job before a step is trained; one that could not be judged starts, and that is said.
It runs once, not before each restart: after a latch `halt_wait` judges the machine again. Flow: run -> **first_check**
-> launcher.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence

from sdcwatch.errors import EXIT_HALTED
from sdcwatch.launch import launcher
from sdcwatch.launch.health_check import MOST_SECONDS, HealthCheck, judged


def refusal(command: Sequence[str], signals: launcher.Signals, say: Callable[[str], None]) -> int | None:
    """Runs the health check; None when the launcher may start, else the status with which `sdcwatch run` ends.

    Args:
        command: the check; what its status and last line prove is `health_check.judged`.
        signals: one that asks to end ends the check, too.
        say: writes to the log.
    """
    check = HealthCheck(command)
    try:
        if check.process is None:
            say(f"preflight before the first step: unknown ({check.problem}); starting")
            return None
        status, detail = _ended(check.process, signals)
        if signals.ended_by is not None:
            return 128 + signals.ended_by
        printed = check.printed()
    finally:
        check.close()
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
    until = time.monotonic() + MOST_SECONDS
    while child.poll() is None and signals.ended_by is None and time.monotonic() < until:
        launcher.pause(signals, 0.05)
    if child.poll() is None:
        launcher.end(child, kill_after=2.0)
        return None, f"ended after at most {MOST_SECONDS:g} s"
    return launcher.status_of(child), f"exited {launcher.status_of(child)}"
