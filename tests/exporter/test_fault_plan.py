"""Fault plans: read strictly, installed before the monitor, and they strike where and when they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sdcwatch.errors import ConfigurationError
from sdcwatch.fingerprint import fingerprint
from sdcwatch.testing import LOCATIONS, Fault, FaultPlan
from torch import nn

VARIABLE = "SDCWATCH_TESTING_FAULT"


def plan(*faults: Any) -> FaultPlan:
    return FaultPlan.from_environment({VARIABLE: json.dumps(list(faults))})


def test_a_plan_is_read_from_the_environment() -> None:
    """One object or a list; nothing without the variable."""
    one = {"rank": 1, "step": 3, "location": "backward"}
    assert FaultPlan.from_environment({}).faults == ()
    assert FaultPlan.from_environment({VARIABLE: json.dumps(one)}).faults == (Fault(**one),)
    assert (
        plan(one, {**one, "step": 4}).faults
        == FaultPlan().fail_at(1, 3, location="backward").fail_at(1, 4, location="backward").faults
    )


@pytest.mark.parametrize(
    "text",
    [
        "{", "5", "null", "[5]", '"backward"', "{}",
        '{"rank": 1, "step": 3}',
        '{"rank": 1, "step": 3, "location": "backward", "color": 1}',
        '{"rank": 1, "step": 3, "location": "sideways"}',
        '{"rank": 1, "step": 3, "location": "backward", "pattern": "gamma_rays"}',
        '{"rank": 1, "step": 3, "location": "backward", "mode": "sometimes"}',
        '{"rank": 1, "step": "3", "location": "backward"}',
        '{"rank": true, "step": 3, "location": "backward"}',
        '{"rank": 1, "instance": "i-1", "step": 3, "location": "backward"}',
        '{"step": 3, "location": "backward"}',
        '{"rank": 1, "step": 3, "location": "backward", "marker": "/tmp/x"}',
    ],
)  # fmt: skip
def test_a_plan_that_makes_no_sense_is_refused(text: str) -> None:
    """A fault that silently does nothing would be a test that proves nothing."""
    with pytest.raises(ConfigurationError, match=VARIABLE):
        FaultPlan.from_environment({VARIABLE: text})


def train(rank: int, size: int, text: str, steps: int = 4, first_step: int = 0) -> list[tuple[int, int, int]]:
    """Per step: fingerprints of the reduced gradient, weights as the forward began, and weights with momentum after."""
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    FaultPlan.from_environment({VARIABLE: text}).install(ddp, optimizer, first_step=first_step)
    found = []
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ddp(torch.randn(3, 4, generator=generator)).square().sum()
        start = fingerprint(ddp.parameters())
        loss.backward()
        gradient = fingerprint(p.grad for p in ddp.parameters())
        optimizer.step()
        state = [optimizer.state[p]["momentum_buffer"] for p in ddp.parameters()]
        found.append((start, gradient, fingerprint([*ddp.parameters(), *state])))
    return found


def place(clean: list[Any], hit: list[Any]) -> tuple[int, int] | None:
    """First step, and first of (forward, gradient, end of step) in it, that differs."""
    for step, (one, other) in enumerate(zip(clean, hit, strict=True)):
        for column in range(3):
            if one[column] != other[column]:
                return step, column
    return None


@pytest.mark.parametrize("location", LOCATIONS)
def test_a_fault_strikes_first_where_and_when_it_says(ranks: Any, location: str) -> None:
    """Step 2 of rank 1: the forward, the gradient or the end of the step is the first to differ there."""
    clean = ranks(train, 2, "")
    fault = {"rank": 1, "step": 2, "location": location, "pattern": "scale", "seed": 1}
    hit = ranks(train, 2, json.dumps(fault))
    at_end = ("optimizer_weight", "optimizer_state", "optimizer_state_at_rest")
    column = 0 if location == "weights_at_rest" else 2 if location in at_end else 1
    assert clean[0] == clean[1]
    assert place(clean[1], hit[1]) == (2, column)
    # what is struck before the reduce reaches the other rank at once, what comes after it not in this step
    alone = (*at_end, "reduced_gradient", "reduced_gradient_some")
    spread = place(clean[0], hit[0])
    assert spread is None or spread[0] > 2 if location in alone else spread == (2, 1)


def test_a_transient_fault_with_a_marker_strikes_once_across_restarts(ranks: Any, tmp_path: Path) -> None:
    """The run that starts again on the same machine, from the same step, is clean, whatever its process id."""
    fault = {
        "rank": 0, "step": 1, "location": "reduced_gradient", "mode": "transient", "marker": str(tmp_path / "struck"),
    }  # fmt: skip
    clean = ranks(train, 1, "")
    assert place(clean[0], ranks(train, 1, json.dumps(fault))[0]) == (1, 1)
    assert (tmp_path / "struck").exists()
    assert place(clean[0], ranks(train, 1, json.dumps(fault))[0]) is None


def twice(rank: int, size: int, text: str) -> list[Any]:
    return [train(rank, size, text), train(rank, size, text)]


def test_a_marker_outlives_a_process_id(ranks: Any, tmp_path: Path) -> None:
    """A restarted container often gets the process id that it had."""
    fault = {
        "rank": 0, "step": 1, "location": "reduced_gradient", "mode": "transient", "marker": str(tmp_path / "struck"),
    }  # fmt: skip
    first, second = ranks(twice, 1, json.dumps(fault))[0]
    assert place(first, second) == (1, 1)
    assert place(second, ranks(train, 1, "")[0]) is None


def by_instance(rank: int, size: int, text: str) -> Any:
    import os

    os.environ["SDCWATCH_INSTANCE"] = f"i-{rank}"
    return train(rank, size, text)


def test_a_fault_with_an_instance_follows_the_machine(ranks: Any) -> None:
    """Whatever rank runs on it."""
    fault = {"instance": "i-1", "step": 1, "location": "reduced_gradient"}
    clean, hit = ranks(train, 2, ""), ranks(by_instance, 2, json.dumps(fault))
    assert place(clean[1], hit[1]) == (1, 1)
    assert hit[0][1][1] == clean[0][1][1]


def late(rank: int, size: int, root: str) -> str:
    from sdcwatch import Monitor

    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    monitor = Monitor(ddp, optimizer, spool_dir=f"{root}/{rank}", node=f"n{rank}")
    faults = FaultPlan().fail_at(rank, 1, location="backward")
    try:
        FaultPlan().install(ddp, optimizer, first_step=0)
        faults.install(ddp, optimizer, first_step=0)
    except ConfigurationError as error:
        return str(error)
    finally:
        monitor.close()
    return "installed"


def test_a_plan_after_the_monitor_is_refused(ranks: Any, tmp_path: Path) -> None:
    """It would strike after the look; an empty plan does no harm."""
    assert ranks(late, 2, str(tmp_path)) == ["install the fault plan before making the Monitor"] * 2


def test_an_installed_fault_is_announced(ranks: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody takes a drill for the real thing."""
    ranks(train, 1, json.dumps({"rank": 0, "step": 1, "location": "backward"}), 1)
    assert "sdcwatch.testing: rank 0 will fail" in capfd.readouterr().err
