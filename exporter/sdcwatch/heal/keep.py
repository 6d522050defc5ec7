"""What a heal needs of the running step: its micro-batches, and the model as it was before the first of them.

Kept from `s.loss` until the exchange of that backward, and only with `on_fault="heal"`: one copy of the step's
micro-batches, one of the model's buffers, and the random state (some 5 KB) a micro-batch. Parameters and gradients are
not copied. A step that cannot be repeated exactly is refused by name, never guessed. It never changes what it is given.
Flow: `s.loss` -> **keep** -> recompute.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from sdcwatch.checks.module_state import ModuleState
from sdcwatch.checks.replay import autocast_state, rng_state

#: Why the running step cannot be repeated. The position is the code on which ranks agree; 0 stands for "it can".
REFUSALS = {
    "": "",
    "no_s_loss": "its loss did not come from s.loss(batch), or not all of it",
    "two_backwards": "a second backward pass of one step reduced: call backward() on one loss a step, the others of an "
    "accumulation under no_sync()",
    "outer_graph": "the loss is part of a larger graph: the batch requires gradients, backward() runs with "
    "create_graph, or inside another backward",
    "batch": "the batch cannot be copied, or loss_fn returns something else than one tensor that requires gradients",
    "unused_loss": "a loss of s.loss was never differentiated, or more than once",
    "accumulated": "its gradients were added to those of an earlier step: make one monitor.step of the accumulation",
    "comm_hook": "a communication hook may carry state from one reduce to the next",
    "own_failure": "keeping the step failed on some rank (see its log)",
}
CODES = {name: code for code, name in enumerate(REFUSALS)}
NAMES = tuple(REFUSALS)


@dataclass(slots=True)
class Kept:
    """One micro-batch: all that decides its gradient, apart from the weights.

    Attributes:
        sync: the backward of this one reduces.
        seeds: the gradient that reached the loss tensor, once for each backward through it.
    """

    batch: Any
    rng: dict[str, Any]
    autocast: tuple[str, bool, torch.dtype]
    sync: bool
    seeds: list[torch.Tensor] = field(default_factory=list)


class StepKeeper:
    """Keeps the running step of one rank.

    Args:
        ddp: the DDP model.
        parameters: the replicated parameters, in module order.
        device: where the model lives.

    Attributes:
        batches: the micro-batches so far.
        entry: buffers and attributes before the first forward of the step.
        forward_sync: DDP's flag that its next forward sends the buffers of rank 0 round, as of then.
        had_gradients: which parameters had a gradient (of zeros) as the first backward began.
    """

    def __init__(
        self, ddp: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter], device: torch.device
    ) -> None:
        self._ddp = ddp
        self._parameters = parameters
        self._device = device
        self.batches: list[Kept] = []
        self.entry: ModuleState | None = None
        self.forward_sync = False
        self.had_gradients: list[bool] = []
        self._nonzero: list[torch.Tensor] = []
        self._failure = ""

    def begin(self) -> None:
        """A new step: forgets the last one."""
        self.batches.clear()
        self.had_gradients = []
        self._nonzero = []
        self._failure = ""

    def release(self) -> None:
        """The exchange of the step's backward is over: gives up the micro-batches, keeps what was found out."""
        self.batches.clear()
        self._nonzero = []

    def before(self, batch: Any) -> Kept:
        """Takes what the next call of the loss function reads.

        Raises:
            Exception: whatever copying a batch of the user's own classes raises; `failed` then says so.
        """
        if _requires_grad(batch) or _in_backward():
            self._failure = self._failure or "outer_graph"
        if not self.batches:
            self._enter()
        kept = Kept(
            own_copy(batch), rng_state(self._device), autocast_state(self._device), self._ddp.require_backward_grad_sync
        )
        self.batches.append(kept)
        return kept

    def failed(self, why: str) -> None:
        """This step cannot be repeated; the first reason counts."""
        self._failure = self._failure or why

    def after(self, kept: Kept, loss: Any) -> None:
        """Watches the loss that came out: backward begins there, and with what."""
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            self._failure = self._failure or "batch"
            return
        first = kept is self.batches[0]

        def began(seed: torch.Tensor) -> None:
            if first:  # not earlier: the loop may zero its gradients between loss and backward
                self._look_at_gradients()
            if torch.is_grad_enabled() or seed.requires_grad:
                self._failure = self._failure or "outer_graph"
            kept.seeds.append(seed.detach().clone())

        loss.register_hook(began)

    def _enter(self) -> None:
        if self.entry is None:
            self.entry = ModuleState(self._ddp.module)
        else:
            self.entry.take()
        self.forward_sync = bool(self._ddp.require_forward_param_sync)

    def _look_at_gradients(self) -> None:
        gradients = [p.grad for p in self._parameters]
        self.had_gradients = [g is not None for g in gradients]
        # not read here: that would wait for the device on every step
        self._nonzero = [torch.count_nonzero(_numbers(g)) for g in gradients if g is not None]

    def refusal(self, backwards_in_step: int) -> str:
        """Why the step whose reducing backward has just ended cannot be repeated (a key of `REFUSALS`); "" if it can.

        Waits for the device where gradients stood before the step, so it is for the moment of a heal, and of a start.
        """
        if self._failure:
            return self._failure
        if backwards_in_step > 1:
            return "two_backwards"
        if not self.batches or not self.batches[-1].sync:
            return "no_s_loss"
        if any(kept.sync for kept in self.batches[:-1]):
            return "two_backwards"
        if any(len(kept.seeds) != 1 for kept in self.batches):
            return "unused_loss"
        if any(int(n) for n in self._nonzero):
            return "accumulated"
        return ""

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that are held now: buffers and micro-batches."""
        return (self.entry.nbytes if self.entry is not None else 0) + sum(_nbytes(kept.batch) for kept in self.batches)


def own_copy(value: Any) -> Any:
    """A copy of a batch that nothing else writes to; of a slice only the elements it holds, with its strides."""
    if isinstance(value, torch.Tensor):
        return _copied(value)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if type(value) is dict:
        return {key: own_copy(item) for key, item in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(own_copy, value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(own_copy, value))
    return copy.deepcopy(value)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if type(plain) is not torch.Tensor or plain.layout is not torch.strided or not plain.numel():
        return plain.clone()
    # the strides stay: they decide which kernel runs
    span = 1 + sum((size - 1) * stride for size, stride in zip(plain.size(), plain.stride(), strict=True))
    flat = plain.as_strided((span,), (1,)).clone()
    return flat.as_strided(plain.size(), plain.stride(), 0)


def _in_backward() -> bool:
    current: Any = getattr(torch._C, "_current_graph_task_id", None)
    return current is not None and current() != -1


def _numbers(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout is torch.strided else gradient.coalesce().values()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in _tensors(item)]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [t for item in value for t in _tensors(item)]
    return []


def _requires_grad(batch: Any) -> bool:
    return any(t.requires_grad for t in _tensors(batch))


def _nbytes(batch: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(batch) if t.layout is torch.strided)
