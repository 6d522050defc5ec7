"""Fault injection as a product: faults go into data, never into a verdict. See `sdcwatch.testing.faults` for a
training run, and `sdcwatch.testing.broken_device` for whatever else computes.

Names come on first use, so that a pattern can be had without the hooks that strike with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdcwatch.testing.broken_device import BrokenDevice
    from sdcwatch.testing.fault import LOCATIONS, MODES, Fault
    from sdcwatch.testing.faults import FaultPlan, Installed
    from sdcwatch.testing.files import corrupt_file
    from sdcwatch.testing.patterns import PATTERNS
    from sdcwatch.testing.places import Strike

__all__ = [
    "LOCATIONS",
    "MODES",
    "PATTERNS",
    "BrokenDevice",
    "Fault",
    "FaultPlan",
    "Installed",
    "Strike",
    "corrupt_file",
]

_FROM = {
    "LOCATIONS": "fault",
    "MODES": "fault",
    "BrokenDevice": "broken_device",
    "Fault": "fault",
    "FaultPlan": "faults",
    "Installed": "faults",
    "corrupt_file": "files",
    "PATTERNS": "patterns",
    "Strike": "places",
}


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(importlib.import_module(f"sdcwatch.testing.{_FROM[name]}"), name)
    raise AttributeError(f"module 'sdcwatch.testing' has no attribute {name!r}")
