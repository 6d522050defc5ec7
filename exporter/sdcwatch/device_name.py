"""What DCGM and the inventory call this rank's device: `GPU-...`, or `MIG-...` with its parent beside it.

torch knows the UUID of a whole GPU; NVML, where its Python binding is installed, knows a MIG slice's and its parent's,
and the GPU's for a torch that is too old; and a board's serial number. Changes no device.
Flow: monitor -> **device_name** -> identity; preflight.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


@dataclass(frozen=True, slots=True)
class DeviceName:
    """`uuid` as NVML spells it; `parent`: the GPU that a MIG slice lies on, empty for a whole GPU or where unknown."""

    uuid: str
    parent: str = ""


def device_name(device: torch.device, environ: Mapping[str, str] | None = None, nvml: Any = None) -> DeviceName | None:
    """The device's name; None on a CPU, or where neither torch nor NVML knows it.

    Args:
        nvml: the `pynvml` module; found by itself where it is installed.
    """
    if device.type != "cuda":
        return None
    index = device.index if device.index is not None else torch.cuda.current_device()
    visible = _visible((os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES"), index)
    if visible.startswith("MIG-"):
        return DeviceName(visible, _parent(visible, nvml))
    uuid = normalised(str(getattr(torch.cuda.get_device_properties(device), "uuid", "")))
    return DeviceName(uuid) if uuid else _from_nvml(visible or str(index), nvml)


def serial_number(name: DeviceName, nvml: Any = None) -> str:
    """The board's serial number, as its maker takes it back under; empty where NVML or the board has none.

    Args:
        nvml: the `pynvml` module; found by itself where it is installed.
    """
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        return _text(nvml.nvmlDeviceGetSerial(nvml.nvmlDeviceGetHandleByUUID(name.parent or name.uuid)))
    except Exception:  # consumer boards have none, and NVML raises errors of its own
        return ""


def normalised(uuid: str) -> str:
    """`GPU-` and the UUID in small letters, whatever prefix and case it came in; empty for anything else."""
    bare = uuid.strip().lower().removeprefix("gpu-")
    return f"GPU-{bare}" if _UUID.fullmatch(bare) else ""


def _visible(variable: str | None, index: int) -> str:
    entries = [entry.strip() for entry in (variable or "").split(",")]
    return entries[index] if index < len(entries) else ""


def _from_nvml(which: str, nvml: Any) -> DeviceName | None:
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = (
            nvml.nvmlDeviceGetHandleByIndex(int(which)) if which.isdigit() else nvml.nvmlDeviceGetHandleByUUID(which)
        )
        uuid = normalised(_text(nvml.nvmlDeviceGetUUID(handle)))
    except Exception:  # NVML raises errors of its own; a device without a name is called after its node and rank
        return None
    return DeviceName(uuid) if uuid else None


def _parent(mig: str, nvml: Any) -> str:
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(mig))
        return normalised(_text(nvml.nvmlDeviceGetUUID(handle)))
    except Exception:  # the slice's own name is enough to tell ranks apart
        return ""


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
