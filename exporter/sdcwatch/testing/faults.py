"""`FaultPlan`: puts faults into the data of a real run, at a place, a step and a rank or instance that you name.

Nothing in the product reads it: a training script must import it, build or load a plan, and install it *before*
`Monitor`, and each installed fault is announced on stderr. It changes numbers, never a row, a verdict or a metric.

    plan = FaultPlan().fail_at(rank=2, step=23, location="backward", pattern="scale")
    plan.install(ddp_model, optimizer, first_step=1)
    monitor = Monitor(ddp_model, optimizer, ...)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from sdcwatch.errors import ConfigurationError
from sdcwatch.testing.fault import LOCATIONS, MODES, Fault
from sdcwatch.testing.places import Injection, Strike
from sdcwatch.watch.replication import unwrap

__all__ = ["LOCATIONS", "MODES", "VARIABLE", "Fault", "FaultPlan", "Installed"]

VARIABLE = "SDCWATCH_TESTING_FAULT"


class Installed:
    """The faults that were installed on this rank."""

    def __init__(self, injections: tuple[Injection, ...]) -> None:
        self._injections = injections

    @property
    def strikes(self) -> tuple[Strike, ...]:
        """What was done on this rank so far, in order of faults and of time."""
        return tuple(strike for injection in self._injections for strike in injection.strikes)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """No fault fires or counts meanwhile: what would this rank compute without them?"""
        with contextlib.ExitStack() as stack:
            for injection in self._injections:
                stack.enter_context(injection.pause())
            yield

    def remove(self) -> None:
        """Takes all hooks off the model and the optimizer."""
        for injection in self._injections:
            injection.remove()


class FaultPlan:
    """The faults of one run."""

    def __init__(self, faults: tuple[Fault, ...] = ()) -> None:
        self.faults = faults

    def fail_at(self, rank: int, step: int, **what: Any) -> FaultPlan:
        """A plan with one more fault; `what` are further fields of `Fault`."""
        return FaultPlan((*self.faults, Fault(rank=rank, step=step, **what)))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> FaultPlan:
        """The plan in `SDCWATCH_TESTING_FAULT` (a JSON object or list of them); an empty plan where it is not set.

        Raises:
            ConfigurationError: not JSON, or unknown fields.
        """
        text = (os.environ if environ is None else environ).get(VARIABLE, "")
        if not text:
            return cls()
        try:
            content = json.loads(text)
            return cls(tuple(Fault(**f) for f in (content if isinstance(content, list) else [content])))
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"{VARIABLE} is no fault: {error}") from error

    def install(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, first_step: int) -> Installed:
        """Puts the faults that concern this rank into its model and optimizer; before `Monitor`.

        Args:
            first_step: the training step that runs next.

        Returns:
            What was installed here: it knows the strikes, can pause and can be removed.

        Raises:
            ConfigurationError: a `Monitor` already watches this process, so the fault would come after its look.
        """
        monitor = sys.modules.get("sdcwatch.monitor")
        if self.faults and monitor is not None and monitor._live:
            raise ConfigurationError("install the fault plan before making the Monitor")
        ddp = unwrap(model)
        rank, size = dist.get_rank(), dist.get_world_size()
        installed = []
        for fault in self.faults:
            if fault.hits(rank, size, os.environ.get("SDCWATCH_INSTANCE")):
                print(
                    f"sdcwatch.testing: rank {rank} will fail: {dataclasses.asdict(fault)}", file=sys.stderr, flush=True
                )
                installed.append(Injection(fault, ddp, optimizer, rank=rank, first_step=first_step))
        return Installed(tuple(installed))
