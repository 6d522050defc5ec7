"""Node agents on loopback for tests: each on its member's own address, all on one port.

What it does: serves `GET /events`, `GET /preflight` and `POST /latch/release` as `docs/contracts.md` says, from what
the test puts in; a test may make any of them lie, vanish or answer nonsense.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from sdcwatch_remediation.records import Member

EVENTS_TOKEN = "events-token"
LATCH_TOKEN = "latch-token"


class FakeAgent:
    """One agent; change its fields while it serves."""

    def __init__(self, member: Member) -> None:
        """Serve as this member, without events."""
        self.instance = member.instance_id
        self.node = member.node_name
        self.events: list[dict[str, Any]] = []
        self.raw: bytes | None = None
        """Sent instead of an answer, when set."""
        self.status = 200
        self.redirect_to = ""
        self.latch = ""
        """Id of the latch that stands here; empty: none."""
        self.released: list[str] = []
        self.quarantined = ""
        """Case id that quarantined this node."""
        self.tests: list[dict[str, Any]] | None = None
        """Answers of `GET /preflight`; None: an agent of a version without that road."""
        self.any_latch = False
        """True: it answers with the tests of every latch, whichever was asked for."""
        self.asked: list[str] = []
        """Paths with queries of all `GET`s."""
        self.posts: list[dict[str, Any]] = []

    def events_since(self, since: float) -> dict[str, Any]:
        """Answer `GET /events`."""
        found = [line for line in self.events if line["event"]["time"] >= since]
        who = {"cluster": "demo", "node": self.node, "instance": self.instance, "version": "0"}
        return {"schema": 1, "agent": who, "events": found, "truncated": False}

    def results(self, latch_id: str) -> tuple[int, dict[str, Any]]:
        """Answer `GET /preflight`: status and body."""
        if self.tests is None:
            return 404, {}
        who = {"cluster": "demo", "node": self.node, "instance": self.instance, "version": "0"}
        found = [test for test in self.tests if self.any_latch or test["latch_id"] == latch_id]
        return 200, {"schema": 1, "agent": who, "results": found}

    def release(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer `POST /latch/release`: status and body."""
        if body["latch_id"] in self.released:
            return 200, {"schema": 1, "result": "already_released"}
        if body["latch_id"] != self.latch:
            return 404, {}
        if body["decision"] == "leave":
            self.quarantined = body["case_id"]
            return 200, {"schema": 1, "result": "quarantined"}
        self.released.append(self.latch)
        return 200, {"schema": 1, "result": "released"}


class FakeAgents:
    """The agents of some members, on one port; a context manager."""

    def __init__(self, members: Sequence[Member]) -> None:
        """Bind every member's address on one free port.

        Raises:
            OSError: no port is free on all addresses.
        """
        self.agents = {member.instance_id: FakeAgent(member) for member in members}
        self._servers: list[ThreadingHTTPServer] = []
        addresses = [(member.address, self.agents[member.instance_id]) for member in members]
        for attempt in range(20):
            try:
                self.port = self._bind(addresses)
                break
            except OSError:
                self._close_servers()
                if attempt == 19:
                    raise
        self._threads = [
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
            for server in self._servers
        ]
        for thread in self._threads:
            thread.start()

    def __getitem__(self, instance_id: str) -> FakeAgent:
        return self.agents[instance_id]

    def __enter__(self) -> FakeAgents:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
        for thread in self._threads:
            thread.join(5)
        self._close_servers()

    def say(self, line: dict[str, Any], *, by: Sequence[str] | None = None) -> None:
        """Let all agents (or those given) report an event; where it halts, a latch stands on each of its nodes."""
        for instance, agent in self.agents.items():
            if by is None or instance in by:
                agent.events.append(line)
            if line["event"]["action"] == "halt" and any(r["instance"] == instance for r in line["event"]["ranks"]):
                agent.latch = line["event"]["id"]

    def _bind(self, addresses: Sequence[tuple[str, FakeAgent]]) -> int:
        port = 0
        for address, agent in addresses:
            server = _Server((address, port), _handler(agent))
            self._servers.append(server)
            port = int(server.server_address[1])
        return port

    def _close_servers(self) -> None:
        for server in self._servers:
            server.server_close()
        self._servers = []


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False


def _handler(agent: FakeAgent) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Keep quiet."""

        def do_GET(self) -> None:
            agent.asked.append(self.path)
            if agent.redirect_to:
                self._send(302, b"", location=agent.redirect_to)
            elif agent.raw is not None:
                self._send(agent.status, agent.raw)
            elif self.headers.get("Authorization") != f"Bearer {EVENTS_TOKEN}":
                self._send(401, b"{}")
            elif urlsplit(self.path).path == "/preflight":
                status, tree = agent.results(parse_qs(urlsplit(self.path).query)["latch"][0])
                self._send(status, json.dumps(tree).encode())
            else:
                query = parse_qs(urlsplit(self.path).query)
                self._send(agent.status, json.dumps(agent.events_since(float(query["since"][0]))).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            agent.posts.append(body)
            if self.headers.get("Authorization") != f"Bearer {LATCH_TOKEN}":
                self._send(401, b"{}")
            else:
                status, tree = agent.release(body)
                self._send(status, json.dumps(tree).encode())

        def _send(self, status: int, body: bytes, *, location: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if location:
                self.send_header("Location", location)
            self.end_headers()
            self.wfile.write(body)

    return Handler
