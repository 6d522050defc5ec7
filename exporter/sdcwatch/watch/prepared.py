"""Does the running backward end in DDP's reduce? Only where a forward of the DDP model asked for it.

A backward through the bare module (a probe of gradients on one rank, a second backward of one graph) fires the same
hooks on the parameters, and DDP reduces nothing in it: a collective of ours there would split the ranks, and gradients
that nobody reduced would look corrupt. DDP itself arms its reducer at the end of a forward; this notes the same. It
also says when that backward begins, from a hook on the model's output: with reentrant checkpoints the first hooks of
parameters fire in a nested graph task, whose callbacks run before DDP is done. Flow: DDP's forward -> **prepared** ->
epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from sdcwatch.checks.replay import tensors_in
from sdcwatch.watch.replication import Wrapper


class Prepared:
    """Whether DDP's next backward reduces; a forward hook of the DDP module.

    Attributes:
        standing: a forward asked for the reduce, and no backward has reduced since.
        forwards: how many such forwards there were.
    """

    def __init__(self) -> None:
        self.standing = False
        self.forwards = 0
        self._began: Callable[[], None] | None = None
        self._ddp: Wrapper | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A model that carries this hook can be copied and pickled; the copy is nobody's to watch."""
        return {"standing": False, "forwards": 0, "_began": None, "_ddp": None}

    def watch(self, model: torch.nn.Module, ddp: Wrapper, began: Callable[[], None]) -> RemovableHandle:
        """Hangs itself on the model; the handle takes it off.

        Args:
            model: what the loop calls: DDP itself, the root of `fully_shard`, or `torch.compile` of either. A hook
                inside would be compiled, too.
            ddp: what says whether a backward reduces.
            began: called in the outermost graph task, when the backward of an output begins.
        """
        self._began = began
        self._ddp = ddp
        return model.register_forward_hook(self)

    def __call__(self, model: Any, _: Any, output: Any) -> None:
        """After a forward: the same condition under which DDP arms its reducer."""
        if torch.is_grad_enabled() and self._ddp is not None and self._ddp.require_backward_grad_sync:
            self.standing = True
            self.forwards += 1
            for tensor in tensors_in(output):
                if tensor.requires_grad and self._began is not None:
                    tensor.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        if self._began is not None:
            self._began()

    def used(self) -> None:
        """A backward has reduced: another one of the same forward would not."""
        self.standing = False
