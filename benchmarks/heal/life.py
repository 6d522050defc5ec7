"""One life of a small training run: resumes from a trusted checkpoint, trains under a fault or a kill, and says how it
ended. Accumulation of 4, clipping, dropout and batch norm; data and random numbers follow from step and rank alone.

Flow: lived -> ranks -> **life**. It judges nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from sdcwatch import CorruptionDetected, Monitor
from sdcwatch.checkpoints.manifest import last_clean, resume_point
from sdcwatch.testing import Fault, FaultPlan
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.heal.cases import STEPS
from benchmarks.heal.traps import Trap

ACCUMULATE = 4
SAVE_EVERY = 2


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["input"]), batch["target"]) / ACCUMULATE


def batch_of(step: int, rank: int, micro: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 1000 + rank * 10 + micro)
    return {
        "input": torch.randn(8, 16, generator=generator),
        "target": torch.randint(8, (8,), generator=generator),
    }


def train(rank: int, size: int, root: str, job: dict[str, Any]) -> dict[str, Any]:
    """Trains up to `STEPS`; notes each step that it begins in `begun-<rank>`, so that a killed life tells, too.

    Args:
        job: `on_fault`, `replay_every`, `faults` (fields of `Fault`), `kill` (see `traps`), `ranks_per_node`,
            `trust` (what a resume asks for), `stop_after` (ends by itself after this step, as a preempted job does).

    Returns:
        `digest` of parameters and optimizer state, on rank 0 of the buffers too (None where it did not reach the end),
        `stopped` (step of a halt), `first` step trained, `healed`, `events`, `suspects`, `struck` (strikes here),
        `outliers` (calibrations in which this rank's replay was not that of the next node).
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    first = resume(ddp, optimizer, Path(root) / "checkpoints", job["trust"])
    faults = FaultPlan(tuple(Fault(**fault) for fault in job.get("faults", ())))
    installed = faults.install(ddp, optimizer, first_step=first)
    trap = Trap(job.get("kill"), Path(root), rank)
    node = f"node-{rank // job['ranks_per_node']}"
    monitor = Monitor(
        ddp,
        optimizer,
        loss_fn=loss_fn,
        spool_dir=f"{root}/spool-{node}",
        node=node,
        checkpoint_dir=f"{root}/checkpoints",
        on_fault=job["on_fault"],
        replay_every=job["replay_every"],
        conservation_every=1,
    )
    stopped, last = None, job.get("stop_after", STEPS - 1)
    with Path(root, f"begun-{rank}").open("a", buffering=1) as begun:
        try:
            for step in range(first, last + 1):
                trap.step = step
                begun.write(f"{step}\n")
                torch.manual_seed(step * 100 + rank)
                one_step(monitor, ddp, optimizer, step, rank)
                if step % SAVE_EVERY == 1:
                    to = Path(root) / "checkpoints" / f"step-{step:03d}.pt"
                    monitor.checkpoint(to, saver(ddp, optimizer, trap))
            monitor.close()
        except CorruptionDetected as error:
            stopped = error.step
    metrics = monitor._epoch.reporter.metrics  # type: ignore[union-attr]
    return {
        "digest": digest(ddp, optimizer, buffers=rank == 0) if stopped is None and last == STEPS - 1 else None,
        "stopped": stopped,
        "first": first,
        "healed": sum(
            int(metrics.get("sdc_heals_total", check=check, outcome="healed") or 0)
            for check in ("gradient_checksum", "allreduce_conservation", "weight_checksum", "replay")
        ),
        "events": [f"{v.check}: {v.kind}, {v.path}" for v in monitor.verdicts],
        "suspects": sorted({r for v in monitor.verdicts for r in v.suspects}),
        "struck": len(installed.strikes),
        "outliers": int(metrics.get("sdc_calibration_outliers_total") or 0),
    }


def one_step(monitor: Monitor, ddp: Any, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    """Four micro-batches, clipping, the optimizer."""
    with monitor.step(step) as s:
        for micro in range(ACCUMULATE):
            with ddp.no_sync() if micro < ACCUMULATE - 1 else contextlib.nullcontext():
                s.loss(batch_of(step, rank, micro)).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def resume(ddp: Any, optimizer: torch.optim.Optimizer, folder: Path, trust: str) -> int:
    """Loads what may be trusted; the first step to train. One throw-away backward first: see decision 8."""
    fresh = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    ddp(batch_of(0, 0, 0)["input"]).sum().backward()
    optimizer.zero_grad()
    record = resume_point(folder) if trust == "checked" else last_clean(folder, trust)
    if record is None:
        ddp.module.load_state_dict(fresh)
        return 0
    state = torch.load(record.path, weights_only=True)
    ddp.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return record.step + 1


def saver(ddp: Any, optimizer: torch.optim.Optimizer, trap: Trap) -> Callable[[Path], object]:
    """What `monitor.checkpoint` calls to write."""

    def save(path: Path) -> None:
        torch.save({"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}, path)
        trap.written(path)

    return save


def digest(ddp: Any, optimizer: torch.optim.Optimizer, *, buffers: bool) -> str:
    """SHA-256 over all bits; buffers are each rank's own under DDP, and rank 0's go into checkpoints."""
    state: Iterable[torch.Tensor] = (
        *ddp.module.parameters(),
        *(value for held in optimizer.state.values() for value in held.values()),
        *(ddp.module.buffers() if buffers else ()),
    )
    content = b"".join(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in state)
    return hashlib.sha256(content).hexdigest()
