"""A fingerprint against the fastest read of the same buffer: `tensor.view(int64).sum()`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from sdcwatch.fingerprint import fingerprint

#: Each work repeats so long before it is timed: the other one's threads, which spin for some milliseconds after their
#: last work, are asleep by then, and the cores are awake, as they are in training (a core that slept is slow at first).
WARM_SECONDS = 0.05
#: Pairs of one row before the next one's turn: another number of threads means another pool, which has to warm up.
PAIRS_A_TURN = 10


def _rate(work: Callable[[torch.Tensor], object], buffer: torch.Tensor) -> float:
    begin = time.perf_counter()
    work(buffer)
    return buffer.numel() / (time.perf_counter() - begin)


def _hashed(buffer: torch.Tensor) -> int:
    return fingerprint([buffer])


def _summed(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(torch.int64).sum()


def _ratio(buffer: torch.Tensor, *, hashed_first: bool) -> float:
    """Rate of a fingerprint over that of the sum, one right after the other."""
    rates = {}
    for work in (_hashed, _summed) if hashed_first else (_summed, _hashed):
        warm = time.perf_counter() + WARM_SECONDS
        while time.perf_counter() < warm:
            work(buffer)
        rates[work] = _rate(work, buffer)
    return rates[_hashed] / rates[_summed]


def bandwidth(*, megabytes: tuple[int, ...] = (64, 256), rounds: int = 120) -> list[dict[str, Any]]:
    """Ratios of the two rates, median and quartiles: one thread and all of torch's, all rows in turns.

    Two threads share what memory gives them with each other and with a machine's other tenants, so ratios of one row
    differ by more than rows do; each row gets some pairs in every turn, so whatever comes and goes hits all.
    """
    before = torch.get_num_threads()
    buffers = {size: torch.randint(256, (size << 20,), dtype=torch.uint8) for size in megabytes}
    ratios: dict[tuple[int, int], list[float]] = {
        (size, threads): [] for size in megabytes for threads in sorted({1, before})
    }
    try:
        for turn, done in enumerate(range(0, rounds, PAIRS_A_TURN)):
            for threads in sorted({1, before}, reverse=turn % 2 == 1):
                torch.set_num_threads(threads)
                for size, buffer in buffers.items():
                    _summed(buffer)  # makes the pool of so many threads
                    for pair in range(min(PAIRS_A_TURN, rounds - done)):
                        ratios[size, threads].append(_ratio(buffer, hashed_first=pair % 2 == 1))
    finally:
        torch.set_num_threads(before)
    rows = []
    for (size, threads), row in ratios.items():
        low, middle, high = statistics.quantiles(row, n=4)
        rows.append({
            "megabytes": size, "threads": threads, "of_sum": middle, "quartiles": (low, high), "rounds": len(row),
        })  # fmt: skip
    return rows


def growth(*, megabytes: tuple[int, ...] = (4, 16, 64, 256)) -> list[dict[str, Any]]:
    """Fingerprint time by bytes, as a multiple of the smallest."""
    rows: list[dict[str, Any]] = []
    for size in megabytes:
        buffer = torch.zeros(size << 20, dtype=torch.uint8)
        seconds = statistics.median([buffer.numel() / _rate(_hashed, buffer) for _ in range(7)])
        rows.append({"megabytes": size, "times": seconds / rows[0]["seconds"] if rows else 1.0, "seconds": seconds})
    return rows
