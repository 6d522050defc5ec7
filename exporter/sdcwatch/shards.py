"""This rank's part of a tensor that several ranks hold together.

Checks compare what a rank holds itself: for a `DTensor` that is its local shard. Nothing here is collective, and
nothing is gathered.
"""

from __future__ import annotations

import torch


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the local shard of a `DTensor` (the same memory, outside any graph)."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        shard: torch.Tensor = tensor.to_local()
    return shard
