"""A compiled DDP model: torchrun --nproc-per-node=3 examples/compiled_loop.py (the backend here needs no compiler)."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from sdcwatch import Monitor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def loss_fn(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return functional.mse_loss(model(inputs), targets)


def train() -> None:
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    model: Any = torch.compile(DistributedDataParallel(net), backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = Monitor(model, optimizer, loss_fn=loss_fn, replay_every=2)  # sdcwatch: what the loop calls
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, 9):
        with monitor.step(step) as s:  # sdcwatch
            batch = torch.randn(8, 16, generator=data), torch.randn(8, 4, generator=data)
            s.loss(batch).backward()  # sdcwatch
            optimizer.step()
            optimizer.zero_grad()
    monitor.close()


def main() -> None:
    dist.init_process_group("gloo")
    train()
    torch.compiler.reset()  # what it has compiled keeps the model: torch may hang where DDP outlives its group
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
