"""torch.save and torch.distributed.checkpoint with a manifest, on real ranks: saved, trusted, loaded, compared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from sdcwatch.checkpoints import agree_on_resume, dcp, pin, torch_file
from sdcwatch.checkpoints import manifest as checkpoint
from sdcwatch.errors import CheckpointError
from sdcwatch.monitor import Monitor
from torch.nn.parallel import DistributedDataParallel


def build() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(5)
    ddp = DistributedDataParallel(torch.nn.Linear(6, 3))
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-2)


def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def train(monitor: Monitor, optimizer: Any, steps: range) -> None:
    for step in steps:
        with monitor.step(step) as s:
            s.loss(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).backward()
            optimizer.step()
            optimizer.zero_grad()


def save_and_resume(rank: int, size: int, root: str, kind: str) -> Any:
    folder = Path(root) / "checkpoints"
    settings: Any = {"checkpoint_dir": folder, "replay_every": 1, "spool_dir": f"{root}/{rank}", "node": f"n{rank}"}
    ddp, optimizer = build()
    monitor = Monitor(ddp, optimizer, loss_fn=loss_fn, **settings)
    with pytest.raises(CheckpointError, match="no step has run"):
        dcp.async_save(monitor, {}, folder / "x")
    train(monitor, optimizer, range(1, 4))
    state = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
    path = folder / "step-3"
    if kind == "torch.save":
        torch_file.save(monitor, state, path)
    elif kind == "dcp.save":
        dcp.save(monitor, state, path)
    else:
        dcp.async_save(monitor, state, path).result()
    train(monitor, optimizer, range(4, 6))
    assert monitor._trust is not None
    monitor._trust.settle(30)
    monitor.close()
    dist.barrier()

    ddp, optimizer = build()
    found = agree_on_resume(folder)
    assert found is not None
    assert (found.step, found.trust) == (3, "verified")
    if kind == "torch.save":
        loaded = torch.load(found.path, weights_only=True)
    else:
        train_once(ddp, optimizer)  # DCP loads into what is there, so the optimizer must have its state first
        loaded = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch_dcp.load(loaded, checkpoint_id=found.path)
    ddp.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    again = Monitor(ddp, optimizer, loss_fn=loss_fn, resumed_from=found, **settings)
    train(again, optimizer, range(4, 6))
    again.close()
    visible = sorted(name for name in os.listdir(folder) if name != pin.FOLDER)  # the pin comes when it comes
    return visible, [f.name for f in found.files], [v.kind for v in again.verdicts]


def train_once(ddp: Any, optimizer: Any) -> None:
    loss_fn(ddp, torch.ones(2, 6)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["torch.save", "dcp.save", "dcp.async_save"])
def test_what_was_saved_is_trusted_and_resumed_from(ranks: Any, tmp_path: Path, kind: str) -> None:
    """One checkpoint of three ranks under its own name and nothing beside it; its shards are in the manifest."""
    results = ranks(save_and_resume, 3, str(tmp_path), kind)
    assert len({str(result) for result in results}) == 1
    names, files, verdicts = results[0]
    assert (names, verdicts) == (["step-3", "step-3.manifest.json"], [])
    if kind == "torch.save":
        assert files == ["step-3"]
    else:
        assert ".metadata" in files
        assert len(files) >= 3  # replicated tensors are divided among the ranks' shards


def one_shard_rots(rank: int, size: int, root: str) -> str:
    folder = Path(root) / "checkpoints"
    settings: Any = {"checkpoint_dir": folder, "spool_dir": f"{root}/{rank}", "node": f"n{rank}"}
    ddp, optimizer = build()
    monitor = Monitor(ddp, optimizer, loss_fn=loss_fn, **settings)
    train(monitor, optimizer, range(1, 3))
    dcp.save(monitor, {"model": ddp.module.state_dict()}, folder / "step-2")
    monitor.close()
    if rank == 0:
        shard = max(folder.glob("step-2/*.distcp"))
        data = bytearray(shard.read_bytes())
        data[-20] ^= 4
        shard.write_bytes(data)
    dist.barrier()
    try:
        Monitor(ddp, optimizer, loss_fn=loss_fn, resumed_from=folder / "step-2", **settings)
    except CheckpointError as error:
        return str(error)
    return "trained"


def test_a_rotten_shard_is_named(ranks: Any, tmp_path: Path) -> None:
    """One bit in one shard of the folder: refused on every rank, with the shard's name."""
    said = ranks(one_shard_rots, 2, str(tmp_path))
    assert said[0] == said[1]
    assert ".distcp differs from its manifest" in said[0]


def test_without_a_monitor_that_is_on_the_calls_are_torchs_own(tmp_path: Path) -> None:
    """A laptop: one process, no group; the same lines save as torch does."""
    model = torch.nn.Linear(2, 2)
    monitor = Monitor(model, torch.optim.SGD(model.parameters()))
    torch_file.save(monitor, model.state_dict(), tmp_path / "a.pt")
    with pytest.warns(UserWarning, match="single process"):  # torch's own words
        dcp.save(monitor, {"model": model.state_dict()}, tmp_path / "b")
    assert torch.load(tmp_path / "a.pt").keys() == model.state_dict().keys()
    assert (tmp_path / "b" / ".metadata").exists()
    assert checkpoint.list_checkpoints(tmp_path) == ()
