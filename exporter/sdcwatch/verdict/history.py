"""What earlier exchanges of this epoch left behind: the only memory of the verdict engine.

Frozen and bounded; every rank that read the same rows holds the same one. It never holds tensors or rows. Flow: judge
takes one and returns the next; a new epoch begins with `History.initial()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sdcwatch.verdict.partition import Partition
from sdcwatch.verdict.records import TRANSPORT, Verdict

#: Open events kept a check; a group that splits more often keeps the newest.
MAX_OPEN = 16


@dataclass(frozen=True, slots=True)
class Calibration:
    """Where replay was shown to be deterministic. Anything not in here cannot accuse.

    Attributes:
        edges: (owner, server, batch signature, compile count of owner, of server) whose S and N agreed.
        originals: (rank, batch signature, compile count) whose O and S agreed.
        nondeterministic: (batch signature, compile count) for which half or more of the edges failed.
        complete: whole-group profiles for which every edge and every O is shown, newest last (a fast path).
    """

    edges: frozenset[tuple[int | None, ...]] = frozenset()
    originals: frozenset[tuple[int | None, ...]] = frozenset()
    nondeterministic: frozenset[tuple[int | None, ...]] = frozenset()
    complete: tuple[tuple[tuple[int | None, ...], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class History:
    """The state of all checks after the newest judged exchange of an epoch.

    Attributes:
        step: group's step of the newest exchange; None before the first.
        steps: each rank's own step number of that exchange, only where they differed.
        config: partition by schema, loss scale and step number; None before the first run.
        gradient: partition of the reduced gradient at its newest run; None before the first.
        conserved: whether the reduced gradient was the average of the local ones at the newest run; None before it.
        gradient_edits: moves of the gradients' version counters at the newest conserved run, a rank.
        conserved_step: step of the newest clean run of allreduce_conservation.
        spoiled: a wrong gradient was the same on all replicas: no later step is checked in this epoch.
        weights: partition of the parameters where last seen; None before the first.
        state: partition of the optimizer state where last seen; None before the first.
        signs: signs of software in the newest exchange; the optimizer step that followed ran under them.
        versions_now: version counters at the newest exchange, a rank.
        optimizer_steps: optimizer steps taken by the newest exchange, a rank.
        counters: the counters of `signs.COUNTERS` at the newest exchange that compared the state after an optimizer
            step, a rank each; only what they moved since then can explain a difference.
        optimizer_step_of: step of the newest optimizer step already judged.
        gradient_clean_since: gradient_checksum ran and was clean at every step from this one on; None: not so.
        weights_clean_step: step of the newest clean run of weight_checksum.
        open: events whose difference lasts, oldest first.
        checked: newest checked step.
        audited: step of the newest clean audit.
        tainted: a replay disputed an original gradient: later audits verify nothing more in this epoch.
        calibration: what replay was shown to reproduce.
    """

    step: int | None = None
    steps: tuple[int, ...] = ()
    config: Partition | None = None
    gradient: Partition | None = None
    conserved: bool | None = None
    gradient_edits: tuple[int | None, ...] = ()
    conserved_step: int | None = None
    spoiled: bool = False
    weights: Partition | None = None
    state: Partition | None = None
    signs: tuple[str, ...] = ()
    versions_now: tuple[int | None, ...] = ()
    optimizer_steps: tuple[int | None, ...] = ()
    counters: tuple[tuple[int | None, ...], ...] = ()
    optimizer_step_of: int | None = None
    gradient_clean_since: int | None = None
    weights_clean_step: int | None = None
    open: tuple[Verdict, ...] = ()
    checked: int | None = None
    audited: int | None = None
    tainted: bool = False
    calibration: Calibration = field(default_factory=Calibration)

    @classmethod
    def initial(cls) -> History:
        """The history of an epoch that has not exchanged anything yet."""
        return cls()

    def opened(self, topic: str) -> tuple[Verdict, ...]:
        """Open events of a topic (see `topic_of`)."""
        return tuple(v for v in self.open if topic_of(v) == topic)

    def with_open(self, topic: str, events: tuple[Verdict, ...]) -> History:
        """The same history with the open events of a topic exchanged for `events`."""
        if not events and not self.open:
            return self
        kept = tuple(v for v in self.open if topic_of(v) != topic)
        return replace(self, open=kept + events[-MAX_OPEN:])


def transport_topic(check: str) -> str:
    """Topic of faults in the exchange that carries `check`."""
    return f"{TRANSPORT}:{check}"


def topic_of(verdict: Verdict) -> str:
    """What an event lasts under: its check, or the exchange where it never got as far as a check."""
    return transport_topic(verdict.check) if verdict.path == TRANSPORT else verdict.check


def checked_through(history: History) -> int | None:
    """Newest checked step: the state after it was proven equal on all ranks. None: no step yet."""
    return history.checked


def verified_through(history: History) -> int | None:
    """Newest verified step: checked, and a replay audit at that step or later was clean on every rank."""
    if history.checked is None or history.audited is None:
        return None
    return min(history.checked, history.audited)
