"""`sdcwatch doctor --drill` against a real agent, Prometheus, Alertmanager and remediation service on loopback."""

from __future__ import annotations

import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sdcwatch_remediation.simulator import Simulator, SimulatorConfig

ROOT = Path(__file__).parents[2]
RULES = ROOT / "alert_rules"
pytestmark = [pytest.mark.integration, pytest.mark.needs("prometheus", "alertmanager"), pytest.mark.timeout(240)]
Require = Callable[[str], Path]
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "thing", "AWS_EC2_METADATA_DISABLED": "true"}


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Pager(http.server.ThreadingHTTPServer):
    """Stands in for every receiver that is not the service; keeps (path, alert name)."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []
        super().__init__(("127.0.0.1", 0), _PagerHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _PagerHandler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert isinstance(self.server, Pager)
        self.server.heard += [(self.path, alert["labels"]["alertname"]) for alert in body["alerts"]]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@dataclass
class Stack:
    """Everything that runs, with its addresses."""

    folder: Path
    spool: Path
    prometheus: str
    alertmanager: str
    service: str
    pager: Pager
    simulator: Simulator
    node: str
    instance: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, name: str, *words: object, env: dict[str, str] | None = None) -> None:
        log = (self.folder / f"{name}.log").open("wb")
        with log:
            self.processes.append(
                subprocess.Popen(
                    [str(word) for word in words], cwd=self.folder, stdout=log, stderr=log,
                    env={**clean(), **CREDENTIALS, **(env or {})},
                )
            )  # fmt: skip

    def doctor(self, *words: str) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "sdcwatch.cli", "doctor", "--json", "--spool-dir", str(self.spool)),
                *("--prometheus", self.prometheus, "--alertmanager", self.alertmanager, "--service", self.service),
                *("--service-token-file", str(self.folder / "cases")),
                *words,
            ],
            capture_output=True, text=True, timeout=150, env=clean(),
        )  # fmt: skip
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def get(self, url: str) -> Any:
        with urllib.request.urlopen(url, timeout=5) as stream:
            text = stream.read().decode()
        return json.loads(text) if text[:1] in "[{" else text

    def until(self, what: str, condition: Callable[[], Any], seconds: float = 60) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if found := condition():
                    return found
            except OSError:
                pass
            time.sleep(0.2)
        logs = {path.name: path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log")}
        raise AssertionError(f"not within {seconds:.0f} s: {what}\n{logs}")


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("SDCWATCH_", "SLURM", "KUBERNETES", "AWS_"))}


@pytest.fixture
def start(tmp_path: Path, require: Require) -> Iterator[Callable[..., Stack]]:
    """`start(alert_token, **thresholds)` starts them all, and waits until the watchdog has gone all the way."""
    config = SimulatorConfig.of_size("demo", nodes=4, spares=1, clock_factor=1.0)
    pager = Pager()
    stacks: list[Stack] = []
    with Simulator(config) as simulator:

        def begin(alert_token: str = "alerts-token", **thresholds: str) -> Stack:
            agent, prometheus, alertmanager, service = free_ports(4)
            instance, node = member(simulator)
            stack = Stack(
                tmp_path, tmp_path / "spool", f"http://127.0.0.1:{prometheus}", f"http://127.0.0.1:{alertmanager}",
                f"http://127.0.0.1:{service}", pager, simulator, node, instance,
            )  # fmt: skip
            stacks.append(stack)
            configure(stack, require, alert_token, agent, thresholds)
            python = (sys.executable, "-m")
            stack.run(
                "agent", *python, "sdcwatch.cli", "agent", "--spool-dir", stack.spool, "--port", agent,
                "--node", node, "--instance", instance, "--cluster", "demo", "--events-token-file", "events",
            )  # fmt: skip
            stack.run("service", *python, "sdcwatch_remediation.cli", "serve", "--config", "service.toml")
            stack.run(
                "prometheus", require("prometheus"), "--config.file=prometheus.yaml", "--storage.tsdb.path=tsdb",
                # An alert of the first seconds, before Alertmanager is discovered, is only sent again after this time.
                "--rules.alert.resend-delay=2s", f"--web.listen-address=127.0.0.1:{prometheus}",
            )  # fmt: skip
            stack.run(
                "alertmanager", require("alertmanager"), "--config.file=alertmanager.yaml", "--storage.path=am",
                "--cluster.listen-address=", f"--web.listen-address=127.0.0.1:{alertmanager}",
            )  # fmt: skip
            stack.until("the watchdog", lambda: ("/watchdog", "SDCWatchdog") in pager.heard)
            stack.until("the service", lambda: stack.get(f"{stack.service}/readyz")["ready"])
            up = f"{stack.prometheus}/api/v1/query?query=sdc_build_info"
            stack.until("a scrape", lambda: stack.get(up)["data"]["result"])
            return stack

        yield begin
        for stack in stacks:
            for process in stack.processes:
                process.terminate()
            for process in stack.processes:
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(15)
    pager.shutdown()
    pager.server_close()


def member(simulator: Simulator) -> tuple[str, str]:
    """Instance id and node name of the cluster's first worker."""
    from sdcwatch_remediation.actions.hyperpod import HyperPod

    provider = HyperPod(
        "demo", region="us-west-2", endpoint_url=simulator.url, access_key_id="any", secret_access_key="thing"
    )
    first = provider.inventory().members[0]
    provider.close()
    return first.instance_id, first.node_name


def configure(stack: Stack, require: Require, alert_token: str, agent: int, thresholds: dict[str, str]) -> None:
    """The repository's own files, with this stack's ports, a scrape a second, and thresholds where asked for."""
    folder = stack.folder
    (folder / "secrets").mkdir()
    (folder / "secrets" / "webhook.token").write_text(alert_token)
    for name in ("alerts", "cases", "approve", "admin", "events", "latch"):
        (folder / name).write_text(f"{name}-token\n")
    settings = (RULES / "settings.toml").read_text().replace("https://example.com/", "https://runbooks.corp/")
    for name, value in thresholds.items():
        settings, changed = re.subn(rf'(?m)^{name} = "\w+"$', f'{name} = "{value}"', settings)
        assert changed == 1, name
    (folder / "settings.toml").write_text(settings)
    subprocess.run(
        [sys.executable, RULES / "build.py", "--settings", folder / "settings.toml", "--out", folder],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    (folder / "alertmanager-branch.yaml").unlink()
    port = stack.service.rsplit(":", 1)[1]
    prometheus = (RULES / "prometheus.yaml").read_text().replace("127.0.0.1:9093", stack.alertmanager[7:])
    prometheus = prometheus.replace("127.0.0.1:9479", f"127.0.0.1:{port}").replace("scrape_timeout: 4s", "")
    prometheus = re.sub(r"(?m)^(  scrape_interval|  evaluation_interval): 5s", r"\1: 1s", prometheus)
    (folder / "prometheus.yaml").write_text(prometheus)
    (folder / "targets").mkdir()
    (folder / "targets" / "agents.yaml").write_text(f'- targets: ["127.0.0.1:{agent}"]\n')
    alertmanager = (RULES / "alertmanager.yaml").read_text().replace("127.0.0.1:9479", f"127.0.0.1:{port}")
    alertmanager = alertmanager.replace("127.0.0.1:9480", f"127.0.0.1:{stack.pager.server_address[1]}")
    (folder / "alertmanager.yaml").write_text(alertmanager)
    (folder / "service.toml").write_text(
        f'[server]\nport = {port}\nalerts_token_file = "alerts"\ncases_token_file = "cases"\n'
        f'approve_token_file = "approve"\nadmin_token_file = "admin"\n'
        f'[cluster]\nname = "demo"\nregion = "us-west-2"\nendpoint_url = "{stack.simulator.url}"\n'
        f'[agents]\nport = {agent}\nevents_token_file = "events"\nlatch_token_file = "latch"\n'
        '[worker]\npoll_seconds = 0.2\n[policy]\nmode = "auto"\nconfirm = "first"\ngroups = ["workers"]\n'
        "settle_seconds = 0.2\n"
    )


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {finding["name"]: finding["status"] for finding in report["findings"]}


def test_a_drill_goes_the_whole_way_is_refused_and_pages_nobody(start: Callable[..., Stack]) -> None:
    """Every hop sees it, in order; the service records it; no case, no replacement, no page, and the rest is wired."""
    stack = start()
    status, report = stack.doctor("--drill", "--drill-timeout", "60")
    print(json.dumps(report, indent=1))
    seen = statuses(report)
    assert {name for name, found in seen.items() if found != "pass"} == set()
    assert status == 0
    hops = ("spool", "agent", "scrape", "prometheus", "alert", "alertmanager", "service", "refused")
    by_name = {finding["name"]: finding for finding in report["findings"]}
    times = [by_name[f"drill_{hop}"]["seconds"] for hop in hops]
    assert all(0 <= seconds < 30 for seconds in times), times
    assert times[0] < times[3] <= times[4] <= times[6]
    assert by_name["drill_alertmanager"]["detail"] == "for automation"
    second, again = stack.doctor("--drill", "--drill-timeout", "60")
    assert (second, again["drill"]["id"] != report["drill"]["id"]) == (0, True), "a second drill rings anew"
    assert stack.get(f"{stack.prometheus}/api/v1/targets")["data"]["activeTargets"][0]["lastError"] == ""
    assert not [name for _, name in stack.pager.heard if name != "SDCWatchdog"]
    assert "BatchReplaceClusterNodes" not in (stack.folder / "service.log").read_text()
    assert (stack.folder / "service.log").read_text().count("drill_received") == 2


def test_a_drill_that_does_not_come_back_is_told_by_the_doctor_and_by_an_alert(start: Callable[..., Stack]) -> None:
    """Alertmanager holds a wrong token: the doctor names the hop and its fix, and SDCDrillLost becomes a ticket."""
    stack = start("stale-token", drill_lost="5s")
    status, report = stack.doctor("--drill", "--drill-timeout", "12")
    seen = statuses(report)
    assert status == 1
    assert {name for name, found in seen.items() if found == "fail"} == {"drill_service", "drill_refused"}
    lost = next(finding for finding in report["findings"] if finding["name"] == "drill_service")
    assert "401" in lost["fix"]
    stack.until("the ticket", lambda: ("/tickets", "SDCDrillLost") in stack.pager.heard)
    assert not [path for path, name in stack.pager.heard if path == "/page"]
