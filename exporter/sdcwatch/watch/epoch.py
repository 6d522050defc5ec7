"""The running watch of one epoch: hooks in, one exchange at the end of each checked reducing backward, judgements out.

Cadence counts reducing backwards, not the user's step numbers: DDP keeps that count equal on all ranks, so the
cadence of our collectives cannot split. Collectives only happen in `_exchange`, after DDP's own of the same backward.
Exceptions of our own become error rows or counted skips. Flow: monitor -> **epoch** -> checks, audit, exchange,
verdict -> report, contain.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from sdcwatch.checks.conservation import Conservation
from sdcwatch.checks.gradients import LocalGradients, ReducedGradients
from sdcwatch.checks.replay import LossFunction, Recorder
from sdcwatch.checks.weights import OptimizerWatch
from sdcwatch.environment import describe, digest
from sdcwatch.errors import CorruptionDetected
from sdcwatch.event import Event
from sdcwatch.evidence.keep import Keeper
from sdcwatch.heal.plan import asks
from sdcwatch.observation import ErrorCode, Row, RowError
from sdcwatch.packed_rows import measured
from sdcwatch.settings import Settings
from sdcwatch.verdict import (
    History,
    Judgement,
    checked_everywhere,
    combine,
    judge,
    judge_sets,
    verified_everywhere,
)
from sdcwatch.verdict.records import REPLAY, ROW_CHECKS
from sdcwatch.watch.audit import Auditor, Outcome
from sdcwatch.watch.budget import Budget, Cadences, Stretch
from sdcwatch.watch.clock import Clock
from sdcwatch.watch.contain import Halt, containing
from sdcwatch.watch.draft import Draft
from sdcwatch.watch.exchange import Exchange, last_rows
from sdcwatch.watch.mend import Mender
from sdcwatch.watch.prepared import Prepared
from sdcwatch.watch.report import Reporter, log, median_time
from sdcwatch.watch.row_fields import RowFields, Watched
from sdcwatch.watch.start import Membership
from sdcwatch.watch.unhooked import Unhooked

#: Audits skipped in a row after which replay is exported as off, whatever the reason: an alert then says so.
BLIND_AFTER = 3
#: What an epoch that is over still has; everything else reaches model and optimizer.
KEPT = frozenset(
    {"membership", "exchange", "reporter", "halt", "histories", "cadences", "stretch", "step", "count", "_over"}
)


class Epoch:
    """One rank's watch from `Monitor(...)` to `close()`.

    Args:
        settled: called with (checked, verified) step whenever one of them moved on, on every rank.
    """

    def __init__(
        self,
        watched: Watched,
        settings: Settings,
        membership: Membership,
        exchange: Exchange,
        reporter: Reporter,
        halt: Halt,
        settled: Callable[[int | None, int | None], None],
    ) -> None:
        self.watched = watched
        self.membership = membership
        self.exchange = exchange
        self.reporter = reporter
        self.halt = halt
        self.step = 0
        self.count = 0
        self.histories = tuple(History.initial() for _ in membership.parts or (membership.group,))
        self.recorder = Recorder(watched.device, watched.ddp.module, watched.parameters)
        self.replay_off = "" if membership.replays else "disabled"
        self._settings = settings
        self._settled = settled
        self._last_settled: tuple[int | None, int | None] = (None, None)
        self._armed_at: int | None = None
        self.backwards_in_step = 0
        self._in_step = False
        self._over = False
        self._join_seen = False
        self._disagreed = False
        self._audits_skipped = 0
        self.mender = Mender(self, settings.heal_window) if settings.on_fault == "heal" else None
        self._evidence = Keeper(watched, settings, reporter)
        self._environment = membership.group.environments[exchange.rank]
        self.clock = Clock(watched.device, reporter.spent)
        self.budget = Budget(settings, reporter.seconds)
        self.stretch = Stretch()
        self.cadences = Cadences.of(settings)
        self._export_cadences()
        self.prepared = Prepared()
        self._forward_handle = self.prepared.watch(watched.model, watched.ddp, self._backward_begins)
        self.auditor = Auditor(
            exchange,
            membership.group,
            module=watched.ddp.module,
            loss_fn=watched.loss_fn or _no_loss,
            parameters=watched.parameters,
            device=watched.device,
            swallow=reporter.swallow,
        )
        reduced = ReducedGradients(watched.parameters)
        self.optimizer_watch = OptimizerWatch(
            watched.optimizer,
            watched.parameters,
            current_step=lambda: self.step,
            due=lambda: self.check_due and not self._joining(),
            gate=halt.meet,
            guard=self._guard,
            reduced=reduced,
        )
        self.unhooked = Unhooked(
            watched.optimizer,
            reporter,
            reductions=lambda: self.count,
            excused=lambda: self._joining() or not watched.comparable,
            replays=lambda: bool(self.cadences.replay) and not self.replay_off,
        )
        self.conservation = (
            Conservation(watched.ddp, watched.parameters, exchange.size)
            if isinstance(watched.ddp, DistributedDataParallel)
            else None
        )
        self.local = LocalGradients(
            watched.local_gradients,
            reducing=self._reducing,
            first=self._arm,
            further=self.conservation.local if self.conservation is not None else None,
        )
        self.fields = RowFields(
            watched, reporter, self.local, reduced, self.conservation, self.optimizer_watch, self.recorder, self.clock
        )
        self._begin_local()

    @property
    def history(self) -> History:
        """The history of the only replica set; audits run where there is one."""
        return self.histories[0]

    @property
    def check_due(self) -> bool:
        """Whether the next reducing backward is checked."""
        return self.watched.comparable and self.count % self.cadences.checks == 0

    @property
    def audit_due(self) -> bool:
        """Whether the next reducing backward is audited."""
        every = self.cadences.replay
        return bool(every) and not self.replay_off and self.count % every == 0

    @property
    def conservation_due(self) -> bool:
        """Whether the next reducing backward is held against the average of the local gradients."""
        every = self.cadences.conservation
        return bool(every) and bool(self.watched.local_gradients) and (self._healing or self.count % every == 0)

    @property
    def _healing(self) -> bool:
        """Whether the backward that runs is a heal's own."""
        return self.mender is not None and self.mender.healer.busy

    def begin_step(self, step: int) -> None:
        """A new training step; meets a standing halt."""
        self.halt.meet()
        self.step = step
        self.backwards_in_step = 0
        self._in_step = True
        self.recorder.begin()
        self.unhooked.begin_step()
        if self.mender is not None:
            self.mender.healer.keeper.begin()

    def loss(self, loss_fn: LossFunction, batch: Any) -> Any:
        """Calls `loss_fn(model, batch)`, keeping what an audit or a heal of this step will need."""

        def compute() -> Any:
            return self.recorder.loss(loss_fn, self.watched.model, batch, audited=self.audit_due)

        return compute() if self.mender is None else self.mender.healer.loss(batch, compute)

    def end_step(self, seconds: float) -> None:
        """The step is over: counts and writes; nothing collective."""
        self._in_step = False
        if self._join_seen:
            self._join_seen = False
            for check in (*ROW_CHECKS, REPLAY):
                self.reporter.skipped(check, "join")
        self.reporter.finished_step(self.step, seconds)

    def _joining(self) -> bool:
        return bool(getattr(getattr(self.watched.ddp, "_join_config", None), "enable", False))

    def _backward_begins(self) -> None:
        if not self._over and self._reducing():
            self._arm()

    def _reducing(self) -> bool:
        if not self.watched.ddp.require_backward_grad_sync or not self.prepared.standing:
            return False
        if self._joining():
            self._join_seen = True
            return False
        return True

    def _arm(self) -> None:
        """As a reducing backward begins: run `_end_of_backward` after DDP's own final callback, once a forward."""
        if self._armed_at == self.prepared.forwards:
            return
        self._armed_at = self.prepared.forwards
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(self._end_of_backward))
        if self.conservation is not None:
            self.conservation.begin(self.count, due=self.conservation_due, followed=self.local.followed())

    def _end_of_backward(self) -> None:
        self.prepared.used()
        if self._healing:
            return  # a heal's own backward: `_healed` exchanges once it is over
        checked, audited, conserved = self.check_due, self.audit_due, self.conservation_due
        self.clock.collect()
        self.count += 1
        self.backwards_in_step += 1
        try:
            if self.mender is not None:
                self.mender.healer.refuse_first_steps(self.count, self.backwards_in_step if self._in_step else 0)
            if checked:
                self._exchange(audited)
        finally:
            self.budget.interval(time.perf_counter(), checked=checked, conserved=conserved, audited=audited)
            self._begin_local()
            if self.mender is not None:
                self.mender.healer.keeper.release()

    def _begin_local(self) -> None:
        self.local.begin(due=self.check_due, audited=self.audit_due)

    def _exchange(self, audited: bool) -> None:
        with self.clock.timed("gradient_checksum"):
            self._exchange_timed(audited)

    def _exchange_timed(self, audited: bool) -> None:
        payload = self._audit_payload() if audited else None
        draft = self.own_row(lambda: self.fields.measured() | (self._replayable(payload) if audited else {}))
        rows = self.exchange.rows(draft)
        row = draft.row
        self.unhooked.row(row.weights_now)
        outcome = self._audit(rows, row, payload) if audited else None
        before = self.histories
        judgement = self.judge_rows(rows, outcome)
        self._evidence.hold(outcome, before[0])
        try:
            if self.mender is not None and asks(judgement):
                self.mender.mend(judgement, before, row, rows, outcome)
            else:
                self._settle(judgement, row, rows, self.exchange)
        finally:
            self._evidence.hold(None, before[0])

    def _audit(self, rows: Sequence[Row | RowError], row: Row, payload: bytes | None) -> Outcome:
        """Runs one audit. Collective."""
        with self.clock.timed("replay"):
            outcome = self.auditor.run(
                self.history, rows, row, payload, self.local.digests(), unchanged=self.recorder.unchanged
            )
        self._audits_skipped = self._audits_skipped + 1 if outcome.reason else 0
        blind = self._audits_skipped >= BLIND_AFTER
        self.reporter.metrics.set("sdc_detector_enabled", float(not blind), check="replay")
        return outcome

    def _audit_payload(self) -> bytes | None:
        """This step's packed micro-batches; and the environment as it is now, since flags may change in mid-run."""
        try:
            self._environment = digest(describe(self.watched.device))
            return self.recorder.pack()
        except Exception as error:  # our border: what cannot be packed cannot be replayed, and training goes on
            self.reporter.swallow("replay", error)
            return None

    def judge_rows(self, rows: Sequence[Row | RowError], outcome: Outcome | None) -> Judgement:
        steps = sorted(measured(rows, "step"))
        step = steps[len(steps) // 2] if steps else self.step
        judgement, histories = Judgement.void(step, self.exchange.size), self.histories
        try:
            judgement, histories = self._compare(step, rows, outcome)
        except Exception as error:  # our border: a verdict that fails is no verdict, and the ranks still agree below
            self.reporter.swallow("verdict", error)
        wanted = self.budget.wanted(self.stretch)
        agreed, highest, most = self.exchange.agree_on_most(judgement.code, judgement.digest, wanted)
        self._stretch_to(Stretch(*most))
        if agreed:
            self.histories = histories
        combined = combine(judgement, agreed, highest, lasting=self._disagreed)
        self._disagreed = not agreed
        return combined

    def _stretch_to(self, stretch: Stretch) -> None:
        """Takes the cadences that all ranks agreed on; said and exported where they changed."""
        if stretch == self.stretch:
            return
        self.stretch, self.cadences = stretch, Cadences.of(self._settings, stretch)
        self._export_cadences()
        if self.exchange.rank == 0:
            every = ", ".join(f"{check} every {n}" for check, n in self.cadences.by_check().items() if n)
            self.reporter.say(
                f"sdcwatch: to keep to max_overhead={self._settings.max_overhead:g}, cadences are now: {every} "
                "(reducing backwards); raise max_overhead, or set it to 0, to check as often as the settings say"
            )

    def _export_cadences(self) -> None:
        for check, every in self.cadences.by_check().items():
            self.reporter.metrics.set("sdc_check_every", every, check=check)

    def _compare(
        self, step: int, rows: Sequence[Row | RowError | None], outcome: Outcome | None = None
    ) -> tuple[Judgement, tuple[History, ...]]:
        """The pure verdict on one exchange; nothing is remembered yet."""
        if self.membership.parts:
            return judge_sets(self.histories, self.membership.parts, step, rows)
        judgement, history = judge(
            self.history,
            self.membership.group,
            step,
            rows,
            outcome.rows if outcome else None,
            outcome.tie if outcome else None,
            audit_reason=outcome.reason if outcome else None,
        )
        return judgement, (history,)

    def finish(self, timeout: timedelta) -> None:
        """Judges the last optimizer step through the rendezvous store: no collective, and peers may be gone already.

        Raises:
            CorruptionDetected: that step was wrong on some rank, and `on_fault` is `halt`.
        """
        if self.halt.standing or self.count == 0 or not self.watched.comparable:
            return
        rows: list[Row | RowError | None] = []
        try:
            row = self.own_row(self.fields.state).row
            rank, size = self.exchange.rank, self.exchange.size
            rows = last_rows(row, epoch=self.membership.epoch, rank=rank, size=size, timeout=timeout)
            judgement, histories = self._compare(self.step, rows)
        except Exception as error:  # our border: a run that finished must end well
            self.reporter.swallow("weight_checksum", error)
            return
        if any(r is None for r in rows):
            log.warning("sdcwatch: peers did not close in time; the last checkpoint stays a candidate")
            return
        self.histories = histories
        # No backward belongs to this row, so what it has no gradient for was not skipped: it was not due.
        due = tuple((check, result) for check, result in judgement.checks if check == "weight_checksum")
        self._settle(dataclasses.replace(judgement, checks=due), row, rows, None)

    def _settle(
        self, judgement: Judgement, row: Row, rows: Sequence[Row | RowError | None], exchange: Exchange | None
    ) -> None:
        event = containing(self.report(judgement, row, rows), "halt")
        if event is not None:
            self.halt.raise_for(event, exchange)

    def report(
        self, judgement: Judgement, row: Row, rows: Sequence[Row | RowError | None], action: str | None = None
    ) -> list[Event]:
        """Makes a judgement durable; its new events. `action`: what happens to what contains (default: `on_fault`)."""
        checked, verified = checked_everywhere(self.histories), verified_everywhere(self.histories)
        when = median_time(rows, time.time())
        events = self.reporter.judged(judgement, row, when=when, checked=checked, verified=verified, action=action)
        self._evidence.keep(events, rows)
        if (checked, verified) != self._last_settled:
            self._last_settled = (checked, verified)
            self._settled(checked, verified)
        return events

    def own_row(self, measure: Callable[[], dict[str, Any]]) -> Draft[Row]:
        fixed: dict[str, Any] = {
            "rank": self.exchange.rank,
            "instance": self.membership.group.instances[self.exchange.rank],
            "epoch": self.membership.group.epoch,
            "step": self.step,
            "time": time.time(),
            "environment": self._environment,
        }
        try:
            return Draft.of(Row, {**fixed, "error": ErrorCode.NONE, **measure()})
        except Exception as error:  # our border: the row still travels, its numbers are void
            self.reporter.swallow("gradient_checksum", error)
            return Draft(Row(**fixed, error=ErrorCode.CHECK))

    def _replayable(self, payload: bytes | None) -> dict[str, Any]:
        return self.fields.replayable(payload, collective=self.auditor.collective, backwards=self.backwards_in_step)

    def _guard(self, what: str, measure: Callable[[], None]) -> None:
        with self.clock.timed("weight_checksum"):
            try:
                measure()
            except CorruptionDetected:
                raise
            except Exception as error:  # our border: optimizer.step must not fail because a measurement did
                self.reporter.swallow(what, error)

    def close(self) -> None:
        """Removes every hook, and lets go of model and optimizer at once.

        The parts of an epoch know each other, so only the garbage collector would free them, late. A DDP model that it
        frees after `destroy_process_group()` can hang the process (docs/deploying.md), although the user's own scopes
        were in order.
        """
        self._over = True
        self._forward_handle.remove()
        self.local.close()
        self.optimizer_watch.close()
        self.unhooked.close()
        for name in vars(self).keys() - KEPT:
            delattr(self, name)


def _no_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    raise AssertionError("no audit runs without a loss_fn")
