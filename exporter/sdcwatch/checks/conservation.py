"""Conservation: the reduced gradient must be the average of the local ones, seen through a linear checksum.

Each rank takes a float64 weighted sum of its local gradients before the reduce, and the same of the reduced gradient
after it. The weights are pseudo-random (a sign and a magnitude for each position), so a wrong, moved or swapped element
shows, and rounding errors, which know nothing of the weights, average out. It reads each gradient once, in chunks, and
never writes to one. It compares nothing: `verdict.conservation` does. Flow: LocalGradients -> **conservation** -> row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from sdcwatch.checks.gradients import stacked
from sdcwatch.observation import CONSERVATION_GROUPS, SkipReason

_CHUNKS = {"cpu": 1 << 15, "other": 1 << 20}
# The weights move by this many positions from one backward to the next: what one step's weights hide, the next show.
_SHIFTS, _STRIDE = 4096, 1277
_SEED = 20210817
#: Float64 sums over a whole chunk are no better than this, whatever the gradient's own precision.
_SUMMING = 2.0**-40
#: From this many units of rounding on (many ranks, few bits) errors no longer add up like random ones.
_COHERENT = 0.25
_REPLACED = 1 << 20


class Conservation:
    """The checksums of one rank.

    Attributes:
        hook_seconds: spent in hooks of the running backward.

    Args:
        ddp: the model whose reduce is watched.
        parameters: those whose gradients DDP reduces, in module order.
        size: ranks of the group.
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter], size: int) -> None:
        self.hook_seconds = 0.0
        self._ddp = ddp
        self._parameters = parameters
        self._size = size
        self._due = False
        self._shift = 0
        self._local: dict[int, torch.Tensor] = {}
        self._marks: dict[int, tuple[int, int]] = {}
        self._stale: frozenset[int] = frozenset()
        self._odd = False
        self._reason: str | None = None
        self._weights: dict[torch.device, torch.Tensor] = {}
        self._buffers: dict[torch.device, torch.Tensor] = {}
        self._factors: dict[int, torch.Tensor] = {}
        self._only: dict[int, float] = {}
        self._rounding: tuple[Any, torch.Tensor] | None = None

    def begin(self, count: int, *, due: bool, followed: bool = False) -> None:
        """From the first hook of a reducing backward.

        Args:
            count: how many reducing backwards ran before, equal on all ranks.
            due: whether this one is checked.
            followed: a hook of the user's runs after ours, so what DDP reduces need not be what we saw: undefined.
        """
        self.hook_seconds = 0.0
        self._shift = count * _STRIDE % _SHIFTS
        self._local.clear()
        self._marks.clear()
        self._odd = False
        self._reason = (undefined(self._ddp) or ("undefined" if followed else None)) if due else None
        self._due = due and self._reason is None
        # DDP reduces what an unused parameter's `grad` held before, and no hook of ours saw that.
        self._stale = frozenset()
        if due and self._may_be_unused:
            self._stale = frozenset(i for i, p in enumerate(self._parameters) if p.grad is not None)

    @property
    def _may_be_unused(self) -> bool:
        return bool(self._ddp.find_unused_parameters or getattr(self._ddp, "static_graph", False))

    def local(self, index: int, gradient: torch.Tensor) -> None:
        """Takes one parameter's gradient as this rank's backward left it, before DDP reads it."""
        if not self._due:
            return
        begin = time.perf_counter()
        if gradient.layout is not torch.strided:
            self._odd = True
            return
        self._local[index] = self._checksum(index, gradient)
        self._marks[index] = _mark(gradient)
        self.hook_seconds += time.perf_counter() - begin

    def fields(self, norms: Mapping[int, torch.Tensor]) -> dict[str, Any]:
        """The row's fields, at the end of the backward, sums as 0-d tensors; none where the check was not due.

        Args:
            norms: L2 norm of each local gradient by parameter index.
        """
        if not self._due and self._reason is None:
            return {}
        reason = self._reason or self._unseen()
        if reason is not None:
            return {"conservation": SkipReason.code(reason)}
        reduced = {i: self._checksum(i, p.grad) for i, p in enumerate(self._parameters) if p.grad is not None}
        seen = [i for i in sorted(self._local) if i in norms]
        found: dict[str, Any] = {"conservation": 1, "gradient_edits": self._edits()}
        for name, indices, values in (
            ("local_sum", sorted(self._local), [self._local[i] for i in sorted(self._local)]),
            ("reduced_sum", list(reduced), list(reduced.values())),
            ("reduce_noise", seen, [norms[i] for i in seen]),
        ):
            column = stacked(values) if values else self._nothing()
            if name == "reduce_noise":
                sums = [part.square().sum().sqrt() for part in self._by_group(seen, self._noise(seen, column))]
            else:
                sums = [part.sum() for part in self._by_group(indices, column)]
            found |= {f"{name}_{group}": value for group, value in enumerate(sums)}
        return found

    def _unseen(self) -> str | None:
        """A reason where some gradient that DDP reduced was not read before the reduce."""
        if self._odd:
            return "undefined"
        unfired = [i for i in range(len(self._parameters)) if i not in self._local]
        if not self.finished(self._local):
            return "undefined"
        return "undefined" if self._stale.intersection(unfired) else None

    def finished(self, fired: Collection[int]) -> bool:
        """Whether DDP's reduce can be over: it waits for every parameter, unless some may be unused."""
        return self._may_be_unused or len(fired) == len(self._parameters)

    def _edits(self) -> int:
        """The furthest that a version counter moved between our look and now; DDP itself moves all of them alike."""
        furthest = 0
        for index, (pointer, version) in self._marks.items():
            gradient = self._parameters[index].grad
            now = _mark(gradient) if gradient is not None else (0, 0)
            furthest = max(furthest, now[1] - version if now[0] == pointer else _REPLACED)
        return furthest

    def _nothing(self) -> torch.Tensor:
        return torch.zeros(0, dtype=torch.float64, device=self._parameters[0].device)

    def _by_group(self, indices: Sequence[int], values: torch.Tensor) -> Sequence[torch.Tensor]:
        """Values of parameters, by index, in order. Neighbours share a group: their gradients are of a size."""
        sizes = [0] * CONSERVATION_GROUPS
        for index in indices:
            sizes[index * CONSERVATION_GROUPS // len(self._parameters)] += 1
        parts: Sequence[torch.Tensor] = torch.split(values, sizes)
        return parts

    def _noise(self, indices: Sequence[int], norms: torch.Tensor) -> torch.Tensor:
        """What rounding may do to parameters' weighted sums: L2 norms of their errors, from this rank's share."""
        gradients = [(self._parameters[i], self._parameters[i].grad) for i in indices]
        dtypes = tuple((p if grad is None else grad).dtype for p, grad in gradients)
        key = (tuple(indices), dtypes, norms.device)
        if self._rounding is None or self._rounding[0] != key:
            pairs = [self._roundings(p.numel(), dtype) for (p, _), dtype in zip(gradients, dtypes, strict=True)]
            table = torch.tensor(pairs, dtype=torch.float64).view(-1, 2).to(norms.device)
            self._rounding = (key, table)
        table = self._rounding[1]
        return table[:, 0] * norms + table[:, 1]

    def _roundings(self, elements: int, dtype: torch.dtype) -> tuple[float, float]:
        """How the error of one parameter's sum grows with the norm of its gradient, and what it is without one."""
        info = torch.finfo(dtype)
        unit = max(info.eps / 2, _SUMMING)
        roundings = self._size + 1  # 1/W itself, the product with it, and W - 1 sums
        steps = roundings if roundings * unit > _COHERENT else math.sqrt(roundings)
        smallest = info.smallest_normal if dtype is not torch.float16 else info.smallest_normal * info.eps
        return steps * unit, roundings * smallest * math.sqrt(elements)

    def _checksum(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """The weighted sum of one gradient in float64, 0-d, on the gradient's device."""
        value = gradient.detach()
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj())
        flat = value.reshape(-1)  # a copy of one parameter where its gradient is not contiguous
        device = flat.device
        chunk = _CHUNKS["cpu" if device.type == "cpu" else "other"]
        weights, buffer = self._tables(device, chunk)
        count = flat.numel()
        if count <= chunk:  # most parameters: as few calls as there can be
            part = torch.dot(buffer[:count].copy_(flat), weights[self._shift : self._shift + count])
            return part * self._only_factor(index)
        shifted = weights[self._shift : self._shift + chunk]
        parts = [torch.dot(buffer.copy_(piece), shifted) for piece in flat[: count - count % chunk].split(chunk)]
        if rest := count % chunk:
            parts.append(torch.dot(buffer[:rest].copy_(flat[-rest:]), shifted[:rest]))
        return torch.dot(torch.stack(parts), self._chunk_factors(index, len(parts), device))

    def _only_factor(self, index: int) -> float:
        if index not in self._only:
            self._only[index] = weights(1, _SEED + 1 + index).tolist()[0]
        return self._only[index]

    def _tables(self, device: torch.device, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._weights:
            self._weights[device] = weights(chunk + _SHIFTS, _SEED).to(device)
            self._buffers[device] = torch.empty(chunk, dtype=torch.float64, device=device)
        return self._weights[device], self._buffers[device]

    def _chunk_factors(self, index: int, count: int, device: torch.device) -> torch.Tensor:
        if index not in self._factors or self._factors[index].device != device:
            self._factors[index] = weights(count, _SEED + 1 + index).to(device)
        return self._factors[index]


def _mark(gradient: torch.Tensor) -> tuple[int, int]:
    """What changes when code of any kind writes to a gradient or exchanges it."""
    pointer = gradient.data_ptr() if gradient.layout is torch.strided else id(gradient)
    return pointer, gradient._version


def undefined(ddp: DistributedDataParallel) -> str | None:
    """Why the reduce of this model is no plain average (`comm_hook`); None where it is one."""
    # Built-in hooks leave no trace on the Python side but this one.
    hooked = ddp._comm_hooks or ddp._get_ddp_logging_data().get("comm_hook")
    return "comm_hook" if hooked or getattr(ddp, "_delay_all_reduce_params", None) else None


def weights(count: int, seed: int) -> torch.Tensor:
    """Pseudo-random float64 weights with |w| in [0.5, 1), equal on every rank; the global RNG is not touched."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = 0.5 + 0.5 * torch.rand(count, dtype=torch.float64, generator=generator)
    sign = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    return magnitude * sign
