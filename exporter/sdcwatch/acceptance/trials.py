"""The trials: pairs of steps with and without the monitor, and a handful of faults put into the data.

Every rank runs the same trials in the same order; what they found is gathered, so that all ranks return one card.
Flow: main -> **trials** -> card.
"""

from __future__ import annotations

import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sdcwatch import Monitor
from sdcwatch._version import __version__
from sdcwatch.acceptance.card import Card, Times, Trial
from sdcwatch.acceptance.model import Model, Shape, loss_fn, tokens_of
from sdcwatch.testing import FaultPlan

_WARM_UP = 2
#: Steps of a fault's run, and the step that it strikes: replay needs a clean audit first.
_STEPS, _STRIKES = 8, 4


@dataclass(frozen=True, slots=True)
class _Fault:
    location: str
    pattern: str
    check: str
    mode: str = "transient"
    names: bool = False  # a node, where three take part
    replay: bool = False


_FAULTS = (
    _Fault("optimizer_weight", "scale", "weight_checksum", names=True),
    _Fault("weights_at_rest", "scale", "weight_checksum"),
    _Fault("reduced_gradient", "scale", "gradient_checksum"),
    _Fault("reduced_gradient_all", "scale", "allreduce_conservation"),
    _Fault("backward", "scale", "replay", mode="persistent", names=True, replay=True),
)


class _Run:
    """One model and optimizer from one seed, watched or not."""

    def __init__(self, shape: Shape, device: torch.device, plan: FaultPlan | None = None, **settings: Any) -> None:
        torch.manual_seed(0)
        self._shape, self._device = shape, device
        self.ddp = DistributedDataParallel(Model(shape).to(device))
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-4)
        self.installed = plan.install(self.ddp, self.optimizer, first_step=1) if plan is not None else None
        self.monitor = Monitor(self.ddp, self.optimizer, loss_fn=loss_fn, **settings) if settings else None

    def step(self, number: int) -> None:
        """One training step."""
        batch = tokens_of(self._shape, number, dist.get_rank(), self._device)
        if self.monitor is None:
            loss_fn(self.ddp, batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return
        with self.monitor.step(number) as step:
            step.loss(batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def close(self) -> None:
        """Takes monitor and faults off."""
        if self.monitor is not None:
            self.monitor.close()
        if self.installed is not None:
            self.installed.remove()


def run(shape: Shape, device: torch.device, *, pairs: int, seconds: float, spool: str) -> Card:
    """All trials; collective.

    Args:
        pairs: pairs of steps with and without the monitor; fewer where half of `seconds` is over.
        spool: an empty folder of this rank.
    """
    common: dict[str, Any] = {"job": "sdcwatch-acceptance", "agent": "off", "spool_dir": spool, "on_fault": "observe"}
    deadline = time.monotonic() + seconds / 2
    memory = _Memory(device)
    plain = _plain(shape, device, _WARM_UP)
    memory.mark()
    watched = _Run(shape, device, **common)
    taken = _pairs(plain, watched, pairs, deadline, device)
    # The second model, its gradients, buckets and optimizer state are ours, not the monitor's.
    second = 5 * sum(p.nbytes for p in watched.ddp.parameters()) / 2**20
    watched.close()
    extra = memory.extra() - second
    same = same_bits(_equal(plain, watched), lambda: _equal(plain, _plain(shape, device, _WARM_UP + taken.pairs)))
    nodes = len(set(_everyone(os.environ.get("SDCWATCH_NODE", platform.node()))))
    trials, skipped = _faults(shape, device, common, nodes, deadline + seconds / 2)
    return Card(
        versions=_versions(device),
        world_size=dist.get_world_size(),
        nodes=nodes,
        backend=dist.get_backend(),
        parameters=sum(p.numel() for p in plain.ddp.parameters()),
        same_bits=same,
        times=taken,
        memory_mb=max(0.0, *_everyone(extra)),
        trials=trials,
        skipped=skipped,
    )


def same_bits(equal: bool, control: Callable[[], bool]) -> bool | None:
    """Whether the monitor left the weights as they would have been.

    Args:
        equal: the weights with it equal those without, on every rank.
        control: run only where they do not: do two runs without it end alike? Collective.

    Returns:
        None where they do not, either: kernels whose results change from run to run.
    """
    if equal:
        return True
    return False if control() else None


def _plain(shape: Shape, device: torch.device, steps: int) -> _Run:
    """A run without the monitor, after its first steps."""
    one = _Run(shape, device)
    for number in range(1, steps + 1):
        one.step(number)
    return one


def _equal(one: _Run, other: _Run) -> bool:
    """Whether all weights are, on every rank; collective."""
    pairs = zip(one.ddp.parameters(), other.ddp.parameters(), strict=True)
    return all(_everyone(all(torch.equal(a, b) for a, b in pairs)))


def _pairs(plain: _Run, watched: _Run, pairs: int, deadline: float, device: torch.device) -> Times:
    for number in range(1, _WARM_UP + 1):
        watched.step(number)
    seconds: dict[int, list[float]] = {id(plain): [], id(watched): []}
    for number in range(_WARM_UP + 1, _WARM_UP + 1 + pairs):
        for one in (plain, watched) if number % 2 else (watched, plain):
            dist.barrier()
            begin = time.perf_counter()
            one.step(number)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            dist.barrier()
            seconds[id(one)].append(time.perf_counter() - begin)
        if any(_everyone(time.monotonic() > deadline)):
            break
    without, with_ = seconds[id(plain)], seconds[id(watched)]
    ratios = [b / a for a, b in zip(without, with_, strict=True)]
    return Times(len(ratios), _percentiles(without), _percentiles(with_), statistics.median(ratios) - 1)


def _faults(
    shape: Shape, device: torch.device, common: dict[str, Any], nodes: int, deadline: float
) -> tuple[tuple[Trial, ...], tuple[str, ...]]:
    victim = dist.get_world_size() - 1
    trials, skipped = [_trial(shape, device, common, None, victim, nodes)], []
    for fault in _FAULTS:
        if fault.replay and nodes < 2:
            skipped.append(f"{fault.location}: replay needs two nodes (--ranks-a-node 1 calls each rank one)")
        elif any(_everyone(time.monotonic() > deadline)):
            skipped.append(f"{fault.location}: the time is over (--minutes)")
        else:
            trials.append(_trial(shape, device, common, fault, victim, nodes))
    return tuple(trials), tuple(skipped)


def _trial(
    shape: Shape, device: torch.device, common: dict[str, Any], fault: _Fault | None, victim: int, nodes: int
) -> Trial:
    plan = FaultPlan()
    if fault is not None:
        plan = plan.fail_at(victim, _STRIKES, location=fault.location, pattern=fault.pattern, mode=fault.mode)
    settings = common | {"replay_every": 1 if fault is not None and fault.replay else 0, "conservation_every": 1}
    settings["max_overhead"] = 0  # a fault is injected into one certain step, which must be a checked one
    one = _Run(shape, device, plan, **settings)
    for number in range(1, _STEPS + 1):
        one.step(number)
    assert one.monitor is not None
    one.close()
    verdicts = [v for v in one.monitor.verdicts if v.kind != "undefined"]
    named = tuple(sorted({rank for v in verdicts for rank in v.suspects}))
    seen = tuple(f"{v.check} {v.kind} at step {v.step}" for v in verdicts)
    if fault is None:
        passed, expected = not verdicts, "nothing"
    else:
        by_name = fault.names and nodes >= 3
        expected = f"{fault.check}{f' naming rank {victim}' if by_name else ''}"
        found = any(v.check == fault.check for v in verdicts)
        passed = found and set(named) <= {victim} and (named == (victim,) or not by_name)
    location = fault.location if fault is not None else ""
    return Trial(
        location, None if fault is None else victim, None if fault is None else _STRIKES, expected, seen, named,
        all(_everyone(passed)),
    )  # fmt: skip


class _Memory:
    """The most memory of this rank above a mark, in MB."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._at = 0.0

    def _peak(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def mark(self) -> None:
        """From here on."""
        self._at = self._peak()

    def extra(self) -> float:
        """Since the mark."""
        return self._peak() - self._at


def _everyone(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _percentiles(values: list[float]) -> tuple[float, float]:
    """p50 and p95."""
    return statistics.median(values), sorted(values)[min(int(0.95 * len(values)), len(values) - 1)]


def _versions(device: torch.device) -> dict[str, str]:
    found = {"sdcwatch": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        found |= {
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "gpu": torch.cuda.get_device_name(device),
        }
    return found
