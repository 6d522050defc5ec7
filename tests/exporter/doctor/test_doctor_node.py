"""`sdcwatch doctor` on a node: spool, agent, scrapes, and servers that answer well, badly or not at all."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from sdcwatch.agent.collector import Collector
from sdcwatch.agent.node import Node
from sdcwatch.agent.state import StateFile
from sdcwatch.agent.tally import Tally
from sdcwatch.cli import main
from sdcwatch.doctor import drill as drills
from sdcwatch.doctor import node_checks, path_checks
from sdcwatch.doctor.http import Client, Unreachable
from sdcwatch.errors import ConfigurationError
from sdcwatch.event import parse_line
from sdcwatch.settings import Settings
from sdcwatch.spool.folders import prepare_user_root
from sdcwatch.spool.reader import read_event_lines

ROOT = Path(__file__).parents[3]
NODE = Node("blue", "n0", "i-0", "host")


class Fake(http.server.ThreadingHTTPServer):
    """Answers by path: a status and a body, and a clock that may be wrong."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.clock = 0.0
        self.seen: list[dict[str, str]] = []
        super().__init__(("127.0.0.1", 0), _FakeHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _FakeHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        fake = self.server
        assert isinstance(fake, Fake)
        fake.seen.append(dict(self.headers.items()))
        status, body = fake.answers.get(urlsplit(self.path).path, (404, "no such page"))
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def date_time_string(self, timestamp: float | None = None) -> str:
        assert isinstance(self.server, Fake)
        return super().date_time_string(time.time() + self.server.clock)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name in [name for name in os.environ if name.startswith(("SDCWATCH_", "SLURM"))]:
        monkeypatch.delenv(name)
    return Settings.load({"spool_dir": str(tmp_path / "spool")})


def found(findings: list[Any]) -> dict[str, str]:
    return {finding.name: finding.status for finding in findings}


def prometheus(fake: Fake, **changes: Any) -> Client:
    """A Prometheus that has everything, but for what `changes` says."""
    page = {"runbook_url": f"{changes.get('runbooks', 'https://wiki.corp/sdc')}/X.md"}
    health = changes.get("health", "ok")
    rules = [{"name": n, "health": health, "lastError": "x", "annotations": page} for n in path_checks.NEEDED]
    series = [{"metric": {"job": changes.get("job", "sdcwatch")}, "value": [time.time(), "1"]}]
    managers = [{"url": "http://127.0.0.1:9093/api/v2/alerts"}]
    fake.answers = {
        "/api/v1/query": (200, {"data": {"result": changes.get("series", series)}}),
        "/api/v1/rules": (200, {"data": {"groups": [{"rules": changes.get("rules", rules)}]}}),
        "/api/v1/alertmanagers": (200, {"data": {"activeAlertmanagers": changes.get("managers", managers)}}),
    }
    return Client(fake.url)


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({}, set()),
        ({"series": []}, {"target"}),
        ({"job": "pods"}, {"target"}),
        ({"rules": []}, {"rules"}),
        ({"health": "err"}, {"rules"}),
        ({"managers": []}, {"alertmanagers"}),
    ],
)
def test_each_thing_missing_in_prometheus_is_named(fake: Fake, changes: dict[str, Any], failing: set[str]) -> None:
    """One finding fails, with what to do, and the others pass."""
    findings = path_checks.check_prometheus(prometheus(fake, **changes), NODE)
    assert {f.name for f in findings if f.status == "fail"} == failing
    assert all(f.fix for f in findings if f.status != "pass")
    assert len(findings) == 5


@pytest.mark.parametrize(
    ("base", "status"),
    [
        ("https://example.com/sdcwatch/runbooks", "unknown"),
        ("https://wiki.example.com/runbooks", "unknown"),
        ("https://notexample.com/runbooks", "pass"),
        ("https://wiki.corp/sdc", "pass"),
    ],
)
def test_pages_that_link_to_the_placeholder_are_a_warning(fake: Fake, base: str, status: str) -> None:
    """It is no failure, since the page still comes; and it says which setting to set."""
    findings = {f.name: f for f in path_checks.check_prometheus(prometheus(fake, runbooks=base), NODE)}
    assert findings["runbooks"].status == status
    assert status == "pass" or "names.runbook_base" in findings["runbooks"].fix
    assert base in findings["runbooks"].detail


def alertmanager(fake: Fake, config: dict[str, Any], alerts: list[Any] | None = None) -> Client:
    watchdog = [{"receivers": [{"name": "watchdog"}]}]
    fake.answers = {
        "/api/v2/status": (200, {"config": {"original": yaml.safe_dump(config)}}),
        "/api/v2/alerts": (200, watchdog if alerts is None else alerts),
    }
    return Client(fake.url)


def ours() -> Any:
    return yaml.safe_load((ROOT / "alert_rules" / "alertmanager.yaml").read_text())


def test_our_own_routing_passes_and_what_is_taken_away_is_named(fake: Fake) -> None:
    """The shipped file is wired; without the drill's route, the webhook or the watchdog one finding each fails."""
    service = Client("http://127.0.0.1:9479")
    assert set(found(path_checks.check_alertmanager(alertmanager(fake, ours()), NODE, service)).values()) == {"pass"}
    config = ours()
    config["route"]["routes"] = [r for r in config["route"]["routes"] if "SDCDrill" not in str(r["matchers"])]
    failing = found(path_checks.check_alertmanager(alertmanager(fake, config), NODE, service))
    assert [name for name, status in failing.items() if status == "fail"] == ["drill_route"]
    elsewhere = Client("http://127.0.0.1:1")
    failing = found(path_checks.check_alertmanager(alertmanager(fake, ours(), []), NODE, elsewhere))
    assert [name for name, status in failing.items() if status == "fail"] == ["watchdog", "doorbell"]
    hidden = ours()
    hidden["receivers"][0]["webhook_configs"][0]["url"] = "<secret>"
    assert found(path_checks.check_alertmanager(alertmanager(fake, hidden), NODE, elsewhere))["doorbell"] == "unknown"


def test_what_cannot_be_asked_is_unknown_and_what_does_not_answer_fails(fake: Fake) -> None:
    """No question is passed over in silence."""
    fake.answers = {"/api/v2/status": (200, {"config": {"original": "route: &a {b: c}"}})}
    assert found(path_checks.check_alertmanager(Client(fake.url), NODE, None)) == {
        "alertmanager": "pass",
        "route": "unknown",
    }
    fake.answers = {"/api/v1/query": (200, {"data": {}})}
    assert found(path_checks.check_prometheus(Client(fake.url), NODE)) == {
        "prometheus": "pass",
        "target": "unknown",
        "rules": "unknown",
        "runbooks": "unknown",
        "alertmanagers": "unknown",
    }
    closed = Client("http://127.0.0.1:1")
    for findings in (
        path_checks.check_prometheus(closed, NODE),
        path_checks.check_alertmanager(closed, NODE, None),
        path_checks.check_service(closed),
    ):
        assert [finding.status for finding in findings] == ["fail"]
    fake.answers = {"/healthz": (200, "ok"), "/readyz": (503, '{"provider": false}')}
    (finding,) = path_checks.check_service(Client(fake.url))
    assert (finding.status, "provider" in finding.detail) == ("fail", True)


@pytest.mark.parametrize(("ahead", "status"), [(0, "pass"), (25, "pass"), (40, "fail"), (-40, "fail")])
def test_clocks_apart_by_half_a_minute_fail(fake: Fake, ahead: float, status: str) -> None:
    """A page needs clocks within a minute, so half of it is a warning in time."""
    fake.clock, fake.answers = ahead, {"/healthz": (200, "ok")}
    assert found(path_checks.check_clocks({"service": Client(fake.url)})) == {"clocks": status}
    assert found(path_checks.check_clocks({"service": Client("http://127.0.0.1:1")})) == {"clocks": "unknown"}


def test_a_token_goes_to_its_server_only_and_never_along_a_redirect(fake: Fake, tmp_path: Path) -> None:
    """And a URL that cannot be used is wrong use, before anything is asked."""
    (tmp_path / "token").write_text("secret\n")
    fake.answers = {"/x": (302, ""), "/elsewhere": (200, "got it")}
    assert Client(fake.url, str(tmp_path / "token")).get("/x").status == 302
    assert [headers.get("Authorization") for headers in fake.seen] == ["Bearer secret"]
    for url in ("127.0.0.1:9090", "ftp://x", "file:///etc/passwd", "http://", "http://a:b@c", "http://x:99999", ""):
        with pytest.raises(ConfigurationError):
            Client(url)
    with pytest.raises(ConfigurationError, match="token"):
        Client(fake.url, str(tmp_path / "none"))
    with pytest.raises(Unreachable, match="not JSON"):
        Client(fake.url).json("/elsewhere")


def view(settings: Settings, fake: Fake | None = None) -> node_checks.NodeView:
    root = prepare_user_root(settings.spool_dir)
    return node_checks.NodeView(root, NODE, None, Client(fake.url) if fake else None)


def test_a_bare_machine_fails_with_fixes_and_nothing_is_created(settings: Settings, tmp_path: Path) -> None:
    """The doctor looks; it does not make the folders whose absence it should report."""
    seen = node_checks.look(settings)
    statuses = found(node_checks.check(seen, settings, {}))
    assert statuses == {"spool": "fail", "identity": "unknown", "agent": "fail", "scrape": "fail"}
    assert not (tmp_path / "spool").exists()


def test_a_spool_that_somebody_opened_or_a_name_that_contradicts_is_told(settings: Settings) -> None:
    """The two things that make ranks refuse to start."""
    root = prepare_user_root(settings.spool_dir)
    record = {"schema": 1, "cluster": "blue", "node": "n0", "instance": "i-0", "host": "h", "time": 1.0}
    (root / "node.json").write_text(json.dumps(record))
    seen = node_checks.look(settings)
    assert (seen.node.node, found(node_checks.check(seen, settings, {}))["identity"]) == ("n0", "pass")
    other = found(node_checks.check(seen, settings, {"SLURMD_NODENAME": "n1"}))
    assert other["identity"] == "fail"
    Path(settings.spool_dir).chmod(0o777)
    assert found(node_checks.check(seen, settings, {}))["spool"] == "fail"
    Path(settings.spool_dir).chmod(0o1777)


def test_scrapes_that_stopped_are_told(settings: Settings) -> None:
    """Never, lately, and long ago are three answers."""
    root = prepare_user_root(settings.spool_dir)
    state = StateFile(root, host="127.0.0.1", port=1, outlives_ranks=True)
    assert found(node_checks.check(node_checks.look(settings), settings, {}))["scrape"] == "fail"
    state.scraped(time.time() - 900)
    assert found(node_checks.check(node_checks.look(settings), settings, {}))["scrape"] == "fail"
    state.scraped(time.time() - 10)
    assert found(node_checks.check(node_checks.look(settings), settings, {}))["scrape"] == "pass"


def test_a_drill_is_an_event_of_the_schema_marked_as_one_and_served_by_the_agent(settings: Settings) -> None:
    """The same bytes that a rank would write; the agent exports its time, and no mismatch series of anybody."""
    seen = view(settings)
    sent = drills.send(settings, seen)
    (line,), _ = read_event_lines(seen.root)
    event, reporter, _ = parse_line(line)
    assert (event.drill, event.id, event.suspects, reporter.node) == (True, sent.event_id, (0,), "n0")
    state = StateFile(seen.root, host="127.0.0.1", port=1, outlives_ranks=True)
    text = Collector(seen.root, NODE, state, tally := Tally()).collect().text
    labels = f'training_node="n0",training_instance="i-0",drill="{sent.id}"'
    assert f'sdc_drill_timestamp_seconds{{training_job="sdcwatch-drill",training_cluster="blue",{labels}}}' in text
    assert "sdc_last_mismatch" not in text
    assert "sdc_mismatches_total" not in text
    assert (sum(tally.dropped.values()), tally.parse_errors) == (0, 0)
    again = drills.send(settings, seen)
    text = Collector(seen.root, NODE, state, tally).collect().text
    assert text.count("sdc_drill_timestamp_seconds{") == 2
    assert again.id != sent.id


def test_a_drill_that_is_seen_nowhere_fails_hop_by_hop_and_in_time(settings: Settings, fake: Fake) -> None:
    """Each hop that was asked names its fix, each that could not be is unknown, and the limit holds."""
    seen = view(settings, fake)
    sent = drills.send(settings, seen)
    fake.answers = {"/metrics": (200, ""), "/api/v1/query": (200, {"data": {"result": []}})}
    started = time.monotonic()
    findings = drills.follow(sent, drills.Way(seen, Client(fake.url), None, Client(fake.url), False), limit=0.6)
    assert time.monotonic() - started < 5
    assert {f.name.removeprefix("drill_"): f.status for f in findings} == {
        "spool": "pass", "agent": "fail", "scrape": "fail", "prometheus": "fail", "alert": "fail",
        "alertmanager": "unknown", "service": "fail", "refused": "unknown",
    }  # fmt: skip
    assert all(f.fix for f in findings if f.status != "pass")


def test_the_command_prints_lines_or_one_object_and_its_status(settings: Settings, tmp_path: Path) -> None:
    """1 with findings that fail, 2 for wrong use, --json one object; a drill without an agent is not sent."""
    words = [sys.executable, "-m", "sdcwatch.cli", "doctor", "--spool-dir", str(tmp_path / "spool")]
    done = subprocess.run([*words, "--json", "--drill"], capture_output=True, text=True, timeout=60)
    report = json.loads(done.stdout)
    assert (done.returncode, report["schema"], report["drill"]) == (1, 1, None)
    assert [f["status"] for f in report["findings"] if f["name"] == "drill_spool"] == ["fail"]
    assert not (tmp_path / "spool").exists()
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "-> give --prometheus URL" in done.stdout
    assert main(["doctor", "--prometheus", "nowhere"]) == 2
    assert main(["doctor", "--drill-timeout", "0"]) == 2
