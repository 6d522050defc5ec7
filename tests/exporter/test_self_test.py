"""The self-test at start: every check finds an injected fault, and one that cannot is said to be blind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sdcwatch.catalog import CHECKS
from sdcwatch.watch import self_test


def test_every_check_finds_the_injection_and_leaves_no_trace() -> None:
    """Nothing is blind, it takes milliseconds, and the random state is the user's."""
    before = torch.get_rng_state()
    self_test.run(torch.device("cpu"))
    found = min((self_test.run(torch.device("cpu")) for _ in range(5)), key=lambda result: result.seconds)
    assert found.blind == ()
    assert found.seconds < 0.2
    assert torch.equal(torch.get_rng_state(), before)
    assert {*self_test.CHECKS, "checkpoint"} == set(CHECKS)


def nothing(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("name", "broken", "blind"),
    [
        ("fingerprint", lambda tensors: 7, {"gradient_checksum", "weight_checksum", "replay"}),
        ("norm", lambda tensor: torch.ones(()), {"gradient_norm"}),
        ("weights", lambda count, seed: torch.zeros(count, dtype=torch.float64), {"allreduce_conservation"}),
        ("fingerprint", nothing, set(self_test.CHECKS)),
        ("judge", nothing, set(self_test.CHECKS)),
    ],
)
def test_a_check_that_cannot_see_is_blind(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Any, blind: set[str]
) -> None:
    """A fingerprint that is always the same, a constant norm, weights of zero, and code that raises."""
    monkeypatch.setattr(self_test, name, broken)
    assert set(self_test.run(torch.device("cpu")).blind) == blind


def start(rank: int, size: int, root: str, broken: bool) -> Any:
    from sdcwatch import Monitor
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    if broken and rank == 1:
        self_test.norm = lambda tensor: torch.ones(())  # type: ignore[assignment]
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    monitor = Monitor(ddp, optimizer, spool_dir=f"{root}/node-{rank}", node=f"node-{rank}")
    with monitor.step(0):
        ddp(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    assert monitor._epoch is not None
    metrics = monitor._epoch.reporter.metrics
    found = {
        name: (metrics.get("sdc_self_test_passed", check=name), metrics.get("sdc_detector_enabled", check=name))
        for name in ("gradient_norm", "weight_checksum")
    }
    verdicts = monitor.verdicts
    monitor.close()
    return found, verdicts


@pytest.mark.parametrize("broken", [False, True])
def test_a_rank_that_is_blind_shows_on_all(ranks: Any, tmp_path: Path, broken: bool) -> None:
    """The metric that SDCCheckDisabled reads falls to 0 on every rank; the injection itself is no verdict anywhere."""
    for found, verdicts in ranks(start, 2, str(tmp_path), broken):
        assert found["weight_checksum"] == (1, 1)
        assert found["gradient_norm"] == ((0, 0) if broken else (1, 1))
        assert verdicts == ()
