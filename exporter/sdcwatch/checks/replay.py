"""Replay: a rank's micro-batches, run again by the rank itself and by a rank on the next node.

What is replayed is what was differentiated: the batch as it was when the loss was computed, RNG and autocast as they
were then, and the seed that the loss tensor received in backward (accumulation, loss scale, auxiliary terms).
Gradients come from `autograd.grad` on the plain module, so no `.grad`, hook of DDP or bucket is touched; buffers, RNG
and flags are put back bit for bit, also when the replay raises. Never a collective here. Flow: **checks** ->
observation.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sdcwatch.checks.module_state import ModuleState
from sdcwatch.fingerprint import Digest, combine, digest_bytes, fingerprint, read_digests, unread_fingerprint

LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]


@dataclass(slots=True)
class MicroBatch:
    """One call of the loss function: its input and everything else that decides its gradient."""

    batch: Any
    rng: dict[str, Any]
    autocast: tuple[str, bool, torch.dtype]
    seed: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """Gradients of one rank's micro-batches as one uint64, and parameter by parameter."""

    digest: int
    digests: dict[int, int]


class Recorder:
    """Keeps the micro-batches of an audited step as packed bytes, as they were at loss time.

    Args:
        device: where the model lives.
        module: the plain module under DDP: its train flags decide the gradient, too.
        parameters: whose `.grad` says, as backward begins, whether gradients are added to something.

    Attributes:
        failure: reason (`batch`, ...) why this step cannot be replayed, None when it can.
        had_gradients: some parameter had a gradient as the first backward of the step began.
        unchanged: no batch was written to between its loss and the end of its backward. What the loss function itself
            does to its batch, a replay does again; what the loop does in between, autograd may read and no replay can.
    """

    def __init__(
        self,
        device: torch.device,
        module: torch.nn.Module | None = None,
        parameters: Sequence[torch.nn.Parameter] = (),
    ) -> None:
        self._device = device
        self._module = module
        self._parameters = parameters
        self._training: list[bool] = []
        self._packed: list[tuple[bytes, MicroBatch]] = []
        self._shapes: list[str] = []
        self.failure: str | None = None
        self.had_gradients = False
        self.unchanged = True

    def begin(self) -> None:
        """Forgets the last step."""
        self._packed.clear()
        self._shapes.clear()
        self.failure = None
        self.unchanged = True

    def loss(self, loss_fn: LossFunction, model: torch.nn.Module, batch: Any, *, audited: bool) -> Any:
        """Calls `loss_fn(model, batch)`, watching what it takes where the step is audited."""
        if not audited:
            return loss_fn(model, batch)
        try:
            taken = MicroBatch(batch, rng_state(self._device), autocast_state(self._device))
            data = _dump(_own(batch))
            self._shapes.append(f"{signature(batch)};{taken.autocast}")
        except Exception:  # our border: pickling runs the batch's own code; the loss itself must run outside this block
            self.failure = "batch"
            return loss_fn(model, batch)
        loss = loss_fn(model, batch)
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            self.failure = "batch"
            return loss
        taken.batch = None
        self._packed.append((data, taken))
        self._shapes.append(rank_local_values(loss_fn))
        self._training = [] if self._module is None else [m.training for m in self._module.modules()]
        first = len(self._packed) == 1
        changed = _watch(batch)

        def finished() -> None:
            try:
                self.unchanged = self.unchanged and not changed()
            except Exception:  # our border: a batch that cannot be read again may have changed
                self.unchanged = False

        def begin(seed: torch.Tensor) -> None:
            if first:  # not earlier: the loop may zero its gradients between loss and backward
                self.had_gradients = any(p.grad is not None for p in self._parameters)
            taken.seed = seed.detach().clone()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(finished)

        loss.register_hook(begin)
        return loss

    def pack(self) -> bytes | None:
        """All micro-batches of the step as one payload, or None when there is nothing to replay."""
        if self.failure or not self._packed or any(taken.seed is None for _, taken in self._packed):
            return None
        return _dump(
            {
                "had_gradients": self.had_gradients,
                "training": self._training,
                "batches": [(data, taken.rng, taken.autocast, taken.seed) for data, taken in self._packed],
            }
        )

    def signature(self) -> int:
        """uint64 of the structure, shapes, dtypes, autocast and number of the micro-batches."""
        parts = [*self._shapes, str(self.had_gradients), f"frozen buffers {self._frozen_buffers()}"]
        return digest_bytes("|".join(parts).encode())

    def _frozen_buffers(self) -> int:
        """Buffers that modules in eval mode compute with: where they change on a rank, its edge calibrates anew."""
        frozen = [] if self._module is None else [m for m in self._module.modules() if not m.training]
        return fingerprint(b for m in frozen for b in m.buffers(recurse=False))


def run(
    payload: bytes,
    *,
    module: torch.nn.Module,
    loss_fn: LossFunction,
    parameters: Sequence[torch.nn.Parameter],
    device: torch.device,
) -> Replayed:
    """Computes the local gradients of a packed step again, and leaves no trace in the module or the process.

    Args:
        payload: what `Recorder.pack` made, of this rank or another.
        module: the plain module under DDP.
        parameters: the replicated parameters, in module order.

    Raises:
        RuntimeError: whatever the loss function raises; state is restored first.
    """
    content = _load(payload, device)
    gradients = _Gradients(parameters, based=content["had_gradients"])
    with traceless(module, device):
        for submodule, training in zip(module.modules(), content["training"], strict=False):
            submodule.training = training
        for number, (data, rng, autocast, seed) in enumerate(content["batches"], 1):
            set_rng_state(rng, device)
            batch = _load(data, device)
            kind, enabled, dtype = autocast
            with torch.enable_grad(), torch.autocast(kind, dtype, enabled=enabled):
                loss = loss_fn(module, batch)
            with gradients.watched(last=number == len(content["batches"])):
                torch.autograd.grad(loss, list(parameters), grad_outputs=seed.to(loss.device), allow_unused=True)
    digests = gradients.digests()
    return Replayed(combine_digests(digests), digests)


class _Gradients:
    """Replayed gradients as they appear: in the last micro-batch each is fingerprinted and freed at once.

    So one micro-batch never holds a second copy of the gradients; several hold their sum, as the live step did.

    Args:
        based: the live gradient was added to zeros.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, based: bool) -> None:
        self._parameters = parameters
        self._based = based
        self._total: list[torch.Tensor | None] = [None] * len(parameters)
        self._digests: dict[int, Digest] = {}

    @contextlib.contextmanager
    def watched(self, *, last: bool) -> Iterator[None]:
        """While the block runs, each parameter's gradient goes into the sum; `last`: and out of memory."""
        # Hooks of a leaf run before `autograd.grad` keeps its gradient, ours after the user's, and may exchange it.
        handles = [p.register_hook(self._hook(index, last)) for index, p in enumerate(self._parameters)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, index: int, last: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        def take(gradient: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                if last and self._total[index] is None and not self._based:
                    self._digests[index] = unread_fingerprint([gradient])
                else:
                    self._total[index] = _accumulate(self._total[index], gradient, based=self._based)
                    if last:
                        self._finish(index)
                # What is kept instead is one zero.
                return gradient.new_zeros(()).expand_as(gradient) if gradient.layout is torch.strided else gradient

        return take

    def _finish(self, index: int) -> None:
        total, self._total[index] = self._total[index], None
        if total is not None:
            self._digests[index] = unread_fingerprint([total])

    def digests(self) -> dict[int, int]:
        """Fingerprint of each parameter's gradient, by index; parameters that had none are absent."""
        for index in range(len(self._total)):
            self._finish(index)  # a parameter that the last micro-batch did not use
        return read_digests(self._digests)


def combine_digests(digests: dict[int, int]) -> int:
    """One uint64 over per-parameter digests, with the indices that have one."""
    return combine([n for index in sorted(digests) for n in (index, digests[index])])


def first_difference(one: dict[int, int], other: dict[int, int]) -> int | None:
    """Index of the first parameter whose digests differ, None when all agree."""
    return next((i for i in sorted(one.keys() | other.keys()) if one.get(i) != other.get(i)), None)


def signature(value: Any) -> str:
    """Structure, shapes and dtypes of a batch as text; values of plain data do not count."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{tuple(value.stride())}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{signature(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return type(value).__name__ + "(" + ",".join(map(signature, value)) + ")"
    return type(value).__qualname__


def rank_local_values(loss_fn: LossFunction) -> str:
    """Plain values that a loss function closes over, as text: where one rank changes one, replay calibrates anew.

    Whole numbers are left out: most are counters, and a count that moves each step would keep replay from ever judging.
    """
    cells = [cell.cell_contents for cell in getattr(loss_fn, "__closure__", None) or () if _is_set(cell)]
    owner = getattr(loss_fn, "__self__", None)
    held = vars(owner) if owner is not None and hasattr(owner, "__dict__") else {}
    defaults = getattr(loss_fn, "__defaults__", None) or ()
    return repr([_plain_values(value) for value in (*cells, *defaults, held)])


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _plain_values(value: Any, depth: int = 0) -> Any:
    if isinstance(value, (bool, float, str)):
        return value.hex() if isinstance(value, float) else value[:200] if isinstance(value, str) else value
    if depth < 2 and isinstance(value, dict) and len(value) <= 64:
        return {str(k)[:50]: _plain_values(v, depth + 1) for k, v in value.items()}
    if depth < 2 and isinstance(value, (list, tuple)) and len(value) <= 64:
        return [_plain_values(item, depth + 1) for item in value]
    return None


def rng_state(device: torch.device) -> dict[str, Any]:
    """State of every random generator that a loss function may draw from."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Puts `rng_state` back."""
    torch.set_rng_state(state["torch"].cpu())
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


@contextlib.contextmanager
def traceless(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Module, RNG and determinism flags are as before when the block ends, whatever happens in it."""
    rng = rng_state(device)
    state = ModuleState(module)
    deterministic = torch.get_deterministic_debug_mode()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # not use_deterministic_algorithms: that also switches the compiler, whose modules run as they are
            torch.set_deterministic_debug_mode("warn")
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            yield
    finally:
        torch.set_deterministic_debug_mode(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        set_rng_state(rng, device)
        state.restore()


def _accumulate(total: torch.Tensor | None, gradient: torch.Tensor | None, *, based: bool) -> torch.Tensor | None:
    if gradient is None:
        return total
    if total is None:
        # With `zero_grad(set_to_none=False)` the live gradient was added to zeros, which turns -0.0 into 0.0.
        return torch.zeros_like(gradient).add_(gradient) if based else gradient.clone()
    return total.add_(gradient)


def autocast_state(device: torch.device) -> tuple[str, bool, torch.dtype]:
    kind = device.type
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _watch(batch: Any) -> Callable[[], bool]:
    """Says later whether a tensor of the batch was written to; it keeps none of them alive."""
    tensors = [weakref.ref(tensor) for tensor in tensors_in(batch)]
    before = [fingerprint([tensor]) for tensor in tensors_in(batch)]

    def changed() -> bool:
        now = [tensor() for tensor in tensors]
        return any(t is not None and fingerprint([t]) != was for t, was in zip(now, before, strict=True))

    return changed


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a batch, or in what a forward returned, as DDP itself looks for them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def _own(value: Any) -> Any:
    """The batch with each tensor in memory of its own: saving a slice would save all that it was cut from."""
    if type(value) is torch.Tensor and value.layout is torch.strided and value.numel():
        span = 1 + sum((size - 1) * stride for size, stride in zip(value.size(), value.stride(), strict=True))
        if value.untyped_storage().nbytes() <= span * value.element_size():
            return value
        flat = value.detach().as_strided((span,), (1,)).clone()
        # the strides stay: they decide which kernel runs
        return flat.as_strided(value.size(), value.stride(), 0).requires_grad_(value.requires_grad)
    if type(value) is dict:
        return {key: _own(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_own, value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_own, value))
    return value


def unpacked(payload: bytes, device: torch.device) -> dict[str, Any]:
    """What a rank packed, batches and all; it runs the code of pickled objects, so only for a peer of this job."""
    content: dict[str, Any] = _load(payload, device)
    batches = [(_load(data, device), *rest) for data, *rest in content["batches"]]
    return {**content, "batches": batches}


def packed(content: dict[str, Any]) -> bytes:
    """The payload of what `unpacked` gives."""
    return _dump({**content, "batches": [(_dump(batch), *rest) for batch, *rest in content["batches"]]})


def _load(data: bytes, device: torch.device) -> Any:
    """Reads what a rank packed; its device's tensors go to this rank's device, those in host memory stay there."""

    def place(storage: Any, location: str) -> Any:
        return torch.serialization.default_restore_location(storage, location if location == "cpu" else str(device))

    return torch.load(io.BytesIO(data), map_location=place, weights_only=False)


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
