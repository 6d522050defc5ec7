"""2,048 agents' text: how large it is, and how long the page rule takes a real Prometheus over all of its series.

Twice: scraped from all agents, with an event on one rank and on one node (benchmarks/fleet_scrape.py), and the rule's
expression alone with an event on every rank, where the texts are loaded as one block with promtool.
"""

from __future__ import annotations

import json
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from benchmarks.fleet_scrape import RULES, scraped
from benchmarks.rank_text import job_text, labels_of


def page_rule() -> str:
    """The expression of SDCReplicaMismatch, as it ships."""
    groups = yaml.safe_load((RULES / "mismatch.rules.yaml").read_text())["groups"]
    return next(r["expr"] for g in groups for r in g["rules"] if r.get("alert") == "SDCReplicaMismatch")


def fleet(*, agents: int = 2048, repeats: int = 7, interval: int = 60) -> dict[str, Any]:
    """Bytes and series of one scrape of all agents; seconds of the page rule's expression, where Prometheus is."""
    texts = job_text(agents=agents)
    lines = [line for text in texts for line in text.splitlines() if line and line[0] != "#"]
    found: dict[str, Any] = {
        "agents": agents, "bytes": sum(map(len, texts)), "series": len(lines),
        "series_a_rank": len(lines) / (8 * agents),
    }  # fmt: skip
    if shutil.which("promtool") and shutil.which("prometheus"):
        found["scraped"] = scraped([texts[0] + _events(1), *texts[1:]], texts[0] + _events(8), interval=interval)
        found["page_rule_seconds"] = statistics.median(_page_rule(lines, agents * 8, repeats))
    return found


def _events(ranks: int) -> str:
    """An event of now on so many ranks of the first node."""
    now = time.time()
    rows = []
    for rank in range(ranks):
        labels = ",".join(f'{name}="{value}"' for name, value in {**labels_of(rank, 8), "check": "replay"}.items())
        rows.append(f"sdc_last_mismatch_timestamp_seconds{{{labels}}} {now:.0f}\n")
    return "".join(rows)


def _page_rule(lines: list[str], ranks: int, repeats: int) -> list[float]:
    now = int(time.time())
    with tempfile.TemporaryDirectory(prefix="sdcwatch-fleet-") as folder:
        text = Path(folder) / "all.txt"
        with text.open("w") as out:
            for line in sorted(lines):  # families must be together
                out.write(f"{line} {now - 60}\n")
            for rank in range(ranks):
                labels = f'training_job="bench",rank="{rank}",check="replay"'
                out.write(f"sdc_last_mismatch_timestamp_seconds{{{labels}}} {now - 100} {now - 60}\n")
            out.write("# EOF\n")
        make = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(text), f"{folder}/data"]
        subprocess.run(make, check=True, capture_output=True, timeout=240)
        return _asked(folder, repeats, now - 60)


def _asked(folder: str, repeats: int, at: int) -> list[float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    Path(folder, "p.yaml").write_text("global: {}\n")
    command = [
        "prometheus", f"--config.file={folder}/p.yaml", f"--storage.tsdb.path={folder}/data",
        "--storage.tsdb.retention.time=3650d", f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        base = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{base}/-/ready", timeout=2)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        query = urllib.parse.urlencode({"query": page_rule(), "time": at})
        seconds = []
        for _ in range(repeats):
            begin = time.perf_counter()
            with urllib.request.urlopen(f"{base}/api/v1/query?{query}", timeout=60) as answer:
                result = json.load(answer)["data"]["result"]
            seconds.append(time.perf_counter() - begin)
            assert result, "the page rule saw no series"
        return seconds
    finally:
        process.terminate()
        process.wait(20)
