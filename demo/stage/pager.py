"""The pager, ticket queue and dead-man's switch of the demo: takes Alertmanager's webhooks and remembers them.

Stands where a team's own receivers would. It answers 200 to everything and acts on nothing.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Page:
    """One alert as it arrived: at which receiver, when (unix seconds), and what it said."""

    receiver: str
    time: float
    status: str
    labels: dict[str, str]
    annotations: dict[str, str]

    @property
    def alert(self) -> str:
        """The alert's name."""
        return self.labels.get("alertname", "")


class Pager:
    """A loopback server with one path a receiver; usable as a context manager."""

    def __init__(self, port: int, log: Path) -> None:
        self.pages: list[Page] = []
        pager, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                with lock:
                    pager._take(self.path.strip("/"), json.loads(body))
                    with open(log, "ab") as stream:
                        stream.write(body.strip() + b"\n")
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="pager", daemon=True)

    def _take(self, receiver: str, payload: dict[str, Any]) -> None:
        for alert in payload.get("alerts", ()):
            self.pages.append(
                Page(receiver, time.time(), alert["status"], dict(alert["labels"]), dict(alert["annotations"]))
            )

    def __enter__(self) -> Pager:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
