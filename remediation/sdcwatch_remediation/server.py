"""Listen: bind the socket, run uvicorn around the app, and end in order.

What it does: binds first, so that a busy port is one clear sentence; starts the worker; ends it before the process.
What it never does: listen wider than the configuration, which `config.check` has judged, says.
Its place: `cli serve` calls `serve`.
"""

from __future__ import annotations

import gc
import logging
import signal
import socket
import ssl
import sys

import uvicorn

from sdcwatch_remediation.app import make_app
from sdcwatch_remediation.errors import ConfigError
from sdcwatch_remediation.peers import PeerProtocol
from sdcwatch_remediation.service import Service, print_line
from sdcwatch_remediation.settings import Config, Server


def serve(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status.

    Raises:
        ConfigError: the port is busy, or a token file or the database does not fit.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    listener = _bind(config.server)
    service = Service(config)
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.server.tls_cert_file else "http"
    where = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    server = make_server(service)
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal again once it has ended; ours lets the `finally` below close the service then.
        signal.signal(number, lambda *_: None)
    # What was imported and built by now stays: a full collection that walks through it again holds all requests up.
    gc.collect()
    gc.freeze()
    service.start()
    print_line(
        {
            "time": service.clock(),
            "case": "",
            "step": "listening",
            "detail": {"url": where, "database_id": service.database.id, "mode": config.policy.mode},
        }
    )
    try:
        server.run(sockets=[listener])
    finally:
        service.close()
        listener.close()
    return 0


def make_server(service: Service) -> uvicorn.Server:
    """Put uvicorn around a service, with TLS and clients' certificates as its configuration says."""
    server = service.config.server
    return uvicorn.Server(
        uvicorn.Config(
            make_app(service),
            http=PeerProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ssl_certfile=server.tls_cert_file or None,
            ssl_keyfile=server.tls_key_file or None,
            ssl_ca_certs=server.client_ca_file or None,
            # People, probes and Prometheus come without a certificate, on the same port. Whoever shows one is verified.
            ssl_cert_reqs=ssl.CERT_OPTIONAL if server.client_ca_file else ssl.CERT_NONE,
            timeout_graceful_shutdown=10,
        )
    )


def _bind(server: Server) -> socket.socket:
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = None
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((server.host, server.port))
    except (OSError, OverflowError, ValueError, TypeError) as error:
        # Besides the system's refusals: a port out of range, and host names that no encoding of names takes.
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"cannot listen on {server.host}:{server.port} ({getattr(error, 'strerror', None) or error}); "
            "stop what listens there or set server.host and server.port"
        ) from error
    return listener
