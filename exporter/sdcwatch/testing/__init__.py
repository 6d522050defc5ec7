"""Fault injection as a product: faults go into data, never into a verdict. See `sdcwatch.testing.faults`."""

from sdcwatch.testing.faults import LOCATIONS, MODES, Fault, FaultPlan
from sdcwatch.testing.patterns import PATTERNS

__all__ = ["LOCATIONS", "MODES", "PATTERNS", "Fault", "FaultPlan"]
