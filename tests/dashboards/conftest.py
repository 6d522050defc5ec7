"""A world for the dashboards to look at: agents over a recorded spool, the service's metrics, DCGM, Prometheus, rules.

The spool is what four ranks of `make demo` wrote until they halted (recorded/), with its times moved to now; a second
job adds what that run had none of. Nothing here is for production.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import yaml
from prometheus_client import generate_latest
from sdcwatch.exposition import Sample, parse
from sdcwatch.metrics import RankMetrics
from sdcwatch.spool.rank import Spool
from sdcwatch_remediation import catalog
from sdcwatch_remediation.telemetry import Telemetry

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).parent / "recorded"
LIMIT = 60.0
#: The GPU that the recorded run named.
NAMED = "CPU-i-0de30000000000003-0"
_DCGM = (
    "GPU_TEMP", "MEMORY_TEMP", "POWER_USAGE", "SM_CLOCK", "MEM_CLOCK", "XID_ERRORS", "ECC_DBE_VOL_TOTAL",
    "UNCORRECTABLE_REMAPPED_ROWS", "CORRECTABLE_REMAPPED_ROWS", "ROW_REMAP_FAILURE", "PCIE_REPLAY_COUNTER",
    "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
)  # fmt: skip


class World(NamedTuple):
    """Address of a Prometheus that has scraped everything, and when it began, in unix seconds."""

    url: str
    started: float


def module(name: str) -> Iterator[ModuleType]:
    """A module of dashboards/, which is no package."""
    sys.path.insert(0, str(ROOT / "dashboards"))
    try:
        yield __import__(name)
    finally:
        sys.path.remove(str(ROOT / "dashboards"))


@pytest.fixture(scope="session")
def queries() -> Iterator[ModuleType]:
    yield from module("queries")


@pytest.fixture(scope="session")
def lint() -> Iterator[ModuleType]:
    yield from module("lint")


@pytest.fixture(scope="session")
def bounds() -> Iterator[ModuleType]:
    yield from module("bounds")


@pytest.fixture(scope="session")
def ask() -> Iterator[ModuleType]:
    yield from module("ask")


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait(ready: Callable[[], bool], what: str) -> None:
    """Until it is so; a failure names what was waited for."""
    deadline, waiting = time.monotonic() + LIMIT, threading.Event()
    while not ready():
        assert time.monotonic() < deadline, f"{what} did not come within {LIMIT:.0f} s"
        waiting.wait(0.2)


def _recorded(rank: int, shift: float) -> tuple[dict[str, str], str]:
    """Identity and metrics of one recorded rank; times in them are moved by `shift` seconds."""
    text = (RECORDED / f"rank-{rank}.prom").read_text()
    step = next(s for s in parse(text) if isinstance(s, Sample) and s.name == "sdc_training_step")
    moved = re.sub(r"(?m)^(sdc_\w+_timestamp_seconds\{.*\}) (\S+)$", lambda m: f"{m[1]} {float(m[2]) + shift!r}", text)
    return dict(step.labels), moved


def _newest() -> float:
    text = "".join(path.read_text() for path in RECORDED.glob("*.prom"))
    return max(float(value) for value in re.findall(r"(?m)^sdc_last_step_timestamp_seconds\{.*\} (\S+)$", text))


def _second_job(identity: dict[str, str]) -> str:
    """A job with an event that names nobody, a heal and skips, on the first node."""
    metrics = RankMetrics({**identity, "training_job": "second"}, writes_node=True, writes_job=True)
    metrics.set("sdc_training_step", 7)
    metrics.inc("sdc_unattributed_total", check="gradient_checksum", verdict="inconclusive")
    metrics.set(
        "sdc_last_unattributed_timestamp_seconds", time.time(), check="gradient_checksum", verdict="inconclusive"
    )
    metrics.inc("sdc_heals_total", check="weight_checksum", outcome="healed")
    metrics.inc("sdc_skips_total", check="replay", reason="budget")
    return metrics.lines()


def _service() -> str:
    """What the service's own telemetry exports once everything has happened once."""
    telemetry = Telemetry()
    gauges = {}
    for metric in catalog.CATALOG:
        labels = tuple({"outcome": "replaced", "result": "fail"}.get(label, "some") for label in metric.labels)
        if metric.kind == "counter":
            telemetry.count(metric.name, *labels)
        elif not metric.name.endswith(("_build_info", "_timestamp_seconds")):
            gauges[metric.name] = {labels: 1.0}
    telemetry.watch(lambda: gauges)
    telemetry.round_ended(time.time())
    return generate_latest(telemetry.registry).decode()


def _dcgm() -> str:
    """As dcgm-exporter writes it, with `Hostname` renamed as some installations do, and the GPU on two pods at once."""
    rows = []
    for field in _DCGM:
        rows.append(f"# TYPE DCGM_FI_DEV_{field} gauge")
        for pod in ("a", "b"):
            labels = f'gpu="0",UUID="{NAMED}",device="nvidia0",modelName="x",hostname="renamed",pod="{pod}"'
            rows.append(f"DCGM_FI_DEV_{field}{{{labels}}} 40")
    return "\n".join(rows) + "\n"


@contextlib.contextmanager
def served(pages: dict[str, Callable[[], str]]) -> Iterator[str]:
    """host:port where each path gives its text."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = pages[self.path]().encode()
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
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(LIMIT)


@contextlib.contextmanager
def running(command: list[object], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program that ends with the block."""
    with log.open("w") as stream:
        process = subprocess.Popen([str(word) for word in command], stdout=stream, stderr=stream)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(LIMIT)


@contextlib.contextmanager
def _node(folder: Path, rank: int, shift: float) -> Iterator[str]:
    """host:port of a real agent of a node whose one rank wrote what was recorded."""
    identity, text = _recorded(rank, shift)
    epoch = f"e{int(time.time() * 1000)}-0000000{rank}"
    with contextlib.ExitStack() as opened:
        jobs = {identity["training_job"]: text}
        if rank == 0:
            jobs["second"] = _second_job(identity)
        for job, metrics in jobs.items():
            spool = Spool.open(folder / "spool", job, epoch, rank, 0, {**identity, "training_job": job})
            opened.callback(spool.close)
            assert spool.write_metrics(metrics)
        port = free_port()
        options = ["--spool-dir", folder / "spool", "--port", port, "--node", identity["training_node"]]
        options += ["--instance", identity["training_instance"], "--cluster", identity["training_cluster"]]
        command = [sys.executable, "-c", "import sys; from sdcwatch.cli import main; sys.exit(main())", "agent"]
        opened.enter_context(running([*command, *options], folder / "agent.log"))
        yield f"127.0.0.1:{port}"


def value(url: str, query: str) -> float:
    """One value from Prometheus; 0 where there is none, or it does not answer yet."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?query={query}", timeout=5) as answer:
            result = json.load(answer)["data"]["result"]
    except OSError:
        return 0.0
    return float(result[0]["value"][1]) if result else 0.0


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, require: Callable[[str], Path]) -> Iterator[World]:
    """A job in which a GPU was named and everything else happened once, scraped at least six times."""
    folder = tmp_path_factory.mktemp("world")
    started = time.time()
    shift = started - _newest()
    with contextlib.ExitStack() as opened:
        agents = []
        for rank in range(4):
            node = folder / f"node{rank}"
            node.mkdir()
            agents.append(opened.enter_context(_node(node, rank, shift)))
        pages = {"/service": _service, "/dcgm": _dcgm}
        extra = opened.enter_context(served(pages))
        rules = sorted((ROOT / "alert_rules").glob("*.rules.yaml"))
        for path in rules:
            (folder / path.name).write_text(path.read_text())
        jobs = [{"job_name": "sdcwatch", "static_configs": [{"targets": agents}]}] + [
            {"job_name": name, "metrics_path": path, "static_configs": [{"targets": [extra]}]}
            for name, path in (("sdcwatch-remediation", "/service"), ("dcgm", "/dcgm"))
        ]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": ["*.rules.yaml"],
            "scrape_configs": jobs,
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command: list[object] = [
            require("prometheus"), f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
        ]  # fmt: skip
        process = opened.enter_context(running(command, folder / "prometheus.log"))

        def ready() -> bool:
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            return (
                value(url, "min(count_over_time(up[1m]))%2Bsum(up)-6") >= 6
                and value(url, "count(ALERTS%7Balertstate%3D%22firing%22%7D)") >= 2
                and value(url, "count(sdc_agent_last_scrape_timestamp_seconds)") == 4
            )

        wait(ready, "six scrapes of everything and a firing alert")
        yield World(url, started)
