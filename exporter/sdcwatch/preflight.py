"""`sdcwatch preflight`: can this machine's devices still calculate?

Judges the host's CPU and each CUDA device by answers that are known exactly, by repeating work bit for bit, by a small
deterministic training step, and by memory patterns. It accuses only what it can prove: an error or an unsupported type
is "could not judge", never a failure. A pass proves little against a rare fault; a failure proves much. It never joins
a process group and never touches a training job's files. torch is imported when a run begins, not before.
Flow: **preflight** -> `sdcwatch run`, remediation's evidence.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from sdcwatch.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

Outcome = Literal["pass", "fail", "unknown"]
#: Exit status of each outcome (docs/contracts.md).
STATUS: dict[str, int] = {"pass": 0, "fail": 1, "unknown": 3}
DEFAULT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check on one device: how often it ran and what it proved. `detail` is one sentence."""

    check: str
    outcome: Outcome
    rounds: int
    detail: str


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """All checks of one device. `device` as torch names it, `name` as its maker does."""

    device: str
    name: str
    outcome: Outcome
    checks: tuple[CheckResult, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The judgement of one machine. `seconds` is what it took."""

    outcome: Outcome
    seconds: float
    devices: tuple[DeviceReport, ...]
    detail: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--seconds",
        type=float,
        default=DEFAULT_SECONDS,
        help=f"time for all devices together; each check runs at least once (default: {DEFAULT_SECONDS:g})",
    )
    parser.add_argument("--device", action="append", metavar="DEVICE", help="cpu, cuda:0, ...; default: all there are")


def main(arguments: argparse.Namespace) -> int:
    """0 pass, 1 fail, 3 could not judge."""
    if not arguments.seconds > 0:
        raise ConfigurationError("--seconds must be above 0")
    report = judge(seconds=arguments.seconds, devices=arguments.device)
    if arguments.json:
        print(json.dumps({"schema": 1, **asdict(report)}))
    else:
        print(describe(report))
    return STATUS[report.outcome]


def describe(report: Report) -> str:
    """The report for a person: a line a check, the judgement last."""
    lines = []
    for device in report.devices:
        lines.append(f"{device.device} ({device.name}): {device.outcome}")
        lines.extend(f"  {c.check:<22} {c.outcome:<8} {c.rounds:>5} rounds  {c.detail}" for c in device.checks)
    words = {"pass": "pass", "fail": "FAIL", "unknown": "could not judge"}[report.outcome]
    lines.append(f"preflight: {words} in {report.seconds:.1f} s" + (f": {report.detail}" if report.detail else ""))
    return "\n".join(lines)


def judge(
    *,
    seconds: float = DEFAULT_SECONDS,
    devices: list[str] | None = None,
    matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> Report:
    """Runs all checks.

    Args:
        seconds: time for all devices together.
        devices: torch device names; None: the CPU and every CUDA device.
        matmul: what multiplies in the known-answer and repeatability checks; None: `torch.matmul`.

    Raises:
        ConfigurationError: a device name that torch does not know.
    """
    started = time.monotonic()
    # cuBLAS is reproducible only with a fixed workspace, and reads this when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return Report("unknown", time.monotonic() - started, (), f"torch cannot be imported ({error}); use its Python")
    names = devices or ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    reports = []
    for name in names:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ConfigurationError(f"--device {name!r} is no torch device: {str(error).splitlines()[0]}") from error
        reports.append(_judge_device(torch, device, seconds / len(names), matmul or torch.matmul))
    return Report(_worst([r.outcome for r in reports]), time.monotonic() - started, tuple(reports))


def _worst(outcomes: list[Outcome]) -> Outcome:
    if "fail" in outcomes:
        return "fail"
    return "unknown" if "unknown" in outcomes or not outcomes else "pass"


def _judge_device(
    torch: ModuleType,
    device: torch.device,
    seconds: float,
    matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> DeviceReport:
    checks = importlib.import_module("sdcwatch.preflight_checks")
    started = time.monotonic()
    planned: dict[str, Callable[[], Iterator[str | None]]] = checks.plan(torch, device, matmul)
    results = []
    for position, (name, rounds) in enumerate(planned.items()):
        left = seconds - (time.monotonic() - started)
        results.append(_run_check(torch, name, rounds, left / (len(planned) - position)))
    label = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return DeviceReport(str(device), str(label), _worst([r.outcome for r in results]), tuple(results))


def _run_check(torch: ModuleType, name: str, rounds: Callable[[], Iterator[str | None]], seconds: float) -> CheckResult:
    """Runs rounds until time is up or one of them shows an error; each round yields None, or what is wrong."""
    done, end = 0, time.monotonic() + seconds
    try:
        with torch.random.fork_rng():
            for wrong in rounds():
                done += 1
                if wrong is not None:
                    return CheckResult(name, "fail", done, wrong)
                if time.monotonic() >= end:
                    break
    except Exception as error:  # an error is not a wrong answer: whatever it is, it only takes the judgement away
        return CheckResult(name, "unknown", done, f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")
    return CheckResult(name, "pass", done, "as expected")


def parse_outcome(text: str) -> dict[str, Any]:
    """Reads `--json` output back; an empty object where it is none."""
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="sdcwatch preflight")
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
