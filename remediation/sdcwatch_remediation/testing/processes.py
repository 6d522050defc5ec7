"""The service as real processes before a simulated HyperPod, on loopback, so that they can be killed: for tests.

What it does: `Serve` starts `sdcwatch-remediation serve` and reads the audit lines that it prints; `Site` is what
stands around it: the simulator over HTTP, node agents on the inventory's own addresses, tokens and a configuration.
What it never does: end a process that it did not start, listen beyond loopback, or share a folder with another site.
Its place: the campaign `make campaign-kill`, its short form in the tests, and `make bench-remediation`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from sdcwatch_remediation.actions.hyperpod import HyperPod
from sdcwatch_remediation.records import Member
from sdcwatch_remediation.simulator import Simulator, SimulatorConfig
from sdcwatch_remediation.testing.agents import EVENTS_TOKEN, LATCH_TOKEN, FakeAgents

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "thing", "AWS_EC2_METADATA_DISABLED": "true"}
START_SECONDS = 60.0


class Serve:
    """One process of the service."""

    def __init__(self, config: Path, *, heard: Callable[[Serve, dict[str, Any]], None] | None = None) -> None:
        """Start it.

        Args:
            config: its configuration.
            heard: called with each audit line at once, in the thread that reads them.
        """
        self.lines: list[dict[str, Any]] = []
        self._heard = heard
        self._news = threading.Condition()
        self._ended = False
        self._errors = config.with_suffix(".err").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sdcwatch_remediation.cli", "serve", "--config", str(config)],
            env={**os.environ, **CREDENTIALS},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    def url(self) -> str:
        """Wait until it listens and return its base URL.

        Raises:
            TimeoutError: it ended or did not listen in time.
        """
        line = self.until("listening", START_SECONDS)
        if line is None:
            raise TimeoutError(f"serve does not listen; it ended with {self.process.poll()}")
        return str(line["detail"]["url"])

    def until(self, step: str, seconds: float) -> dict[str, Any] | None:
        """Wait for an audit line; None when the process ended or the time did first."""
        with self._news:
            self._news.wait_for(lambda: self._ended or self._find(step) is not None, seconds)
            return self._find(step)

    def kill(self) -> None:
        """kill -9."""
        if self.alive:
            self.process.send_signal(signal.SIGKILL)

    def end(self, seconds: float = 15.0) -> int:
        """SIGTERM, and SIGKILL where that does not end it; return the exit status."""
        if self.alive:
            self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
        status = self.process.wait(10)
        self._reader.join(5)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._errors.close()
        return status

    def _find(self, step: str) -> dict[str, Any] | None:
        return next((line for line in self.lines if line["step"] == step), None)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            try:
                line = json.loads(raw)
            except ValueError:
                continue  # the line that it was killed in
            if self._heard is not None:
                self._heard(self, line)
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


class Site:
    """A simulated cluster with its agents and the service's configuration; a context manager."""

    def __init__(self, folder: Path, *, nodes: int = 4, spares: int = 2) -> None:
        """Prepare it in a folder of its own; nothing listens yet."""
        self.folder = folder
        self.simulator = Simulator(
            SimulatorConfig.of_size(
                "demo", nodes=nodes, spares=spares, shutdown_seconds=0.1, provision_seconds=0.2, boot_seconds=0.3
            )
        )
        self.members: tuple[Member, ...] = ()

    def __enter__(self) -> Site:
        for name in ("alerts", "cases", "approve", "admin"):
            (self.folder / name).write_text(f"{name}-token\n")
        (self.folder / "events").write_text(EVENTS_TOKEN)
        (self.folder / "latch").write_text(LATCH_TOKEN)
        self.simulator.start()
        self.members = self._inventory()
        self.agents = FakeAgents(self.members)
        self.agents.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.agents.__exit__(None, None, None)
        self.simulator.stop()

    def _inventory(self) -> tuple[Member, ...]:
        provider = HyperPod(
            "demo", region="us-west-2", endpoint_url=self.simulator.url, access_key_id="any", secret_access_key="thing"
        )
        try:
            return provider.inventory().members
        finally:
            provider.close()

    def config(self, name: str, *, database: str, worker: str = "", **policy: Any) -> Path:
        """Write a configuration and return its path.

        Args:
            name: of the file.
            database: SQLAlchemy URL.
            worker: more lines of `[worker]`.
            policy: settings of `[policy]`.
        """
        settings = {"mode": "auto", "confirm": "first", "groups": ["workers"], "settle_seconds": 0.2, **policy}
        path = self.folder / f"{name}.toml"
        path.write_text(
            '[server]\nport = 0\nalerts_token_file = "alerts"\ncases_token_file = "cases"\n'
            'approve_token_file = "approve"\nadmin_token_file = "admin"\n'
            f'[database]\nurl = "{database}"\n'
            f'[cluster]\nname = "demo"\nregion = "us-west-2"\nendpoint_url = "{self.simulator.url}"\n'
            f'[agents]\nport = {self.agents.port}\nevents_token_file = "events"\nlatch_token_file = "latch"\n'
            f"[worker]\npoll_seconds = 0.1\n{worker}\n[policy]\n"
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        )
        return path


def post(url: str, body: bytes, seconds: float = 10.0) -> int:
    """Deliver one body as Alertmanager would; return the status, 0 where nobody answered."""
    headers = {"Authorization": "Bearer alerts-token"}
    try:
        answer = httpx.post(f"{url}/v1/alerts", content=body, headers=headers, timeout=seconds, trust_env=False)
    except httpx.HTTPError:
        return 0
    return answer.status_code


def wait_for(condition: Callable[[], bool], seconds: float, pause: float = 0.02) -> bool:
    """Wait until a condition holds; return whether it came to hold in time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(pause)
    return True
