"""What the ranks run on: versions, hardware and threads, so that two cards can be compared.

Reads and never changes anything. Flow: **versions** -> trials -> card.
"""

from __future__ import annotations

import importlib
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import xxhash

from sdcwatch import environment

MISSING = "none"


def of_rank(device: torch.device) -> dict[str, str]:
    """This rank's parts, always the same keys; `none` where a part is missing."""
    facts = environment.describe(device)
    found = {name: facts.get(name, "") for name in ("sdcwatch", "python", "torch", "cuda", "cudnn", "nccl", "gpu")}
    found |= {
        "triton": _triton(),
        "xxhash": xxhash.VERSION,
        "driver": driver_version(facts.get("driver", "")),
        "cpu": cpu_model(),
        "os": _distribution(),
        "kernel": f"{platform.system()} {platform.release()}",
        "torch threads": str(torch.get_num_threads()),
    }
    return {name: MISSING if value in ("", "None") else value for name, value in found.items()}


def merged(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """All ranks' parts as one; where ranks differ, each value that some rank has."""
    return {name: " / ".join(sorted({rank[name] for rank in ranks})) for name in ranks[0]}


def driver_version(line: str) -> str:
    """The number in the driver's own line (`NVRM version: ... Kernel Module  550.54.15 ...`); else the line."""
    number = re.search(r"\d+(?:\.\d+)+", line)
    return number.group() if number else line


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name; its architecture where it has none (many ARM ones)."""
    try:
        named = re.search(r"^model name\s*:\s*(.*\S)", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        named = None
    return named.group(1) if named else platform.processor() or platform.machine()


def _triton() -> str:
    try:
        return str(importlib.import_module("triton").__version__)
    except Exception:  # some builds raise other things than ImportError where a driver is missing
        return MISSING


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return MISSING
