"""Coverage: bytes are counted, and what no check reaches has a line that says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sdcwatch.watch.coverage import describe, measure, predicted_seconds, table
from torch import nn


def model() -> tuple[nn.Module, list[nn.Parameter], torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    return net, list(net.parameters()), torch.optim.Adam(net.parameters())


def test_bytes_of_parameters_state_and_buffers_are_counted() -> None:
    """Adam holds two moments a parameter and one float32 step counter each."""
    net, parameters, optimizer = model()
    elements = sum(p.numel() for p in parameters)
    assert measure(net, parameters, optimizer).optimizer == (0, 0)
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    sizes = measure(net, parameters, optimizer)
    assert sizes.parameters == (4 * elements, 0)
    assert sizes.optimizer == (8 * elements + 4 * len(parameters), 0)
    assert sizes.buffers == 8 * 4 * 2 + 8
    assert sizes.unwatched == 0


def test_tied_parameters_are_counted_once() -> None:
    """One entry a storage (field case 7)."""
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    assert measure(net, list(net.parameters()), torch.optim.SGD(net.parameters())).parameters == (64, 0)


def test_what_the_optimizer_does_not_step_is_counted_apart() -> None:
    """A second optimizer's parameters are compared at rest only, and the table says so."""
    net, parameters, _ = model()
    sizes = measure(net, parameters, torch.optim.SGD(parameters[:1]))
    assert sizes.unwatched == 4 * sum(p.numel() for p in parameters[1:])
    assert "not watched" in table(describe(sizes, **OPTIONS), sizes, 0.0)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(
    ("make", "missed"),
    [
        (lambda: torch.empty(4, device="meta"), 16),
        (lambda: torch.eye(4).to_sparse(), 4 * 4 + 2 * 4 * 8),
        (lambda: torch.eye(4).to_sparse_csr(), 4 * 4 + 4 * 8 + 5 * 8),
    ],
    ids=["meta", "coo", "csr"],
)
def test_state_that_no_fingerprint_reads_is_counted_as_missed(make: Callable[[], torch.Tensor], missed: int) -> None:
    """Bytes, never a claim."""
    net, parameters, optimizer = model()
    optimizer.state[parameters[0]]["odd"] = make()
    assert measure(net, parameters, optimizer).optimizer == (0, missed)


OPTIONS: dict[str, Any] = {"check_every": 2, "conservation_every": 2, "replay_every": 10, "replay_off": "", "nodes": 4}


@pytest.mark.parametrize(
    ("change", "enabled", "reason"),
    [
        ({}, True, ""),
        ({"replay_every": 0}, False, "replay_every is 0"),
        ({"replay_off": "disabled: Monitor has no loss_fn"}, False, "no loss_fn"),
    ],
)
def test_replay_that_is_off_says_why(change: dict[str, Any], enabled: bool, reason: str) -> None:
    """Its bytes move from covered to uncovered, and the log shows OFF."""
    net, parameters, optimizer = model()
    sizes = measure(net, parameters, optimizer)
    lines = describe(sizes, **{**OPTIONS, **change})
    replay = next(line for line in lines if line.check == "replay")
    total = sizes.parameters[0]
    assert replay.enabled is enabled
    assert reason in replay.reason
    assert (replay.covered_bytes, replay.uncovered_bytes) == ((total, 0) if enabled else (0, total))
    assert ("OFF" in table(lines, sizes, 0.0)) is not enabled


def test_conservation_under_a_comm_hook_covers_nothing_and_says_so() -> None:
    """Its bytes are uncovered and the log shows why."""
    net, parameters, optimizer = model()
    sizes = measure(net, parameters, optimizer)
    lines = describe(sizes, **OPTIONS, conservation_off="comm_hook: the user's own")
    line = next(line for line in lines if line.check == "allreduce_conservation")
    assert (line.enabled, line.covered_bytes, line.uncovered_bytes) == (False, 0, sizes.parameters[0])
    assert "OFF (comm_hook" in table(lines, sizes, 0.0)


def test_each_check_that_runs_has_a_line_with_its_cadence() -> None:
    """Two nodes can name nobody, and the line says so."""
    net, parameters, optimizer = model()
    sizes = measure(net, parameters, optimizer)
    lines = {line.check: line for line in describe(sizes, **{**OPTIONS, "nodes": 2})}
    assert {name: line.every for name, line in lines.items()} == {
        "gradient_norm": 2,
        "gradient_checksum": 2,
        "allreduce_conservation": 2,
        "weight_checksum": 2,
        "replay": 10,
    }
    assert "nobody can be named" in lines["weight_checksum"].covers
    assert "buffers" in table(tuple(lines.values()), sizes, 0.001)


def test_prediction_measures_and_leaves_no_trace() -> None:
    """A positive number of seconds from the parameters themselves; none without parameters."""
    net, parameters, optimizer = model()
    sizes = measure(net, parameters, optimizer)
    before = [p._version for p in parameters]
    assert 0 < predicted_seconds(parameters, sizes) < 10
    assert predicted_seconds([], sizes) == 0.0
    assert [p._version for p in parameters] == before
