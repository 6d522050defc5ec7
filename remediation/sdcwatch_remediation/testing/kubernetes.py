"""The part of the Kubernetes API that the service uses, on loopback, for the official client: for tests.

What it does: serves a `KubernetesApi` over HTTP, and writes the kubeconfig that leads to it.
What it never does: answer by itself.
Its place: `tests/remediation/test_eks_*.py`, `test_handover_*.py` and the contract of the RBAC manifest.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from sdcwatch_remediation.records import Member
from sdcwatch_remediation.testing.kubernetes_api import TOKEN, Fault, KubernetesApi

__all__ = ["TOKEN", "FakeKubernetes", "Fault"]


class FakeKubernetes(KubernetesApi):
    """The server; `kubeconfig` makes the official client speak to it."""

    def __init__(self, members: Sequence[Member], *, rules: Sequence[dict[str, Any]] | None = None) -> None:
        """Begin with one ready node a member; `rules`: RBAC rules, or None to admit everything."""
        super().__init__(members, rules=rules)
        outer = self

        class Handler(_Handler):
            fake = outer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def serving(self) -> Iterator[FakeKubernetes]:
        """Serve in a thread of its own."""
        self._thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(10)

    def kubeconfig(self, path: Path, *, token: str = TOKEN) -> Path:
        """Write a kubeconfig (JSON is YAML) and return its path."""
        tree = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": {"token": token}}],
        }
        path.write_text(json.dumps(tree))
        return path


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeKubernetes

    def do_GET(self) -> None:
        self._serve()

    def do_PATCH(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet: `calls` says more."""

    def _serve(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        kind = self.headers.get("Content-Type", "")
        reply = self.fake.answer(self.command, self.path, json.loads(raw) if raw else None, token, kind)
        self.close_connection = True
        if reply is None:
            return
        text = reply[1] if isinstance(reply[1], str) else json.dumps(reply[1])
        self.send_response(reply[0])
        self.send_header("Content-Type", "text/plain" if isinstance(reply[1], str) else "application/json")
        self.send_header("Content-Length", str(len(text.encode())))
        self.send_header("Connection", "close")
        if reply[0] in (307, 308):
            self.send_header("Location", self.path + "?again")
        self.end_headers()
        self.wfile.write(text.encode())
