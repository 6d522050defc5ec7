"""sdcwatch: silent data corruption seen from inside PyTorch data-parallel training.

Two changed lines in a loop:

    monitor = Monitor(ddp_model, optimizer, loss_fn=loss_fn, checkpoint_dir=dir)
    with monitor.step(step) as s:
        loss = s.loss(batch)

The facade is lazy: `sdcwatch.catalog` and the agent import without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sdcwatch._version import __version__
from sdcwatch.errors import (
    CheckpointError,
    ConfigurationError,
    CorruptionDetected,
    IdentityError,
    SdcwatchError,
    SpoolError,
)

if TYPE_CHECKING:
    from sdcwatch.monitor import Monitor
    from sdcwatch.settings import Settings

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "CorruptionDetected",
    "IdentityError",
    "Monitor",
    "SdcwatchError",
    "Settings",
    "SpoolError",
    "__version__",
]

_LAZY = {"Monitor": "sdcwatch.monitor", "Settings": "sdcwatch.settings"}


def __getattr__(name: str) -> Any:
    if name == "Monitor":
        try:
            importlib.import_module("torch")
        except (ImportError, OSError) as error:  # OSError: a shared library under it is missing or broken
            raise ConfigurationError(
                f"torch cannot be imported ({error}); run this in the Python of your training image"
            ) from error
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'sdcwatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
