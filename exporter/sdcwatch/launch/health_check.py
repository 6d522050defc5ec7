"""A health check of this machine as a process beside `sdcwatch run`: started, its output kept, its end judged.

It counts what a check proves and nothing more: one that cannot start, crashes or takes too long could not judge. It
decides nothing. Flow: preflight -> **health_check** -> first_check, halt_wait.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence

from sdcwatch.preflight.command import parse_outcome

#: A check that takes longer could not judge.
MOST_SECONDS = 300.0
#: The end of a check's output that is read and kept.
_OUTPUT_BYTES = 65536


class HealthCheck:
    """One run of a check, in a session of its own.

    Attributes:
        process: the check; None where it could not be started.
        problem: why not, else empty.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.problem = ""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close(); outlives this call)
        try:
            self.process = subprocess.Popen(
                command,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self.problem = f"cannot start {command[0]}: {error.strerror}"

    def printed(self) -> str:
        """The end of what it printed; its judgement is the last line."""
        self._output.seek(max(0, self._output.seek(0, 2) - _OUTPUT_BYTES))
        return self._output.read(_OUTPUT_BYTES).decode(errors="replace").strip()

    def close(self) -> None:
        """Lets go of the output; the process has ended by then."""
        self._output.close()


def judged(status: int, printed: str) -> str:
    """`pass`, `fail` or `unknown`: what a check's exit status and output prove together.

    A failure counts only where the command says it itself, in a JSON line with `"outcome": "fail"`: 1 is also the
    status of a program that crashed, was not installed or was called wrongly, and that proves nothing of the machine.
    """
    outcome = parse_outcome(printed).get("outcome")
    if status == 0:
        return "pass" if outcome in (None, "pass") else "unknown"
    return "fail" if status == 1 and outcome == "fail" else "unknown"
