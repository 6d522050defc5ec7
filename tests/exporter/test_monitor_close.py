"""What `close()` leaves behind: nothing that keeps the model alive, and a step that was under way ends well."""

from __future__ import annotations

from typing import Any

import pytest


def loss_fn(model: Any, batch: Any) -> Any:
    return model(batch).square().sum()


def watched(rank: int, root: str, **settings: Any) -> tuple[Any, Any, Any]:
    """A small DDP model, its optimizer and a monitor on them."""
    import torch
    from sdcwatch import Monitor
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    given = {"loss_fn": loss_fn, "spool_dir": f"{root}/node-{rank}", "node": f"node-{rank}", "replay_every": 2}
    return ddp, optimizer, Monitor(ddp, optimizer, **given | settings)


def batch(rank: int, step: int) -> Any:
    import torch

    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def lifetimes(rank: int, size: int, root: str, settings: dict[str, Any]) -> tuple[dict[str, bool], float]:
    """Which objects of a closed loop outlive their scope, the garbage collector apart; how many steps were checked."""
    import gc
    import weakref

    alive: dict[str, weakref.ref[Any]] = {}

    def train() -> float:
        ddp, optimizer, monitor = watched(rank, root, **settings)
        alive.update(ddp=weakref.ref(ddp), optimizer=weakref.ref(optimizer), monitor=weakref.ref(monitor))
        for step in range(1, 6):
            with monitor.step(step) as s:
                s.loss(batch(rank, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        monitor.close()
        return monitor.summary().get("sdcwatch/ran/gradient_checksum", 0.0)  # on the rank that writes it

    gc.collect()
    gc.disable()
    checked = train()
    return {name: reference() is not None for name, reference in alive.items()}, checked


@pytest.mark.parametrize("settings", [{}, {"on_fault": "heal"}, {"replay_every": 0}, {"evidence_mb": 16}], ids=str)
def test_after_close_the_model_goes_with_its_scope(ranks: Any, tmp_path: Any, settings: dict[str, Any]) -> None:
    """No cycle of ours: where DDP outlives its process group, torch can hang the process at its end."""
    results = ranks(lifetimes, 3, str(tmp_path), settings)
    assert [alive for alive, _ in results] == [{"ddp": False, "optimizer": False, "monitor": False}] * 3
    assert results[0][1] == 5


def test_a_step_in_which_close_is_called_ends_as_it_would_without_the_monitor(ranks: Any, tmp_path: Any) -> None:
    """Before the loss, before the backward, before the optimizer: nothing raises, and the weights are the same."""

    def body(rank: int, size: int, root: str, close_before: str) -> bytes:
        ddp, optimizer, monitor = watched(rank, f"{root}/{close_before}")
        for step in (1, 2, 3):
            with monitor.step(step) as s:
                for part in ("loss", "backward", "optimizer", "zero", "end"):
                    if step == 3 and part == close_before:
                        monitor.close()
                    if part == "loss":
                        loss = s.loss(batch(rank, step))
                    elif part == "backward":
                        loss.backward()
                    elif part == "optimizer":
                        optimizer.step()
                    elif part == "zero":
                        optimizer.zero_grad()
        monitor.close()
        return b"".join(p.detach().numpy().tobytes() for p in ddp.parameters())

    parts = ("loss", "backward", "optimizer", "zero", "never")
    finals = [weights for part in parts for weights in ranks(body, 3, str(tmp_path), part)]
    assert len(set(finals)) == 1
