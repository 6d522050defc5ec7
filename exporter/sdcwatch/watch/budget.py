"""The share of training time that checks may take: cadences stretch until they keep to it, replay first.

Each rank measures what its checks cost and what a step takes without them, and says how far it wants the cadences
stretched; the ranks take the most that any wants (`Exchange.agree`), so all run the same collectives. Factors are
powers of two: a stretched check still runs on backwards on which it would have run anyway. It changes when checks run
and never what they conclude, and what it decided is exported. Flow: clock -> **budget** -> exchange -> epoch.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from sdcwatch.settings import Settings
from sdcwatch.verdict.records import REPLAY, ROW_CHECKS

#: How far each may be stretched, as powers of two: replay and conservation give way first.
MOST_REPLAY, MOST_CONSERVATION, MOST_CHECKS = 4, 4, 6
#: First intervals after a start: optimizer state, buckets and calibration are made there.
WARM_UP = 4
#: Intervals that must have been seen before anything is decided, and how many are remembered.
LEAST, KEPT = 8, 33
#: Of the budget, what may be spent by our own clock: it errs, and it does not see calls into our hooks, caches that a
#: check has emptied for what runs next, or peers that wait for the slowest.
SEEN = 0.9
#: A stretch is given back only where the cost without it would keep this much below what may be spent.
MARGIN = 0.8


class Stretch(NamedTuple):
    """By which powers of two the cadences are stretched."""

    checks: int = 0
    conservation: int = 0
    replay: int = 0


@dataclass(frozen=True, slots=True)
class Cadences:
    """How many reducing backwards lie between two runs; 0: off. The two costly ones are multiples of `checks`."""

    checks: int
    conservation: int
    replay: int

    @classmethod
    def of(cls, settings: Settings, stretch: Stretch | None = None) -> Cadences:
        """The settings' own cadences, stretched."""
        stretch = stretch or Stretch()
        checks = settings.check_every << stretch.checks
        return cls(
            checks,
            settings.cadence(settings.conservation_every << stretch.conservation, checks),
            settings.cadence(settings.replay_every << stretch.replay, checks),
        )

    def by_check(self) -> dict[str, int]:
        """The cadence of each check, by name."""
        costly = {"allreduce_conservation": self.conservation, "replay": self.replay}
        return {check: costly.get(check, self.checks) for check in (*ROW_CHECKS, REPLAY)}


@dataclass(frozen=True, slots=True)
class Costs:
    """Medians in seconds: a backward's interval without us, and one run of each kind of check."""

    step: float
    checks: float = 0.0
    conservation: float = 0.0
    replay: float = 0.0

    def share(self, cadences: Cadences) -> float:
        """What the checks take in these cadences, as a share of training without them."""
        kinds = ((self.checks, cadences.checks), (self.conservation, cadences.conservation))
        costs = sum(cost / every for cost, every in (*kinds, (self.replay, cadences.replay)) if every)
        return costs / self.step if self.step > 0 else 0.0


def least(settings: Settings, costs: Costs, share: float) -> Stretch:
    """The least stretch that keeps to `share`, replay before conservation before all others; else the most there is."""
    most = Stretch(MOST_CHECKS, MOST_CONSERVATION, MOST_REPLAY)
    for powers in itertools.product(*(range(n + 1) for n in most)):
        stretch = Stretch(*powers)
        if costs.share(Cadences.of(settings, stretch)) <= share:
            return stretch
    return most


class Budget:
    """What one rank measured, and the stretch that it wants.

    Args:
        settings: cadences and `max_overhead`; 0 there: nothing is ever stretched.
        spent: seconds of each check since the start, kept up to date by others.
    """

    def __init__(self, settings: Settings, spent: Mapping[str, float]) -> None:
        self._settings = settings
        self._spent = spent
        self._before: dict[str, float] = dict(spent)
        self._ended: float | None = None
        self._intervals = 0
        self._steps: deque[float] = deque(maxlen=KEPT)
        self._costs: dict[str, deque[float]] = {
            kind: deque(maxlen=KEPT) for kind in ("checks", "conservation", "replay")
        }

    def interval(self, now: float, *, checked: bool, conserved: bool, audited: bool) -> None:
        """One reducing backward and all up to it is over.

        Args:
            now: seconds on any clock that does not jump.
            checked, conserved, audited: what ran in it.
        """
        spent = {check: self._spent.get(check, 0.0) - self._before.get(check, 0.0) for check in self._spent}
        self._before = dict(self._spent)
        began, self._ended = self._ended, now
        self._intervals += 1
        if began is None or self._intervals <= WARM_UP:
            return
        self._steps.append(max(now - began - sum(spent.values()), 0.0))
        replay, conservation = spent.pop("replay", 0.0), spent.pop("allreduce_conservation", 0.0)
        for kind, ran, seconds in (
            ("checks", checked, sum(spent.values())),
            ("conservation", conserved, conservation),
            ("replay", audited, replay),
        ):
            if ran:
                self._costs[kind].append(seconds)

    def costs(self) -> Costs | None:
        """The medians; None where too little was seen."""
        if len(self._steps) < LEAST or len(self._costs["checks"]) < LEAST:
            return None
        return Costs(_median(self._steps), *(_median(seen) for seen in self._costs.values()))

    def wanted(self, current: Stretch) -> Stretch:
        """What this rank wants now.

        Args:
            current: what all ranks run with; it is kept where giving it back would come close to the budget.
        """
        share = self._settings.max_overhead * SEEN
        costs = self.costs() if share else None
        if costs is None:
            return current
        if costs.share(Cadences.of(self._settings, current)) > share:
            return least(self._settings, costs, share)
        if current == Stretch():
            return current  # the usual case, asked at every exchange: nothing is stretched, and nothing needs to be
        lower = least(self._settings, costs, share * MARGIN)
        return lower if lower < current else current


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
