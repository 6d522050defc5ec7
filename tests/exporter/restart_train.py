"""The training script of the restart tests: a small DDP run that resumes, checkpoints, and meets one mishap.

`restart_train.py FOLDER STORY`. What happens, once, before step 5: `kill` (one rank kills itself), `wait` (every rank
of node `a` stands still until something from outside ends it), `swallow` (a wrong reduce on rank 1, in a loop that
catches everything), `clean` (nothing).
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sdcwatch import Monitor
from sdcwatch.checkpoints import agree_on_resume
from sdcwatch.testing import FaultPlan
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, MISHAP = 12, 5

folder, story = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, node = dist.get_rank(), os.environ["SDCWATCH_NODE"]
struck = folder / "struck"
first_life = story != "clean" and not struck.exists()
dist.barrier()  # every rank has looked


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch), torch.zeros(8, dtype=torch.long))


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step * 10 + rank))


def mishap() -> None:
    if story == "kill" and rank == 1:
        struck.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if story == "wait" and node == "a":
        struck.touch()
        signal.pause()
    struck.touch()


def train() -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)))
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    loss_fn(ddp, batch_of(0)).backward()  # a resumed run has DDP's second bucket layout from its first step on
    optimizer.zero_grad()
    found = agree_on_resume(folder / "checkpoints")
    first = 0
    if found is not None:
        state = torch.load(found.path, weights_only=True)
        ddp.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = found.step + 1
    if first_life and story == "swallow":
        FaultPlan().fail_at(1, MISHAP, location="reduced_gradient", pattern="scale").install(
            ddp, optimizer, first_step=first
        )
    monitor = Monitor(
        ddp,
        optimizer,
        loss_fn=loss_fn,
        checkpoint_dir=folder / "checkpoints",
        on_fault="halt",
        replay_every=2,
        resumed_from=found,
    )
    with open(folder / f"lives-{rank}", "a") as lives:
        lives.write(f"{node} {dist.get_world_size()} from {first} at {found.trust if found else 'start'}\n")
    for step in range(first, STEPS):
        if first_life and step == MISHAP:
            mishap()
        try:
            with monitor.step(step) as s:
                s.loss(batch_of(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        except BaseException:  # the user's own wrapper: it must not be able to swallow a halt
            if story != "swallow":
                raise
            continue
        with open(folder / f"steps-{rank}", "a") as steps:
            steps.write(f"{step}\n")
        if step % 2:
            monitor.checkpoint(
                folder / "checkpoints" / f"step-{step:02d}.pt",
                lambda path: torch.save({"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}, path),
            )
    monitor.close()
    content = b"".join(p.detach().numpy().tobytes() for p in ddp.module.parameters())
    (folder / f"final-{rank}").write_text(hashlib.sha256(content).hexdigest())


train()  # model and monitor are gone when it returns: torch may hang where DDP outlives its group
dist.destroy_process_group()
