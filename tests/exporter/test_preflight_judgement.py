"""Preflight: right answers pass, one wrong bit fails, and what cannot be judged is never called a failure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from sdcwatch.errors import ConfigurationError  # noqa: E402
from sdcwatch.launch.halt_wait import judged  # noqa: E402
from sdcwatch.preflight import checks as preflight_checks  # noqa: E402
from sdcwatch.preflight import command as preflight  # noqa: E402


def test_this_machine_passes_every_check_with_known_answers() -> None:
    """On a healthy CPU each planned check runs at least once and passes."""
    report = preflight.judge(seconds=0.1, devices=["cpu"])
    assert report.outcome == "pass", preflight.describe(report)
    checks = {c.check for c in report.devices[0].checks}
    assert {
        "known_answer_float32",
        "known_answer_bfloat16",
        "recorded_float32",
        "recorded_bfloat16",
        "recorded_float16",
        "recorded_float64",
        "recorded_training",
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
    products = {c.check for c in report.devices[0].checks if c.check.startswith(("known_answer", "recorded"))}
    assert set(failed) == products - {"recorded_training"}
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


@pytest.mark.parametrize("error", ["OSError('libcudart.so.12: cannot open')", "RuntimeError('numpy clash')"])
def test_torch_that_breaks_at_import_could_not_judge(tmp_path: Path, error: str) -> None:
    """Started as `sdcwatch run` starts it: a broken installation is 3, not the 1 of a Python that crashed."""
    (tmp_path / "torch.py").write_text(f"raise {error}\n")
    program = f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); sys.argv[1:] = ['--json']\n"
    program += "runpy.run_module('sdcwatch.preflight.command', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    assert error.split("'")[1] in json.loads(done.stdout)["detail"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_could_not_judge(capsys: pytest.CaptureFixture[str]) -> None:
    """`--device cuda:0` where this torch or machine has no CUDA says so and exits 3."""
    from sdcwatch.cli import main

    assert main(["preflight", "--json", "--seconds", "0.1", "--device", "cuda:0"]) == 3
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert (device["device"], device["outcome"]) == ("cuda:0", "unknown")


def test_a_gpu_that_is_lost_before_it_is_named_keeps_what_was_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong answer stays proof although the device no longer says its name."""

    def lost(*_: object) -> str:
        raise RuntimeError

    monkeypatch.setattr(torch.cuda, "get_device_name", lost)
    monkeypatch.setattr(preflight_checks, "plan", lambda *_: {"known": lambda: iter(["bit 3 is wrong"])})
    report = preflight.judge(seconds=0.1, devices=["cuda:0"])
    assert (report.outcome, report.devices[0].name) == ("fail", "cuda:0")


def test_any_crash_of_preflight_could_not_judge(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even an error that nobody foresaw, and without a text, never has the status of a failure."""

    def crash(**_: object) -> preflight.Report:
        raise AssertionError

    monkeypatch.setattr(preflight, "judge", crash)
    from sdcwatch.cli import main

    assert main(["preflight", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["outcome"] == "unknown"


@pytest.mark.parametrize(
    ("status", "printed", "result"),
    [
        (0, "", "pass"),
        (0, '{"outcome": "pass"}', "pass"),
        (0, '{"outcome": "fail"}', "unknown"),
        (1, 'a warning\n{"outcome": "fail"}', "fail"),
        (1, "Traceback (most recent call last):", "unknown"),
        (1, '{"outcome": "unknown"}', "unknown"),
        (3, '{"outcome": "fail"}', "unknown"),
    ],
)
def test_only_a_failure_that_preflight_itself_tells_is_believed(status: int, printed: str, result: str) -> None:
    """Status 1 alone is what any Python program gives that crashed."""
    assert judged(status, printed) == result


def test_a_training_script_without_torch_is_told_so() -> None:
    """`from sdcwatch import Monitor` says which Python to use instead of a bare ImportError."""
    program = "import sys; sys.modules['torch'] = None\nfrom sdcwatch import Monitor"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "ConfigurationError: torch cannot be imported" in done.stderr
    assert "run this in the Python of your training image" in done.stderr
