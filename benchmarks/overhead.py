"""Whole steps with and without the monitor, side by side: two models of one seed take turns, step by step.

Each pair of steps gives one ratio, and the order within a pair changes, so what else the machine does hits both. Steps
differ by what is measured in them, and a median regression says what each part adds; what a cadence costs is their sum,
each part as often as it comes. The defaults' cadence is the one on which the budget settles in a run of its own: where
the two models take turns, it would take the other one's steps for the loop's own work. Processor time is
compared beside the clock's: our work on a host is all computing, and other tenants of a machine take none of it.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
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
#: Steps in which the budget sees what checks cost.
SETTLE = 30
#: Long enough that each size sees the step in which the reduce is held against its parts.
CURVE_SECONDS = 270.0
#: What may be measured in a step, by whose cadence, and how many steps before that is due: the optimizer's part of a
#: checked step is measured in the step before it.
PARTS = {
    "gradient_checksum": ("gradient_checksum", 0),
    "optimizer": ("weight_checksum", 1),
    "allreduce_conservation": ("allreduce_conservation", 0),
    "replay": ("replay", 0),
}
#: Rounds of reweighting after which a median regression stands still.
_ROUNDS = 60
#: Resamples of the pairs from which the spread of a share is read.
_DRAWS = 200
#: Every check as often as its setting says, whatever it costs.
UNBOUND = {"max_overhead": 0.0}
#: A cadence with steps of all kinds, some without any part: from these each part can be told apart and priced.
MIXED, MIXED_SECONDS = {"check_every": 3, "conservation_every": 6, **UNBOUND}, 360.0


class Plain:
    """Training steps without a monitor."""

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        self.ddp = DistributedDataParallel(module)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-4)
        self.count = 0

    def step(self, loss: Callable[..., torch.Tensor], *batches: Any, reduce: bool = True) -> None:
        """One step over micro-batches; without its reduce, the ranks' weights part."""
        self.count += 1
        with self.losses(loss) as loss_of:
            for number, batch in enumerate(batches, 1):
                with contextlib.nullcontext() if reduce and number == len(batches) else self.ddp.no_sync():
                    (loss_of(batch) / len(batches)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @contextlib.contextmanager
    def losses(self, loss: Callable[..., torch.Tensor]) -> Iterator[Callable[[Any], torch.Tensor]]:
        """What gives the loss of a micro-batch in the step that runs inside."""
        yield lambda batch: loss(self.ddp, batch)


class Watched(Plain):
    """The same with one."""

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        super().__init__(module)
        self.monitor = Monitor(self.ddp, self.optimizer, loss_fn=settings.pop("loss", loss_fn), **settings)

    def every(self) -> dict[str, int]:
        """The cadence of each check as it is now."""
        return {line.check: line.every for line in self.monitor.coverage()}

    @contextlib.contextmanager
    def losses(self, loss: Callable[..., torch.Tensor]) -> Iterator[Callable[[Any], torch.Tensor]]:
        """The monitor's, which has the loss function since its start."""
        with self.monitor.step(self.count) as step:
            yield step.loss


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
    clock, processor, measured = [], [], []
    deadline = 0.0
    torch.manual_seed(0)
    without = Plain(make())
    torch.manual_seed(0)
    watched = Watched(make(), loss=loss, **settings)
    for number in range(pairs + 2):
        taken = {}
        parts = parts_of(watched.count, watched.every())
        for run in (without, watched) if number % 2 else (watched, without):
            dist.barrier()
            begin, computed = time.perf_counter(), time.process_time()
            run.step(loss, batch)
            computed = time.process_time() - computed
            dist.barrier()
            taken[type(run)] = time.perf_counter() - begin, computed
        if number < 2:  # the first steps make optimizer state and buckets, and calibrate
            deadline = time.monotonic() + most_seconds
            continue
        measured.append(parts)
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
        "seconds": clock, "processor": processor, "parts": measured, "same_bits": same, "verdicts": events,
        "every": every,
    }  # fmt: skip


def parts_of(count: int, every: dict[str, int]) -> frozenset[str]:
    """What is measured in a step before which `count` were run."""
    return frozenset(
        part for part, (check, before) in PARTS.items() if every.get(check) and (count + before) % every[check] == 0
    )


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


def _settled(rank: int, ranks: int, size: Size, tokens: int, settings: dict[str, Any]) -> dict[str, int]:
    """The cadence that the defaults come to in a run of their own."""
    torch.manual_seed(0)
    watched = Watched(Transformer(size), **settings)
    batch = batch_of(size, tokens, CPU, seed=rank)
    for _ in range(SETTLE):
        watched.step(loss_fn, batch)
    every = watched.every()
    watched.monitor.close()
    return every


def summary(results: list[Any], every: dict[str, int] | None = None) -> dict[str, Any]:
    """Overheads by the clock of one rank (the others wait for the same steps), and by all ranks' processors."""
    first = results[0]
    every = every or first["every"]
    processor = [(parts, *pair) for r in results for parts, pair in zip(r["parts"], r["processor"], strict=True)]
    clock = [(parts, *pair) for parts, pair in zip(first["parts"], first["seconds"], strict=True)]
    return {
        "pairs": len(clock),
        "step_seconds": statistics.median(plain for _, plain, _ in clock),
        "overhead": share(clock, every),
        "overhead_spread": spread(clock, every),
        "processor_overhead": share(processor, every),
        "every": every,
        "same_bits": all(r["same_bits"] for r in results),
        "verdicts": [kind for r in results for kind in r["verdicts"]],
    }


def pooled(runs: Sequence[list[Any]]) -> list[Any]:
    """Results of the same measurement, taken again in other rounds, as those of one: all pairs of each rank."""
    return [
        {
            **of_rank[-1],
            **{name: [pair for run in of_rank for pair in run[name]] for name in
               ("seconds", "processor", "parts", "verdicts")},
            "same_bits": all(run["same_bits"] for run in of_rank),
        }
        for of_rank in zip(*runs, strict=True)
    ]  # fmt: skip


def spread(steps: Sequence[tuple[frozenset[str], float, float]], every: dict[str, int]) -> tuple[float, float]:
    """What other pairs could have given: the 5th and the 95th percentile of `share` over resamples of these pairs.

    Pairs are drawn again among those in which the same was measured, so no resample lacks a part.
    """
    kinds: dict[frozenset[str], list[tuple[frozenset[str], float, float]]] = {}
    for step in steps:
        kinds.setdefault(step[0], []).append(step)
    draw = random.Random(0)
    shares = [
        share([step for kind in kinds.values() for step in draw.choices(kind, k=len(kind))], every)
        for _ in range(_DRAWS)
    ]
    low, *_, high = statistics.quantiles(shares, n=20)
    return low, high


def share(steps: Sequence[tuple[frozenset[str], float, float]], every: dict[str, int]) -> float:
    """What a cadence adds to a step, as a share of it: the sum of its parts, each as often as it comes.

    Args:
        steps: what was measured in a step; its seconds without and with the monitor.
        every: the cadence, by check.

    Raises:
        ValueError: the cadence has a part that no step measured.
    """
    round_of = math.lcm(*(every[check] for check in every if every[check]), 1)
    coming = [parts_of(n, every) for n in range(round_of)]
    if missing := frozenset().union(*coming) - frozenset().union(*(parts for parts, _, _ in steps)):
        raise ValueError(f"no step measured {sorted(missing)}; take more pairs")
    ratios = torch.tensor([watched / plain for _, plain, watched in steps], dtype=torch.float64)
    design = _rows([parts for parts, _, _ in steps])
    weights = torch.ones_like(ratios)
    for _ in range(_ROUNDS):  # least squares of residuals over their own size: least absolute ones, so a median
        root = weights.sqrt()
        left, right = design * root[:, None], (ratios * root)[:, None]
        found = torch.linalg.lstsq(left, right, driver="gelsd").solution[:, 0]
        weights = 1 / (ratios - design @ found).abs().clamp_min(1e-6)
    return float((_rows(coming) @ found).mean()) - 1


def _rows(steps: Sequence[frozenset[str]]) -> torch.Tensor:
    """(steps, 1 + parts) float64: a step itself, and which parts were measured in it."""
    return torch.tensor([[1.0, *(float(part in parts) for part in PARTS)] for parts in steps], dtype=torch.float64)


def step_overhead(*, size: Size = SMALL, tokens: int = 1024, pairs: int = 60) -> dict[str, Any]:
    """Default settings without replay, checks on every step, and replay's share from audited steps beside plain ones.

    A part costs the same in any cadence: both cadences are priced from all steps, of a mixed one and of every step.
    """
    unaudited = {"replay_every": 0}
    settled = on_ranks(_settled, 2, size, tokens, unaudited)[0]
    mixed = on_ranks(_transformer, 2, size, tokens, pairs, {**unaudited, **MIXED}, MIXED_SECONDS)
    full = on_ranks(_transformer, 2, size, tokens, max(pairs // 3, 12), {**unaudited, **UNBOUND})
    priced = pooled([mixed, full])
    default, always = summary(priced, settled), summary(priced, full[0]["every"])
    # every second step is audited: its excess over its neighbours, at one audit in 200 steps
    rare = {"replay_every": 2, "conservation_every": 0, **UNBOUND}
    audits = on_ranks(_transformer, 2, size, tokens, max(pairs // 6, 4), rare)
    seconds = audits[0]["seconds"]
    audited, plain = [w / p for p, w in seconds[0::2]], [w / p for p, w in seconds[1::2]]
    extra = statistics.median(audited) - statistics.median(plain)
    return {
        **default, "tokens": tokens, "audit_steps": extra, "overhead_with_replay": default["overhead"] + extra / 200,
        "every_step": always["overhead"], "every_step_spread": always["overhead_spread"],
        "every_step_processor": always["processor_overhead"],
    }  # fmt: skip


def curve(*, size: Size = SMALL, tokens: tuple[int, ...] = (256, 512, 2048), pairs: int = 20) -> list[dict[str, Any]]:
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


def flat(
    *, counts: tuple[int, ...] = (10, 100, 1000), total: int = 4_000_000, pairs: int = 12, rounds: int = 4
) -> list[dict[str, Any]]:
    """Added seconds a step where the same total size lies in 10, 100 or 1,000 parameters; the counts take turns."""
    taken: dict[int, list[list[Any]]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count, runs in taken.items():
            runs.append(on_ranks(_layers, 2, count, total, pairs))
    rows = []
    for count, runs in taken.items():
        results = pooled(runs)
        added = statistics.median(w - p for p, w in results[0]["seconds"])
        rows.append({"parameters": count, "added_seconds": added, **summary(results)})
    return rows
