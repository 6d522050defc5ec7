"""A loop with accumulation, a loss scaler and clipping: torchrun --nproc-per-node=3 examples/plain_loop.py (CPU)."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from sdcwatch import Monitor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

ACCUMULATE = 2


def loss_fn(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    with torch.autocast("cpu", torch.bfloat16):
        return functional.mse_loss(model(inputs), targets) / ACCUMULATE


def train() -> None:
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    monitor = Monitor(model, optimizer, loss_fn=loss_fn, scaler=scaler, replay_every=2)  # sdcwatch
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, 9):
        with monitor.step(step) as s:  # sdcwatch: one step round all micro-batches
            for micro in range(ACCUMULATE):
                batch = torch.randn(8, 16, generator=data), torch.randn(8, 4, generator=data)
                with contextlib.nullcontext() if micro == ACCUMULATE - 1 else model.no_sync():
                    scaler.scale(s.loss(batch)).backward()  # sdcwatch: s.loss(batch) for loss_fn(model, batch)
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    monitor.close()


def main() -> None:
    dist.init_process_group("gloo")
    train()  # model and monitor are gone when it returns: torch may hang where DDP outlives its group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
