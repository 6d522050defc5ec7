"""The command as an operator runs it: `serve` as a real process, the simulator through boto3, the client commands."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sdcwatch_remediation import cli
from sdcwatch_remediation.records import Member
from sdcwatch_remediation.simulator import Simulator, SimulatorConfig
from sdcwatch_remediation.testing import FakeAgents, alert, delivery, event_line
from sdcwatch_remediation.testing.agents import EVENTS_TOKEN, LATCH_TOKEN

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "thing", "AWS_EC2_METADATA_DISABLED": "true"}


class Process:
    """`sdcwatch-remediation serve` and the audit lines that it prints."""

    def __init__(self, config: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        self._arrived: queue.Queue[dict[str, Any]] = queue.Queue()
        command = [sys.executable, "-m", "sdcwatch_remediation.cli", "serve", "--config", str(config)]
        self.process = subprocess.Popen(
            command, env={**os.environ, **CREDENTIALS}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._arrived.put(json.loads(line))

    def until(self, step: str, *, seconds: float = 20.0) -> dict[str, Any]:
        """Wait for an audit line."""
        end = time.monotonic() + seconds
        while True:
            for line in self.lines:
                if line["step"] == step:
                    return line
            try:
                self.lines.append(self._arrived.get(timeout=max(0.01, end - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"no {step} in {seconds} s; seen {[x['step'] for x in self.lines]}") from None

    def end(self) -> int:
        """Send SIGTERM and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(15)
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    """Four workers and a spare, a hundred times faster than real."""
    config = SimulatorConfig.of_size(
        "demo", nodes=4, spares=1, shutdown_seconds=0.1, provision_seconds=0.1, boot_seconds=0.2, clock_factor=1.0
    )
    with Simulator(config) as running:
        yield running


def inventory(simulator: Simulator) -> tuple[Member, ...]:
    from sdcwatch_remediation.actions.hyperpod import HyperPod

    provider = HyperPod(
        "demo", region="us-west-2", endpoint_url=simulator.url, access_key_id="any", secret_access_key="thing"
    )
    members = provider.inventory().members
    provider.close()
    return members


@pytest.fixture
def serve(tmp_path: Path, simulator: Simulator) -> Iterator[Callable[..., tuple[Process, FakeAgents, Path]]]:
    """Starts `serve` against the simulator and fake agents on the inventory's own addresses."""
    processes: list[Process] = []
    agents = FakeAgents(inventory(simulator))

    def start(**policy: Any) -> tuple[Process, FakeAgents, Path]:
        for name in ("alerts", "cases", "approve", "admin"):
            (tmp_path / name).write_text(f"{name}-token\n")
        (tmp_path / "events").write_text(EVENTS_TOKEN)
        (tmp_path / "latch").write_text(LATCH_TOKEN)
        settings = {"mode": "auto", "confirm": "first", "groups": ["workers"], "settle_seconds": 0.2, **policy}
        config = tmp_path / "service.toml"
        config.write_text(
            f'[server]\nport = 0\nalerts_token_file = "alerts"\ncases_token_file = "cases"\n'
            f'approve_token_file = "approve"\nadmin_token_file = "admin"\n'
            f'[cluster]\nname = "demo"\nregion = "us-west-2"\nendpoint_url = "{simulator.url}"\n'
            f'[agents]\nport = {agents.port}\nevents_token_file = "events"\nlatch_token_file = "latch"\n'
            "[worker]\npoll_seconds = 0.1\n[policy]\n"
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        )
        process = Process(config)
        processes.append(process)
        return process, agents, config

    with agents:
        try:
            yield start
        finally:
            for process in processes:
                process.end()


def post(url: str, member: Member, rank: int) -> httpx.Response:
    headers = {"Authorization": "Bearer alerts-token"}
    return httpx.post(f"{url}/v1/alerts", content=delivery(alert(member, rank)), headers=headers, trust_env=False)


def test_from_webhook_to_replaced_through_unmodified_boto3(
    serve: Callable[..., tuple[Process, FakeAgents, Path]], simulator: Simulator
) -> None:
    """One real process, real HTTP, the simulator's own life cycle: one call, proven, latch released."""
    process, agents, _ = serve()
    url = process.until("listening")["detail"]["url"]
    members = inventory(simulator)
    line = event_line(members, [2], time=time.time())
    agents.say(line)
    assert post(url, members[2], 2).status_code == 200
    closed = process.until("closed")
    assert post(url, members[2], 2).json()["alerts"][0]["result"] == "rejected"
    headers = {"Authorization": "Bearer cases-token"}
    case = httpx.get(f"{url}/v1/cases/{closed['case']}", headers=headers, trust_env=False).json()
    assert (case["outcome"], case["schema"]) == ("replaced", 1)
    times = list(case["times"].values())
    assert None not in times
    assert times == sorted(times)
    calls = [call for call in simulator.calls() if call.operation == "BatchReplaceClusterNodes"]
    assert len(calls) == 1
    assert agents[members[2].instance_id].quarantined == case["id"]
    assert agents[members[0].instance_id].released == [line["event"]["id"]]
    metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    assert 'sdc_remediation_closed_cases{outcome="replaced"} 1.0' in metrics
    assert httpx.get(f"{url}/readyz", trust_env=False).json()["ready"] is True
    assert process.end() == 0


def test_an_operator_looks_approves_and_pauses_from_the_shell(
    serve: Callable[..., tuple[Process, FakeAgents, Path]], simulator: Simulator, capsys: pytest.CaptureFixture[str]
) -> None:
    """cases, show, pause, resume and approve talk to the running service with the token of each role."""
    process, agents, config = serve(mode="approve")
    url = process.until("listening")["detail"]["url"]
    members = inventory(simulator)
    agents.say(event_line(members, [1], time=time.time()))
    post(url, members[1], 1)
    case = process.until("awaiting_approval")["case"]
    where = ["--config", str(config), "--url", url]
    assert cli.main(["cases", *where]) == 0
    assert cli.main(["cases", "--json", *where]) == 0
    assert cli.main(["show", case, *where]) == 0
    capsys.readouterr()
    assert cli.main(["show", "--instance", members[1].instance_id, *where]) == 0
    assert case in capsys.readouterr().out
    assert cli.main(["pause", *where, "--by", "Ada", "--reason", "drill"]) == 0
    assert cli.main(["resume", *where, "--by", "Ada"]) == 0
    assert cli.main(["hold", "--instance", members[1].instance_id, *where, "--by", "Ada", "--reason", "first"]) == 0
    assert "held by Ada: first" in capsys.readouterr().out
    assert cli.main(["hold", case, "--instance", members[1].instance_id, *where]) == 2
    assert cli.main(["unhold", case, *where, "--by", "Ada"]) == 0
    assert "held by" not in capsys.readouterr().out
    assert cli.main(["approve", "case-nothing", *where, "--yes"]) == 1
    assert cli.main(["approve", case, *where, "--by", "Ada", "--yes"]) == 0
    process.until("closed")
    assert cli.main(["reject", case, *where]) == 1
    out = capsys.readouterr()
    assert "is closed and cannot become rejected" in out.err
    assert "no such case" in out.err
    assert len([call for call in simulator.calls() if call.operation == "BatchReplaceClusterNodes"]) == 1


def test_a_busy_port_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and what to do, before anything is opened."""
    (tmp_path / "alerts").write_text("token")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = tmp_path / "service.toml"
        config.write_text(
            f'[server]\nport = {taken.getsockname()[1]}\nalerts_token_file = "alerts"\n'
            '[cluster]\nname = "demo"\n[agents]\nevents_token_file = "alerts"\n'
        )
        assert cli.main(["serve", "--config", str(config)]) == 2
    assert "stop what listens there or set server.host and server.port" in capsys.readouterr().err
    assert not (tmp_path / "remediation.sqlite3").exists()


def test_wrong_use_is_status_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file, an unknown key and a service that is not there each say what to do."""
    assert cli.main(["serve", "--config", str(tmp_path / "none.toml")]) == 2
    assert "sdcwatch-remediation init" in capsys.readouterr().err
    path = tmp_path / "c.toml"
    path.write_text("[server]\nprot = 1\n")
    assert cli.main(["serve", "--check", "--config", str(path)]) == 2
    assert "unknown setting server.prot" in capsys.readouterr().err
    (tmp_path / "token").write_text("x")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert cli.main(["cases", "--url", f"http://127.0.0.1:{port}", "--token-file", str(tmp_path / "token")]) == 1
    assert "is `serve` running there?" in capsys.readouterr().err
