"""`FaultPlan`: puts faults into the data of a real run, at a place, a step and a rank or instance that you name.

Nothing in the product reads it: a training script must import it, build or load a plan, and install it *before*
`Monitor`, and each installed fault is announced on stderr. It changes numbers, never a row, a verdict or a metric.

    plan = FaultPlan().fail_at(rank=2, step=23, location="backward", pattern="scale")
    plan.install(ddp_model, optimizer, first_step=1)
    monitor = Monitor(ddp_model, optimizer, ...)
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sdcwatch.errors import ConfigurationError
from sdcwatch.testing.patterns import PATTERNS, apply
from sdcwatch.watch.prepared import Prepared
from sdcwatch.watch.start import replicated_parameters, unwrap

VARIABLE = "SDCWATCH_TESTING_FAULT"
LOCATIONS = ("backward", "local_gradient", "reduced_gradient", "optimizer_weight", "optimizer_state", "weights_at_rest")
MODES = ("persistent", "transient")
_KINDS: dict[str, type] = {"step": int, "rank": int, "parameter": int, "seed": int, "instance": str, "marker": str}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        location: `backward` (the device computes a wrong gradient, in replays too), `local_gradient` (one parameter's
            gradient before the reduce), `reduced_gradient` (what the collective handed back here), `optimizer_weight`
            and `optimizer_state` (inside `optimizer.step`), `weights_at_rest` (memory, between two steps).
        step: first training step that is hit.
        mode: `persistent` hits every step from there on, `transient` one step only.
        rank, instance: whom it hits; a fault with an instance follows that machine, whatever rank it runs.
        pattern: a name of `sdcwatch.testing.patterns.PATTERNS`.
        parameter: which parameter (index in module order; taken modulo their number).
        seed: decides the elements and bits.
        marker: a file that a transient fault creates when it fires and that keeps it from firing again after a restart;
            one for each fault.
    """

    location: str
    step: int
    mode: str = "persistent"
    rank: int | None = None
    instance: str | None = None
    pattern: str = "scale"
    parameter: int = 0
    seed: int = 0
    marker: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("location", LOCATIONS), ("mode", MODES), ("pattern", tuple(PATTERNS))):
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"fault's {name} is {getattr(self, name)!r}, none of {', '.join(allowed)}")
        if (self.rank is None) == (self.instance is None):
            raise ConfigurationError("a fault names either rank or instance")
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
                raise ConfigurationError(f"fault's {name} is {value!r}; it must be {kinds.__name__}")
        if self.marker is not None and self.mode != "transient":
            raise ConfigurationError("a fault with a marker fires once: give it mode transient")


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

    def install(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, first_step: int) -> None:
        """Puts the faults that concern this rank into its model and optimizer; before `Monitor`.

        Args:
            first_step: the training step that runs next.

        Raises:
            ConfigurationError: a `Monitor` already watches this process, so the fault would come after its look.
        """
        monitor = sys.modules.get("sdcwatch.monitor")
        if self.faults and monitor is not None and monitor._live:
            raise ConfigurationError("install the fault plan before making the Monitor")
        ddp = unwrap(model)
        rank = dist.get_rank()
        instance = os.environ.get("SDCWATCH_INSTANCE")
        for fault in self.faults:
            if fault.rank == rank or (fault.instance is not None and fault.instance == instance):
                print(
                    f"sdcwatch.testing: rank {rank} will fail: {dataclasses.asdict(fault)}", file=sys.stderr, flush=True
                )
                _Injection(fault, ddp, optimizer, first_step).install()


class _Injection:
    """One fault, installed on this rank."""

    def __init__(
        self, fault: Fault, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, first_step: int
    ) -> None:
        self.fault = fault
        self.ddp = ddp
        self.optimizer = optimizer
        self.step = first_step
        named = replicated_parameters(ddp)
        self.name, self.parameter = named[fault.parameter % len(named)]
        # not the process id: a restarted container often gets the same one
        self._token = secrets.token_hex(8)

    def install(self) -> None:
        getattr(self, f"_install_{self.fault.location}")()
        # The step number rises when the optimizer's step has ended, whichever hooks run in between.
        self.optimizer.register_step_post_hook(lambda *_: self._advance())

    def _advance(self) -> None:
        self.step += 1

    def _fires(self) -> bool:
        if self.step < self.fault.step:
            return False
        if self.fault.mode == "persistent":
            return True
        if self.step != self.fault.step:
            return False
        if self.fault.marker is None:
            return True
        marker = Path(self.fault.marker)
        if marker.exists() and marker.read_text(encoding="utf-8") != self._token:
            return False
        marker.write_text(self._token, encoding="utf-8")
        return True

    def _hit(self, tensor: torch.Tensor) -> None:
        apply(self.fault.pattern, tensor, self.fault.seed)

    def _install_backward(self) -> None:
        """The gradient at one layer's output is wrong, in the live backward and in every replay on this device."""
        owner = self.ddp.module.get_submodule(self.name.rpartition(".")[0])
        injection = self

        class Corrupt(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
                return value.view_as(value)

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                if not injection._fires():
                    return gradient
                wrong = gradient.contiguous().clone()
                injection._hit(wrong)
                return wrong

        _apply: Any = Corrupt.apply

        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
            return _apply(output) if isinstance(output, torch.Tensor) and output.requires_grad else output

        owner.register_forward_hook(hook)

    def _install_local_gradient(self) -> None:
        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is not None and self.ddp.require_backward_grad_sync and self._fires():
                self._hit(parameter.grad)

        self.parameter.register_post_accumulate_grad_hook(hook)

    def _install_reduced_gradient(self) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        armed: list[bool] = []

        def strike() -> None:
            armed.clear()
            if self.parameter.grad is not None and self._fires():
                self._hit(self.parameter.grad)

        def began() -> None:
            if not armed:
                armed.append(True)
                engine.queue_callback(lambda: engine.queue_callback(strike))

        # The monitor looks in a callback that is queued at the same moment; installed before it, this one runs first.
        Prepared().watch(self.ddp, self.ddp, began)

    def _install_optimizer_weight(self) -> None:
        self.optimizer.register_step_post_hook(lambda *_: self._hit(self.parameter) if self._fires() else None)

    def _install_optimizer_state(self) -> None:
        def hook(*_: Any) -> None:
            if not self._fires():
                return
            state = self.optimizer.state.get(self.parameter, {})
            values = [v for v in state.values() if isinstance(v, torch.Tensor) and v.numel() > 1]
            if values:
                self._hit(values[0])

        self.optimizer.register_step_post_hook(hook)

    def _install_weights_at_rest(self) -> None:
        struck: set[int] = set()

        def hook(*_: Any) -> None:
            # Once a step: the forward that follows already reads the wrong weight.
            if self.ddp.training and self.step not in struck and self._fires():
                struck.add(self.step)
                self._hit(self.parameter)

        self.ddp.module.register_forward_pre_hook(hook)
