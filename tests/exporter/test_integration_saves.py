"""What a trainer saves is noted by the one-line integrations, on real ranks; the trainers are stand-ins."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sdcwatch.checkpoints.manifest import list_checkpoints
from sdcwatch.integrations import hf, lightning
from torch.nn.parallel import DistributedDataParallel


def made(rank: int) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    return ddp, torch.optim.SGD(ddp.parameters(), 0.1)


def save(ddp: DistributedDataParallel, place: Path, rank: int) -> None:
    if rank == 0:
        place.parent.mkdir(parents=True, exist_ok=True)
        torch.save(ddp.module.state_dict(), place)


def wait_as_a_process_does_at_its_end() -> None:
    """For threads that are no daemons, hashing among them; forked ranks leave without."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(60)


def in_transformers(rank: int, size: int, folder: str, settings: dict[str, Any]) -> None:
    ddp, optimizer = made(rank)
    trainer = SimpleNamespace(
        optimizer=optimizer,
        accelerator=SimpleNamespace(scaler=None),
        args=SimpleNamespace(output_dir=folder),
        state=SimpleNamespace(global_step=0),
        compute_loss=lambda model, inputs, **_: model(inputs["x"]).square().mean(),
        add_callback=lambda callback: None,
    )
    trainer.training_step = lambda model, inputs, _: trainer.compute_loss(model, inputs).backward()
    hf._callback = lambda watched: None  # ours is a class of the library's
    watched = hf.watch(trainer, **settings)
    for step in (1, 2):
        trainer.training_step(ddp, {"x": torch.ones(3, 4)})
        optimizer.step()
        optimizer.zero_grad()
        trainer.state.global_step = step
        save(ddp, Path(folder) / f"checkpoint-{step}" / "model.pt", rank)
        watched.saved()
    watched.close()
    wait_as_a_process_does_at_its_end()


def in_lightning(rank: int, size: int, folder: str, settings: dict[str, Any]) -> None:
    ddp, optimizer = made(rank)
    strategy = SimpleNamespace(
        model=ddp,
        precision_plugin=SimpleNamespace(),
        training_step=lambda x: ddp(x).square().mean(),
        optimizer_step=lambda optimizer, closure: optimizer.step(closure),
        save_checkpoint=lambda checkpoint, place: save(ddp, Path(place), rank),
    )
    trainer = SimpleNamespace(strategy=strategy, callbacks=[], optimizers=[optimizer], global_step=0)
    lightning._callback = lambda trainer, watched: None
    watched = lightning.watch(trainer, **settings)
    watched.started(SimpleNamespace(automatic_optimization=True))
    for step in (1, 2):
        watched.begins()
        strategy.training_step(torch.ones(3, 4)).backward()
        strategy.optimizer_step(optimizer, lambda: None)
        optimizer.zero_grad()
        trainer.global_step = step
        strategy.save_checkpoint(None, f"{folder}/checkpoint-{step}.pt")
        watched.ended()
    watched.close()
    wait_as_a_process_does_at_its_end()


@pytest.mark.parametrize("loop", [in_transformers, in_lightning])
def test_saves_are_noted_whatever_else_the_monitor_was_given(ranks: Any, tmp_path: Path, loop: Any) -> None:
    """`resumed_from` is an argument of the monitor and no setting: a save must not trip over it."""
    settings = {"checkpoint_dir": str(tmp_path / "saved"), "resumed_from": None, "spool_dir": str(tmp_path / "spool")}
    ranks(loop, 2, settings["checkpoint_dir"], settings)
    found = list_checkpoints(tmp_path / "saved")
    assert [record.step for record in found] == [1, 2]
    assert not any(record.pending for record in found)


@pytest.mark.parametrize("loop", [in_transformers, in_lightning])
def test_saves_without_a_checkpoint_folder_get_no_manifest(ranks: Any, tmp_path: Path, loop: Any) -> None:
    """Whoever did not ask for judged checkpoints finds nothing beside their own files."""
    ranks(loop, 2, str(tmp_path / "saved"), {"spool_dir": str(tmp_path / "spool")})
    assert list_checkpoints(tmp_path / "saved") == ()
