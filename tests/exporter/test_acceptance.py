"""`python -m sdcwatch.acceptance` and benchmarks/gpu.py, as a user starts them, on small models."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sdcwatch.acceptance import trials, versions
from sdcwatch.acceptance.card import Cadence, Card, Times, Trial, json_text, text
from sdcwatch.acceptance.model import Shape
from sdcwatch.acceptance.trials import replay_told, same_bits

ROOT = Path(__file__).resolve().parents[2]
SMALL = Shape(32, 1, 64)
CADENCE = {"weight_checksum": Cadence(1, 4, 12), "gradient_checksum": Cadence(1, 1, 30), "replay": Cadence(0, 0, 0)}


def card(**changed: object) -> Card:
    trial = Trial("optimizer_weight", 2, 4, "weight_checksum", ("weight_checksum attributed at step 5",), (2,), True)
    fields: dict[str, object] = {
        "versions": {"torch": "2"}, "world_size": 3, "nodes": 3, "backend": "gloo", "parameters": 1000,
        "same_bits": True,
        "times": Times(3, (0.1, 0.2), (0.11, 0.21), 0.1, CADENCE), "memory_mb": 3.0, "trials": (trial,),
        "skipped": ("replay: no",),
    }  # fmt: skip
    return Card(**{**fields, **changed})  # type: ignore[arg-type]


def test_a_card_says_what_failed() -> None:
    """Other weights, or one trial, fail the whole card, in both forms."""
    good = card()
    assert good.passed
    assert "PASSED" in text(good)
    assert "not tried: replay" in text(good)
    assert json.loads(json_text(good))["passed"] is True
    bad = card(same_bits=False)
    assert not bad.passed
    assert "DIFFERENT" in text(bad)
    unknown = card(same_bits=None)
    assert unknown.passed
    assert "cannot be told" in text(unknown)
    assert json.loads(json_text(unknown))["same_bits"] is None
    missed = Trial("backward", 2, 4, "replay", (), (), False)
    assert "[FAILED] backward on rank 2" in text(card(trials=(missed,)))
    assert json.loads(json_text(card(trials=(missed,))))["passed"] is False


@pytest.mark.parametrize(
    ("equal", "control", "expected"), [(True, None, True), (False, True, False), (False, False, None)]
)
def test_other_weights_are_the_monitors_doing_only_where_a_control_ends_alike(
    equal: bool, control: bool | None, expected: bool | None
) -> None:
    """Kernels that are not deterministic differ without a monitor as well; equal weights need no control."""

    def run_again() -> bool:
        assert control is not None, "no third run where weights are equal"
        return control

    assert same_bits(equal, run_again) is expected


def test_a_card_says_how_often_the_timed_steps_were_checked() -> None:
    """An overhead means nothing without the cadence that it was measured at."""
    told = " ".join(text(card()).split())
    assert "weight_checksum every 1 to 4 steps (ran 12 times)" in told
    assert "gradient_checksum every step (ran 30 times)" in told
    assert "replay off" in told
    held = json.loads(json_text(card()))["times"]["cadence"]
    assert held["weight_checksum"] == {"least": 1, "most": 4, "ran": 12}


def test_a_card_shows_memory_below_nothing_as_it_was_measured() -> None:
    """Peaks do not repeat to the megabyte; a number that is cut off at 0 would hide by how much."""
    assert "without the monitor: -3 MB" in text(card(memory_mb=-3.2))


def test_every_part_has_its_version_or_none() -> None:
    """The same keys on every machine, whatever it lacks, each with a value."""
    found = versions.of_rank(torch.device("cpu"))
    assert set(found) == {
        "sdcwatch", "python", "torch", "cuda", "cudnn", "nccl", "gpu", "triton", "xxhash", "driver", "cpu", "os",
        "kernel", "torch threads",
    }  # fmt: skip
    assert all(found.values())
    assert [found[name] for name in ("gpu", "driver", "cudnn")] == ["none"] * 3
    assert found["torch threads"] == str(torch.get_num_threads())
    assert found["kernel"].endswith(os.uname().release)


def test_versions_of_ranks_that_differ_are_all_on_the_card() -> None:
    """One node with another driver is what a card should show."""
    ranks = [{"driver": "550.54.15", "os": "a"}, {"driver": "535.1", "os": "a"}, {"driver": "550.54.15", "os": "a"}]
    assert versions.merged(ranks) == {"driver": "535.1 / 550.54.15", "os": "a"}


def test_names_are_read_from_what_the_kernel_says(tmp_path: Path) -> None:
    """The driver's number in the lines of both kernel modules; a processor without a name has an architecture."""
    for line in ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
                 "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build"):  # fmt: skip
        assert versions.driver_version(line) == "550.54.15"
    assert versions.driver_version("unknown") == "unknown"
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t: a\n")
    assert versions.cpu_model(tmp_path / "cpuinfo") == "Some CPU @ 2 GHz"
    (tmp_path / "cpuinfo").write_text("processor\t: 0\n")
    assert versions.cpu_model(tmp_path / "cpuinfo") == versions.cpu_model(tmp_path / "missing") != ""


@pytest.mark.parametrize(
    ("passed", "control", "expected"), [(True, None, True), (False, "", False), (False, "said software", None)]
)
def test_a_replay_fails_only_where_runs_without_a_fault_repeat_themselves(
    passed: bool, control: str | None, expected: bool | None
) -> None:
    """Steps that are unlike their own repetition blame nobody; a trial that passed needs no control."""

    def run_again() -> str:
        assert control is not None, "no run without a fault where the fault was found"
        return control

    trial = Trial("backward", 2, 4, "replay", ("replay attributed at step 4",), (1,), passed)
    told = replay_told(trial, run_again)
    assert told.passed is expected
    if expected is None:
        shown = text(card(trials=(told,)))
        assert "[cannot be told] backward on rank 2" in shown
        assert "without a fault, said software" in shown
        assert "names 1" not in shown
        assert json.loads(json_text(card(trials=(told,))))["passed"] is True


def node_of_its_own(rank: int, folder: str) -> str:
    """A spool for each rank, as on nodes of their own."""
    torch.manual_seed(0)
    os.environ["SDCWATCH_NODE"] = f"n{rank}"
    return str(Path(folder) / str(rank))


def replayed(rank: int, size: int, folder: str, loss: Callable[..., Any]) -> list[dict[str, Any]]:
    """The replay trial alone, under a loss of its own."""
    trials.loss_fn = loss  # this process ends with the test
    trials._FAULTS = trials._FAULTS[-1:]
    common = {"job": "j", "agent": "off", "spool_dir": node_of_its_own(rank, folder), "on_fault": "observe"}
    found, _ = trials._faults(SMALL, torch.device("cpu"), common, size, float("inf"), repeats=True)
    return [dataclasses.asdict(trial) for trial in found[1:]]


def noisy(original: Callable[..., torch.Tensor], model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """A loss that no replay repeats."""
    return original(model, tokens) * (1 + int.from_bytes(os.urandom(2), "big") / 2**20)


def test_a_replay_of_kernels_that_do_not_repeat_themselves_cannot_be_told(ranks: Any, tmp_path: Path) -> None:
    """Three real ranks: not FAILED, for the same run without the fault cannot be audited either."""
    for (trial,) in ranks(replayed, 3, str(tmp_path), functools.partial(noisy, trials.loss_fn)):
        assert trial["passed"] is None
        assert "of 8 audits were judged" in trial["control"]


def missed(rank: int, size: int, folder: str) -> list[dict[str, Any]]:
    """The replay trial of a monitor whose replays see nothing."""
    trials.FaultPlan.install = lambda *a, **k: None
    return replayed(rank, size, folder, trials.loss_fn)


def test_a_missed_fault_fails_where_a_run_without_it_repeats_itself(ranks: Any, tmp_path: Path) -> None:
    """The control must not excuse a fault that was not found."""
    for (trial,) in ranks(missed, 3, str(tmp_path)):
        assert trial["passed"] is False
        assert trial["control"] == ""


def measured(rank: int, size: int, folder: str, megabytes: int) -> tuple[float, dict[str, Any], bool | None]:
    """Memory, times and bits of the card where the monitor holds so much more than it does."""

    class Greedy(trials.Monitor):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self.held = torch.ones(megabytes << 18)

    trials.Monitor = Greedy  # type: ignore[misc]
    trials._FAULTS = ()
    spool = node_of_its_own(rank, folder)
    found = trials.run(Shape(256, 2, 64), torch.device("cpu"), pairs=3, seconds=60, spool=spool)
    return found.memory_mb, dataclasses.asdict(found.times), found.same_bits


def test_memory_is_what_the_monitor_holds_and_no_part_of_a_model(ranks: Any, tmp_path: Path) -> None:
    """A monitor that holds 64 MB more: that, a few of its own, and nothing of the second model's five times 7 MB."""
    for memory, times, bits in ranks(measured, 2, str(tmp_path), 64):
        assert 55 < memory < 95
        cadence = times["cadence"]["weight_checksum"]
        assert cadence["least"] >= 1  # the budget may stretch it, on a busy machine at once
        assert 0 <= cadence["ran"] <= 3
        assert bits is True


@pytest.mark.integration
@pytest.mark.timeout(400)
def test_acceptance_passes_on_three_ranks(tmp_path: Path) -> None:
    """Every fault is found, the failing rank is named where it can be, nobody else is, and weights are equal."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "sdcwatch.acceptance"]
    small = ["--pairs", "3", "--width", "32", "--layers", "1", "--tokens", "64", "--ranks-a-node", "1"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *small, "--json", str(tmp_path / "card.json")],
        capture_output=True, text=True, timeout=380, env=environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "card.json").read_text())
    assert found["same_bits"]
    assert found["versions"]["torch threads"] == "1"
    assert found["times"]["cadence"]["weight_checksum"]["ran"] > 0
    assert [t["named"] for t in found["trials"] if t["location"] in ("optimizer_weight", "backward")] == [[2], [2]]


@pytest.mark.integration
@pytest.mark.timeout(400)
def test_the_gpu_script_runs_on_a_cpu(tmp_path: Path) -> None:
    """Every number of the script is there, weights are equal, and a file holds what was printed."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--tiny"]
    command += ["--json", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout[done.stdout.index('{\n "device"') :])
    assert found == json.loads((tmp_path / "gpu.json").read_text())
    assert found["bits"] == {"same_bits": True, "control_same_bits": True, "steps": 3}
    assert found["bandwidth"]["share"] > 0
    assert found["read_after_backward"]["step_ms"] > 0
    assert found["tiny"]["added_ms"] > 0
    assert found["tiny"]["host_reads"] > 0
