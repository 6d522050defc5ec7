"""`torch.save` with a manifest: `torch_file.save(monitor, state, path)` where a loop says `torch.save(state, path)`.

Writes beside the place and renames, so that no crash leaves half a file; only the lowest rank writes.
Flow: training loop -> **torch_file** -> monitor.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from sdcwatch.monitor import Monitor


def save(monitor: Monitor, state: Any, path: str | os.PathLike[str], **options: Any) -> None:
    """Saves `state`, which belongs to the newest step; call it on every rank, after the step.

    Args:
        options: further arguments of `torch.save`.

    Raises:
        CheckpointError: no step has run yet.
    """
    monitor.checkpoint(path, lambda beside: torch.save(state, beside, **options))
