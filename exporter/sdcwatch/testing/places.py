"""Where faults strike: one function a location, each hanging hooks on a model or optimizer of this rank.

Hooks are installed before the monitor's, so a strike comes before its look. They write raw memory: no version counter
moves, no autograd rule is broken. Flow: faults -> **places** -> trigger (when) and patterns (what).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sdcwatch.shards import local
from sdcwatch.testing import simulated_reduce
from sdcwatch.testing.fault import Fault
from sdcwatch.testing.patterns import apply
from sdcwatch.testing.trigger import Trigger
from sdcwatch.watch.prepared import Prepared
from sdcwatch.watch.replication import ShardedReplicas, Wrapper, replicated_parameters


@dataclass(frozen=True, slots=True)
class Strike:
    """One strike, as it happened: the truth that a detector's answer is held against.

    Attributes:
        step: training step.
        elements: how many elements hold other bits now.
        error: L2 norm of the change, in float64; not finite where a value is not.
    """

    step: int
    elements: int
    error: float


class Injection:
    """One fault, installed on this rank.

    Args:
        fault, ddp, optimizer: what strikes, and where.
        rank, first_step: this rank, and the training step that runs next.

    Attributes:
        strikes: what was done so far, oldest first.
    """

    def __init__(
        self,
        fault: Fault,
        ddp: Wrapper,
        optimizer: torch.optim.Optimizer,
        *,
        rank: int,
        first_step: int,
    ) -> None:
        self.fault = fault
        self.strikes: list[Strike] = []
        self._ddp = ddp
        self._optimizer = optimizer
        self._rank = rank
        self._trigger = Trigger(fault, first_step)
        named = replicated_parameters(ddp)
        self._name, self._parameter = named[fault.parameter % len(named)]
        self._handles: list[Any] = []
        self._local: torch.Tensor | None = None
        getattr(self, f"_{fault.location}")()
        # The step number rises when the optimizer's step has ended, whichever hooks run in between.
        self._handles.append(optimizer.register_step_post_hook(lambda *_: self._trigger.advance()))

    def remove(self) -> None:
        """Takes every hook off again; what was struck stays struck."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Nothing fires meanwhile."""
        with self._trigger.pause():
            yield

    def _hit(self, whole: torch.Tensor) -> None:
        tensor = local(whole)  # of a sharded one, what this rank holds
        before = tensor.detach().clone()
        apply(self.fault.pattern, tensor, self.fault.seed)
        self._note(before, tensor.detach())

    def _note(self, before: torch.Tensor, after: torch.Tensor) -> None:
        changed = before.reshape(-1, 1).view(torch.uint8) != after.reshape(-1, 1).view(torch.uint8)
        error = float(torch.linalg.vector_norm(after.double() - before.double()))
        self.strikes.append(Strike(self._trigger.step, int(changed.any(dim=1).sum()), error))

    def _once_a_step(self, strike: Callable[[], None]) -> Any:
        """A forward pre-hook: between two steps, before the training forward reads what is struck."""
        struck: set[int] = set()

        def hook(*_: Any) -> None:
            if self._ddp.module.training and self._trigger.step not in struck and self._trigger.fires():
                struck.add(self._trigger.step)
                strike()

        return hook

    @property
    def _outermost(self) -> torch.nn.Module:
        """What the loop calls."""
        return self._ddp.module if isinstance(self._ddp, ShardedReplicas) else self._ddp

    def _owner(self) -> torch.nn.Module:
        module: torch.nn.Module = self._ddp.module
        return module.get_submodule(self._name.rpartition(".")[0])

    def _input_batch(self) -> None:
        def hook(module: torch.nn.Module, inputs: Any) -> None:
            values = [v for v in inputs if isinstance(v, torch.Tensor) and v.is_floating_point() and v.is_contiguous()]
            if module.training and values and self._trigger.fires():
                self._hit(values[0])

        self._handles.append(self._outermost.register_forward_pre_hook(hook))

    def _forward(self) -> None:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.requires_grad and self._trigger.fires():
                self._hit(output)

        self._handles.append(self._owner().register_forward_hook(hook))

    def _backward(self) -> None:
        """The gradient at one layer's output is wrong, in the live backward and in every replay on this device."""
        injection = self

        class Corrupt(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
                return value.view_as(value)

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                if not injection._trigger.fires():
                    return gradient
                wrong = gradient.contiguous().clone()
                injection._hit(wrong)
                return wrong

        _apply: Any = Corrupt.apply

        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
            return _apply(output) if isinstance(output, torch.Tensor) and output.requires_grad else output

        self._handles.append(self._owner().register_forward_hook(hook))

    def _local_gradient(self) -> None:
        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is not None and self._ddp.require_backward_grad_sync and self._trigger.fires():
                self._hit(parameter.grad)

        self._handles.append(self._parameter.register_post_accumulate_grad_hook(hook))

    def _after_reduce(self, strike: Callable[[torch.Tensor], None]) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        armed: list[bool] = []

        def reduced() -> None:
            armed.clear()
            if self._parameter.grad is not None and self._trigger.fires():
                strike(self._parameter.grad)

        def began() -> None:
            if not armed:
                armed.append(True)
                engine.queue_callback(lambda: engine.queue_callback(reduced))

        # The monitor looks in a callback that is queued at the same moment; installed before it, this one runs first.
        self._handles.append(Prepared().watch(self._outermost, self._ddp, began))

    def _reduced_gradient(self) -> None:
        self._after_reduce(self._hit)

    _reduced_gradient_some = _reduced_gradient_all = _reduced_gradient

    def _ring_forward(self) -> None:
        self._simulated(simulated_reduce.ring, simulated_reduce.ring_sends)

    def _tree_forward(self) -> None:
        self._simulated(simulated_reduce.tree, lambda size: simulated_reduce.tree_sends(size, self.fault.rank or 0))

    def _simulated(self, reduce: Callable[..., list[torch.Tensor]], sends: Callable[[int], int]) -> None:
        """Puts what a simulated collective with one wrong send would hand this rank into what the real one did."""

        def keep(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._local = parameter.grad.detach().clone()

        def strike(gradient: torch.Tensor) -> None:
            assert self._local is not None
            size = dist.get_world_size(self._ddp.process_group)
            values = [torch.empty_like(self._local) for _ in range(size)]
            dist.all_gather(values, self._local, group=self._ddp.process_group)
            flat = [value.flatten() for value in values]

            def wire(sender: int, made: int, sent: torch.Tensor) -> None:
                if sender == self.fault.rank and made == self.fault.hop % max(1, sends(size)) and sent.numel():
                    apply(self.fault.pattern, sent, self.fault.seed)

            right = reduce(flat, lambda *_: None)[self._rank]
            wrong = reduce(flat, wire)[self._rank]
            before = gradient.detach().clone()
            held = gradient.data.view(-1)
            differs = right.view(torch.int32) != wrong.view(torch.int32)
            # only what differs: the simulation adds in another order than the real collective did
            held[differs] = (wrong / size)[differs]
            self._note(before, gradient.detach())

        self._handles.append(self._parameter.register_post_accumulate_grad_hook(keep))
        self._after_reduce(strike)

    def _optimizer_weight(self) -> None:
        self._handles.append(
            self._optimizer.register_step_post_hook(
                lambda *_: self._hit(self._parameter) if self._trigger.fires() else None
            )
        )

    def _strike_state(self) -> None:
        state = self._optimizer.state.get(self._parameter, {})
        values = [v for v in state.values() if isinstance(v, torch.Tensor) and v.numel() > 1]
        if values:
            self._hit(values[0])

    def _optimizer_state(self) -> None:
        self._handles.append(
            self._optimizer.register_step_post_hook(lambda *_: self._strike_state() if self._trigger.fires() else None)
        )

    def _weights_at_rest(self) -> None:
        hook = self._once_a_step(lambda: self._hit(self._parameter))
        self._handles.append(self._ddp.module.register_forward_pre_hook(hook))

    def _optimizer_state_at_rest(self) -> None:
        hook = self._once_a_step(self._strike_state)
        self._handles.append(self._ddp.module.register_forward_pre_hook(hook))
