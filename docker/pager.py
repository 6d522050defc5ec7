"""Stands where your pager, ticket queue and dead-man's switch would: prints each alert that arrives, one line each.

Loopback only; answers 200 to every POST and acts on nothing.
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT = 9480


class Pager(BaseHTTPRequestHandler):
    """One path a receiver."""

    def do_GET(self) -> None:
        """For the health check."""
        self._answer()

    def do_POST(self) -> None:
        """Takes one delivery of Alertmanager."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))))
        for alert in body.get("alerts", ()):
            print(f"[{self.path.strip('/')}] {alert['status']} {alert['annotations'].get('summary', '')}", flush=True)
        self._answer()

    def _answer(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Deliveries are printed, requests are not."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", PORT), Pager).serve_forever()
