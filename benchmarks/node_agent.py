"""The node agent with eight ranks: how long a scrape takes, how much memory it holds, how many series a rank has."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from sdcwatch.metrics import RankMetrics
from sdcwatch.spool.rank import Spool

from benchmarks.rank_text import fill, labels_of


def agent(*, ranks: int = 8, scrapes: int = 30) -> dict[str, Any]:
    """Median and slowest of some scrapes, resident megabytes, and the most series that a rank has."""
    with tempfile.TemporaryDirectory(prefix="sdcwatch-agent-") as folder:
        ranks_of: list[tuple[Spool, RankMetrics]] = []
        for rank in range(ranks):
            spool = Spool.open(Path(folder), "bench", "e0000000000001-00000001", rank, rank, labels_of(rank, ranks))
            metrics = RankMetrics(labels_of(rank, ranks), writes_node=rank == 0, writes_job=rank == 0)
            fill(metrics)
            spool.write_metrics(metrics.lines())
            ranks_of.append((spool, metrics))
        mine = labels_of(0, ranks)
        command = [sys.executable, "-m", "sdcwatch.cli", "agent", "--spool-dir", folder, "--port", "0"]
        command += ["--node", mine["training_node"], "--instance", mine["training_instance"]]
        command += ["--cluster", mine["training_cluster"]]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return _scraped(Path(folder) / str(os.getuid()) / "agent.json", process.pid, scrapes, ranks_of)
        finally:
            process.terminate()
            process.wait(10)
            for spool, _ in ranks_of:
                spool.close()


def _scraped(note: Path, pid: int, scrapes: int, ranks_of: list[tuple[Spool, RankMetrics]]) -> dict[str, Any]:
    """Scrapes the agent; every rank has written anew before each, as in a job that runs."""
    deadline = time.monotonic() + 30
    while not note.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the agent did not start in 30 s")
        time.sleep(0.05)
    port = json.loads(note.read_text())["port"]
    seconds, text = [], ""
    for step in range(scrapes):
        for spool, metrics in ranks_of:
            metrics.set("sdc_training_step", float(step))
            spool.write_metrics(metrics.lines())
        begin = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        seconds.append(time.perf_counter() - begin)
    resident = next(
        int(line.split()[1]) / 1024 for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line
    )
    by_rank = Counter(
        line.split('rank="')[1].split('"')[0] for line in text.splitlines() if 'rank="' in line and line[0] != "#"
    )
    return {
        "scrape_ms_median": 1000 * statistics.median(seconds),
        "scrape_ms_most": 1000 * max(seconds),
        "resident_mb": resident,
        "series_a_rank": max(by_rank.values()),
        "bytes": len(text),
    }
