"""Halt: stop every rank at the same step, after the proof is on disk, and keep launchers from starting again.

Order: this rank's spool is fsynced already; latches are written; the ranks exchange "written"; then every rank
raises. The halt is sticky: the first raise comes out of `backward()`, the next `step()` or `optimizer.step` meets it
again and ends the process with status 86, whatever the loop catches. It heals nothing and blames nobody. Flow:
verdict -> report -> **contain**.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from sdcwatch import durable
from sdcwatch.checkpoints import manifest as checkpoint
from sdcwatch.errors import EXIT_HALTED, CorruptionDetected, SdcwatchError
from sdcwatch.event import Event
from sdcwatch.latch.files import Latch, LatchNode, NamedRank, write_latch
from sdcwatch.watch.exchange import Exchange
from sdcwatch.watch.report import Reporter, log
from sdcwatch.watch.same_step import EVIDENCE


class Halt:
    """The sticky stop of one rank.

    Args:
        reporter: where the state is exported.
        checkpoint_dir: shared folder of checkpoints and latch, or None.
        scrapes: scrapes to wait for where the agent dies with the job.
        seconds: the most seconds of that wait.
    """

    def __init__(self, reporter: Reporter, *, checkpoint_dir: Path | None, scrapes: int, seconds: float) -> None:
        self._reporter = reporter
        self._checkpoint_dir = checkpoint_dir
        self._scrapes = scrapes
        self._seconds = seconds
        self._standing: BaseException | None = None
        self._met = 0

    @property
    def standing(self) -> bool:
        """True once this rank has been halted."""
        return self._standing is not None

    def meet(self) -> None:
        """Called where a halted rank would go on: ends the process with status 86."""
        if self._standing is None:
            return
        try:
            self._reporter.say(f"sdcwatch: this loop went on after a halt; ending with status {EXIT_HALTED}")
            sys.stdout.flush()
        finally:  # whatever state the streams are in, a halted rank goes no further
            os._exit(EXIT_HALTED)

    def stop(self, error: BaseException) -> None:
        """This rank must not go on, whatever the loop catches; nothing new is proven, so no latch is written.

        Args:
            error: what happened amid collectives of ours; a peer that died looks the same.
        """
        self._standing = error

    def raise_for(self, event: Event, exchange: Exchange | None) -> None:
        """Stops this rank; collective, so every rank calls it with the same event.

        Args:
            exchange: None at the very end of a run, where no collective may be issued any more.

        Raises:
            CorruptionDetected: always.
        """
        self._reporter.state("halted")
        self._latch(event)
        self.taint(event)
        if EVIDENCE in event.evidence:
            self._step_back(event)
        if exchange is not None:
            exchange.agree(1, 1)  # "written": nobody leaves before everybody's proof and latch are on disk
        self._grace(time.time())
        self._standing = error = CorruptionDetected(
            f"sdcwatch halted step {event.step}: {event.sentence} (event {event.id}; the latch keeps the job stopped "
            "until it is released, see `sdcwatch latch show`)",
            event_id=event.id,
            step=event.step,
        )
        _exit_with_status(error)
        raise error

    def _latch(self, event: Event) -> None:
        membership = self._reporter.membership
        latch = Latch(
            latch_id=event.id,
            training_job=event.training_job,
            epoch=event.epoch,
            step=event.step,
            check=event.check,
            kind=event.kind,
            time=event.time,
            named=tuple(
                NamedRank(r, i.node, i.instance, i.gpu_uuid)
                for r in event.suspects
                for i in (membership.identities[r],)
            ),
            nodes=tuple(
                LatchNode(membership.identities[ranks[0]].node, membership.identities[ranks[0]].instance)
                for ranks in membership.nodes.values()
            ),
            last_clean_step=event.last_clean_step,
            trust_needed=event.trust_needed,
            checkpoint_dir=str(self._checkpoint_dir) if self._checkpoint_dir else None,
            sentence=event.sentence,
            same_step_as=str(event.evidence.get(EVIDENCE, "")),
        )
        places: list[Path] = []
        if self._reporter.spool is not None:
            places.append(Path(self._reporter.spool.job_directory))
        if self._checkpoint_dir is not None and self._reporter.rank in membership.reporters():
            places.append(self._checkpoint_dir)
        try:
            write_latch(places, latch)
        except (OSError, SdcwatchError) as error:
            self._reporter.swallow("latch", error)

    def taint(self, event: Event) -> None:
        """Renames the checkpoints that may hold what this event shows; only the job's lowest rank does."""
        if self._checkpoint_dir is None or self._reporter.rank != self._reporter.membership.reporters()[0]:
            return
        try:
            checkpoint.taint(
                self._checkpoint_dir, event.last_clean_step, f"{event.id}: {event.sentence}", epoch=event.epoch
            )
        except (OSError, SdcwatchError) as error:
            self._reporter.swallow("checkpoint", error)

    def _step_back(self, event: Event) -> None:
        """These steps failed on other hardware, too: the next life begins one verified checkpoint earlier."""
        if self._checkpoint_dir is None or self._reporter.rank != self._reporter.membership.reporters()[0]:
            return
        try:
            if not checkpoint.step_back(self._checkpoint_dir, f"{event.id}: {event.sentence}"):
                self._reporter.say("sdcwatch: no older verified checkpoint is left to step back to: choose one by hand")
        except (OSError, SdcwatchError) as error:
            self._reporter.swallow("checkpoint", error)

    def _grace(self, since: float) -> None:
        """Waits until the agent reports enough scrapes, where it would die with this job; bounded."""
        if self._reporter.spool is None or self._scrapes == 0:
            return
        agent = Path(self._reporter.spool.job_directory).parent / "agent.json"
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            try:
                content = durable.read_json(agent)
            except (OSError, SdcwatchError, ValueError):
                return
            if not content or content.get("outlives_ranks", True):
                return
            if sum(1 for t in content.get("scrapes", ()) if float(t) > since) >= self._scrapes:
                return
            time.sleep(0.2)
        with contextlib.suppress(OSError, ValueError):  # logging itself raises where stderr is closed
            log.warning("sdcwatch: the agent reported fewer than %d scrapes in %.0f s", self._scrapes, self._seconds)


def _exit_with_status(error: CorruptionDetected) -> None:
    """An uncaught `CorruptionDetected` ends the process with status 86 instead of Python's 1."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError, ValueError):  # a traceback that cannot be printed keeps its status
            previous(kind, value, trace)
        chain: BaseException | None = value
        while chain is not None:
            if chain is error:
                raise SystemExit(EXIT_HALTED)
            chain = chain.__cause__ or chain.__context__

    sys.excepthook = hook


def containing(events: Sequence[Event], *actions: str) -> Event | None:
    """The event for which the job stops, of those with such an action: one that names somebody, else the first."""
    acted = [e for e in events if e.action in actions]
    return next((e for e in acted if e.suspects), acted[0] if acted else None)
