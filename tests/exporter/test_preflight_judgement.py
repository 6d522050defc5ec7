"""Preflight: right answers pass, one wrong bit fails, and what cannot be judged is never called a failure."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from sdcwatch import preflight, preflight_checks  # noqa: E402
from sdcwatch.errors import ConfigurationError  # noqa: E402


def test_this_machine_passes_every_check_with_known_answers() -> None:
    """On a healthy CPU each planned check runs at least once and passes."""
    report = preflight.judge(seconds=0.1, devices=["cpu"])
    assert report.outcome == "pass", preflight.describe(report)
    checks = {c.check for c in report.devices[0].checks}
    assert {
        "known_answer_float32",
        "known_answer_bfloat16",
        "repeat_matmul",
        "training_step",
        "memory_pattern",
    } <= checks
    assert all(c.rounds >= 1 for c in report.devices[0].checks)


def test_one_wrong_bit_in_one_entry_fails() -> None:
    """The smallest error a multiplier can make, at one place, is seen in every type and named with its entry."""

    def bad(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        result = torch.matmul(left, right)
        integers = result.view({4: torch.int32, 2: torch.int16, 8: torch.int64}[result.element_size()])
        integers[7, 11] ^= 1
        return result

    report = preflight.judge(seconds=0.1, devices=["cpu"], matmul=bad)
    assert report.outcome == "fail"
    failed = {c.check: c.detail for c in report.devices[0].checks if c.outcome == "fail"}
    assert set(failed) == {c for c in (r.check for r in report.devices[0].checks) if c.startswith("known_answer")}
    assert "[7,11]" in failed["known_answer_float32"]


def test_intermittent_error_fails_repeatability() -> None:
    """A product that changes between two equal calls is proof, even though neither answer is known."""
    calls = 0

    def flaky(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.matmul(left, right) + (1e-6 if calls == 3 else 0.0)

    rounds = preflight_checks.repeat_matmul(torch, torch.device("cpu"), flaky)
    assert "changed between two equal calls" in str(next(rounds))


def test_an_error_takes_the_judgement_away_and_accuses_nobody() -> None:
    """Out of memory or a missing kernel is "could not judge", exit status 3."""

    def broken(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    report = preflight.judge(seconds=0.1, devices=["cpu"], matmul=broken)
    assert report.outcome == "unknown"
    assert preflight.STATUS[report.outcome] == 3
    assert "out of memory" in preflight.describe(report)


def test_judging_leaves_the_random_state_alone() -> None:
    """The checks seed their own generators; a caller's numbers go on as before."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    preflight.judge(seconds=0.1, devices=["cpu"])
    assert torch.equal(torch.rand(3), expected)


def test_unknown_device_is_wrong_use() -> None:
    """A name torch does not know is an error of the caller, not of the machine."""
    with pytest.raises(ConfigurationError, match="--device"):
        preflight.judge(devices=["gpu9"])


def test_missing_torch_could_not_judge() -> None:
    """Without torch the command says so and exits 3."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from sdcwatch.cli import main\nsys.exit(main(['preflight', '--json', '--seconds', '1']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    assert "torch cannot be imported" in json.loads(done.stdout)["detail"]
