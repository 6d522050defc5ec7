"""`sdcwatch preflight`: can this machine's devices still calculate?

Judges the host's CPU and each CUDA device by answers that are known exactly or stand in the source, by repeating work
bit for bit, by a small deterministic training step, and by memory patterns. It accuses only what it can prove: an
error, an unsupported type or a crash of its own is "could not judge", never a failure. A pass proves little against a
rare fault; a failure proves much. It never joins a process group and never touches a training job's files. torch is
imported when a run begins, not before.
Flow: **preflight** -> `sdcwatch run`, remediation's evidence.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
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
#: Switches of libraries that would make fp32 or fp64 products coarser, as they stand on some images: right for
#: training, and here they would make a healthy machine look wrong. Libraries read them when torch is first used.
PLAIN_ARITHMETIC = {
    "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT",
    "DNNL_DEFAULT_FPMATH_MODE": "STRICT",
    "NVIDIA_TF32_OVERRIDE": "0",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0",
    "CUBLAS_EMULATE_SINGLE_PRECISION": "0",
    "CUBLAS_EMULATE_DOUBLE_PRECISION": "0",
}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check on one device: how often it ran and what it proved. `detail` is one sentence."""

    check: str
    outcome: Outcome
    rounds: int
    detail: str


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """All checks of one device. `device` as torch names it, `name` as its maker does; `uuid` and `serial` as NVML has
    them, empty on a CPU and where unknown."""

    device: str
    name: str
    outcome: Outcome
    checks: tuple[CheckResult, ...]
    uuid: str = ""
    serial: str = ""


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
    """0 pass, 1 fail, 3 could not judge.

    Raises:
        ConfigurationError: wrong use.
    """
    if not (math.isfinite(arguments.seconds) and arguments.seconds > 0):
        raise ConfigurationError("--seconds must be a number above 0")
    started = time.monotonic()
    os.environ.update(PLAIN_ARITHMETIC)
    try:
        report = judge(seconds=arguments.seconds, devices=arguments.device)
    except ConfigurationError:
        raise
    except Exception as error:  # Python's own status for a crash is 1, which here would accuse the machine
        report = Report("unknown", time.monotonic() - started, (), f"preflight itself failed: {_words(error)}")
    text = json.dumps({"schema": 1, **asdict(report)}) if arguments.json else describe(report)
    try:
        print(text, flush=True)
    except OSError as error:
        print(f"sdcwatch preflight: the judgement cannot be printed: {error}", file=sys.stderr)
        return STATUS["unknown"]
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
    except Exception as error:  # a library that is missing under it is an OSError, a clash of versions anything else
        detail = f"torch cannot be imported ({_words(error)}); use its Python"
        return Report("unknown", time.monotonic() - started, (), detail)
    names = devices or ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    reports = []
    for name in names:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ConfigurationError(f"--device {name!r} is no torch device: {_words(error)}") from error
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
    started = time.monotonic()
    results = []
    try:
        checks = importlib.import_module("sdcwatch.preflight.checks")
        planned: dict[str, Callable[[], Iterator[str | None]]] = checks.plan(torch, device, matmul)
    except Exception as error:  # no CUDA in this build, a GPU that fell off the bus: nothing is proven
        planned = {}
        results.append(CheckResult("plan", "unknown", 0, _words(error)))
    for position, (name, rounds) in enumerate(planned.items()):
        left = seconds - (time.monotonic() - started)
        results.append(_run_check(torch, name, rounds, left / (len(planned) - position)))
    outcome = _worst([r.outcome for r in results])
    return DeviceReport(str(device), _label(torch, device), outcome, tuple(results), *_names(device))


def _names(device: torch.device) -> tuple[str, str]:
    """UUID and serial number, as an event and an invoice name the device."""
    try:
        found = importlib.import_module("sdcwatch.device_name")
        named = found.device_name(device)
        return (named.uuid, found.serial_number(named)) if named is not None else ("", "")
    except Exception:  # lost since the checks began
        return "", ""


def _label(torch: ModuleType, device: torch.device) -> str:
    """The maker's name of a device; torch's where a GPU no longer says it, so that its checks' results are kept."""
    if device.type != "cuda":
        return str(device.type)
    try:
        return str(torch.cuda.get_device_name(device))
    except Exception:  # lost since the checks began
        return str(device)


def _words(error: BaseException) -> str:
    """Type and first line of an error; some have no text at all."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first[:160]}" if first else type(error).__name__


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
        return CheckResult(name, "unknown", done, _words(error))
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
    try:
        sys.exit(main(_parser.parse_args()))
    except ConfigurationError as _error:
        print(f"sdcwatch preflight: {_error}", file=sys.stderr)
        sys.exit(2)
