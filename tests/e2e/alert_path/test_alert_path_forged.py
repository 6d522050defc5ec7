"""Four forgeries on the real path: each rings for a healthy node, none proves anything, nothing is done."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from alertpath.job import RANK, make_event
from alertpath.programs import fetch, free_port, wait
from sdcwatch import event as events

pytestmark = [pytest.mark.integration, pytest.mark.needs("prometheus", "alertmanager")]
PATIENCE = 45.0
VICTIM = 2
ROUNDS_SECONDS = 4.0
"""Twenty rounds of the service's worker in these worlds, after the case was found unproven."""


def victim_labels(world: Any) -> dict[str, str]:
    one = world.members[VICTIM]
    return {
        "training_job": "gpt", "training_cluster": "demo", "training_node": one.node_name,
        "training_instance": one.instance_id, "gpu_uuid": f"GPU-{one.instance_id}", "rank": str(VICTIM),
        "check": "replay",
    }  # fmt: skip


def forged_series(world: Any) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in victim_labels(world).items())
    return "".join(
        f"# TYPE {name} {kind}\n{name}{{{labels}}} {value}\n"
        for name, kind, value in (
            ("sdc_last_mismatch_timestamp_seconds", "gauge", time.time()),
            ("sdc_mismatches_total", "counter", 1),
        )
    )


@contextlib.contextmanager
def served(address: str, port: int, answers: dict[str, Any]) -> Iterator[list[str]]:
    """Serve fixed texts (or, called, their results) by path; gives what was asked for and what was posted."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Keep quiet."""

        def do_GET(self) -> None:
            asked.append(f"GET {self.path}")
            found = answers.get(self.path.partition("?")[0])
            self._send(200 if found else 404, found() if found else "")

        def do_POST(self) -> None:
            asked.append(f"POST {self.path}")
            self.rfile.read(int(self.headers["Content-Length"]))
            self._send(404, "{}")

        def _send(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer((address, port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield asked
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()


def is_unproven_and_nothing_is_done(world: Any) -> dict[str, Any]:
    """Wait for the case, give the service twenty rounds, and return the case: unproven still, and no act."""
    wait("the doorbell opens a case", world.cases, PATIENCE, 0.2)
    wait("the proof was looked for", lambda: world.cases()[0]["state"] == "unproven", PATIENCE, 0.2)
    until = time.time() + ROUNDS_SECONDS
    wait("twenty rounds", lambda: time.time() > until, ROUNDS_SECONDS + 5)
    (case,) = world.cases()
    assert (case["state"], case["instance_id"]) == ("unproven", world.members[VICTIM].instance_id)
    whole = fetch(f"{world.service_url}/v1/cases/{case['id']}", token="cases-token-of-this-test")
    steps = [line["step"] for line in whole["timeline"]]
    assert world.replacements() == 0
    assert whole["intents"] == []
    assert not {"quarantine_requested", "act_requested", "replace_requested", "latch_released"} & set(steps)
    return dict(whole)


def test_a_forged_post_to_alertmanager_proves_nothing(world: Any) -> None:
    """Anybody may post to Alertmanager; its delivery carries our token, and still no agent knows the event."""
    world.start(*(one.agent for one in world.nodes), world.alertmanager, world.service)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 30))
    labels = {"alertname": "SDCReplicaMismatch", "category": "sdc", "severity": "critical", **victim_labels(world)}
    body = [{"labels": labels, "annotations": {"summary": "s"}, "startsAt": now}]
    assert fetch(f"http://127.0.0.1:{world.alertmanager_port}/api/v2/alerts", body) is not None
    case = is_unproven_and_nothing_is_done(world)
    assert case["evidence"] == []
    assert "no agent of another node knows such an event" in case["reason"]


def test_forged_series_from_a_tenants_pod_prove_nothing(world: Any) -> None:
    """A scraped pod may write any labels; the rule fires for them and rings, and no agent knows the event."""
    port = free_port()
    tenant = f"127.0.0.1:{port}"
    targets = [*(one.target for one in world.nodes), tenant]
    prometheus = world.new_prometheus("scraper", world.prometheus_port, [world.alertmanager_port], agents=targets)
    with served("127.0.0.1", port, {"/metrics": lambda: forged_series(world)}):
        world.start(*(one.agent for one in world.nodes), world.alertmanager, prometheus, world.service)
        case = is_unproven_and_nothing_is_done(world)
    assert case["evidence"] == []


def forge_a_file(world: Any, event: events.Event, place: int, claims: int) -> None:
    """Let a process on one node write, in that node's spool, an event as if it were the rank `claims`."""
    owner = event.ranks[claims]
    reporter = events.Reporter(owner.rank, owner.node, owner.instance, owner.gpu_uuid)
    spec = {
        "root": str(world.nodes[place].root), "rank": claims, "event": events.as_dict(event), "born": event.time - 0.5,
        "reporter": asdict(reporter), "reports": True, "write": True, "dies": 0.2, "torn": False,
    }  # fmt: skip
    subprocess.run([sys.executable, str(RANK), json.dumps(spec)], timeout=60, check=False)


def test_forged_spool_files_on_one_node_are_one_witness_at_most(world: Any) -> None:
    """Its own rank's file counts as that node's word; one that claims another node's rank is dropped by the agent."""
    world.start()
    world.scraped()
    event = make_event("gpt", world.nodes, VICTIM, time.time() + 2.0, "demo")
    for claims in (0, 1):
        forge_a_file(world, event, 0, claims)
    case = is_unproven_and_nothing_is_done(world)
    assert {copy["agent"] for copy in case["evidence"]} == {world.members[0].instance_id}
    assert "only one agent of another node attests it" in case["reason"]


@pytest.mark.parametrize("claims", ["itself", "its neighbour"])
def test_an_agent_that_lies_is_one_witness_or_none(world: Any, claims: str) -> None:
    """It gives a perfect event and rings by its own metrics; under another node's name its answer does not count."""
    liar, neighbour = world.nodes[0], world.nodes[1]
    event = make_event("gpt", world.nodes, VICTIM, time.time() - 5.0, "demo")
    line = {"schema": 1, "event": events.as_dict(event), "reporter": {"rank": 0}, "detail": {}}
    who = liar if claims == "itself" else neighbour
    identity = {"cluster": "demo", "node": who.name, "instance": who.instance, "version": "0"}
    answer = json.dumps({"schema": 1, "agent": identity, "events": [line], "truncated": False})
    answers = {"/metrics": lambda: forged_series(world), "/events": lambda: answer}
    with served(liar.address, liar.port, answers) as asked:
        honest = (one.agent for one in world.nodes[1:])
        world.start(*honest, world.alertmanager, world.prometheus, world.service)
        case = is_unproven_and_nothing_is_done(world)
    assert any(one.startswith("GET /events") for one in asked)
    assert not [one for one in asked if one.startswith("POST")]
    told = {copy["agent"] for copy in case["evidence"]}
    assert told == ({liar.instance} if claims == "itself" else set())
