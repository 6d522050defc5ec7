"""Tasks of several simulated processes that take turns at named moments, in an order that the caller chooses.

What it does: runs each task in a thread that waits at every `point` until it is given the turn, so one thread runs at
a time and a run is repeated exactly by choosing the same turns. A process can be killed at any point: its tasks end
there, with nothing after it run, and whatever transaction was open is rolled back.
What it never does: sleep, or let the operating system choose an order.
Its place: under `schedules`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

TURN_SECONDS = 60.0
"""Longest time that a task may take between two points; longer is a deadlock, and an error."""


class Killed(BaseException):
    """The process of this task ends here."""


class Life:
    """One life of a simulated process, from its start to its kill or its end."""

    def __init__(self, seen: Callable[[str], None] = lambda name: None) -> None:
        """Begin alive; `seen` is told the name of every point that is come to."""
        self.alive = True
        self.ends_at: Callable[[str], bool] | None = None
        """Asked at every point whether the process is killed there; None: it is not going to be."""
        self.ended_at = ""
        """The point at which it was killed."""
        self._seen = seen

    def point(self, name: str) -> None:
        """Wait for a turn, or die; a `commit ...` is inside a transaction, where nobody else can go on."""
        if self.alive:
            self._seen(name)
            if self.ends_at is not None and self.ends_at(name):
                self.alive, self.ended_at = False, name
        task = threading.current_thread()
        if self.alive and not name.startswith("commit ") and isinstance(task, Task):
            task.wait()
        if not self.alive:
            raise Killed


class Task(threading.Thread):
    """Something that one process does; `step` lets it go on to its next point."""

    def __init__(self, name: str, life: Life, work: Callable[[], object]) -> None:
        """Prepare `work`; it begins with the first `step`."""
        super().__init__(name=name, daemon=True)
        self.life = life
        self.error: BaseException | None = None
        self.ended = False
        self._work = work
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self.start()

    def run(self) -> None:
        """Do the work between the turns; used by the thread alone."""
        self._go.acquire()
        try:
            if self.life.alive:
                self._work()
        except Killed:
            pass
        except BaseException as error:  # told to the one who runs the schedule
            self.error = error
        self.ended = True
        self._back.release()

    def wait(self) -> None:
        """Give the turn back and wait for the next one."""
        self._back.release()
        self._go.acquire()

    def step(self) -> bool:
        """Let the task go on to its next point; return whether it has ended.

        Raises:
            RuntimeError: it came to no point in time.
        """
        self._go.release()
        if not self._back.acquire(timeout=TURN_SECONDS):
            raise RuntimeError(f"{self.name} came to no point in {TURN_SECONDS:.0f} s")
        if self.ended:
            self.join()
        return self.ended
