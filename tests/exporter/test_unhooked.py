"""Steps that go past the monitor are counted as not checked and said once; ordinary loops never are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

STEPS = 6


def trained(rank: int, root: str, step_of: Callable[..., None], **given: Any) -> dict[str, Any]:
    """Trains `STEPS` steps with `step_of(number, model, optimizers, monitor, batch)`; what was counted and said."""
    from sdcwatch import Monitor
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 4))
    make = given.pop("make", lambda p: torch.optim.SGD(p, 0.01, momentum=0.9))
    optimizers = [make(model.parameters())]
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sdcwatch").addHandler(handler)
    settings = {"spool_dir": f"{root}/{rank}", "node": f"node-{rank}", "replay_every": 0, "conservation_every": 1}
    monitor = Monitor(model, optimizers[0], **(settings | given))
    for number in range(STEPS):
        step_of(number, model, optimizers, monitor, torch.randn(4, 8, generator=torch.Generator().manual_seed(number)))
    metrics = monitor._epoch.reporter.metrics  # type: ignore[union-attr]
    checks = ("gradient_checksum", "weight_checksum", "replay")
    found = {
        "skips": {c: metrics.get("sdc_skips_total", check=c, reason="unhooked") for c in checks},
        "ran": metrics.get("sdc_checks_total", check="gradient_checksum"),
        "said": [line for line in lines if "not checked" in line],
        "verdicts": monitor.verdicts,
    }
    monitor.close()
    return found


def one(forward: Callable[..., torch.Tensor], monitor: Any, number: int, optimizer: Any, batch: torch.Tensor) -> None:
    with monitor.step(number):
        forward(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def bare_module(number: int, model: Any, optimizers: list[Any], monitor: Any, batch: torch.Tensor) -> None:
    one(model.module if number >= 2 else model, monitor, number, optimizers[0], batch)


def bare_forward(number: int, model: Any, optimizers: list[Any], monitor: Any, batch: torch.Tensor) -> None:
    one(model.forward if number >= 2 else model, monitor, number, optimizers[0], batch)


def from_the_start(number: int, model: Any, optimizers: list[Any], monitor: Any, batch: torch.Tensor) -> None:
    one(model.forward, monitor, number, optimizers[0], batch)


@pytest.mark.parametrize(("way", "missed"), [(bare_module, 4), (bare_forward, 4), (from_the_start, 6)])
def test_calls_past_the_hooks_are_counted_and_said_once(ranks: Any, tmp_path: Path, way: Any, missed: int) -> None:
    """`ddp.module(x)` and `ddp.forward(x)` run no hook: every such step is a skip of every check of a row."""
    for found in ranks(lambda rank, size: trained(rank, str(tmp_path), way), 2):
        assert found["skips"] == {"gradient_checksum": missed, "weight_checksum": missed, "replay": None}
        assert found["ran"] in (STEPS - missed, None)
        assert len(found["said"]) == 1
        assert "model.module(batch)" in found["said"][0]
        assert found["verdicts"] == ()


def replaced(number: int, model: Any, optimizers: list[Any], monitor: Any, batch: torch.Tensor) -> None:
    if number == 3:
        optimizers[0] = torch.optim.AdamW(model.parameters(), 0.01, fused=True)  # writes past version counters
    one(model, monitor, number, optimizers[0], batch)


def test_a_new_optimizer_is_counted_as_an_unchecked_one(ranks: Any, tmp_path: Path) -> None:
    """Gradients and weights are compared on; what the new optimizer did in its steps is a skip of the weight check."""
    for found in ranks(lambda rank, size: trained(rank, str(tmp_path), replaced), 2):
        # It steps three times from step 3 on; the last of them has no further backward that could show it.
        assert found["skips"] == {"gradient_checksum": None, "weight_checksum": 2, "replay": None}
        assert found["ran"] == STEPS
        assert len(found["said"]) == 1
        assert "make a new Monitor" in found["said"][0]


def accumulated(number: int, model: Any, optimizers: list[Any], monitor: Any, batch: torch.Tensor) -> None:
    """Each micro-batch in a step of its own, the optimizer outside of it, as libraries do."""
    import contextlib

    with monitor.step(number), contextlib.nullcontext() if number % 2 else model.no_sync():
        model(batch).square().mean().backward()
    if number % 2:
        optimizers[0].step()
        optimizers[0].zero_grad()


def closure(number: int, model: Any, optimizers: list[Any], monitor: Any, batch: torch.Tensor) -> None:
    def again() -> torch.Tensor:
        optimizers[0].zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    with monitor.step(number):
        optimizers[0].step(again)


def probed(number: int, model: Any, optimizers: list[Any], monitor: Any, batch: torch.Tensor) -> None:
    """A probe of gradients through the bare module, and an evaluation, beside a step that is checked."""
    model.module(batch).square().mean().backward()
    optimizers[0].zero_grad()
    with torch.no_grad():
        model.module(batch)
    one(model, monitor, number, optimizers[0], batch)


def loaded(number: int, model: Any, optimizers: list[Any], monitor: Any, batch: torch.Tensor) -> None:
    if number == 3:
        optimizers[0].step()  # a dry step, as some libraries make to have optimizer state
    one(model, monitor, number, optimizers[0], batch)


@pytest.mark.parametrize(
    ("way", "given", "counted"),
    [
        (accumulated, {}, None),
        (closure, {"make": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3)}, None),
        (probed, {}, None),
        (loaded, {}, 1),
    ],
    ids=["accumulated", "closure", "probed", "one dry step"],
)
def test_an_ordinary_loop_is_never_told_so(ranks: Any, tmp_path: Path, way: Any, given: Any, counted: Any) -> None:
    """Accumulation, closures, probes and one dry step: nothing is said, and nothing but the dry step counted."""
    for found in ranks(lambda rank, size: trained(rank, str(tmp_path), way, **given), 2):
        assert found["said"] == []
        assert set(found["skips"].values()) <= {None, counted}
        assert found["verdicts"] == ()
