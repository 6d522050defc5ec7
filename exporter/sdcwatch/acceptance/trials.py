"""The trials: pairs of steps with and without the monitor, and a handful of faults put into the data.

Every rank runs the same trials in the same order; what they found is gathered, so that all ranks return one card.
Flow: main -> **trials** -> card.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sdcwatch import Monitor
from sdcwatch.acceptance import versions
from sdcwatch.acceptance.card import Cadence, Card, Times, Trial
from sdcwatch.acceptance.model import Model, Shape, loss_fn, tokens_of
from sdcwatch.testing import FaultPlan
from sdcwatch.verdict.records import REPLAY

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

    def steps(self, first: int, last: int) -> None:
        """Training steps, the last one included."""
        for number in range(first, last + 1):
            self.step(number)

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
    plain = _plain(shape, device, _WARM_UP)
    memory = _Memory(device)
    # A second model, its gradients, buckets and optimizer state are ours; a third one takes as much, and the monitor.
    second = _plain(shape, device, _WARM_UP)
    ours = memory.rise()
    watched = _Run(shape, device, **common)
    taken = _pairs(plain, watched, pairs, deadline, device)
    watched.close()
    extra = memory.rise() - ours

    def control() -> bool:
        second.steps(_WARM_UP + 1, _WARM_UP + taken.pairs)
        return _equal(plain, second)

    same = same_bits(_equal(plain, watched), control)
    nodes = len(set(_everyone(os.environ.get("SDCWATCH_NODE", platform.node()))))
    trials, skipped = _faults(shape, device, common, nodes, deadline + seconds / 2, repeats=same is not None)
    return Card(
        versions=versions.merged(_everyone(versions.of_rank(device))),
        world_size=dist.get_world_size(),
        nodes=nodes,
        backend=dist.get_backend(),
        parameters=sum(p.numel() for p in plain.ddp.parameters()),
        same_bits=same,
        times=taken,
        memory_mb=max(_everyone(extra)),
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
    one.steps(1, steps)
    return one


def _equal(one: _Run, other: _Run) -> bool:
    """Whether all weights are, on every rank; collective."""
    pairs = zip(one.ddp.parameters(), other.ddp.parameters(), strict=True)
    return all(_everyone(all(torch.equal(a, b) for a, b in pairs)))


def _pairs(plain: _Run, watched: _Run, pairs: int, deadline: float, device: torch.device) -> Times:
    assert watched.monitor is not None
    watched.steps(1, _WARM_UP)
    ran = _ran(watched.monitor)
    every: dict[str, list[int]] = {}
    seconds: dict[int, list[float]] = {id(plain): [], id(watched): []}
    for number in range(_WARM_UP + 1, _WARM_UP + 1 + pairs):
        for line in watched.monitor.coverage():
            every.setdefault(line.check, []).append(line.every if line.enabled else 0)
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
    after = _ran(watched.monitor)
    cadence = {
        check: Cadence(min(seen), max(seen), round(after.get(check, 0.0) - ran.get(check, 0.0)))
        for check, seen in every.items()
    }
    return Times(len(ratios), _percentiles(without), _percentiles(with_), statistics.median(ratios) - 1, cadence)


def _ran(monitor: Monitor) -> dict[str, float]:
    """How often each check ran so far, also under monitors before this one: rank 0 counts; collective."""
    prefix = "sdcwatch/ran/"
    own = {name.removeprefix(prefix): n for name, n in monitor.summary().items() if name.startswith(prefix)}
    counted: dict[str, float] = _everyone(own)[0]
    return counted


def _faults(
    shape: Shape, device: torch.device, common: dict[str, Any], nodes: int, deadline: float, *, repeats: bool
) -> tuple[tuple[Trial, ...], tuple[str, ...]]:
    victim = dist.get_world_size() - 1
    trials, skipped = [_trial(shape, device, common, None, victim, nodes)], []
    for fault in _FAULTS:
        if fault.replay and nodes < 2:
            skipped.append(f"{fault.location}: replay needs two nodes (--ranks-a-node 1 calls each rank one)")
        elif any(_everyone(time.monotonic() > deadline)):
            skipped.append(f"{fault.location}: the time is over (--minutes)")
        else:
            trial = _trial(shape, device, common, fault, victim, nodes)
            if fault.replay:
                trial = replay_told(trial, lambda: _control(shape, device, common, repeats))
            trials.append(trial)
    return tuple(trials), tuple(skipped)


def _trial(
    shape: Shape, device: torch.device, common: dict[str, Any], fault: _Fault | None, victim: int, nodes: int
) -> Trial:
    plan = FaultPlan()
    if fault is not None:
        plan = plan.fail_at(victim, _STRIKES, location=fault.location, pattern=fault.pattern, mode=fault.mode)
    one = _Run(shape, device, plan, **_each_step(common, replay=fault is not None and fault.replay))
    one.steps(1, _STEPS)
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


def _each_step(common: dict[str, Any], *, replay: bool) -> dict[str, Any]:
    """Settings under which each step is checked: a fault is injected into one certain step."""
    return common | {"replay_every": int(replay), "conservation_every": 1, "max_overhead": 0}


def _control(shape: Shape, device: torch.device, common: dict[str, Any], repeats: bool) -> str:
    """What is wrong where no fault is injected; empty: steps repeat themselves, and every audit is clean. Collective.

    Args:
        repeats: two runs without the monitor ended alike, as far as that was asked.
    """
    if not repeats:
        return "two runs without the monitor differ"
    one = _Run(shape, device, **_each_step(common, replay=True))
    assert one.monitor is not None
    before = _ran(one.monitor).get(REPLAY, 0.0)
    one.steps(1, _STEPS)
    one.close()
    judged = round(_ran(one.monitor).get(REPLAY, 0.0) - before)
    said = "; ".join(f"{v.kind} at step {v.step}" for v in one.monitor.verdicts if v.check == REPLAY)
    clean = judged == _STEPS and not said
    found = "" if clean else f"{judged} of {_STEPS} audits were judged and said {said or 'nothing'}"
    return next(filter(None, _everyone(found)), "")


def replay_told(trial: Trial, control: Callable[[], str]) -> Trial:
    """The trial, or that it cannot be told: a replay finds only what makes a step unlike its own repetition.

    Args:
        control: run only where the trial failed: what is wrong where no fault is injected (empty: nothing). Collective.
    """
    wrong = "" if trial.passed else control()
    return replace(trial, passed=None, control=wrong) if wrong else trial


class _Memory:
    """How far the most memory of this rank rises, in MB."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._at = self._peak()

    def _peak(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 2**20
        try:  # what getrusage says begins with the peak of the launcher that this process was forked from
            status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            status = ""
        peak = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
        return (int(peak.group(1)) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 1024

    def rise(self) -> float:
        """Since it was made, or since it was last asked."""
        before, self._at = self._at, self._peak()
        return self._at - before


def _everyone(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _percentiles(values: list[float]) -> tuple[float, float]:
    """p50 and p95."""
    return statistics.median(values), sorted(values)[min(int(0.95 * len(values)), len(values) - 1)]
