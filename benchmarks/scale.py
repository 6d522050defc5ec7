"""Host time of an exchange and its verdict for simulated groups: rows as bytes in, judgement out."""

from __future__ import annotations

import statistics
import time
from typing import Any

from sdcwatch.observation import Row, pack
from sdcwatch.packed_rows import unpack_rows
from sdcwatch.testing.simulated_group import group_of, healthy_row
from sdcwatch.verdict import History, judge


def ranks_growth(*, sizes: tuple[int, ...] = (64, 1024, 4096, 16384), steps: int = 6) -> list[dict[str, Any]]:
    """Milliseconds of one rank's host a step, eight ranks a node: unpacking all rows, and judging them."""
    rows = []
    for size in sizes:
        group = group_of(*([8] * (size // 8)))
        history, parse, verdict = History.initial(), [], []
        for step in range(steps):
            data = b"".join(pack(healthy_row(group, rank, step, 0)) for rank in range(size))
            begin = time.perf_counter()
            found = unpack_rows(Row, data, size)
            between = time.perf_counter()
            judgement, history = judge(history, group, step, found)
            end = time.perf_counter()
            assert not judgement.verdicts
            if step:
                parse.append(1000 * (between - begin))
                verdict.append(1000 * (end - between))
        rows.append({"ranks": size, "unpack_ms": statistics.median(parse), "verdict_ms": statistics.median(verdict)})
    return rows
