"""Does the running backward end in DDP's reduce? Only where a forward of the DDP model asked for it.

A backward through the bare module (a probe of gradients on one rank, a second backward of one graph) fires the same
hooks on the parameters, and DDP reduces nothing in it: a collective of ours there would split the ranks, and gradients
that nobody reduced would look corrupt. DDP itself arms its reducer at the end of a forward; this notes the same. It
holds no more than a flag, so that a model that carries it can still be copied and pickled. Flow: DDP's forward ->
**prepared** -> epoch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle


class Prepared:
    """Whether DDP's next backward reduces; a forward hook of the DDP module."""

    def __init__(self) -> None:
        self.standing = False

    def watch(self, ddp: DistributedDataParallel) -> RemovableHandle:
        """Hangs itself on the model; the handle takes it off."""
        return ddp.register_forward_hook(self)

    def __call__(self, ddp: Any, *_: Any) -> None:
        """After a forward: the same condition under which DDP arms its reducer."""
        if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            self.standing = True

    def used(self) -> None:
        """A backward has reduced: another one of the same forward would not."""
        self.standing = False
