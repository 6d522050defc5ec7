"""Whole steps with and without the monitor, side by side: two models of one seed take turns, step by step.

Each pair of steps gives one ratio, and the order within a pair changes, so what else the machine does hits both. Steps
differ by what is checked in them, and costs are medians over steps of a kind; what a cadence costs is their average,
each kind as often as it comes. The defaults' cadence is the one on which the budget has settled. Processor time is
compared beside the clock's: our work on a host is all computing, and other tenants of a machine take none of it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from sdcwatch import Monitor
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.model import SMALL, Size, Transformer, batch_of, loss_fn
from benchmarks.ranks import on_ranks

CPU = torch.device("cpu")
#: A measurement takes fewer pairs rather than more time, but at least four.
MOST_SECONDS = 150.0
#: Pairs in which the budget sees what checks cost; the defaults are timed for longer.
SETTLE, SETTLED_SECONDS = 14, 330.0
#: Long enough that each size sees the step in which the reduce is held against its parts.
CURVE_SECONDS = 270.0
#: What tells one kind of step from another.
KINDS = ("gradient_checksum", "allreduce_conservation", "replay")
#: What was checked in a step.
Kind = tuple[str, ...]
#: Every check as often as its setting says, whatever it costs.
UNBOUND = {"max_overhead": 0.0}


class Plain:
    """Training steps without a monitor."""

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        self.ddp = DistributedDataParallel(module)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-4)
        self.count = 0

    def step(self, batch: Any, loss: Callable[..., torch.Tensor]) -> None:
        self.count += 1
        loss(self.ddp, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Watched(Plain):
    """The same with one."""

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        super().__init__(module)
        self.monitor = Monitor(self.ddp, self.optimizer, loss_fn=settings.pop("loss", loss_fn), **settings)

    def every(self) -> dict[str, int]:
        """The cadence of each check as it is now."""
        return {line.check: line.every for line in self.monitor.coverage()}

    def step(self, batch: Any, loss: Callable[..., torch.Tensor]) -> None:
        self.count += 1
        with self.monitor.step(self.count) as s:
            s.loss(batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def paired(
    rank: int,
    size: int,
    make: Callable[[], nn.Module],
    batch: Any,
    loss: Any,
    pairs: int,
    settings: Any,
    most_seconds: float = MOST_SECONDS,
) -> Any:
    """Seconds of each step, (without, with) a pair, by the clock and of a rank's processor; are the bits the same?"""
    clock, processor, kinds = [], [], []
    deadline = 0.0
    torch.manual_seed(0)
    without = Plain(make())
    torch.manual_seed(0)
    watched = Watched(make(), loss=loss, **settings)
    for number in range(pairs + 2):
        taken = {}
        kind = kind_of(watched.count, watched.every())
        for run in (without, watched) if number % 2 else (watched, without):
            dist.barrier()
            begin, computed = time.perf_counter(), time.process_time()
            run.step(batch, loss)
            computed = time.process_time() - computed
            dist.barrier()
            taken[type(run)] = time.perf_counter() - begin, computed
        if number < 2:  # the first steps make optimizer state and buckets, and calibrate
            deadline = time.monotonic() + most_seconds
            continue
        kinds.append(kind)
        for times, n in ((clock, 0), (processor, 1)):
            times.append((taken[Plain][n], taken[Watched][n]))
        late = torch.tensor([float(time.monotonic() > deadline)])
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        if late.item() and len(clock) >= 4:
            break
    same = all(torch.equal(a, b) for a, b in zip(without.ddp.parameters(), watched.ddp.parameters(), strict=True))
    events = [verdict.kind for verdict in watched.monitor.verdicts]
    every = watched.every()
    watched.monitor.close()
    return {
        "seconds": clock, "processor": processor, "kinds": kinds, "same_bits": same, "verdicts": events, "every": every
    }  # fmt: skip


def kind_of(count: int, every: dict[str, int]) -> Kind:
    """What is checked in a step before which `count` were run."""
    return tuple(check for check in KINDS if every.get(check) and count % every[check] == 0)


def _transformer(
    rank: int,
    ranks: int,
    size: Size,
    tokens: int,
    pairs: int,
    settings: dict[str, Any],
    most_seconds: float = MOST_SECONDS,
) -> Any:
    batch = batch_of(size, tokens, CPU, seed=rank)
    return paired(rank, ranks, lambda: Transformer(size), batch, loss_fn, pairs, settings, most_seconds)


def summary(results: list[Any]) -> dict[str, Any]:
    """Overheads by the clock of one rank (the others wait for the same steps), and by all ranks' processors."""
    first = results[0]
    seconds, every = first["seconds"], first["every"]
    processor = [(kind, *pair) for r in results for kind, pair in zip(r["kinds"], r["processor"], strict=True)]
    return {
        "pairs": len(seconds),
        "step_seconds": statistics.median(plain for plain, _ in seconds),
        "overhead": share([(kind, *pair) for kind, pair in zip(first["kinds"], seconds, strict=True)], every),
        "processor_overhead": share(processor, every),
        "every": every,
        "same_bits": all(r["same_bits"] for r in results),
        "verdicts": [kind for r in results for kind in r["verdicts"]],
    }


def share(steps: Sequence[tuple[Kind, float, float]], every: dict[str, int]) -> float:
    """What a cadence adds to a step: the median of each kind of step, each kind as often as it comes.

    Args:
        steps: kind, seconds without and seconds with the monitor; a kind costs the same in any cadence.
        every: the cadence, by check.

    Raises:
        ValueError: the cadence has a kind of step of which none was measured.
    """
    ratios: dict[Kind, list[float]] = defaultdict(list)
    for kind, plain, watched in steps:
        ratios[kind].append(watched / plain)
    round_of = math.lcm(*(every[check] for check in KINDS if every.get(check)), 1)
    weights = Counter(kind_of(n, every) for n in range(round_of))
    if missing := weights.keys() - ratios.keys():
        raise ValueError(f"no step of these kinds was measured: {sorted(missing)}; take more pairs")
    return sum(statistics.median(ratios[kind]) * weight for kind, weight in weights.items()) / round_of - 1


def step_overhead(*, size: Size = SMALL, tokens: int = 1024, pairs: int = 24) -> dict[str, Any]:
    """Default settings without replay, checks on every step, and replay's share from audited steps beside plain ones.

    The steps in which the budget settles count as well: a checked step costs the same before and after.
    """
    unaudited = {"replay_every": 0}
    default = summary(on_ranks(_transformer, 2, size, tokens, pairs + SETTLE, unaudited, SETTLED_SECONDS))
    always = summary(on_ranks(_transformer, 2, size, tokens, max(pairs // 2, 12), {**unaudited, **UNBOUND}))
    # every second step is audited: its excess over its neighbours, at one audit in 200 steps
    rare = {"replay_every": 2, "conservation_every": 0, **UNBOUND}
    audits = on_ranks(_transformer, 2, size, tokens, max(pairs // 3, 4), rare)
    seconds = audits[0]["seconds"]
    audited, plain = [w / p for p, w in seconds[0::2]], [w / p for p, w in seconds[1::2]]
    extra = statistics.median(audited) - statistics.median(plain)
    return {
        **default, "tokens": tokens, "audit_steps": extra, "overhead_with_replay": default["overhead"] + extra / 200,
        "every_step": always["overhead"], "every_step_processor": always["processor_overhead"],
        "same_bits": default["same_bits"] and always["same_bits"], "verdicts": default["verdicts"] + always["verdicts"],
    }  # fmt: skip


def curve(*, size: Size = SMALL, tokens: tuple[int, ...] = (256, 512, 2048), pairs: int = 12) -> list[dict[str, Any]]:
    """Overhead of checks on every step, by tokens a step and rank."""
    settings = {"replay_every": 0, **UNBOUND}
    return [
        {"tokens": n, **summary(on_ranks(_transformer, 2, size, n, pairs, settings, CURVE_SECONDS))} for n in tokens
    ]


def _stack(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def square_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A scalar that needs every parameter."""
    return model(batch).square().mean()


def _layers(rank: int, ranks: int, layers: int, total: int, pairs: int) -> Any:
    width = round((total / layers) ** 0.5)
    batch = torch.randn(16, width, generator=torch.Generator().manual_seed(rank))
    return paired(rank, ranks, lambda: _stack(width, layers), batch, square_loss, pairs, {"replay_every": 0, **UNBOUND})


def flat(*, counts: tuple[int, ...] = (10, 100, 1000), total: int = 4_000_000, pairs: int = 20) -> list[dict[str, Any]]:
    """Added seconds a step where the same total size lies in 10, 100 or 1,000 parameters."""
    rows = []
    for count in counts:
        results = on_ranks(_layers, 2, count, total, pairs)
        added = statistics.median(w - p for p, w in results[0]["seconds"])
        rows.append({"parameters": count, "added_seconds": added, **summary(results)})
    return rows
