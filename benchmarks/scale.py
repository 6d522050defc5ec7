"""Host time of an exchange and its verdict for simulated groups: rows as bytes in, judgement out."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

from sdcwatch.observation import Row, pack
from sdcwatch.packed_rows import measured, unpack_rows
from sdcwatch.testing.simulated_group import group_of, healthy_row
from sdcwatch.verdict import Group, History, Judgement, judge


def ranks_growth(
    *, sizes: tuple[int, ...] = (64, 1024, 4096, 16384), repeats: int = 9, faulty_repeats: int = 3
) -> list[dict[str, Any]]:
    """Milliseconds of one rank's host a step, eight ranks a node: a clean step, and one in which a rank's weights part.

    CPU time of the judging thread (what the step loses on a machine of its own), median and least, and the median on
    the clock, which on a busy machine holds other programs' turns as well.
    """
    rows = []
    for size in sizes:
        group = group_of(*([8] * (size // 8)))
        history = History.initial()
        for step in range(2):
            _, history = _step(history, group, step, _rows(group, step))
        clean, bad = _rows(group, 2), _rows(group, 2, faulty=size // 2)
        cpu, clock = _timed(history, group, clean, repeats, faulty=False)
        faulty, _ = _timed(history, group, bad, faulty_repeats, faulty=True)
        rows.append(
            {
                "ranks": size,
                "bytes": len(clean),
                "cpu_ms": statistics.median(cpu),
                "cpu_ms_least": min(cpu),
                "clock_ms": statistics.median(clock),
                "faulty_cpu_ms": statistics.median(faulty),
            }
        )
    return rows


def _rows(group: Group, step: int, faulty: int | None = None) -> bytes:
    rows = [healthy_row(group, rank, step, 0) for rank in range(group.size)]
    if faulty is not None:
        rows[faulty] = replace(rows[faulty], weights_end=1, weights_now=1)
    return b"".join(map(pack, rows))


def _step(history: History, group: Group, step: int, data: bytes) -> tuple[Judgement, History]:
    """All that a rank does with the bytes of one exchange."""
    rows = unpack_rows(Row, data, group.size)
    sorted(measured(rows, "step"))
    sorted(measured(rows, "time"))
    return judge(history, group, step, rows)


def _timed(
    history: History, group: Group, data: bytes, repeats: int, *, faulty: bool
) -> tuple[list[float], list[float]]:
    cpu, clock = [], []
    for _ in range(repeats):
        begin, began = time.thread_time(), time.perf_counter()
        judgement, _ = _step(history, group, 2, data)
        cpu.append(1000 * (time.thread_time() - begin))
        clock.append(1000 * (time.perf_counter() - began))
        assert bool(judgement.verdicts) == faulty
    return cpu, clock
