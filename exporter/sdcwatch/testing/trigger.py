"""When a fault fires: by training step and, within one, by how often its place was passed. Flow: places -> **trigger**.

It never looks at data. Randomness comes from the fault's own seed, never from torch's or Python's generators.
"""

from __future__ import annotations

import contextlib
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path

from sdcwatch.testing.fault import Fault


class Trigger:
    """Decides for one fault on one rank.

    Args:
        fault: what to decide for.
        step: the training step that runs next.

    Attributes:
        step: the training step that runs now.
        paused: True while nothing fires and nothing is counted.
    """

    def __init__(self, fault: Fault, step: int) -> None:
        self.step = step
        self.paused = False
        self._fault = fault
        self._passed = 0
        # not the process id: a restarted container often gets the same one
        self._token = secrets.token_hex(8)

    def advance(self) -> None:
        """The optimizer's step has ended: the next training step begins."""
        self.step += 1
        self._passed = 0

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Lets computations through that are to be right: what would the numbers be without the fault?"""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def fires(self) -> bool:
        """Whether the fault strikes now; call it once each time that its place is passed."""
        if self.paused:
            return False
        passed, fault = self._passed, self._fault
        self._passed += 1
        if self.step < fault.step or fault.call not in (None, passed):
            return False
        if fault.mode == "persistent":
            return True
        first = self.step == fault.step
        if fault.mode == "intermittent":
            return (first and passed == (fault.call or 0)) or self._coin(passed)
        if fault.mode == "once" and passed != (fault.call or 0):
            return False
        return first and self._unmarked()

    def _coin(self, passed: int) -> bool:
        return bool(zlib.crc32(f"{self._fault.seed} {self.step} {passed}".encode()) >> 7 & 1)

    def _unmarked(self) -> bool:
        if self._fault.marker is None:
            return True
        marker = Path(self._fault.marker)
        if marker.exists() and marker.read_text(encoding="utf-8") != self._token:
            return False
        marker.write_text(self._token, encoding="utf-8")
        return True
