"""HSDP: shards inside a group, replicas of them between groups: torchrun --nproc-per-node=3 examples/hsdp_loop.py

Three replicas of one shard each here; with 8 GPUs a node the mesh is (nodes, 8).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from sdcwatch import Monitor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional


def loss_fn(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return functional.mse_loss(model(inputs), targets)


def train() -> None:
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = Monitor(model, optimizer, loss_fn=loss_fn)  # sdcwatch: replay is off here, and coverage() says why
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
    train()  # model and monitor are gone when it returns: torch may hang where DDP outlives its group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
