"""What an agent costs a node of eight ranks: the time of a scrape, and memory."""

from __future__ import annotations

import itertools
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sdcwatch.catalog import METRICS

Make = Callable[..., Any]
RANKS, ROUNDS = 8, 25
#: The wall time is stated for an idle machine; tests share two cores, so this many times as much is let pass; of
#: processor time, which waiting does not lengthen, twice as much.
SCRAPE_MS, GENEROUS = 20.0, 10.0
RSS_MB = 80.0


def processor_ms(pid: int) -> float:
    """Processor time of a process so far, in milliseconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def fill(rank: Any, step: int) -> None:
    """Every series that a rank can have, as after some steps."""
    for metric in METRICS.values():
        if metric.scope == "agent" or metric.kind == "info" or metric.name == "sdc_drill_timestamp_seconds":
            continue
        values = [metric.enums[label] for label in metric.labels]
        for chosen in itertools.product(*values):
            labels = dict(zip(metric.labels, chosen, strict=True))
            (rank.metrics.inc if metric.kind == "counter" else rank.metrics.set)(metric.name, float(step), **labels)
    rank.write()


@pytest.mark.timeout(120)
def test_a_scrape_of_eight_ranks_is_quick_and_small(agent: Make, rank: Make, record_property: Make) -> None:
    """Every file changes before each scrape, as it does in training; an answer without metrics is timed beside each."""
    ranks = [rank(number) for number in range(RANKS)]
    running = agent()
    scrapes, plain = [], []
    before = processor_ms(running.process.pid)
    for step in range(1, ROUNDS + 1):
        for each in ranks:
            fill(each, step)
        begun = time.perf_counter()
        assert running.ask("GET", "/healthz")[0] == 200
        between = time.perf_counter()
        text = running.metrics()
        scrapes.append(time.perf_counter() - between)
        plain.append(between - begun)
    busy = (processor_ms(running.process.pid) - before) / ROUNDS
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    rss = int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024
    scrape, healthz = statistics.median(scrapes) * 1000, statistics.median(plain) * 1000
    lines = sum(not line.startswith("#") for line in text.splitlines())
    print(
        f"{RANKS} ranks, {lines} series: scrape {scrape:.1f} ms, /healthz beside it {healthz:.1f} ms (medians of "
        f"{ROUNDS}), {busy:.1f} ms of processor time a round; largest RSS {rss:.0f} MB"
    )
    record_property("scrape_ms", round(scrape, 1))
    record_property("processor_ms", round(busy, 1))
    record_property("rss_mb", round(rss))
    assert lines > 250
    assert busy < 2 * SCRAPE_MS
    assert scrape < SCRAPE_MS * GENEROUS + healthz
    assert rss < RSS_MB
