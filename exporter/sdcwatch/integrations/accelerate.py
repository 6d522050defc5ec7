"""Hugging Face Accelerate: `watch(accelerator, model, optimizer, loss_fn)` after `accelerator.prepare(...)`.

The loop stays the user's own, so this only unwraps what Accelerate wrapped. Flow: training loop -> **accelerate** ->
monitor.
"""

from __future__ import annotations

from typing import Any

from sdcwatch.checks.replay import LossFunction
from sdcwatch.monitor import Monitor


def watch(
    accelerator: Any, model: Any, optimizer: Any, loss_fn: LossFunction | None = None, **settings: Any
) -> Monitor:
    """Gives the monitor of a prepared model; the loop calls `monitor.step`, `s.loss` and `accelerator.backward`.

    Args:
        accelerator: whose `scaler` is watched, where mixed precision has one.
        model, optimizer: as `accelerator.prepare` gave them.
        loss_fn: `loss_fn(model, batch) -> scalar loss`.
        settings: as of `Monitor`.
    """
    inner = getattr(optimizer, "optimizer", optimizer)  # the one whose step really runs
    return Monitor(model, inner, loss_fn=loss_fn, scaler=getattr(accelerator, "scaler", None), **settings)
