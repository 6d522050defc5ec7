"""A small HTTP server in which one slow or silent client cannot keep a scrape waiting.

The accept loop only accepts: the TLS handshake, every read and every write happen in a worker with a time-out, a whole
connection has a deadline, and the number of workers is bounded (a connection beyond it is closed at once). It knows no
routes. Standard library only. Flow: command -> **server** -> handler.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import ssl
import threading
import time
from pathlib import Path
from typing import Any

from sdcwatch.agent.tally import Tally
from sdcwatch.errors import ConfigurationError

#: Seconds for one read, write or handshake step, and for a whole connection.
IO_SECONDS = 5.0
CONNECTION_SECONDS = 15.0
MAX_WORKERS = 32


def tls_context(cert: Path | str, key: Path | str) -> ssl.SSLContext:
    """A server context for one certificate chain and key.

    Raises:
        ConfigurationError: the files cannot be read or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"--tls-cert {cert} with --tls-key {key}: {error}") from error
    return context


class AgentServer(socketserver.TCPServer):
    """Binds at once; `serve_forever` serves until `shutdown`.

    Args:
        handler: the handler class; instances find what they serve in `server.routes`.
        routes: what the handler serves.
        context: TLS, or None for plain HTTP.

    Raises:
        OSError: the address cannot be bound.
    """

    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[socketserver.BaseRequestHandler],
        routes: Any,
        tally: Tally,
        context: ssl.SSLContext | None = None,
    ) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.routes = routes
        self._tally = tally
        self._context = context
        self._slots = threading.BoundedSemaphore(MAX_WORKERS)
        self._deadlines: dict[socket.socket, float] = {}
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hands one connection to a worker; called in the accept loop, so it must not block."""
        if not self._slots.acquire(blocking=False):
            self._tally.refuse("busy")
            self.shutdown_request(request)
            return
        try:
            threading.Thread(target=self._work, args=(request, client_address), daemon=True).start()
        except RuntimeError:  # no thread to be had
            self._slots.release()
            self._tally.refuse("busy")
            self.shutdown_request(request)

    def service_actions(self) -> None:
        """Ends connections that are past their deadline; called twice a second by the accept loop."""
        now = time.monotonic()
        for connection, deadline in list(self._deadlines.items()):
            if now > deadline:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that misbehaves or goes away is not worth a stack trace."""

    def _work(self, request: socket.socket, client_address: Any) -> None:
        connection = request
        try:
            connection.settimeout(IO_SECONDS)
            if self._context is not None:
                connection = self._context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            self._deadlines[connection] = time.monotonic() + CONNECTION_SECONDS
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()
            self.finish_request(connection, client_address)
        except (OSError, ValueError):
            self._tally.refuse("request")
        finally:
            self._deadlines.pop(connection, None)
            self.shutdown_request(connection)
            self._slots.release()
