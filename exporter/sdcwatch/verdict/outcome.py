"""What one check made of one step, and the rule that says when an event is over.

Flow: gradient, weights, replay -> **outcome** -> engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from sdcwatch.verdict.group import Group
from sdcwatch.verdict.history import History
from sdcwatch.verdict.partition import Partition, outside
from sdcwatch.verdict.records import Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one check: its name for the counters, its verdicts, and the history that follows.

    Attributes:
        result: `clean`, `differs`, `undefined` or `skipped:<reason>`.
        verdicts: lasting ones first, then new ones.
        history: history after this check.
        partition: who shares a fingerprint with whom; None where nothing was compared.
        outliers: ranks of the one rank or node that failed all its calibration edges (replay only).
    """

    result: str
    verdicts: tuple[Verdict, ...]
    history: History
    partition: Partition | None = None
    outliers: tuple[int, ...] = ()


def still_apart(events: Iterable[Verdict], part: Partition, group: Group) -> tuple[Verdict, ...]:
    """The events whose difference lasts: one of their ranks is still outside the majority (or none is a majority)."""
    if not part:
        return ()
    apart = set(outside(part, group))
    return tuple(event for event in events if apart.intersection(event.differing))


def lasting(events: Iterable[Verdict], step: int) -> tuple[Verdict, ...]:
    """Open events as they are said again at a later step: the same event, not a new one."""
    return tuple(replace(event, step=step, new=False) for event in events)
