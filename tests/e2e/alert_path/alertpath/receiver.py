"""A pager that remembers what arrived and when, and can refuse: the far end of every alert path under test."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Arrival:
    """One alert of one delivery: at which receiver, when (unix seconds), and what it said."""

    receiver: str
    time: float
    status: str
    labels: dict[str, str]
    annotations: dict[str, str]
    delivery: int


class Receiver:
    """A loopback server with one path a receiver. Use it as a context manager."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.answer = 200
        self.asked = 0
        receiver, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))))
                with lock:
                    receiver.asked += 1
                    status = receiver.answer
                    if status < 300:
                        receiver._take(self.path.strip("/"), body)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="receiver", daemon=True)

    def _take(self, path: str, body: dict[str, Any]) -> None:
        now = time.time()
        for alert in body.get("alerts", ()):
            self.arrivals.append(Arrival(path, now, alert["status"], alert["labels"], alert["annotations"], self.asked))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def firing(self, receiver: str, alert: str = "SDCReplicaMismatch", **labels: str) -> list[Arrival]:
        """Firing alerts of one name that reached one receiver, oldest first."""
        wanted = {"alertname": alert, **labels}.items()
        return [
            a for a in list(self.arrivals)
            if a.receiver == receiver and a.status == "firing" and wanted <= a.labels.items()
        ]  # fmt: skip

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
