"""A fingerprint against the fastest read of the same buffer: `tensor.view(int64).sum()`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from sdcwatch.fingerprint import fingerprint

#: A pool of OpenMP spins for some milliseconds after its last work, on the cores that the next measurement needs.
SPIN_SECONDS = 0.05


def _rate(work: Callable[[torch.Tensor], object], buffer: torch.Tensor) -> float:
    begin = time.perf_counter()
    work(buffer)
    return buffer.numel() / (time.perf_counter() - begin)


def _hashed(buffer: torch.Tensor) -> int:
    return fingerprint([buffer])


def _summed(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(torch.int64).sum()


def _ratio(buffer: torch.Tensor) -> float:
    rates = []
    for work in (_summed, _hashed):
        time.sleep(SPIN_SECONDS)
        work(buffer)  # wakes the threads, which takes as long as some megabytes do
        rates.append(_rate(work, buffer))
    return rates[1] / rates[0]


def bandwidth(*, megabytes: tuple[int, ...] = (64, 256), repeats: int = 25) -> list[dict[str, Any]]:
    """Median ratio of the two rates, one thread and all of torch's, taken in turns.

    A small buffer is read more often: a thread that wakes up late decides much of its time.
    """
    rows = []
    before = torch.get_num_threads()
    try:
        for size in megabytes:
            buffer = torch.randint(256, (size << 20,), dtype=torch.uint8)
            for threads in sorted({1, before}):
                torch.set_num_threads(threads)
                ratios = [_ratio(buffer) for _ in range(repeats * max(megabytes) // size)]
                rows.append({"megabytes": size, "threads": threads, "of_sum": statistics.median(ratios)})
    finally:
        torch.set_num_threads(before)
    return rows


def growth(*, megabytes: tuple[int, ...] = (4, 16, 64, 256)) -> list[dict[str, Any]]:
    """Fingerprint time by bytes, as a multiple of the smallest."""
    rows: list[dict[str, Any]] = []
    for size in megabytes:
        buffer = torch.zeros(size << 20, dtype=torch.uint8)
        seconds = statistics.median([buffer.numel() / _rate(_hashed, buffer) for _ in range(7)])
        rows.append({"megabytes": size, "times": seconds / rows[0]["seconds"] if rows else 1.0, "seconds": seconds})
    return rows
