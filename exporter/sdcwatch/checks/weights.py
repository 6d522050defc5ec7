"""Parameters and optimizer state, fingerprinted when `optimizer.step` begins and when it ends.

Equal before and different after means that the step itself computed something else; different although the last end
agreed means memory, or code that ran on one rank (version counters tell). What is measured here rides in the *next*
row. Nothing here is collective: a rank that skips its optimizer step cannot split the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import numbers
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from sdcwatch.checks.gradients import ReducedGradients
from sdcwatch.fingerprint import (
    Digest,
    Fingerprinter,
    can_fingerprint,
    combine_unread,
    digest_bytes,
    fingerprint,
    unread_fingerprint,
)
from sdcwatch.shards import local

_TENSOR = frozenset((torch.Tensor,))


@dataclass(frozen=True, slots=True)
class StepBegin:
    """What this rank held as `optimizer.step` began. Versions are sums of version counters."""

    gradient: Digest
    weights: Digest
    state: Digest | None
    versions: int
    hyperparameters: Digest
    rng: int


@dataclass(frozen=True, slots=True)
class StepMeasure:
    """One whole `optimizer.step`, run in training step `step`.

    State is None where collectives ran inside the step: what a rank holds after it may have come from another one
    (`ZeroRedundancyOptimizer` broadcasts its parameters), so a difference must not name anybody.
    """

    step: int
    begin: StepBegin
    weights_end: Digest
    state_end: Digest | None
    versions_end: int
    drew: int  # digest of the random state that the step drew from, 0 where it drew nothing


class OptimizerWatch:
    """Hooks round `optimizer.step`.

    Args:
        optimizer: any `torch.optim` optimizer.
        parameters: the replicated parameters, in module order.
        current_step: gives the training step that is running.
        due: whether this interval is to be measured.
        gate: called first when `optimizer.step` begins; may raise (a sticky halt).
        guard: wraps our own measuring so that its exceptions are counted, never raised.
        reduced: these parameters' gradients, where somebody else measures them as well.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        *,
        current_step: Callable[[], int],
        due: Callable[[], bool],
        gate: Callable[[], None],
        guard: Callable[[str, Callable[[], None]], None],
        reduced: ReducedGradients | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self.calls = 0
        self.newest: StepMeasure | None = None
        self._begin: StepBegin | None = None
        self._issued = 0
        self._reduced = reduced or ReducedGradients(parameters)
        self._weights, self._state = Fingerprinter(), Fingerprinter()
        self._current_step = current_step
        self._due = due
        self._gate = gate
        self._guard = guard
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def _before(self, *_: Any) -> None:
        self._gate()
        self._begin = None
        if self._due():
            self._guard("weight_checksum", self._measure_begin)

    def _measure_begin(self) -> None:
        self._issued = collectives_issued()
        self._begin = StepBegin(
            gradient=self._reduced.fingerprint(),
            weights=self.weights(),
            state=state_fingerprint(self.optimizer, self.parameters, self._state),
            versions=versions(self.parameters),
            hyperparameters=hyperparameters_digest(self.optimizer),
            rng=_rng_digest(),
        )

    def _after(self, *_: Any) -> None:
        self.calls += 1
        if self._begin is None:
            self.newest = None
            return
        self._guard("weight_checksum", self._measure_end)

    def _measure_end(self) -> None:
        assert self._begin is not None
        begin, self.newest = self._begin, None
        alone = collectives_issued() == self._issued
        self.newest = StepMeasure(
            step=self._current_step(),
            begin=begin if alone else dataclasses.replace(begin, state=None),
            weights_end=self.weights(),
            state_end=state_fingerprint(self.optimizer, self.parameters, self._state) if alone else None,
            versions_end=versions(self.parameters),
            drew=begin.rng if _rng_digest() != begin.rng else 0,
        )

    def weights(self) -> Digest:
        """Fingerprint of the parameters as they are now."""
        return self._weights.fingerprint([self.parameters])

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def collectives_issued() -> int:
    """How many collectives this process has issued, over all its groups that count them."""
    issued = 0
    if dist.is_available() and dist.is_initialized():
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
        for group in groups:
            with contextlib.suppress(RuntimeError, AttributeError):  # a backend that does not count
                issued += int(group._get_sequence_number_for_group())
    return issued


def _rng_digest() -> int:
    """uint64 of torch's CPU random state: an optimizer that draws from it steps otherwise on every rank's own state."""
    return fingerprint([torch.get_rng_state()])


def versions(parameters: Sequence[torch.nn.Parameter]) -> int:
    """Sum of the parameters' version counters; raw memory writes do not move it."""
    return sum(p._version for p in parameters)


def state_tensors(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]
) -> Iterator[torch.Tensor | None]:
    """Every tensor of the replicated parameters' state, in an order that is the same on all ranks.

    State of other parameters in the same optimizer (experts, a rank's own temperature) differs by design.
    """
    return iter(_state(optimizer, parameters)[0])


def state_fingerprint(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    fingerprinter: Fingerprinter | None = None,
) -> Digest:
    """One uint64 over the optimizer's state: tensors by their bytes, numbers by their exact text.

    Args:
        fingerprinter: the one that took it before, which makes it cheaper.
    """
    tensors, numbers = _state(optimizer, parameters)
    of_tensors = (fingerprinter or Fingerprinter()).fingerprint([tensors])
    return combine_unread([of_tensors, digest_bytes(";".join(numbers).encode())])


def _state(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]
) -> tuple[list[torch.Tensor | None], list[str]]:
    """All tensors of the parameters' state, and all else in it as text; both by parameter, then by sorted key."""
    tensors: list[torch.Tensor | None] = []
    numbers: list[str] = []
    sorted_keys: dict[tuple[Any, ...], list[Any]] = {}  # nearly always the same few for every parameter
    for parameter in parameters:
        entry = optimizer.state.get(parameter)
        if not entry:
            tensors.append(None)
            continue
        keys = tuple(entry)
        if keys not in sorted_keys:
            sorted_keys[keys] = sorted(keys, key=str)
        values = [entry[key] for key in sorted_keys[keys]]
        if _TENSOR.issuperset(map(type, values)):
            tensors += values
            continue
        for key, value in zip(sorted_keys[keys], values, strict=True):
            if isinstance(value, torch.Tensor):
                tensors.append(value)
            else:
                tensors.extend(_tensors(value))
                numbers.append(f"{key}={_exact(value, [])}")
    return tensors, numbers


def covered_bytes(tensors: Iterator[torch.Tensor | None]) -> tuple[int, int]:
    """Bytes that a fingerprint reads, and bytes that it cannot (sparse, meta)."""
    read = missed = 0
    for whole in tensors:
        if whole is None:
            continue
        tensor = local(whole)
        size = tensor.numel() * tensor.element_size() if tensor.layout is torch.strided else 0
        if can_fingerprint(tensor):
            read += size
        else:
            missed += size or sum(t.numel() * t.element_size() for t in _sparse_parts(tensor))
    return read, missed


def hyperparameters_digest(optimizer: torch.optim.Optimizer) -> Digest:
    """The uint64 of `param_groups` without their parameters: learning rates, betas, flags, in exact form."""
    single: list[torch.Tensor] = []
    groups = [
        {key: _exact(value, single) for key, value in group.items() if key != "params"}
        | {"count": len(group["params"])}
        for group in optimizer.param_groups
    ]
    text = digest_bytes(json.dumps(groups, sort_keys=True).encode())
    return combine_unread([text, unread_fingerprint(single)]) if single else text


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _tensors(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _exact(value: Any, single: list[torch.Tensor]) -> str:
    """A value as text; a tensor of one element goes to `single`, so that nothing is read from its device."""
    if isinstance(value, torch.Tensor):
        if value.numel() <= 1:
            single.append(value)
        return f"{value.dtype}{tuple(value.shape)}"
    if isinstance(value, numbers.Real) and not isinstance(value, (bool, int)):
        return float(value).hex()  # numpy's scalars too
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_exact(value[k], single)}" for k in sorted(value, key=str)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_exact(item, single) for item in value) + "]"
    if value is None or isinstance(value, (bool, numbers.Integral, str)):
        return repr(value)
    return type(value).__qualname__


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._values(), tensor._indices()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
    return []
