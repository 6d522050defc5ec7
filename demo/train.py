"""The training script of the demo: a byte-level GPT under DDP, with the lines that sdcwatch asks for.

Started by torchrun, one process a rank. Everything that has to do with sdcwatch is marked; the rest is a plain loop.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from sdcwatch import Monitor  # sdcwatch
from sdcwatch.checkpoints.manifest import resume_point  # sdcwatch
from sdcwatch.testing import FaultPlan  # the demo only: puts a fault into data where the environment asks for one
from stage.gpt import VOCABULARY, ByteGPT, Shape, batch_of, standard_library_text, weights_sha256
from stage.steplog import StepLog
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def loss_fn(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).view(-1, VOCABULARY), targets.view(-1))


def saver(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Callable[[Path], object]:
    """Writes everything that a resume needs to the path it is given."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return lambda path: torch.save(state, path)


def resume(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, log: StepLog) -> int:
    """Loads the newest checkpoint that may be trusted, and returns the step to go on with."""
    record = resume_point(folder)  # sdcwatch: instead of "the newest file"
    if record is None:
        log.write("start", step=1, resumed_from=None, trust=None)
        return 1
    state = torch.load(record.path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    log.write("start", step=record.step + 1, resumed_from=record.step, trust=record.trust)
    return record.step + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder that all ranks share")
    parser.add_argument("--step-log", type=Path, required=True, help="folder for the step log")
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--pace", type=float, default=0.0, help="least seconds a step takes, so that one can watch")
    arguments = parser.parse_args()

    arguments.checkpoints.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(7)
    dist.init_process_group("gloo")
    train(arguments)  # model and monitor are gone when it returns: torch may hang where DDP outlives its group
    dist.destroy_process_group()


def train(arguments: argparse.Namespace) -> None:
    rank, shape = dist.get_rank(), Shape()
    model = ByteGPT(shape)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    log = StepLog(arguments.step_log, rank=rank, model=model)

    text = standard_library_text()
    # DDP lays its buckets out anew after its first backward, and a sum's last bit depends on where in a bucket it lies.
    # One throw-away backward makes step n of a resumed run add up in the same order as step n of an unbroken one.
    loss_fn(ddp, batch_of(text, shape, seed=7, step=0, rank=rank)).backward()
    optimizer.zero_grad()
    first = resume(arguments.checkpoints, model, optimizer, log)
    FaultPlan.from_environment().install(ddp, optimizer, first_step=first)  # the demo only
    monitor = Monitor(  # sdcwatch: line 1
        ddp,
        optimizer,
        loss_fn=loss_fn,
        checkpoint_dir=arguments.checkpoints,
        on_fault="halt",
        replay_every=10,
        max_overhead=0,  # steps of a small model take milliseconds: the demo checks every one, whatever that costs
        agent="external",
    )

    for step in range(first, arguments.steps + 1):
        began = time.monotonic()
        log.begin(step)
        with monitor.step(step) as s:  # sdcwatch: line 2
            loss = s.loss(batch_of(text, shape, seed=7, step=step, rank=rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        log.end(step, loss.item())
        if step % arguments.save_every == 0:
            monitor.checkpoint(arguments.checkpoints / f"step-{step:06d}.pt", saver(model, optimizer, step))
        time.sleep(max(0.0, arguments.pace - (time.monotonic() - began)))
    monitor.close()
    log.write("done", step=arguments.steps, sha256=weights_sha256(model))


if __name__ == "__main__":
    main()
