"""Send the trace of each case that has ended over OTLP/HTTP, once.

What it does: looks in the database for ended cases without a `trace_exported` audit line, sends their spans, and writes
that line when the collector has taken them. So a collector that is away, or a restart, delays a trace and loses none.
What it never does: stand in the way of a case. It runs in a thread of its own, and its errors are logged only.
Its place: `service` starts it where `[tracing]` names an endpoint; `tracing` makes the spans.
"""

from __future__ import annotations

import importlib
import logging
import re
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import exists, select

from sdcwatch_remediation import schema
from sdcwatch_remediation._version import __version__
from sdcwatch_remediation.cases import Case, from_row
from sdcwatch_remediation.config import is_loopback
from sdcwatch_remediation.errors import ConfigError, RemediationError
from sdcwatch_remediation.settings import Tracing
from sdcwatch_remediation.store import Store
from sdcwatch_remediation.tracing import Span, spans

EXPORTED = "trace_exported"
"""The audit line that says that a case's trace was taken."""

WINDOW_SECONDS = 7 * 86400.0
"""Cases that ended longer ago are not sent any more."""

ASIDE_SECONDS = 600.0
"""After which a trace that was refused is tried again; others are not kept waiting by it."""

STOP_SECONDS = 2.0
_SECRET = re.compile("auth|token|key|cookie|secret", re.IGNORECASE)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Wire:
    """Modules of `opentelemetry.proto`."""

    common: Any
    resource: Any
    trace: Any
    service: Any


class TraceExporter:
    """The thread that sends traces; `failed` is called each time one could not be sent.

    Raises:
        ConfigError: the endpoint, a file or the extra is wrong or missing.
    """

    def __init__(
        self, settings: Tracing, store: Store, *, pause_seconds: float, failed: Callable[[], None] = lambda: None
    ) -> None:
        """Check the settings; nothing is sent before `start` or `round`."""
        self._settings = settings
        self._store = store
        self._pause = max(1.0, pause_seconds)
        self._failed = failed
        self._wire = _load()
        self._url, verify = _target(settings)
        self._http = httpx.Client(
            verify=verify, timeout=settings.timeout_seconds, trust_env=False, follow_redirects=False
        )
        self._aside: dict[str, float] = {}
        self._problem = ""
        self._ending = threading.Event()
        self._writing = threading.Lock()
        self._abandoned = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End within `STOP_SECONDS`; what was not sent is sent after the next start."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
        with self._writing:  # a thread that is left behind must not write beside the next process
            self._abandoned = True
        self._http.close()

    def round(self) -> int:
        """Send every trace that waits, oldest first, until one cannot be sent; return how many were taken.

        Raises:
            StoreUnavailable: the database could not be used.
        """
        taken = 0
        for case in self._waiting():
            if self._ending.is_set():
                break
            if time.monotonic() < self._aside.get(case.id, 0.0):
                continue
            made = spans(case, self._store.timeline(case.id))
            problem, refused = self._send(made)
            self._say(problem)
            if refused:
                self._aside[case.id] = time.monotonic() + ASIDE_SECONDS
            elif problem:
                break
            else:
                taken += 1
                with self._writing:
                    if not self._abandoned:
                        self._store.note(case.id, EXPORTED, {"trace_id": made[0].trace_id, "spans": len(made)})
        return taken

    def _waiting(self) -> list[Case]:
        table, audit = schema.cases, schema.audit
        sent = exists().where(audit.c.case_id == table.c.id, audit.c.step == EXPORTED)
        query = (
            select(table)
            .where(table.c.closed_at > self._store.clock() - WINDOW_SECONDS, ~sent)
            .order_by(table.c.closed_at, table.c.id)
            .limit(100)
        )
        with self._store.database.read() as connection:
            return [from_row(row) for row in connection.execute(query).mappings()]

    def _send(self, made: Sequence[Span]) -> tuple[str, bool]:
        headers = {**_headers(self._settings.headers_file), "content-type": "application/x-protobuf"}
        try:
            body = _request(self._wire, made).SerializeToString()
            answer = self._http.post(self._url, content=body, headers=headers)
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}", False
        if answer.status_code == 200:
            return "", False
        return f"status {answer.status_code}", answer.status_code in (400, 413, 415, 422)

    def _say(self, problem: str) -> None:
        if problem:
            self._failed()
        if problem != self._problem and not self._ending.is_set():
            log.warning("traces are not sent: %s", problem) if problem else log.info("traces are sent again")
            self._problem = problem

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self.round()
            except RemediationError as error:
                self._say(str(error))
            except Exception:  # a trace is never worth a thread: the next round may work
                log.exception("a trace could not be made")
            self._ending.wait(self._pause)


def make(
    settings: Tracing, store: Store, *, pause_seconds: float, failed: Callable[[], None] = lambda: None
) -> TraceExporter | None:
    """Return the exporter, or None where no endpoint is set; raises `ConfigError` like `TraceExporter`."""
    return TraceExporter(settings, store, pause_seconds=pause_seconds, failed=failed) if settings.endpoint else None


def check(settings: Tracing) -> None:
    """Raise `ConfigError` where `make` would; sends nothing and needs no store."""
    _load()
    _target(settings)


def _load() -> _Wire:
    base = "opentelemetry.proto"
    names = ("common.v1.common", "resource.v1.resource", "trace.v1.trace", "collector.trace.v1.trace_service")
    try:
        return _Wire(*(importlib.import_module(f"{base}.{name}_pb2") for name in names))
    except ImportError as error:
        raise ConfigError(
            f"tracing.endpoint needs the extra: pip install 'sdcwatch-remediation[otlp]' ({error})"
        ) from error


def _target(settings: Tracing) -> tuple[str, ssl.SSLContext | bool]:
    try:
        url = httpx.URL(settings.endpoint)
    except httpx.InvalidURL as error:
        raise ConfigError(f"tracing.endpoint: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query:
        raise ConfigError(f"tracing.endpoint {settings.endpoint!r} is no URL such as http://127.0.0.1:4318")
    secrets = [name for name in _headers(settings.headers_file) if _SECRET.search(name)]
    if secrets and url.scheme == "http" and not is_loopback(url.host):
        raise ConfigError(
            f"the header {secrets[0]!r} would travel to {url.host} in clear text: use https in tracing.endpoint"
        )
    verify: ssl.SSLContext | bool = url.scheme == "https"
    if verify and settings.ca_file:
        try:
            verify = ssl.create_default_context(cafile=settings.ca_file)
        except OSError as error:
            raise ConfigError(f"tracing.ca_file {settings.ca_file}: {error.strerror or error}") from error
    return f"{settings.endpoint.rstrip('/')}/v1/traces", verify


def _headers(path: str) -> dict[str, str]:
    if not path:
        return {}
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tracing.headers_file {path} cannot be read as ASCII text: {error}") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        name, colon, value = line.partition(":")
        if line.strip() and not line.startswith("#"):
            if not colon or not re.fullmatch(r"[0-9A-Za-z-]+", name):
                raise ConfigError(f"tracing.headers_file {path}, line {number}: write one `Name: value` a line")
            found[name.lower()] = value.strip()
    return found


def _request(wire: _Wire, made: Sequence[Span]) -> Any:
    types = wire.trace

    def attributes(values: dict[str, str]) -> list[Any]:
        return [
            wire.common.KeyValue(key=key, value=wire.common.AnyValue(string_value=_clean(value)))
            for key, value in values.items()
        ]

    def encoded(span: Span) -> Any:
        code = {True: types.Status.STATUS_CODE_OK, False: types.Status.STATUS_CODE_ERROR, None: 0}[span.ok]
        return types.Span(
            trace_id=bytes.fromhex(span.trace_id),
            span_id=bytes.fromhex(span.span_id),
            parent_span_id=bytes.fromhex(span.parent_id),
            name=span.name,
            kind=types.Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=_nanoseconds(span.start),
            end_time_unix_nano=_nanoseconds(span.end),
            attributes=attributes(span.attributes),
            events=[
                types.Span.Event(
                    name=mark.name,
                    time_unix_nano=_nanoseconds(mark.time),
                    attributes=attributes({"sdcwatch.detail": mark.detail}),
                )
                for mark in span.marks
            ],
            status=types.Status(code=code, message=_clean(span.message)),
        )

    scoped = types.ScopeSpans(
        scope=wire.common.InstrumentationScope(name="sdcwatch_remediation", version=__version__),
        spans=[encoded(span) for span in made],
    )
    told = {"service.name": "sdcwatch-remediation", "service.version": __version__}
    resource = wire.resource.Resource(attributes=attributes(told))
    return wire.service.ExportTraceServiceRequest(
        resource_spans=[types.ResourceSpans(resource=resource, scope_spans=[scoped])]
    )


def _clean(text: str) -> str:
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9) if 0 <= seconds < 1.8e10 else 0
