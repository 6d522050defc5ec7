"""Who is at the other end of a TLS connection: the names in a client's certificate, handed to the application.

What it does: a protocol for uvicorn (which keeps the certificate to itself) that puts the names of a certificate, which
OpenSSL has verified against `server.client_ca_file`, into the ASGI scope of each request of that connection.
What it never does: verify anything itself, or read a name from a header.
Its place: `server` gives the protocol to uvicorn, `app` and `web` ask `reports`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Collection, Mapping
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

KEY = "sdcwatch.client_names"
"""Where in the ASGI scope the names stand: a key that no request can set."""

_SUBJECT = {"commonName": "CN"}


class PeerProtocol(H11Protocol):
    """HTTP/1.1 that knows the client's certificate."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, with the handshake behind it, and the names of its certificate."""
        super().connection_made(transport)
        connection = transport.get_extra_info("ssl_object")
        names = names_of(connection.getpeercert()) if isinstance(connection, ssl.SSLObject) else frozenset()
        served = self.app

        async def with_names(scope: Any, receive: Any, send: Any) -> None:
            await served({**scope, KEY: names}, receive, send)

        self.app = with_names


def names_of(certificate: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the names in a verified certificate (`DNS:...`, `URI:...`, `CN:...`); none where there is none."""
    if not certificate:
        return frozenset()
    alternative = {f"{kind}:{name}" for kind, name in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI")}
    subject = {
        f"{_SUBJECT[key]}:{value}" for part in certificate.get("subject", ()) for key, value in part if key in _SUBJECT
    }
    return frozenset(alternative | subject)


def reports(scope: Mapping[str, Any], pinned: Collection[str]) -> bool:
    """Whether the connection's certificate is one of those that deliver alerts."""
    return not frozenset(pinned).isdisjoint(scope.get(KEY, ()))
