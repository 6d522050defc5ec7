"""Bounded HTTP requests of the doctor: every one has a time limit, a size limit, and an error that is a sentence.

It follows no redirect (a token must not travel on), uses no proxy for loopback, and sends nothing but GET. Standard
library only. Flow: node_checks, path_checks, drill -> **http** -> agent, Prometheus, Alertmanager, service.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPMessage
from typing import IO, Any

from sdcwatch.agent.tokens import SecretFile
from sdcwatch.errors import ConfigurationError

#: Seconds for connecting and for each read; a whole answer may take twice as long.
SECONDS = 3.0
#: Longest answer that is read.
ANSWER_BYTES = 32 << 20


class Unreachable(Exception):
    """No usable answer; the message is one sentence for the person who asked."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        clock: how far the other side's clock is ahead of ours, in seconds, from its Date header; None without one.
        doubt: how wrong `clock` may be, in seconds: the header has whole seconds, and the way takes time.
    """

    status: int
    body: bytes
    clock: float | None
    doubt: float

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", errors="replace")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


class Client:
    """Asks one server.

    Args:
        base: http or https URL, with or without a path before the API's own.
        token_file: file with a bearer token, or with the password of `user`; None: no credential.
        ca_file: PEM certificates to trust for https, or None for the system's.

    Raises:
        ConfigurationError: the URL or a file cannot be used.
    """

    def __init__(
        self, base: str, token_file: str | None = None, ca_file: str | None = None, *, user: str | None = None
    ) -> None:
        parts = urllib.parse.urlsplit(base)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigurationError(f"{base!r} is no http or https URL: write for example http://127.0.0.1:9090")
        if "@" in parts.netloc:
            raise ConfigurationError(f"{parts.hostname}: put no password into a URL; name a token file instead")
        self.base = base.rstrip("/")
        self.host = parts.hostname
        self._headers = {"User-Agent": "sdcwatch-doctor"}
        try:
            self.port = parts.port or (443 if parts.scheme == "https" else 80)
            if token_file:
                secret = SecretFile(token_file, "password" if user else "token").first()
                basic = base64.b64encode(f"{user}:{secret}".encode()).decode("ascii")
                self._headers["Authorization"] = f"Basic {basic}" if user else f"Bearer {secret}"
            context = ssl.create_default_context(cafile=ca_file)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{base}: cannot use {token_file or ca_file or 'this port'}: {error}") from error
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect(), urllib.request.HTTPSHandler(context=context)]
        if is_loopback(self.host):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Answer:
        """One GET; any HTTP status is an answer.

        Raises:
            Unreachable: no answer in time, or none that is HTTP.
        """
        url = self.base + path + (f"?{urllib.parse.urlencode(query)}" if query else "")
        request = urllib.request.Request(url, headers=self._headers)
        sent, started = time.time(), time.monotonic()
        try:
            with self._opener.open(request, timeout=SECONDS) as stream:
                return _answer(stream.status, stream, stream.headers, sent, started)
        except urllib.error.HTTPError as error:
            with error:
                return _answer(error.code, error, error.headers, sent, started)
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise Unreachable(f"{self.base} does not answer: {reason}") from error

    def json(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """The JSON of a 200.

        Raises:
            Unreachable: no answer, another status, or no JSON.
        """
        answer = self.get(path, query)
        if answer.status != 200:
            raise Unreachable(f"{self.base}{path} answered {answer.status}: {answer.text[:200].strip()}")
        try:
            return json.loads(answer.body)
        except ValueError:
            raise Unreachable(f"{self.base}{path} answered something that is not JSON") from None


def is_loopback(host: str) -> bool:
    """True for an address or name that can only be this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _answer(status: int, stream: Any, headers: Any, sent: float, started: float) -> Answer:
    first = time.monotonic()
    parts, size = [], 0
    while part := stream.read1(65536):
        parts.append(part)
        size += len(part)
        if size > ANSWER_BYTES or time.monotonic() - started > 2 * SECONDS:
            raise Unreachable("the answer is too long, or comes too slowly")
    way = first - started
    clock = None
    if when := headers.get("Date"):
        try:
            # Whole seconds, rounded down: half a second is right on average.
            clock = parsedate_to_datetime(when).timestamp() + 0.5 - (sent + way / 2)
        except (TypeError, ValueError):
            clock = None
    return Answer(status, b"".join(parts), clock, 0.5 + way / 2)
