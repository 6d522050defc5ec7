"""Healthy but odd training loops: each run counts comparisons, and what kinds of verdict it may give.

A comparison is one check judged at one step, once for each rank whose row it compares; the number of times that a check
was judged over a whole group is kept beside it. Three of the loops really do let the state of ranks
part, in code: there `software` or `inconclusive` is right, and a name is as false as anywhere. Flow: pool ->
**healthy** -> guarantees.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from sdcwatch import Monitor
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.campaign import pool, training

#: Name -> kinds of verdict that are right there.
SCENARIOS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "warm-up": (),
    "LR schedule": (),
    "accumulation": (),
    "loss scaling with overflow": (),
    "ragged last batch": (),
    "batch norm": (),
    "dropout": (),
    "tied weights": (),
    "clipping": (),
    "compile": (),
    "EMA swap on rank 0": (),
    "new input shape": (),
    "autotune flag": (),
    "NaN on some ranks": (),
    "resume": (),
    "elastic restart": (),
    "EMA kept on rank 0": ("software", "inconclusive"),
    "rank-local ReduceLROnPlateau": ("software", "inconclusive"),
    "gradient edited on one rank": ("software", "inconclusive"),
}


class _Tied(nn.Module):
    """Embeds and un-embeds with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False)
        self.out.weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(torch.tanh(self.into(x)))[:, :6]
        return out


def _model(name: str) -> nn.Module:
    torch.manual_seed(11)
    if name == "tied weights":
        return _Tied()
    extra = {"batch norm": [nn.BatchNorm1d(16)], "dropout": [nn.Dropout(0.2)]}.get(name, [])
    return nn.Sequential(nn.Linear(12, 16), *extra, nn.GELU(), nn.Linear(16, 6))


@dataclass
class Loop:
    """One training loop in the making; scenarios change its parts."""

    name: str
    rank: int
    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    model: nn.Module
    autocast: str
    scaler: torch.amp.GradScaler | None = None
    schedule: Any = None
    ema: list[torch.Tensor] = field(default_factory=list)

    def rows(self, step: int, steps: int) -> int:
        """Rows of this step's batch."""
        if self.name == "ragged last batch" and step % 10 == 9:
            return 3 + self.rank
        return 5 if self.name == "new input shape" and step > steps // 2 else 8

    def step(self, monitor: Monitor, number: int, batch: Any) -> None:
        """One training step as this loop does it."""
        accumulate = 3 if self.name == "accumulation" else 1
        with monitor.step(number) as s:
            for micro in range(accumulate):
                last = micro == accumulate - 1
                with contextlib.nullcontext() if last else self.ddp.no_sync():
                    with training.precision(self.autocast):
                        loss = s.loss(batch)
                    self._scaled(loss / accumulate, number).backward()
            self._update(number, float(loss.detach()))
            self.optimizer.zero_grad()

    def _scaled(self, loss: torch.Tensor, number: int) -> torch.Tensor:
        if self.name == "NaN on some ranks" and number % 9 == 5 and self.rank == 1:
            loss = loss * float("nan")
        if self.scaler is None:
            return loss
        scaled: torch.Tensor = self.scaler.scale(loss)
        return scaled * (float("inf") if number % 7 == 4 else 1.0)

    def _update(self, number: int, loss: float) -> None:
        parameters = list(self.ddp.parameters())
        if self.name == "gradient edited on one rank" and self.rank == 0 and number == 6:
            for p in parameters:
                assert p.grad is not None
                p.grad.mul_(0.5)
        if self.name == "NaN on some ranks" and not all(
            bool(torch.isfinite(p.grad).all()) for p in parameters if p.grad is not None
        ):
            return
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.name in ("clipping", "loss scaling with overflow"):
            nn.utils.clip_grad_norm_(parameters, 0.5)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if isinstance(self.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.schedule.step(loss)
        elif self.schedule is not None:
            self.schedule.step()
        self._averages(number)

    def _averages(self, number: int) -> None:
        if not self.name.startswith("EMA") or self.rank != 0:
            return
        parameters = list(self.ddp.parameters())
        with torch.no_grad():
            if not self.ema:
                self.ema = [p.detach().clone() for p in parameters]
            for mean, p in zip(self.ema, parameters, strict=True):
                mean.lerp_(p, 0.1)
            if number % 8 != 7:
                return
            kept = [p.detach().clone() for p in parameters]
            for mean, p in zip(self.ema, parameters, strict=True):
                p.copy_(mean)
            if self.name == "EMA swap on rank 0":
                self.ddp.module(torch.zeros(2, 12))
                for old, p in zip(kept, parameters, strict=True):
                    p.copy_(old)


def _loop(name: str, rank: int, autocast: str) -> Loop:
    # dynamo splits the graph at DDP's buckets and wants the first to be the smallest: there, one bucket
    ddp = DistributedDataParallel(_model(name), bucket_cap_mb=25 if name == "compile" else 0.001)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    model: Any = torch.compile(ddp, backend="aot_eager") if name == "compile" else ddp
    loop = Loop(name, rank, ddp, optimizer, model, autocast)
    lr = torch.optim.lr_scheduler
    if name == "warm-up":
        loop.schedule = lr.LinearLR(optimizer, 0.01, total_iters=20)
    if name == "LR schedule":
        loop.schedule = lr.CosineAnnealingLR(optimizer, 30)
    if name == "rank-local ReduceLROnPlateau":
        loop.schedule = lr.ReduceLROnPlateau(optimizer, patience=1 + rank, threshold=10.0)
    if name == "loss scaling with overflow":
        loop.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    return loop


def _watch(loop: Loop, scratch: str, nodes: tuple[int, ...], key: str) -> Monitor:
    node = [node for node, count in enumerate(nodes) for _ in range(count)][loop.rank]
    return Monitor(
        loop.model,
        loop.optimizer,
        loss_fn=training.loss_fn,
        scaler=loop.scaler,
        job=key,
        spool_dir=f"{scratch}/world-{len(nodes)}-{sum(nodes)}/node-{node}",
        node=f"node-{node}",
        agent="off",
        metrics_interval=1e6,
        replay_every=5,
        conservation_every=1,
    )


def _train(loop: Loop, scratch: str, nodes: tuple[int, ...], key: str, first: int, steps: int) -> dict[str, Any]:
    monitor = _watch(loop, scratch, nodes, key)
    generator = torch.Generator().manual_seed(99 + loop.rank)
    torch.manual_seed(500 + loop.rank)
    for number in range(first, first + steps):
        if loop.name == "autotune flag" and number == first + steps // 2:
            torch.backends.cudnn.benchmark = True
        rows = loop.rows(number - first, steps)
        batch = (torch.randn(rows, 12, generator=generator), torch.randint(6, (rows,), generator=generator))
        loop.step(monitor, number, batch)
    torch.backends.cudnn.benchmark = False
    monitor.close()
    return training.seen(monitor)


def run(
    rank: int, size: int, scratch: str, name: str, nodes: tuple[int, ...], autocast: str, steps: int, key: str
) -> Any:
    """Runs one healthy loop on this rank; what sdcwatch said, part by part."""
    loop = _loop(name, rank, autocast)
    if name == "resume":
        parts = [_train(loop, scratch, nodes, key, 0, steps // 2)]
        state = copy.deepcopy((loop.ddp.module.state_dict(), loop.optimizer.state_dict()))
        again = _loop(name, rank, autocast)
        again.ddp.module.load_state_dict(state[0])
        again.optimizer.load_state_dict(state[1])
        return [*parts, _train(again, scratch, nodes, f"{key}-2", steps // 2, steps - steps // 2)]
    if name == "elastic restart":
        return _elastic(loop, scratch, nodes, key, steps)
    return [_train(loop, scratch, nodes, key, 0, steps)]


def _elastic(loop: Loop, scratch: str, nodes: tuple[int, ...], key: str, steps: int) -> list[dict[str, Any]]:
    """The last rank leaves, the others go on as a smaller group, and it comes back."""
    rank, size = loop.rank, sum(nodes)
    parts = [_train(loop, scratch, nodes, key, 0, steps // 2)]
    ports: list[Any] = [pool.free_port() if rank == 0 else None, pool.free_port() if rank == 0 else None]
    dist.broadcast_object_list(ports)
    state = copy.deepcopy((loop.ddp.module.state_dict(), loop.optimizer.state_dict()))
    dist.destroy_process_group()
    fewer = (*nodes[:-1], nodes[-1] - 1) if nodes[-1] > 1 else nodes[:-1]
    if rank < size - 1:
        pool.join_group(rank, size - 1, ports[0])
        again = _loop(loop.name, rank, loop.autocast)
        again.ddp.module.load_state_dict(state[0])
        again.optimizer.load_state_dict(state[1])
        if size - 1 > 1:
            parts.append(_train(again, scratch, fewer, f"{key}-2", steps // 2, steps - steps // 2))
        dist.destroy_process_group()
    pool.join_group(rank, size, ports[1])
    return parts
