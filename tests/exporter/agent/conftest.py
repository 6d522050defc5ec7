"""A rank's files without a training job, and a real agent process on a free port of the loopback."""

from __future__ import annotations

import http.client
import json
import os
import select
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sdcwatch.metrics import RankMetrics
from sdcwatch.spool.rank import Spool

EPOCHS = tuple(f"e{1764600000000 + n}-0000000{n}" for n in range(8))
PROMETHEUS = {"X-Prometheus-Scrape-Timeout-Seconds": "10"}


class Rank:
    """One rank of job `gpt` on node n0 (or another), writing as the monitor does."""

    def __init__(self, root: Path, rank: int, epoch: str, *, job: str, restore: bool, **identity: str) -> None:
        self.identity = {
            "training_job": job,
            "training_cluster": "blue",
            "training_node": "n0",
            "training_instance": "i-0",
            "gpu_uuid": f"GPU-{rank}",
            "rank": str(rank),
            **identity,
        }
        self.spool = Spool.open(root, job, epoch, rank, rank, self.identity)
        self.metrics = RankMetrics(self.identity, writes_node=rank == 0, writes_job=rank == 0)
        if restore and (text := self.spool.previous_metrics()):
            self.metrics.restore(text)

    def write(self) -> Rank:
        assert self.spool.write_metrics(self.metrics.lines()), self.spool.last_refusal
        return self

    def event(self, when: float, *instances: str) -> None:
        ranks = [{"rank": n, "instance": instance} for n, instance in enumerate(instances or ("i-0",))]
        line = {"schema": 1, "event": {"id": f"sdc-{when}", "time": when, "ranks": ranks}, "reporter": {}, "detail": {}}
        assert self.spool.append_event(line), self.spool.last_refusal

    def age(self, seconds: float) -> None:
        """Lets the rank end, as if it had done so that long ago."""
        self.spool.close()
        then = time.time() - seconds
        for path in (*self.spool.directory.iterdir(), self.spool.directory):
            os.utime(path, (then, then))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def rank(root: Path) -> Iterator[Callable[..., Rank]]:
    """`rank(number, epoch_index, ...)` claims a rank and writes its first file."""
    made: list[Rank] = []

    def make(number: int = 0, epoch: int = 0, *, job: str = "gpt", restore: bool = False, **identity: str) -> Rank:
        made.append(Rank(root, number, EPOCHS[epoch], job=job, restore=restore, **identity))
        return made[-1].write()

    yield make
    for each in made:
        each.spool.close()


class Agent:
    """A running `sdcwatch agent`."""

    def __init__(self, process: subprocess.Popen[str], port: int, context: ssl.SSLContext | None) -> None:
        self.process = process
        self.port = port
        self._context = context

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, *, token: str = ""
    ) -> tuple[int, str]:
        """One request; returns status and body."""
        connection: http.client.HTTPConnection = (
            http.client.HTTPSConnection("127.0.0.1", self.port, timeout=10, context=self._context)
            if self._context
            else http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        )
        given = {**({"Authorization": f"Bearer {token}"} if token else {}), **(headers or {})}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, given)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def metrics(self, **headers: str) -> str:
        status, text = self.ask("GET", "/metrics", headers=headers)
        assert status == 200, text
        return text

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=20)


@pytest.fixture
def agent(root: Path) -> Iterator[Callable[..., Agent]]:
    """`agent(*options)` starts one on a free port, as node n0 (i-0) of cluster blue, and waits until it serves."""
    processes: list[subprocess.Popen[str]] = []

    def start(*options: object, context: ssl.SSLContext | None = None) -> Agent:
        process = launch(root, *options)
        processes.append(process)
        assert process.stdout is not None
        ready = select.select([process.stdout], [], [], 20)[0]
        line = process.stdout.readline() if ready else ""
        assert " serves node " in line, (line, process.poll(), process.stderr and process.stderr.read())
        return Agent(process, int(line.split("/metrics")[0].rsplit(":", 1)[1]), context)

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


def launch(root: Path, *options: object) -> subprocess.Popen[str]:
    given = [str(option) for option in options]
    words = [sys.executable, "-m", "sdcwatch.cli", "agent", "--spool-dir", str(root)]
    words += ["--node", "n0", "--instance", "i-0", "--cluster", "blue"]
    if "--port" not in given:
        words += ["--port", "0"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SDCWATCH_", "SLURM", "KUBERNETES"))}
    return subprocess.Popen(
        [*words, *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.fixture
def refused(root: Path) -> Callable[..., tuple[int, str]]:
    """`refused(*options)` starts an agent that cannot serve; returns its exit status and what it said."""

    def start(*options: object) -> tuple[int, str]:
        process = launch(root, *options)
        _, err = process.communicate(timeout=30)
        return process.returncode, err

    return start


@pytest.fixture
def token_file(tmp_path: Path) -> Callable[[str, str], Path]:
    """`token_file(name, secret)` writes one."""

    def write(name: str, secret: str) -> Path:
        path = tmp_path / name
        path.write_text(secret + "\n")
        return path

    return write
