"""The simulator's virtual clock: real time scaled by a factor, plus what a caller advances by hand.

What it does: answers "what time is it in the simulated cluster", in unix seconds, and never runs backwards.
What it never does: sleep, or wake anybody; the cluster settles what is due whenever it is next asked.
Its place: under the simulated cluster; an end-to-end demo runs it at factor 1, tests freeze it (factor 0) and advance.
"""

from __future__ import annotations

import math
import threading
import time


class VirtualClock:
    """A monotonic clock in unix seconds, safe to read and advance from several threads."""

    def __init__(self, *, start: float | None = None, factor: float = 1.0) -> None:
        """Begin at `start` (unix seconds; None: the real time now).

        Args:
            start: The virtual time at which the clock begins, in unix seconds.
            factor: Virtual seconds that pass per real second; 0 stands still until `advance`.

        Raises:
            ValueError: The factor is negative or not a finite number.
        """
        if not math.isfinite(factor) or factor < 0:
            raise ValueError(f"the clock factor must be 0 or more, got {factor}; 0 freezes the clock, 1 is real time")
        self.factor = factor
        self._start = time.time() if start is None else start
        self._began = time.monotonic()
        self._advanced = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        """Return the virtual time in unix seconds."""
        with self._lock:
            return self._start + (time.monotonic() - self._began) * self.factor + self._advanced

    def advance(self, seconds: float) -> float:
        """Jump forward by `seconds` of virtual time and return the new virtual time.

        Raises:
            ValueError: The jump is negative or not a finite number.
        """
        if not math.isfinite(seconds) or seconds < 0:
            raise ValueError(f"the clock can only be advanced by 0 seconds or more, got {seconds}")
        with self._lock:
            self._advanced += seconds
        return self.now()
