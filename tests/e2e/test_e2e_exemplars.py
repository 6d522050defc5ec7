"""A real Prometheus asks the agent for OpenMetrics and keeps the event as an exemplar of the counter it moved."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sdcwatch.metrics import RankMetrics
from sdcwatch.spool.rank import Spool

pytestmark = [pytest.mark.integration, pytest.mark.needs("prometheus")]


def write_event(root: Path) -> str:
    """One rank whose event names it, written as the monitor does; the event's id."""
    identity = {
        "training_job": "gpt", "training_cluster": "blue", "training_node": "n0", "training_instance": "i-0",
        "gpu_uuid": "GPU-0", "rank": "0",
    }  # fmt: skip
    now = time.time()
    spool = Spool.open(root, "gpt", f"e{int(now * 1000)}-0000000a", 0, 0, identity)
    metrics = RankMetrics(identity, writes_node=True, writes_job=True)
    metrics.blame(identity, "replay", now)
    event = {
        "id": "sdc-0123456789abcdef", "training_job": "gpt", "training_cluster": "blue", "step": 57, "time": now,
        "check": "replay", "kind": "attributed", "suspects": [0], "drill": False,
        "evidence": {"edges": [{"self": "00ff00ff00ff00ff"}]},
        "ranks": [{"rank": 0, "node": "n0", "instance": "i-0", "gpu_uuid": "GPU-0"}],
    }  # fmt: skip
    assert spool.append_event({"schema": 1, "event": event, "reporter": {}, "detail": {}})
    assert spool.write_metrics(metrics.lines())
    spool.close()
    return str(event["id"])


def test_prometheus_keeps_the_exemplar(tmp_path: Path, require: Callable[[str], Path]) -> None:
    """Asked for the exemplars of sdc_mismatches_total, it names event, step and digest."""
    event_id = write_event(tmp_path / "spool")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SDCWATCH_", "SLURM", "KUBERNETES"))}
    agent = subprocess.Popen(
        [
            *(sys.executable, "-m", "sdcwatch.cli", "agent", "--spool-dir", str(tmp_path / "spool"), "--port", "0"),
            *("--node", "n0", "--instance", "i-0", "--cluster", "blue"),
        ],
        stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert agent.stdout is not None
    line = agent.stdout.readline() if select.select([agent.stdout], [], [], 30)[0] else ""
    target = urllib.parse.urlsplit(line.split()[2]).netloc
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    (tmp_path / "prometheus.yaml").write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n"
        f"  - job_name: sdcwatch\n    static_configs: [{{targets: ['{target}']}}]\n"
    )
    with (tmp_path / "prometheus.log").open("wb") as log:
        prometheus = subprocess.Popen(
            [
                require("prometheus"), "--config.file=prometheus.yaml", "--storage.tsdb.path=tsdb",
                "--enable-feature=exemplar-storage", f"--web.listen-address={address}",
            ],
            cwd=tmp_path, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        found = until_exemplars(address)
    finally:
        for process in (agent, prometheus):
            process.terminate()
            process.communicate(timeout=20)
    (series,) = found
    assert series["seriesLabels"]["check"] == "replay"
    (exemplar,) = series["exemplars"]
    assert exemplar["labels"] == {"event": event_id, "step": "57", "digest": "00ff00ff00ff00ff"}


def until_exemplars(address: str, seconds: float = 40) -> Any:
    query = urllib.parse.urlencode(
        {"query": "sdc_mismatches_total", "start": f"{time.time() - 600}", "end": f"{time.time() + 600}"}
    )
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://{address}/api/v1/query_exemplars?{query}", timeout=5) as stream:
                if found := json.load(stream)["data"]:
                    return found
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"no exemplar within {seconds:.0f} s")
