"""`python -m sdcwatch.acceptance` and benchmarks/gpu.py, as a user starts them, on small models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sdcwatch.acceptance.card import Card, Times, Trial, json_text, text
from sdcwatch.acceptance.trials import same_bits

ROOT = Path(__file__).resolve().parents[2]


def card(**changed: object) -> Card:
    trial = Trial("optimizer_weight", 2, 4, "weight_checksum", ("weight_checksum attributed at step 5",), (2,), True)
    fields: dict[str, object] = {
        "versions": {"torch": "2"}, "world_size": 3, "nodes": 3, "backend": "gloo", "parameters": 1000,
        "same_bits": True,
        "times": Times(3, (0.1, 0.2), (0.11, 0.21), 0.1), "memory_mb": 3.0, "trials": (trial,),
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
