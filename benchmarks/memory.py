"""Extra memory of a process: with the monitor off audit, and the peak during an audit; each in processes of its own."""

from __future__ import annotations

import resource
from typing import Any

import torch

from benchmarks.model import SMALL, Size, Transformer, batch_of, loss_fn
from benchmarks.overhead import CPU, Plain, Watched
from benchmarks.ranks import on_ranks


def _peak(rank: int, ranks: int, size: Size, settings: dict[str, Any] | None) -> float:
    torch.manual_seed(0)
    run = Plain(Transformer(size)) if settings is None else Watched(Transformer(size), **settings)
    batch = batch_of(size, 256, CPU, seed=rank)
    for _ in range(3):
        run.step(loss_fn, batch)
    if isinstance(run, Watched):
        run.monitor.close()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory(*, size: Size = SMALL) -> dict[str, Any]:
    """Peak resident megabytes over three steps, above a run without the monitor, and the model's own size."""
    plain, watched, audited = (
        max(on_ranks(_peak, 2, size, settings)) for settings in (None, {"replay_every": 0}, {"replay_every": 1})
    )
    model = sum(p.nbytes for p in Transformer(size).parameters()) / 2**20
    return {
        "model_mb": model, "bound_mb": max(model / 100, 64), "off_audit_mb": watched - plain,
        "audit_mb": audited - plain,
    }  # fmt: skip
