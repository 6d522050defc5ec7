"""Every panel gets data from a real Prometheus that scrapes what the exporter writes, and the preview draws it."""

from __future__ import annotations

import http.server
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sdcwatch.metrics import RankMetrics

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
LIMIT = 40.0


class Job:
    """Two ranks of a small job; each scrape sees it two steps further."""

    def __init__(self) -> None:
        self.started = time.time()
        self.steps = 0
        self.ranks = [
            RankMetrics(
                {
                    "training_job": "gpt", "training_cluster": "c1", "training_node": f"n{rank}",
                    "training_instance": f"i-{rank}", "gpu_uuid": f"GPU-{rank}", "rank": str(rank),
                },
                writes_node=True, writes_job=rank == 0,
            )
            for rank in range(2)
        ]  # fmt: skip

    def text(self) -> str:
        self.steps += 2
        for number, rank in enumerate(self.ranks):
            self._step(number, rank)
        return "".join(rank.render() for rank in self.ranks)

    def _step(self, number: int, rank: RankMetrics) -> None:
        now = time.time()
        rank.set("sdc_training_step", self.steps)
        rank.set("sdc_last_step_timestamp_seconds", now)
        rank.set("sdc_gradient_norm", 2.0 / self.steps + 0.1 * number)
        rank.set("sdc_gradient_norm_deviation", 0.5 * number)
        for check in ("weight_checksum", "replay"):
            rank.inc("sdc_checks_total", check=check)
            rank.set("sdc_replica_groups", 1, check=check)
            rank.set("sdc_detector_enabled", 1, check=check)
            rank.set("sdc_coverage_bytes", 1e6, check=check, covered="yes")
            rank.inc("sdc_check_seconds_total", 0.01, check=check)
        rank.inc("sdc_step_seconds_total", 1.0)
        rank.set("sdc_world_size", 2)
        for name in ("sdc_checked_step", "sdc_verified_step", "sdc_last_clean_checkpoint_step"):
            rank.set(name, self.steps - 2)
        for state in ("training", "halted"):
            rank.set("sdc_training_state", float(state == "training"), state=state)


@pytest.fixture
def job() -> Iterator[tuple[Job, str]]:
    """The job, and host:port where it is scraped."""
    state = Job()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = state.text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are no news."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield state, f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(LIMIT)


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def samples(url: str) -> int:
    """How often Prometheus has scraped the job; 0 while it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?query=count_over_time(up[1m])", timeout=5) as answer:
            result = json.load(answer)["data"]["result"]
    except OSError:
        return 0
    return int(float(result[0]["value"][1])) if result else 0


@pytest.fixture
def prometheus(job: tuple[Job, str], require: Callable[[str], Path], tmp_path: Path) -> Iterator[str]:
    """URL of a real Prometheus that has scraped the job at least six times."""
    port = free_port()
    config = tmp_path / "prometheus.yaml"
    config.write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
        f"scrape_configs: [{{job_name: sdcwatch, static_configs: [{{targets: ['{job[1]}']}}]}}]\n"
    )
    with (tmp_path / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                require("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + LIMIT
        waiting = threading.Event()
        while samples(url) < 6:
            assert process.poll() is None, (tmp_path / "prometheus.log").read_text()
            assert time.monotonic() < deadline, "Prometheus scraped nothing"
            waiting.wait(0.2)
        yield url
        process.terminate()
        process.wait(LIMIT)


def draw(url: str, state: Job, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable, DASHBOARDS / "preview.py", url, "--start", str(state.started), "--end", str(time.time()),
            "--out", out, "--strict", *more,
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.needs("module:matplotlib", "prometheus")
def test_a_healthy_job_fills_every_panel(job: tuple[Job, str], prometheus: str, tmp_path: Path) -> None:
    """Only panels about faults may be empty; the picture is there and has a size worth looking at."""
    done = draw(prometheus, job[0], tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    picture = tmp_path / "out" / "training-job.png"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 20_000

    unknown = draw(prometheus, job[0], tmp_path / "other", "--var", "job=nobody")
    assert unknown.returncode == 1
    assert "no data: Gradient norm per rank" in unknown.stderr


@pytest.mark.needs("module:matplotlib")
def test_a_prometheus_that_is_not_there_is_said_in_a_sentence(tmp_path: Path) -> None:
    """No traceback: the address, and what to look at."""
    done = draw(f"http://127.0.0.1:{free_port()}", Job(), tmp_path)
    assert done.returncode == 1
    assert "is Prometheus running there?" in done.stderr
    assert "Traceback" not in done.stderr
