"""What a forward leaves behind in a module besides gradients, taken at one moment and put back bit for bit at another.

Buffers (batch norm counts every forward), attributes (a counter, a cached length), train flags. Of an attribute it
keeps what it is bound to, not what a list or a tensor that it holds contains; and all of them, since a length put back
without the table it belongs to would lie. Parameters and gradients are not its business. Flow: replay, heal.
"""

from __future__ import annotations

from typing import Any

import torch


class ModuleState:
    """The state of a module and all its submodules.

    Args:
        module: the plain module under DDP.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self.take()

    @property
    def nbytes(self) -> int:
        """Bytes of the copies of buffers that are held."""
        return sum(c.numel() * c.element_size() for c in self._copies)

    def take(self) -> None:
        """Takes the state as it is now, into the memory of the last time where the buffers are still the same."""
        modules = list(self._module.modules())
        self._attributes = [(m, dict(m.__dict__)) for m in modules]
        self._places = [(m, dict(m._buffers)) for m in modules]
        buffers = [b for b in self._module.buffers() if not overlaps(b)]
        with torch.no_grad():
            if _alike(buffers, self._buffers):
                for copy, buffer in zip(self._copies, buffers, strict=True):
                    copy.copy_(buffer)
            else:
                self._copies = [b.detach().clone() for b in buffers]
        self._buffers = buffers

    def restore(self) -> None:
        """Puts it all back; version counters of buffers do not move, for autograd may have saved them."""
        for submodule, bound in self._attributes:
            for name in submodule.__dict__.keys() - bound.keys():
                del submodule.__dict__[name]
            # through __dict__: a property or a __setattr__ of the module's own must not see this
            changed = {n: v for n, v in bound.items() if submodule.__dict__.get(n, _MISSING) is not v}
            submodule.__dict__.update(changed)
        for submodule, named in self._places:
            # a forward may have put a new tensor in a buffer's place
            if submodule._buffers.keys() != named.keys() or any(submodule._buffers[n] is not named[n] for n in named):
                submodule._buffers.clear()
                submodule._buffers.update(named)
        with torch.no_grad():
            for buffer, copy in zip(self._buffers, self._copies, strict=True):
                buffer.data.copy_(copy)


_MISSING: Any = object()


def _alike(buffers: list[torch.Tensor], before: list[torch.Tensor]) -> bool:
    return len(buffers) == len(before) and all(b is a for b, a in zip(buffers, before, strict=True))


def overlaps(tensor: torch.Tensor) -> bool:
    """An expanded tensor: torch refuses in-place writes to it, the loss function's as well as ours."""
    return tensor.layout is torch.strided and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
