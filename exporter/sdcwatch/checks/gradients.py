"""Local gradients before the reduce and reduced gradients after it.

`LocalGradients` hangs a post-accumulate hook on every parameter: it fires before DDP copies the gradient into its
bucket, so it sees what *this* rank computed, and it registers no communication hook (one changes bits). It measures
the L2 norm always and the fingerprint on audit steps. It never writes to a gradient. Flow: **checks** -> observation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from sdcwatch.fingerprint import Digest, Fingerprinter, on_host, read_digests, unread_fingerprint
from sdcwatch.shards import local

_HALF = (torch.float16, torch.bfloat16)
#: Bytes of gradients that are summed before they are hashed: what a core's own cache keeps.
_CACHED = 1 << 20


class LocalGradients:
    """What this rank's backward produced, parameter by parameter.

    Attributes:
        seconds: spent on norms in hooks of the running backward.

    Args:
        parameters: the parameters that DDP reduces, in module order.
        reducing: tells whether the running backward will reduce (False under `no_sync` and inside `join`).
        first: called once a reducing backward, from its first hook, on the autograd thread.
        further: what else looks at each local gradient, by parameter index.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        reducing: Callable[[], bool],
        first: Callable[[], None],
        further: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        self._parameters = parameters
        self._reducing = reducing
        self._first = first
        self._further = further
        self._failure: Exception | None = None
        self._norms: dict[int, torch.Tensor] = {}
        # Written anew in every backward: a tensor made for each gradient would set off the garbage collector.
        self._tables: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        self._slots: dict[int, torch.Tensor] = {}
        self._digests: dict[int, Digest] = {}
        self._handles: list[RemovableHandle] = []
        self.due = self.audited = False
        self.seconds = 0.0
        for index, parameter in enumerate(parameters):
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(index)))

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def observe(parameter: torch.Tensor) -> None:
            if not self._reducing():
                return
            try:
                self._first()
                if parameter.grad is not None:
                    self._look(index, parameter.grad)
            except Exception as error:  # our border: the user's backward goes on, and `norms` says it to the row
                self._failure = error

        return observe

    def _look(self, index: int, gradient: torch.Tensor) -> None:
        if not self.due:
            return
        begin = time.perf_counter()
        self._norms[index] = self._norm(index, gradient)
        self.seconds += time.perf_counter() - begin
        if self.audited:
            self._digests[index] = unread_fingerprint([gradient])
        if self._further is not None:
            self._further(index, gradient)

    def _norm(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """The norm of one gradient, in this parameter's place."""
        if index in self._slots:
            try:
                return norm(gradient, out=self._slots[index])
            except RuntimeError:  # gradients of this parameter were of another type, or on another device
                del self._slots[index]
        value = norm(gradient)
        kind = value.device, value.dtype
        if kind not in self._tables:
            self._tables[kind] = torch.zeros(len(self._parameters), device=value.device, dtype=value.dtype)
        self._slots[index] = self._tables[kind][index]
        return self._slots[index].copy_(value)

    def begin(self, *, due: bool, audited: bool) -> None:
        """Forgets the last backward; `due` asks for norms in the next one, `audited` for fingerprints as well."""
        self._norms.clear()
        for table in self._tables.values():
            table.zero_()
        self._digests.clear()
        self._failure = None
        self.seconds = 0.0
        self.due, self.audited = due or audited, audited

    def norms(self) -> Mapping[int, torch.Tensor]:
        """L2 norm of each local gradient seen, by parameter index, as 0-d tensors that the next backward overwrites.

        Raises:
            Exception: what a hook of ours ran into during this backward.
        """
        if self._failure is not None:
            raise self._failure
        return self._norms

    def norm(self) -> float | torch.Tensor:
        """L2 norm over all parameters seen, 0-d float64; NaN or Inf where the gradient (or its square) is."""
        if not self.norms():
            return 0.0
        return stacked([table.to(torch.float64).square().sum() for table in self._tables.values()]).sum().sqrt()

    def digests(self) -> dict[int, int]:
        """Fingerprint of each parameter's local gradient, by parameter index (audit steps only)."""
        return read_digests(self._digests)

    def followed(self) -> bool:
        """Whether a hook that came later sees (and may change) a gradient between our look and DDP's."""
        for parameter, handle in zip(self._parameters, self._handles, strict=True):
            hooks = parameter._post_accumulate_grad_hooks or {}
            if next(reversed(hooks), handle.id) != handle.id:
                return True
        return False

    def close(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def norm(gradient: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """L2 norm of one gradient as a 0-d tensor on its device; half precisions are summed in float32.

    Args:
        out: where to leave it.

    Raises:
        RuntimeError: `out` is of another type or on another device.
    """
    value = _outside_graph(gradient)
    if value.layout is not torch.strided:
        value = value.coalesce().values()
    if value.dtype is torch.float32:
        plain: torch.Tensor = torch.linalg.vector_norm(value, out=out)  # what it is told costs a seventh of a small one
        return plain
    if value.is_floating_point() and value.element_size() == 1:
        value = value.to(torch.float32)  # the 8-bit floats have no norm of their own
    # Not torch.dot, although it is twice as fast on a CPU: its last bits depend on where the memory begins, and a heal
    # compares the norms of two passes to the bit.
    dtype = torch.float32 if value.dtype in _HALF else None
    result: torch.Tensor = torch.linalg.vector_norm(value, dtype=dtype, out=out)
    return result


def stacked(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """0-d tensors of any float types and devices (a model may lie on several) as one (n,) float64 tensor."""
    try:
        together = torch.stack(list(values))  # in the widest of their types, which holds each of them exactly
    except RuntimeError:  # several devices
        together = torch.stack([value.to(values[0].device, torch.float64) for value in values])
    return together.to(torch.float64)


class ReducedGradients:
    """Gradients as the reduce left them, the same on every rank.

    Args:
        parameters: those whose gradients DDP reduces, in module order.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._bounds = _bounds(parameters)
        self._fingerprinter = Fingerprinter()

    def fingerprint(self) -> Digest:
        """Their fingerprint, not read from a device."""
        return self._fingerprinter.fingerprint(self._parts())

    def measured(self) -> tuple[Digest, int | torch.Tensor]:
        """Their fingerprint, and 1 where they hold Inf or NaN, else 0; nothing is read from a device.

        Sums are a cheap first look, taken just before the same memory is hashed, so that it comes out of a cache. In
        host memory they are of float32 (of squares, where there are many small gradients), and only where one is not
        finite are the elements asked. Nobody can ask so on a device without waiting for it, and there sums are of
        float64, which finite elements of fewer bits never fill.
        """
        values: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []

        def looked_at() -> Iterator[Sequence[torch.Tensor | None]]:
            for part in self._parts():
                real = [value for value in map(_real, part) if value is not None]
                values.extend(real)
                sums.extend(_witnesses(real))
                yield part

        digest = self._fingerprinter.fingerprint(looked_at())
        if not sums:
            return digest, 0
        if not all(map(on_host, sums)):
            return digest, (~torch.isfinite(stacked(sums)).all()).long()
        suspicious = not bool(torch.isfinite(torch.stack(sums).sum()))
        return digest, int(suspicious and any(not bool(torch.isfinite(v).all()) for v in values))

    def _parts(self) -> Iterator[Sequence[torch.Tensor | None]]:
        """The gradients in module order, as many at once as a cache holds."""
        gradients = [parameter.grad for parameter in self._parameters]
        for begin, end in self._bounds:
            yield gradients[begin:end]


def _bounds(parameters: Sequence[torch.nn.Parameter]) -> list[tuple[int, int]]:
    """Where to cut their gradients into runs of about `_CACHED` bytes; a larger one stands alone."""
    bounds: list[tuple[int, int]] = []
    begin = size = 0
    for index, parameter in enumerate(parameters):
        size += parameter.nbytes
        if size >= _CACHED or index == len(parameters) - 1:
            bounds.append((begin, index + 1))
            begin, size = index + 1, 0
    return bounds


def _witnesses(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """0-d tensors, one of which is not finite where an element is not; on a device, only there."""
    if len(values) > 1 and all(value.dtype is torch.float32 and on_host(value) for value in values):
        return [torch.stack(torch._foreach_norm(values)).sum()]  # one call for all; norms never cancel each other
    return [_witness(value) for value in values]


def _witness(value: torch.Tensor) -> torch.Tensor:
    """A 0-d tensor that is not finite where an element is not; on a device, only there."""
    if on_host(value):
        return torch.sum(value) if value.dtype is torch.float32 else value.sum(dtype=torch.float32)
    if value.dtype is torch.float64 and value.numel():
        largest: torch.Tensor = torch.linalg.vector_norm(value, float("inf"))
        return largest
    return value.sum(dtype=torch.float64)


def _real(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The numbers of a gradient: its stored values where it is sparse, real and imaginary parts where complex."""
    if gradient is None:
        return None
    value = _outside_graph(local(gradient))
    if value.layout is not torch.strided:
        if value.layout is not torch.sparse_coo:
            return None
        value = value._values()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _outside_graph(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient itself, which is in a graph only under `create_graph`; a call less for every parameter."""
    return gradient.detach() if gradient.requires_grad else gradient
