"""How long our own work takes, on the clock that training feels: the host's, or the device's own time line.

Where tensors lie on a GPU, the host's clock would count the wait for the backward to drain as ours. Two events on the
stream count what the device did, or idled, between them; they are read only once they have passed, so nothing waits
for them. Work inside other work counts once, for the inner one. Flow: epoch -> **clock** -> report, budget.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class Timeline(Protocol):
    """Marks on some clock."""

    def mark(self) -> Any:
        """A mark at this moment."""

    def passed(self, mark: Any) -> bool:
        """Whether the clock has come to this mark; never waits."""

    def between(self, begin: Any, end: Any) -> float:
        """Seconds between two marks that have passed."""


class HostTimeline:
    """`time.perf_counter`."""

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return True

    def between(self, begin: float, end: float) -> float:
        return end - begin


class DeviceTimeline:
    """CUDA events on the current stream of one device, which need not be the process's current device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1000.0


@dataclass(slots=True)
class _Span:
    check: str
    begin: Any
    end: Any = None
    inside: list[_Span] = field(default_factory=list)


class Clock:
    """Times named work.

    Args:
        device: where the watched tensors lie.
        spent: called with (check, seconds) as soon as the time is known.
        timeline: another clock (tests).
    """

    #: Spans whose time is not known yet; more than this means that nobody collects, and the oldest are forgotten.
    MOST = 256

    def __init__(
        self, device: torch.device, spent: Callable[[str, float], None], timeline: Timeline | None = None
    ) -> None:
        self._spent = spent
        self._timeline = timeline or (DeviceTimeline(device) if device.type == "cuda" else HostTimeline())
        self._open: list[_Span] = []
        self._waiting: deque[_Span] = deque(maxlen=self.MOST)

    @contextlib.contextmanager
    def timed(self, check: str) -> Iterator[None]:
        """Counts what runs inside for `check`, less what is timed inside it on its own."""
        span = _Span(check, self._timeline.mark())
        self._open.append(span)
        try:
            yield
        finally:
            span.end = self._timeline.mark()
            self._open.remove(span)
            if self._open:
                self._open[-1].inside.append(span)
            self._waiting.append(span)
            if not self._open:
                self.collect()

    def collect(self) -> None:
        """Passes on every time that is known by now."""
        while self._waiting and self._timeline.passed(self._waiting[0].end):
            span = self._waiting.popleft()
            inner = sum(self._timeline.between(s.begin, s.end) for s in span.inside)
            self._spent(span.check, self._timeline.between(span.begin, span.end) - inner)
