"""One life of a small training run: resumes from a trusted checkpoint, trains under a fault or a kill, and says how it
ended. Accumulation of 4, clipping, dropout and batch norm; data and random numbers follow from step and rank alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sdcwatch import CorruptionDetected, Monitor
from sdcwatch.checkpoints.manifest import resume_point
from sdcwatch.heal import healer
from sdcwatch.testing import Fault, FaultPlan
from sdcwatch.watch.contain import Halt
from sdcwatch.watch.exchange import Exchange
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 12
ACCUMULATE = 4
SAVE_EVERY = 2
REPLAY_EVERY = 3


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["input"]), batch["target"]) / ACCUMULATE


def batch_of(step: int, rank: int, micro: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 1000 + rank * 10 + micro)
    return {
        "input": torch.randn(8, 16, generator=generator),
        "target": torch.randint(8, (8,), generator=generator),
    }


def train(rank: int, size: int, root: str, job: dict[str, Any]) -> dict[str, Any]:
    """Trains up to `STEPS`.

    Args:
        job: `on_fault`, `faults` (fields of `Fault`), `kill` ({"during", "ranks", "step"}), `ranks_per_node`,
            `stop_after` (ends by itself after this step, as a preempted job does).

    Returns:
        `digest` of parameters and optimizer state (None where it did not reach the end), `stopped` (step of a halt),
        `first` step trained, `steps` trained, `heals`, `events`.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    first = resume(ddp, optimizer, Path(root) / "checkpoints")
    plan = FaultPlan(tuple(Fault(**fault) for fault in job.get("faults", ())))
    plan.install(ddp, optimizer, first_step=first)
    current = [first]
    kill = job.get("kill")
    if kill is not None and rank in kill["ranks"]:
        arm(kill, current)
    node = f"node-{rank // job.get('ranks_per_node', 1)}"
    monitor = Monitor(
        ddp,
        optimizer,
        loss_fn=loss_fn,
        spool_dir=f"{root}/spool-{node}",
        node=node,
        checkpoint_dir=f"{root}/checkpoints",
        on_fault=job["on_fault"],
        replay_every=REPLAY_EVERY,
        conservation_every=1,
    )
    trained, stopped = 0, None
    last = job.get("stop_after", STEPS - 1)
    try:
        for step in range(first, last + 1):
            current[0] = step
            torch.manual_seed(step * 100 + rank)
            one_step(monitor, ddp, optimizer, step, rank)
            trained += 1
            if step % SAVE_EVERY == 1:
                monitor.checkpoint(
                    Path(root) / "checkpoints" / f"step-{step:03d}.pt", saver(ddp, optimizer, kill, current)
                )
        monitor.close()
    except CorruptionDetected as error:
        stopped = error.step
    heals = {
        outcome: sum(
            monitor._epoch.reporter.metrics.get("sdc_heals_total", check=check, outcome=outcome) or 0  # type: ignore[union-attr]
            for check in ("gradient_checksum", "allreduce_conservation", "weight_checksum", "replay")
        )
        for outcome in ("healed", "failed", "refused")
    }
    return {
        "digest": digest(ddp, optimizer) if stopped is None and last == STEPS - 1 else None,
        "stopped": stopped,
        "first": first,
        "steps": trained,
        "heals": heals,
        "events": [f"{v.check}: {v.kind}, {v.path}" for v in monitor.verdicts],
        "suspects": sorted({r for v in monitor.verdicts for r in v.suspects}),
    }


def one_step(monitor: Monitor, ddp: Any, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    with monitor.step(step) as s:
        for micro in range(ACCUMULATE):
            with ddp.no_sync() if micro < ACCUMULATE - 1 else contextlib.nullcontext():
                s.loss(batch_of(step, rank, micro)).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def resume(ddp: Any, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Loads what may be trusted; the first step to train. One throw-away backward first: see decision 8."""
    fresh = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    ddp(batch_of(0, 0, 0)["input"]).sum().backward()
    optimizer.zero_grad()
    record = resume_point(folder)
    if record is None:
        ddp.module.load_state_dict(fresh)
        return 0
    state = torch.load(record.path, weights_only=True)
    ddp.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return record.step + 1


def saver(
    ddp: Any, optimizer: torch.optim.Optimizer, kill: dict[str, Any] | None, current: list[int]
) -> Callable[[Path], object]:
    def save(path: Path) -> None:
        torch.save({"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}, path)
        if kill is not None and kill["during"] == "checkpoint" and current[0] >= kill["step"]:
            path.write_bytes(path.read_bytes()[:100])  # torn
            os.kill(os.getpid(), signal.SIGKILL)

    return save


def digest(ddp: Any, optimizer: torch.optim.Optimizer) -> str:
    state = [*ddp.module.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    content = b"".join(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in state)
    return hashlib.sha256(content).hexdigest()


def arm(kill: dict[str, Any], current: list[int]) -> None:
    """SIGKILL to this process, without a word, as soon as it is inside of what `kill["during"]` names."""

    def dying(original: Any) -> Any:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if current[0] >= kill["step"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        return wrapped

    if kill["during"] == "check":
        Exchange.rows = dying(Exchange.rows)  # type: ignore[method-assign]
    elif kill["during"] == "heal":
        healer.recompute = dying(healer.recompute)  # type: ignore[attr-defined]
    elif kill["during"] == "halt":
        Halt.taint = dying(Halt.taint)  # type: ignore[method-assign]
