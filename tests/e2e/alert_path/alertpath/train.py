"""One rank of a small real DDP run under `Monitor`, whose optimizer computes wrong on one rank.

    python train.py RANK SIZE PORT SPOOL BAD_RANK

Ends with 86 when it was halted, 0 when nothing was found.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from sdcwatch import Monitor
from sdcwatch.testing import FaultPlan
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    rank, size, port, spool, bad = (*map(int, sys.argv[1:4]), sys.argv[4], int(sys.argv[5]))
    os.environ.update(SDCWATCH_JOB="gpt", LOCAL_RANK="0")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    FaultPlan().fail_at(bad, 6, location="optimizer_weight", pattern="bit_flip").install(model, optimizer, first_step=0)
    monitor = Monitor(
        model,
        optimizer,
        loss_fn=lambda module, batch: module(batch).square().mean(),
        spool_dir=spool,
        on_fault="halt",
        agent="external",
        replay_every=5,
    )
    generator = torch.Generator().manual_seed(rank)
    for step in range(20):
        with monitor.step(step) as s:
            s.loss(torch.randn(8, 16, generator=generator)).backward()
            optimizer.step()
            optimizer.zero_grad()
    monitor.close()


if __name__ == "__main__":
    main()
