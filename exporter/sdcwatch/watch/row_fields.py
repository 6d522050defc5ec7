"""What one rank puts into its row: gradients, parameters, optimizer and user code as they stand at one moment.

It reads and never writes; nothing here is collective, and exceptions are the caller's to turn into an error row. What
was measured on a device stays there, as 0-d tensors: the exchange reads it with the rows. Flow: checks ->
**row_fields** -> epoch, which sends the row.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sdcwatch.checks.conservation import Conservation
from sdcwatch.checks.gradients import LocalGradients, ReducedGradients
from sdcwatch.checks.replay import LossFunction, Recorder
from sdcwatch.checks.weights import OptimizerWatch, hyperparameters_digest, versions
from sdcwatch.fingerprint import Digest, combine_unread
from sdcwatch.observation import SkipReason
from sdcwatch.watch.clock import Clock
from sdcwatch.watch.replication import ShardedReplicas, Wrapper
from sdcwatch.watch.report import Reporter


@dataclass(frozen=True, slots=True)
class Watched:
    """What the epoch watches. `model` is what the loop calls; `parameters` are the replicated ones, in module order."""

    model: torch.nn.Module
    ddp: Wrapper
    optimizer: torch.optim.Optimizer
    loss_fn: LossFunction | None
    parameters: Sequence[torch.nn.Parameter]
    device: torch.device
    schema: int
    scaler: torch.amp.GradScaler | None = None

    @property
    def comparable(self) -> bool:
        """Whether any state is held by more than one rank."""
        return not isinstance(self.ddp, ShardedReplicas) or self.ddp.replicated

    @property
    def local_gradients(self) -> Sequence[torch.nn.Parameter]:
        """The parameters whose gradient a hook sees before the reduce; under `fully_shard` none."""
        return () if isinstance(self.ddp, ShardedReplicas) else self.parameters

    def scale(self) -> float | torch.Tensor | None:
        """The loss scale, where a scaler was passed. Never guessed from gradients: ranks may weight their losses."""
        if self.scaler is None or not self.scaler.is_enabled():
            return None
        # `get_scale` waits for the device; the tensor that it would read is there from the first `scale()` on.
        unread = getattr(self.scaler, "_scale", None)
        return unread.detach() if isinstance(unread, torch.Tensor) else float(self.scaler.get_scale())


class RowFields:
    """The measured fields of this rank's rows."""

    def __init__(
        self,
        watched: Watched,
        reporter: Reporter,
        local: LocalGradients,
        reduced: ReducedGradients,
        conservation: Conservation | None,
        optimizer_watch: OptimizerWatch,
        recorder: Recorder,
        clock: Clock,
    ) -> None:
        self._watched = watched
        self._clock = clock
        self._reporter = reporter
        self._local = local
        self._reduced = reduced
        self._conservation = conservation
        self._optimizer_watch = optimizer_watch
        self._recorder = recorder
        self._hook_said = False
        self._unfinished = 0

    def measured(self) -> dict[str, Any]:
        """All fields of a checked backward, at its end."""
        digest, nonfinite = self._reduced.measured()
        return {
            "reduced": digest,
            "reduced_nonfinite": nonfinite,
            **(self._before_the_reduce() if self._watched.local_gradients else {}),
            **self.state(),
        }

    def _before_the_reduce(self) -> dict[str, Any]:
        norm = self._local.norm()
        self._reporter.spent("gradient_norm", self._local.seconds)
        nonfinite = (~torch.isfinite(norm)).long() if isinstance(norm, torch.Tensor) else 0
        return {"local_norm": norm, "local_nonfinite": nonfinite, **self._conserved()}

    def _conserved(self) -> dict[str, Any]:
        assert self._conservation is not None, "where local gradients are seen, DDP reduces them"
        norms = self._local.norms()
        if not self._conservation.finished(norms):
            self._unfinished += 1
            raise RuntimeError(
                "this backward left parameters without a gradient, so DDP did not finish its reduce and will say so at "
                "the next forward; pass it find_unused_parameters=True where that is meant"
            )
        with self._clock.timed("allreduce_conservation"):
            fields = self._conservation.fields(norms)
        if not fields:
            return fields
        self._reporter.spent("allreduce_conservation", self._conservation.hook_seconds)
        if fields["conservation"] == SkipReason.code("comm_hook") and not self._hook_said:
            self._hook_said = True  # it holds for the whole run: said once, not a skip a step
            self._reporter.skipped("allreduce_conservation", "comm_hook")
        return fields

    def state(self) -> dict[str, Any]:
        """The row's fields that describe parameters, optimizer and user code, as they stand now."""
        fields: dict[str, Any] = {
            "hyperparameters": self._hyperparameters(),
            "loss_scale": self._watched.scale(),
            "schema": self._watched.schema,
            "compile_count": _compiled_graphs(),
            "optimizer_steps": self._optimizer_watch.calls,
            "weights_now": self._optimizer_watch.weights(),
            "versions_now": versions(self._watched.parameters),
            "unfinished": self._unfinished,
        }
        measure = self._optimizer_watch.newest
        if measure is not None:
            fields |= {
                "optimizer_step_of": measure.step,
                "gradient_begin": measure.begin.gradient,
                "weights_begin": measure.begin.weights,
                "weights_end": measure.weights_end,
                "state_begin": measure.begin.state,
                "state_end": measure.state_end,
                "versions_begin": measure.begin.versions,
                "versions_end": measure.versions_end,
            }
        return fields

    def _hyperparameters(self) -> Digest:
        """As the newest step began and as they are now: a change that was undone in between is a sign all the same.

        Random numbers that the step drew count with them: ranks whose generators differ then step otherwise by code.
        """
        measure = self._optimizer_watch.newest
        begun = (measure.begin.hyperparameters, measure.drew) if measure is not None else (0, 0)
        return combine_unread([*begun, hyperparameters_digest(self._watched.optimizer)])

    def replayable(self, payload: bytes | None, *, collective: bool, backwards: int) -> dict[str, Any]:
        """The fields that say whether this rank can audit this step.

        Args:
            payload: this step's packed micro-batches; None where they could not be packed.
            collective: the model's forward is known to use collectives.
            backwards: reducing backwards of this step so far.
        """
        free = _free_memory(self._watched.device)
        reason = self._not_ready(payload, free, collective, backwards)
        if reason is not None or payload is None:
            return {"replay_ready": SkipReason.code(reason or "disabled")}
        return {
            "replay_ready": 1,
            "batch_bytes": len(payload),
            "batch_signature": self._recorder.signature(),
            "free_memory": free,
        }

    def _not_ready(self, payload: bytes | None, free: int | None, collective: bool, backwards: int) -> str | None:
        if collective:
            return "collective"
        if self._recorder.failure:
            return self._recorder.failure
        if payload is None or backwards > 1:
            return "disabled"
        needed = 2 * sum(p.numel() * p.element_size() for p in self._watched.parameters) + len(payload)
        return "oom" if free is not None and free < needed else None


def _compiled_graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def _free_memory(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
