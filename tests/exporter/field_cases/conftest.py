"""The shared small trainer of the field cases: one DDP model on real gloo ranks, each rank a node of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Body = Callable[["Trainer"], Any]
Field = Callable[..., list[Any]]


class Trainer:
    """One rank of a field case: `body` gets it and trains as the case says.

    Attributes:
        rank, size: of this process.
        net, ddp, optimizer: what is trained.
        root: a folder of the test; `settings` are those of its Monitors.
    """

    def __init__(self, rank: int, size: int, root: str, options: dict[str, Any], settings: dict[str, Any]) -> None:
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        self.rank, self.size, self.root, self.settings = rank, size, root, settings
        make = options.get("net") or (lambda: nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8)))
        self.net = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # `broadcast_buffers` has a successor in newer releases
            self.ddp = DistributedDataParallel(self.net, **options.get("ddp", {}))
        self.optimizer = (options.get("optimizer") or (lambda p: torch.optim.AdamW(p, 1e-2)))(self.ddp.parameters())
        self.generator = torch.Generator().manual_seed(100 + rank)
        self.monitor: Any = None
        torch.manual_seed(200 + rank)

    def watch(self, **more: Any) -> Any:
        """Makes the Monitor; `on_fault=halt`, so that a false verdict ends the test."""
        from sdcwatch import Monitor

        given = {"loss_fn": self.loss, "spool_dir": f"{self.root}/node-{self.rank}", "node": f"node-{self.rank}"}
        self.monitor = Monitor(
            self.ddp,
            self.optimizer,
            **(given | {"on_fault": "halt", "conservation_every": 1, "replay_every": 0} | self.settings | more),
        )
        return self.monitor

    @staticmethod
    def loss(model: Any, batch: Any) -> Any:
        import torch

        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def batch(self) -> Any:
        import torch

        return torch.randn(8, 16, generator=self.generator), torch.randint(8, (8,), generator=self.generator)

    def train(self, numbers: range, *, before: Callable[[int], None] | None = None) -> None:
        """The documented loop; `before` runs after backward and before the optimizer's step."""
        for number in numbers:
            with self.monitor.step(number) as step:
                step.loss(self.batch()).backward()
                if before is not None:
                    before(number)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def ran(self, check: str) -> float:
        """Runs of a check on this rank."""
        return float(self.monitor._epoch.reporter.metrics.get("sdc_checks_total", check=check) or 0)

    def skipped(self, check: str, reason: str) -> float:
        """Skips of a check on this rank."""
        return float(self.monitor._epoch.reporter.metrics.get("sdc_skips_total", check=check, reason=reason) or 0)

    def verdicts(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Check, kind and suspects of each verdict."""
        return [(v.check, v.kind, v.suspects) for v in self.monitor.verdicts]


def _body(rank: int, size: int, root: str, options: dict[str, Any], settings: dict[str, Any], body: Body) -> Any:
    trainer = Trainer(rank, size, root, options, settings)
    value = body(trainer)
    if trainer.monitor is not None:
        trainer.monitor.close()
    return value


@pytest.fixture
def field(ranks: Callable[..., list[Any]], tmp_path: Path) -> Field:
    """`field(body, size, options, **settings)` runs `body(trainer)` on every rank; results in rank order.

    Options: `net()`, `optimizer(parameters)`, `ddp` (arguments of DDP), `raw`, `timeout` (as `ranks` takes them).
    """

    def run(body: Body, size: int = 2, options: dict[str, Any] | None = None, **settings: Any) -> list[Any]:
        options = options or {}
        more = {name: options[name] for name in ("raw", "timeout") if name in options}
        return ranks(_body, size, str(tmp_path), options, settings, body, **more)

    return run
