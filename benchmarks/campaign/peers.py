"""sdcguard on the same faults: checksums of every matmul and its comparison of replicas, both at every step.

For a fault in the forward, the backward or the local gradient the pattern strikes the output of the very matmul that
sdcguard checks (a layer's product, or the gradient of its weight), which is the kindest place for it; all other faults
are those of `sdcwatch.testing`. Flow: training -> **peers** -> score.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sdcwatch.testing import Fault, FaultPlan
from sdcwatch.testing.patterns import apply
from sdcwatch.testing.trigger import Trigger
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.campaign import training
from benchmarks.campaign.cases import Case

VERSION = "0.4.0"
FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "campaign" / f"sdcguard-{VERSION}"
_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_AT_MATMULS = ("forward", "backward", "local_gradient")


def fetch() -> bool:
    """Puts sdcguard into a folder of its own, never into the environment; False where it cannot be had."""
    if not (FOLDER / "sdcguard").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(FOLDER)]
        done = subprocess.run([*command, f"sdcguard=={VERSION}"], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"campaign: sdcguard {VERSION} cannot be had, its column stays empty: {done.stderr.strip()[-200:]}")
            return False
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.metadata.version("sdcguard") == VERSION


class _AtMatmul(TorchDispatchMode):
    """Strikes one matmul's output a step: the layer's product, or the gradient of its weight."""

    def __init__(self, fault: Fault, shape: torch.Size, forward: bool) -> None:
        super().__init__()
        self.trigger = Trigger(fault, 0)
        self.armed = False
        self._fault = fault
        self._shape = shape
        self._forward = forward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.armed and func in _MATMULS and tuple(out.shape) == tuple(self._shape):
            self.armed = False
            if self.trigger.fires():
                apply(self._fault.pattern, out, self._fault.seed)
        return out


@contextlib.contextmanager
def _faulty(case: Case, rank: int, ddp: Any, optimizer: Any, rows: int) -> Iterator[_AtMatmul | None]:
    fault = Fault(**{**case.fault, "call": None})
    if case.location not in _AT_MATMULS:
        FaultPlan((fault,)).install(ddp, optimizer, first_step=0)
        yield None
        return
    if rank != case.rank:
        yield None
        return
    layer = [m for m in ddp.module.modules() if isinstance(m, torch.nn.Linear)][case.parameter // 2 % 2]
    forward = case.location == "forward"
    mode = _AtMatmul(fault, torch.Size((rows, layer.out_features)) if forward else layer.weight.shape, forward)
    with mode:
        yield mode


def run(rank: int, size: int, scratch: str, case: Case) -> list[dict[str, Any]]:
    """Runs one case under sdcguard; its alerts on this rank: step, detector and whom it names."""
    from sdcguard import SDCGuard

    ddp, optimizer = training.build(case.optimizer)
    data = training.batches(rank, case.steps, case.seed)
    with warnings.catch_warnings(), _faulty(case, rank, ddp, optimizer, len(data[0][0])) as mode:
        warnings.simplefilter("ignore")
        guard = SDCGuard(every=1, replicas=True).watch(ddp.module)
        # one step more: its comparison of weights looks at the beginning of the next step
        for step, batch in enumerate([*data, data[-1]]):
            with guard.on_step(step):
                if mode is not None:
                    mode.armed = case.location == "forward"
                with training.precision(case.precision):
                    loss = training.loss_fn(ddp, batch)
                if mode is not None:
                    mode.armed = case.location != "forward"
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if mode is not None:
                mode.trigger.advance()
        guard.unwatch()
    found = []
    for event in guard.log.events:
        named = event.detail.get("suspect_ranks")
        found.append({"step": event.step, "detector": event.detector, "named": [rank] if named is None else named})
    return found
