"""The five requests that an agent answers (docs/contracts.md, Agent over HTTP).

Each road has its own secret; a road without one is closed. A scrape counts only once its answer has been sent, and
counts from the moment at which the spool was read. Standard library only. Flow: server -> **handler** -> collector,
spool.reader, preflight.result, release.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from sdcwatch._version import __version__
from sdcwatch.agent import openmetrics, release
from sdcwatch.agent.collector import Collector
from sdcwatch.agent.node import Node
from sdcwatch.agent.server import IO_SECONDS
from sdcwatch.agent.state import StateFile
from sdcwatch.agent.tally import Tally
from sdcwatch.agent.tokens import Credential, Password, Token
from sdcwatch.preflight.result import own_results
from sdcwatch.spool.reader import read_event_lines

SCHEMA = 1
BODY_BYTES = 64 << 10
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Only Prometheus (and what speaks for it) sends this; a curl must not look like a scrape to a halting job.
SCRAPE_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"


@dataclass(frozen=True, slots=True)
class Routes:
    """What the handler serves. A token that is None closes its road; without `metrics`, `/metrics` is open to all."""

    user_root: Path
    node: Node
    collector: Collector
    state: StateFile
    tally: Tally
    metrics: tuple[Credential, ...]
    events_token: Token | None
    latch_token: Token | None


class AgentHandler(BaseHTTPRequestHandler):
    """One connection, one request (HTTP/1.0: a worker is free again after its answer)."""

    server_version = f"sdcwatch/{__version__}"
    sys_version = ""
    timeout = IO_SECONDS

    @property
    def routes(self) -> Routes:
        return cast(Routes, cast(Any, self.server).routes)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/healthz":
            self._send(200, b"ok\n", "text/plain; charset=utf-8")
        elif url.path == "/metrics":
            self._metrics()
        elif url.path == "/events":
            self._events(url.query)
        elif url.path == "/preflight":
            self._preflight(url.query)
        elif url.path == "/latch/release":
            self._fail(405, "use POST")
        else:
            self._fail(404, "there are /metrics, /healthz, /events, /preflight and /latch/release")

    def do_POST(self) -> None:
        if urlsplit(self.path).path != "/latch/release":
            self._fail(404, "only /latch/release takes a POST")
        elif self._admitted(self.routes.latch_token, "--latch-token-file"):
            self._release()

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: a scrape every few seconds would fill the log; refusals are counted."""

    def _metrics(self) -> None:
        routes = self.routes
        if routes.metrics and not self._admits(routes.metrics):
            return
        snapshot = routes.collector.collect()
        if openmetrics.wanted(self.headers.get("Accept")):
            text, kind = snapshot.openmetrics, openmetrics.CONTENT_TYPE
        else:
            text, kind = snapshot.text, CONTENT_TYPE
        self._send(200, text.encode("utf-8", errors="replace"), kind, ("Vary", "Accept"))
        if self.headers.get(SCRAPE_HEADER):
            routes.state.scraped(snapshot.time)

    def _events(self, query: str) -> None:
        routes = self.routes
        if not self._admitted(routes.events_token, "--events-token-file"):
            return
        asked = parse_qs(query, keep_blank_values=True)
        try:
            since = float(asked.get("since", ["0"])[-1])
            if not math.isfinite(since):
                raise ValueError
        except ValueError:
            self._fail(400, "since must be unix seconds")
            return
        lines, cut = read_event_lines(routes.user_root, instance=asked.get("instance", [None])[-1], since=since)
        head = f'{{"schema":{SCHEMA},"agent":{json.dumps(self._agent())},"events":['
        # Lines go out as they were written: whoever compares copies compares bytes that we did not touch.
        body = head.encode() + b",".join(lines) + f'],"truncated":{json.dumps(cut)}}}\n'.encode()
        self._send(200, body, "application/json")

    def _preflight(self, query: str) -> None:
        routes = self.routes
        if not self._admitted(routes.events_token, "--events-token-file"):
            return
        latch_id = parse_qs(query).get("latch", [""])[-1]
        if not release.is_latch_id(latch_id):
            self._fail(400, "latch must be the id of a latch")
            return
        node = routes.node
        found = own_results(routes.user_root, latch_id=latch_id, node=node.node, instance=node.instance)
        self._json(200, {"schema": SCHEMA, "agent": self._agent(), "results": found})

    def _agent(self) -> dict[str, str]:
        node = self.routes.node
        return {"cluster": node.cluster, "node": node.node, "instance": node.instance, "version": __version__}

    def _release(self) -> None:
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            self._fail(411, "Content-Length is needed")
            return
        if not 0 <= length <= BODY_BYTES:
            self._fail(413, f"a body of at most {BODY_BYTES} bytes is read")
            return
        try:
            request = release.parse_request(json.loads(self.rfile.read(length)))
        except ValueError as error:
            self._fail(400, str(error))
            return
        answer = release.answer(request, self.routes.user_root, self.routes.node)
        if answer.status == 200:
            self._json(200, {"schema": SCHEMA, "result": answer.result})
        else:
            self._fail(answer.status, answer.error)

    def _admitted(self, token: Token | None, option: str) -> bool:
        if token is None:
            self._fail(403, f"closed: start the agent with {option} to open it")
            return False
        return self._admits((token,))

    def _admits(self, credentials: tuple[Credential, ...]) -> bool:
        given = self.headers.get("Authorization")
        admitted = [credential.admits(given) for credential in credentials]
        if any(admitted):
            return True
        self.routes.tally.refuse("token")
        basic = any(isinstance(credential, Password) for credential in credentials)
        challenge = 'Basic realm="sdcwatch"' if basic else "Bearer"
        self._json(401, {"error": "missing or wrong credential"}, ("WWW-Authenticate", challenge))
        return False

    def _fail(self, status: int, sentence: str) -> None:
        self.routes.tally.refuse("request")
        self._json(status, {"error": sentence})

    def _json(self, status: int, record: dict[str, Any], *headers: tuple[str, str]) -> None:
        self._send(status, json.dumps(record).encode() + b"\n", "application/json", *headers)

    def _send(self, status: int, body: bytes, kind: str, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
