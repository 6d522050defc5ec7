"""One heal from the judgement that asks for it to the judgement that confirms it, or to a halt.

It joins what `heal` can do (plan, overwrite, recompute) with what the epoch does anyway (measure, exchange, judge,
report, halt), in the order that matters: the event is durable and doubtful checkpoints are tainted before anything is
written, and every turn is agreed on by all ranks. Flow: epoch -> **mend** -> heal, contain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from sdcwatch.fingerprint import combine, fingerprint
from sdcwatch.heal.healer import Healer
from sdcwatch.heal.plan import Plan, only_new, recheck
from sdcwatch.observation import Row, RowError
from sdcwatch.verdict import History, Judgement
from sdcwatch.watch.audit import Outcome
from sdcwatch.watch.contain import containing

if TYPE_CHECKING:
    from sdcwatch.watch.epoch import Epoch


class Mender:
    """Heals the steps of one epoch.

    Args:
        epoch: the running watch.
        window: a second event of one node within this many reducing backwards halts.
    """

    def __init__(self, epoch: Epoch, window: int) -> None:
        watched = epoch.watched
        assert watched.loss_fn is not None, "refused at start"
        assert isinstance(watched.ddp, DistributedDataParallel), "refused at start"
        self._epoch = epoch
        self.healer = Healer(
            model=watched.model,
            ddp=watched.ddp,
            optimizer=watched.optimizer,
            loss_fn=watched.loss_fn,
            parameters=watched.parameters,
            device=watched.device,
            exchange=epoch.exchange,
            group=epoch.membership.group,
            window=window,
            swallow=epoch.reporter.swallow,
        )

    def mend(
        self,
        judgement: Judgement,
        before: tuple[History, ...],
        row: Row,
        rows: Sequence[Row | RowError],
        audit: Outcome | None,
    ) -> None:
        """Undoes what a judgement shows, or halts. Collective.

        Args:
            before: the histories from which it was judged; once healed, the epoch goes on from there.
            row, rows: this rank's row, and those of all ranks, that were judged.
            audit: the audit of the same exchange.

        Raises:
            CorruptionDetected: on all ranks, where it cannot be healed.
            Exception: amid collectives a peer died, or this rank cannot go on.
        """
        epoch = self._epoch
        plan = self.healer.decide(
            judgement, before[0], rows, count=epoch.count, backwards_in_step=epoch.backwards_in_step
        )
        events = epoch.report(judgement, row, rows, action="halt" if plan.refusal else "heal")
        event = containing(events, "halt", "heal")
        assert event is not None, "a judgement that asks for something has an event"
        trouble = plan.refusal
        if not trouble:
            if plan.source is not None:
                epoch.halt.taint(event)
            try:
                trouble = self._done(plan, judgement, before, audit)
            except Exception as error:
                epoch.halt.stop(error)
                raise
        epoch.reporter.heal(plan.check, "refused" if plan.refusal else "failed" if trouble else "healed", trouble)
        if trouble:
            epoch.halt.raise_for(event, epoch.exchange)
        self.healer.healed(plan, epoch.count)

    def _done(self, plan: Plan, first: Judgement, before: tuple[History, ...], audit: Outcome | None) -> str:
        """Does what the plan says and checks the step again; why it failed, the same on all ranks, or ""."""
        epoch = self._epoch
        norms = self._norms()
        epoch.local.begin(due=True, audited=False)
        trouble = self.healer.rebuild(plan)
        if trouble:
            return trouble
        if plan.source is not None:
            # What was measured round the newest optimizer step, and replayed, describes values that are gone.
            epoch.optimizer_watch.newest = audit = None
        draft = epoch.own_row(epoch.fields.measured)
        rows = epoch.exchange.rows(draft)
        epoch.histories = before
        again = epoch.judge_rows(rows, audit)
        trouble = recheck(again)
        repeated = epoch.exchange.rank in plan.targets or (norms is not None and norms == self._norms())
        if not trouble and not repeated:
            trouble = "a local gradient is not what it was before: the step cannot be repeated exactly"
        trouble = self.healer.confirm(trouble)
        if not trouble:
            epoch.report(only_new(again, first), draft.row, rows)
        return trouble

    def _norms(self) -> int | None:
        """uint64 of the local gradient norms of the newest backward; None where a hook of ours failed in it."""
        try:
            norms = self._epoch.local.norms()
            order = sorted(norms)
            return combine([*order, fingerprint(norms[i] for i in order)])
        except Exception as error:  # our border
            self._epoch.reporter.swallow("gradient_norm", error)
            return None
