"""Local gradients before the reduce and reduced gradients after it.

`LocalGradients` hangs a post-accumulate hook on every parameter: it fires before DDP copies the gradient into its
bucket, so it sees what *this* rank computed, and it registers no communication hook (one changes bits). It measures
the L2 norm always and the fingerprint on audit steps. It never writes to a gradient. Flow: **checks** -> observation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from sdcwatch.fingerprint import fingerprint
from sdcwatch.shards import local

_HALF = (torch.float16, torch.bfloat16)


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
        self._digests: dict[int, int] = {}
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
        self._norms[index] = norm(gradient)
        self.seconds += time.perf_counter() - begin
        if self.audited:
            self._digests[index] = fingerprint([gradient])
        if self._further is not None:
            self._further(index, gradient)

    def begin(self, *, due: bool, audited: bool) -> None:
        """Forgets the last backward; `due` asks for norms in the next one, `audited` for fingerprints as well."""
        self._norms.clear()
        self._digests.clear()
        self._failure = None
        self.seconds = 0.0
        self.due, self.audited = due or audited, audited

    def norms(self) -> Mapping[int, torch.Tensor]:
        """L2 norm of each local gradient seen, by parameter index, as 0-d tensors.

        Raises:
            Exception: what a hook of ours ran into during this backward.
        """
        if self._failure is not None:
            raise self._failure
        return self._norms

    def norm(self) -> float:
        """L2 norm over all parameters seen, in float64; NaN or Inf where the gradient (or its square) is."""
        if not self.norms():
            return 0.0
        norms = list(self.norms().values())
        # a model may lie on several devices
        values = torch.stack([n.to(norms[0].device, torch.float64) for n in norms])
        return float(values.square().sum().sqrt())

    def digests(self) -> dict[int, int]:
        """Fingerprint of each parameter's local gradient, by parameter index (audit steps only)."""
        return dict(self._digests)

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


def norm(gradient: torch.Tensor) -> torch.Tensor:
    """L2 norm of one gradient as a 0-d tensor on its device; half precisions are summed in float32."""
    value = gradient.detach()
    if value.layout is not torch.strided:
        value = value.coalesce().values()
    if value.is_floating_point() and value.element_size() == 1:
        value = value.to(torch.float32)  # the 8-bit floats have no norm of their own
    # Not torch.dot, although it is twice as fast on a CPU: its last bits depend on where the memory begins, and a heal
    # compares the norms of two passes to the bit.
    result: torch.Tensor = torch.linalg.vector_norm(value, dtype=torch.float32 if value.dtype in _HALF else None)
    return result


def reduced(parameters: Sequence[torch.nn.Parameter]) -> tuple[int, bool]:
    """Fingerprint of the reduced gradients, and whether they hold Inf or NaN.

    Sums are a cheap first look, taken just before the same memory is hashed, so that it comes out of a cache: only
    where one is not finite are the elements asked.
    """
    gradients = [None if p.grad is None else local(p.grad) for p in parameters]
    values: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []

    def looked_at() -> Iterator[torch.Tensor | None]:
        for gradient in gradients:
            if gradient is not None and gradient.layout in (torch.strided, torch.sparse_coo):
                values.append(_real(gradient.detach()))
                sums.append(values[-1].sum(dtype=torch.float32))
            yield gradient

    digest = fingerprint(looked_at())
    suspicious = bool(sums) and not math.isfinite(float(torch.stack([s.to(sums[0].device) for s in sums]).sum()))
    nonfinite = suspicious and any(not bool(torch.isfinite(v).all()) for v in values)
    return digest, nonfinite


def _real(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient: its stored values where it is sparse, real and imaginary parts where complex."""
    value = gradient if gradient.layout is torch.strided else gradient._values()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
