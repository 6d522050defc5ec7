"""What real loops do on healthy hardware: nobody is named, nothing is halted, and the checks still run.

Each case once made a healthy job look broken, or a check go blind.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

Case = Callable[[int, str], Any]


def watched(rank: int, root: str, net: nn.Module, *, ddp: dict[str, Any] | None = None, **settings: Any) -> Any:
    """(ddp model, optimizer, monitor, batches) of one rank; `node` and `optimizer` may be given."""
    from sdcwatch import Monitor
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(net, **(ddp or {}))
    optimizer = settings.pop("optimizer", torch.optim.SGD)(model.parameters(), 1e-3)
    given = {
        "loss_fn": squares, "spool_dir": f"{root}/{rank}", "node": f"node-{rank}", "on_fault": "halt",
        "replay_every": 2, "conservation_every": 1,
    }  # fmt: skip
    monitor = Monitor(model, optimizer, **(given | settings))
    return model, optimizer, monitor, torch.Generator().manual_seed(rank)


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def told(monitor: Any) -> dict[str, Any]:
    """Verdicts, and how often each check ran (as the two ranks that write job series count it)."""
    metrics = monitor._epoch.reporter.metrics
    checks = ("gradient_checksum", "weight_checksum", "allreduce_conservation", "replay")
    reports = monitor._epoch.reporter.rank in monitor._epoch.membership.reporters()
    ran = {check: (metrics.get("sdc_checks_total", check=check) or 0) if reports else None for check in checks}
    verdicts = [(v.check, v.kind, v.suspects, v.contains) for v in monitor.verdicts]
    monitor.close()
    return {"verdicts": verdicts, **ran}


def plain_loop(rank: int, root: str, net: nn.Module, before: Callable[[int, nn.Module], None], **settings: Any) -> Any:
    _, optimizer, monitor, generator = watched(rank, root, net, **settings)
    for step in range(10):
        before(step, net)
        with monitor.step(step) as s:
            s.loss(torch.randn(8, 16, generator=generator)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return told(monitor)


def forgotten_eval(rank: int, size: int, root: str) -> Any:
    """Rank 0 evaluates in mid-run and forgets `train()`: dropout is off there only."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    return plain_loop(rank, root, net, lambda step, net: net.eval() if step == 5 and rank == 0 else None)  # type: ignore[func-returns-value]


def precision(rank: int, size: int, root: str) -> Any:
    """A library on rank 0 changes a flag that decides bits."""
    torch.manual_seed(0)

    def before(step: int, net: nn.Module) -> None:
        if step == 5 and rank == 0:
            torch.set_float32_matmul_precision("medium")

    return plain_loop(rank, root, nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 4)), before)


def frozen_statistics(rank: int, size: int, root: str) -> Any:
    """Batch norm in eval mode, whose statistics rank 0 estimates anew for itself."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))
    net[1].eval()

    def before(step: int, net: nn.Module) -> None:
        if step == 5 and rank == 0:
            net.train()
            with torch.no_grad():
                net(torch.randn(8, 16))
            net[1].eval()  # type: ignore[index]

    return plain_loop(rank, root, net, before, ddp={"forward_sync_buffers": False})


def weighted_by_rank(rank: int, size: int, root: str) -> Any:
    """A loss weight in a closure that rank 0 lowers on its own validation loss."""
    torch.manual_seed(0)
    state = {"weight": 1.0}

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean() * state["weight"]

    def before(step: int, net: nn.Module) -> None:
        if step == 5 and rank == 0:
            state["weight"] = 0.5

    return plain_loop(rank, root, nn.Linear(16, 4), before, loss_fn=loss)


@pytest.mark.parametrize("case", [forgotten_eval, precision, frozen_statistics, weighted_by_rank])
def test_what_differs_on_one_rank_after_calibration_accuses_nobody(ranks: Any, tmp_path: Path, case: Any) -> None:
    """Train flags travel with the batch; flags of the process void an audit; other values calibrate anew."""
    for result in ranks(case, 3, str(tmp_path)):
        assert [v for v in result["verdicts"] if v[2] or v[3]] == []
        assert result["gradient_checksum"] in (10, None)


class Checkpointed(nn.Module):
    """Every layer but the first under a reentrant checkpoint, the last one included."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        from torch.utils.checkpoint import checkpoint

        hidden = checkpoint(self.b, self.a(x), use_reentrant=True)
        return {"out": checkpoint(self.c, torch.tanh(hidden), use_reentrant=True)}


def reentrant(rank: int, size: int, root: str, ddp: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model, optimizer, monitor, generator = watched(rank, root, Checkpointed(), ddp=ddp, replay_every=0)
    for step in range(5):
        with monitor.step(step):
            model(torch.randn(8, 16, generator=generator))["out"].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return told(monitor)


@pytest.mark.parametrize("ddp", [{}, {"static_graph": True}], ids=["plain", "static graph"])
def test_reentrant_checkpoints_end_in_one_exchange_after_the_reduce(
    ranks: Any, tmp_path: Path, ddp: dict[str, Any]
) -> None:
    """The first hooks fire in a nested graph task, whose callbacks run before DDP is done."""
    for result in ranks(reentrant, 3, str(tmp_path), ddp):
        assert result["verdicts"] == []
        assert result["gradient_checksum"] in (5, None)


class Elementwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(64))
        self.l = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(self.w * x)  # type: ignore[no-any-return]


def negative_zero(rank: int, size: int, root: str, zero_first: bool) -> Any:
    torch.manual_seed(0)
    _, optimizer, monitor, generator = watched(
        rank, root, Elementwise(), loss_fn=lambda model, batch: (model(batch) - 1.0).square().mean()
    )
    for step in range(12):
        with monitor.step(step) as s:
            if zero_first:
                optimizer.zero_grad()
            x = torch.randn(64, generator=generator).abs() + 0.1
            if step >= 7 and rank == 1:
                x[:32] = 0
            s.loss(x).backward()
            optimizer.step()
            if not zero_first:
                optimizer.zero_grad()
    return told(monitor)


@pytest.mark.parametrize("zero_first", [True, False])
def test_gradients_of_negative_zero_replay_alike_wherever_the_loop_zeroes(
    ranks: Any, tmp_path: Path, zero_first: bool
) -> None:
    """Whether a gradient is added to something is known as backward begins, not as the step does."""
    for result in ranks(negative_zero, 3, str(tmp_path), zero_first):
        assert result["verdicts"] == []
        assert result["replay"] in (6, None)


class WithExpert(nn.Module):
    _ddp_params_and_buffers_to_ignore = ("expert.weight", "expert.bias")

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.expert = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(x) + self.expert(x)  # type: ignore[no-any-return]


def expert(rank: int, size: int, root: str) -> Any:
    torch.manual_seed(0)
    return plain_loop(rank, root, WithExpert(), lambda *_: None, optimizer=torch.optim.AdamW, replay_every=0)


def noisy(rank: int, size: int, root: str) -> Any:
    """An optimizer that draws; rank 0 draws once more for a log."""

    class Langevin(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.randn_like(p) * 1e-4)

    torch.manual_seed(0)
    settings = {"optimizer": Langevin, "replay_every": 0}
    return plain_loop(
        rank, root, nn.Linear(16, 4), lambda s, _: torch.randperm(9) if s == 3 and rank == 0 else None, **settings
    )  # type: ignore[func-returns-value, arg-type]


def clipping_hook(rank: int, size: int, root: str) -> Any:
    """A hook of the user's, registered after the monitor, has an effect from step 5 on."""
    torch.manual_seed(0)
    net = nn.Linear(16, 8)
    model, optimizer, monitor, generator = watched(rank, root, net, replay_every=0)

    def clip(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.clamp_(-5, 5)

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    for step in range(10):
        with monitor.step(step):
            scale = 100.0 if step == 5 and rank == 1 else 1.0
            model(torch.randn(8, 16, generator=generator) * scale).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return told(monitor)


@pytest.mark.parametrize("case", [expert, noisy, clipping_hook])
def test_code_that_is_each_ranks_own_halts_nothing_and_names_nobody(ranks: Any, tmp_path: Path, case: Any) -> None:
    """State of an expert, numbers an optimizer draws, gradients a hook clips."""
    for result in ranks(case, 3, str(tmp_path)):
        assert [v for v in result["verdicts"] if v[2] or v[3]] == []
        assert result["gradient_checksum"] in (10, None)


def contrastive(rank: int, size: int, root: str) -> Any:
    """A loss that gathers features of all ranks, on nodes of two, one and one ranks."""
    import torch.distributed as dist

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        features = model(batch)
        gathered = [torch.empty_like(features) for _ in range(size)]
        dist.all_gather(gathered, features.detach().contiguous())
        everyone = torch.cat(gathered)
        return (features @ everyone.T).logsumexp(1).mean()

    torch.manual_seed(0)
    node = {0: "a", 1: "a", 2: "b", 3: "c"}[rank]
    return plain_loop(rank, root, nn.Linear(16, 8), lambda *_: None, loss_fn=loss, node=node)


def test_a_loss_with_collectives_on_uneven_nodes_is_a_skip(ranks: Any, tmp_path: Path) -> None:
    """Noticed in each rank's own replay, before any rank replays for another."""
    for result in ranks(contrastive, 4, str(tmp_path)):
        assert result["verdicts"] == []
        assert (result["replay"], result["gradient_checksum"]) in ((0, 10), (None, None))
