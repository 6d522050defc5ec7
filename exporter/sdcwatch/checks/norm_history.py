"""A rank's own past: how far the newest local gradient norm lies from those before it.

A robust statistic over a window of logarithms (median and MAD), so that a slow trend, a warm-up or a new learning rate
moves it and one huge value does not. What it calls an outlier, and whatever is not finite, never enters the window; it
begins afresh when outliers go on, for then the run has changed and not the rank. Pure, standard library only; it hints
and never accuses. Flow: row -> **norm_history** -> metrics.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

#: Deviations above this are outliers. Over 10,000 steps of Gaussian norms the chance of one is below 1e-3
#: (`tests/exporter/test_norm_history.py`: none in 30,000).
BOUND = 10.0

_WINDOW = 64
_WARM_UP = 32
_STREAK = 16
#: MAD -> standard deviation of a normal distribution.
_MAD_SCALE = 1.4826
#: A spread below this (5 % of the norm) is no scale to count outliers by: norms that never vary stay unsuspected.
_FLOOR = 0.05


class NormHistory:
    """The window of one rank; begins empty at every start and resume."""

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=_WINDOW)
        self._refused = 0

    def observe(self, norm: float) -> float | None:
        """Takes the newest norm.

        Returns:
            Its robust deviation from the window (>= 0), inf where it is not finite; None while the window holds fewer
            than 32 values, and for a norm of zero (nothing was computed).
        """
        if not math.isfinite(norm):
            return math.inf
        if norm <= 0:
            return None
        value = math.log(norm)
        if len(self._window) < _WARM_UP:
            self._window.append(value)
            return None
        center = median(self._window)
        spread = _MAD_SCALE * median([abs(v - center) for v in self._window])
        deviation = abs(value - center) / max(spread, _FLOOR)
        if deviation <= BOUND:
            self._window.append(value)
            self._refused = 0
            return deviation
        self._refused += 1
        if self._refused >= _STREAK:
            self._window.clear()
            self._refused = 0
        return deviation
