"""One rank's part in healing: what is agreed, in which order it is done, and when it has failed.

Every branch that decides about a collective is agreed on first, so a rank on which something goes wrong turns the heal
into a halt of all ranks, never into a hang. It judges nothing: `epoch` measures and judges again what came out, and
reports. Flow: judge -> plan -> **healer** -> overwrite, recompute -> epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from sdcwatch.checks.conservation import undefined
from sdcwatch.checks.replay import LossFunction
from sdcwatch.errors import ConfigurationError
from sdcwatch.heal import keep
from sdcwatch.heal.overwrite import overwrite
from sdcwatch.heal.plan import Healed, Plan, make_plan
from sdcwatch.heal.recompute import recompute, rehearse
from sdcwatch.observation import Row, RowError
from sdcwatch.verdict import Group, History, Judgement
from sdcwatch.watch.exchange import Exchange
from sdcwatch.watch.replication import ShardedReplicas, Wrapper

#: Reducing backwards of an epoch in which a loop that can never be healed is refused with an error.
_STARTING = 2

Swallow = Callable[[str, BaseException], None]


def refuse_start(ddp: Wrapper, optimizer: Any, loss_fn: LossFunction | None) -> None:
    """Raises ConfigurationError for what can be seen to be beyond healing before the first step."""
    why = ""
    if isinstance(ddp, ShardedReplicas):
        why = "a model under fully_shard gathers its shards in every forward, so a recompute cannot be tried in private"
    elif loss_fn is None:
        why = "it computes gradients again with loss_fn and s.loss(batch), and Monitor was given no loss_fn"
    elif undefined(ddp) is not None or hasattr(ddp, "buffer_hook"):
        why = "a communication hook may carry state from one reduce to the next, so a reduce cannot be repeated"
    elif any(c.__name__ == "ZeroRedundancyOptimizer" for c in type(optimizer).__mro__):
        why = "ZeroRedundancyOptimizer keeps each state on one rank only, so no majority holds it"
    elif any(hasattr(p, "_in_backward_optimizers") for p in ddp.module.parameters()):
        why = "an optimizer that steps inside backward() has used a gradient before it could be checked"
    elif any(isinstance(m, torch.nn.SyncBatchNorm) for m in ddp.module.modules()):
        why = "SyncBatchNorm's forward waits for the other ranks, so a recompute that fails on one rank would hang all"
    if why:
        raise ConfigurationError(f'on_fault="heal" cannot work here: {why}; use on_fault="halt", or change that')


class Healer:
    """Heals on one rank.

    Args:
        model: what the loop calls: DDP, or `torch.compile` of it.
        exchange, group: the replica group.
        parameters: the replicated parameters, in module order.
        window: a second event of one node within this many reducing backwards halts.
        swallow: counts an exception of ours.

    Attributes:
        keeper: the running step.
        busy: a recompute is under way, so the backward that runs is ours.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction,
        parameters: Sequence[torch.nn.Parameter],
        device: torch.device,
        exchange: Exchange,
        group: Group,
        window: int,
        swallow: Swallow,
    ) -> None:
        self._model = model
        self._ddp = ddp
        self._optimizer = optimizer
        self._loss_fn = loss_fn
        self._parameters = parameters
        self._device = device
        self._exchange = exchange
        self._group = group
        self._window = window
        self._swallow = swallow
        self._past: tuple[Healed, ...] = ()
        self.keeper = keep.StepKeeper(ddp, parameters, device)
        self.busy = False

    def loss(self, batch: Any, compute: Callable[[], Any]) -> Any:
        """Keeps `batch`, calls `compute`, and watches the loss that it returns."""
        kept = None
        try:
            kept = self.keeper.before(batch)
        except Exception as error:  # our border: copying runs the batch's own code
            self._swallow("heal", error)
            self.keeper.failed("batch")
        loss = compute()
        if kept is not None:
            self.keeper.after(kept, loss)
        return loss

    def refuse_first_steps(self, count: int, backwards_in_step: int) -> None:
        """In the first reducing backwards of an epoch: refuses a loop whose steps cannot be repeated. Collective.

        Args:
            count: reducing backwards of this epoch, this one included.
            backwards_in_step: those of this step; 0 outside of a step.

        Raises:
            ConfigurationError: on all ranks, for the reason of the rank whose reason stands last in `keep.REFUSALS`.
        """
        if count > _STARTING:
            return
        reason = self._refusal(backwards_in_step) if backwards_in_step else ""
        _, highest = self._exchange.agree(keep.CODES[reason], 0)
        if highest:
            raise ConfigurationError(
                f'on_fault="heal" cannot repeat this step: {keep.REFUSALS[keep.NAMES[highest]]}; use on_fault="halt", '
                "or change that"
            )

    def decide(
        self,
        judgement: Judgement,
        before: History,
        rows: Sequence[Row | RowError],
        *,
        count: int,
        backwards_in_step: int,
    ) -> Plan:
        """The plan on which all ranks agree. Collective; called by all ranks or by none."""
        plan = Plan("gradient_checksum", refusal="planning failed")
        try:
            plan = make_plan(judgement, before, self._group, rows, past=self._past, count=count, window=self._window)
        except Exception as error:  # our border: the ranks still agree below, and halt
            self._swallow("heal", error)
        code = keep.CODES[self._refusal(backwards_in_step)]
        agreed, highest = self._exchange.agree(code, plan.digest)
        if highest:
            return replace(plan, refusal=plan.refusal or f"the step cannot be repeated: {_sentence(highest)}")
        return plan if agreed else replace(plan, refusal="the ranks planned different heals")

    def rebuild(self, plan: Plan) -> str:
        """Does what an agreed plan says. Collective.

        Returns:
            Why it failed, on all ranks alike; "" where the gradients were computed again.

        Raises:
            Exception: the recompute itself failed on this rank, amid collectives: this rank must not go on.
        """
        if plan.source is not None and not overwrite(
            self._exchange,
            self._optimizer,
            self._parameters,
            source=plan.source,
            targets=plan.targets,
            trouble=lambda error: self._swallow("heal", error),
        ):
            return "parameters and optimizer state could not be made equal"
        failed = 0
        try:
            rehearse(
                self.keeper,
                module=self._ddp.module,
                loss_fn=self._loss_fn,
                parameters=self._parameters,
                device=self._device,
            )
        except Exception as error:  # our border: the ranks agree not to begin
            self._swallow("heal", error)
            failed = 1
        if self._exchange.agree(failed, 0)[1]:
            return "the step could not be run a second time on some rank (see its log)"
        self.busy = True
        try:
            recompute(
                self.keeper,
                model=self._model,
                ddp=self._ddp,
                loss_fn=self._loss_fn,
                parameters=self._parameters,
                device=self._device,
            )
        finally:
            self.busy = False
        return ""

    def confirm(self, trouble: str) -> str:
        """Turns one rank's trouble with what was computed again into trouble of all. Collective."""
        _, highest = self._exchange.agree(int(bool(trouble)), 0)
        return trouble or ("what was computed again did not satisfy another rank (see its log)" if highest else "")

    def healed(self, plan: Plan, count: int) -> None:
        """Remembers a heal: a second event of its nodes within the window halts."""
        self._past = (*(h for h in self._past if count - h.count <= self._window), Healed(count, plan.nodes))

    def _refusal(self, backwards_in_step: int) -> str:
        try:
            if undefined(self._ddp) is not None:
                return "comm_hook"
            return self.keeper.refusal(backwards_in_step)
        except Exception as error:  # our border
            self._swallow("heal", error)
            return "own_failure"


def _sentence(code: int) -> str:
    return keep.REFUSALS[keep.NAMES[code]]
