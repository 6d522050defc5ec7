"""One OTLP request over HTTP (standard library) or gRPC (an extra), within a time that holds whatever the peer does.

A sender never retries and never queues: the snapshot is taken anew and the journal keeps the events, so the caller
simply comes again. No proxy and no redirect is followed, because the headers carry a secret.
Flow: otlp -> **otlp_senders** -> collector.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import importlib
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from sdcwatch._version import __version__
from sdcwatch.agent.otlp_options import OtlpOptions
from sdcwatch.agent.otlp_wire import Wire
from sdcwatch.errors import ConfigurationError

Signal = Literal["metrics", "logs"]
_ANSWER_BYTES = 256 << 10
#: These say that the request itself is at fault, so that the same one would be refused again.
_REFUSING_STATUSES = (400, 413, 415, 422)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request.

    Attributes:
        result: `taken`; `refused`: the same request would be refused again; `failed`: it may work later.
        reason: one sentence; for `taken`, what the receiver refused of it, if anything.
        wait: seconds that the receiver asks us to stay away, else 0.
    """

    result: Literal["taken", "refused", "failed"]
    reason: str = ""
    wait: float = 0.0


class Sender(Protocol):
    """Sends one request at a time, from one thread; `abort` may come from another."""

    def send(self, signal: Signal, request: Any, seconds: float) -> Answer:
        """Sends one request and waits at most `seconds` for its answer. Raises nothing but ConfigurationError."""

    def abort(self) -> None:
        """Ends the request that is under way, if any."""


def make(options: OtlpOptions, wire: Wire) -> Sender:
    """The sender of the protocol that was asked for.

    Raises:
        ConfigurationError: its package is not installed, or the authorities cannot be read.
    """
    return GrpcSender(options, wire) if options.protocol == "grpc" else HttpSender(options, wire)


class HttpSender:
    """OTLP/HTTP with binary protobuf, one connection a request."""

    def __init__(self, options: OtlpOptions, wire: Wire) -> None:
        self._options = options
        self._answers = {
            "metrics": wire.metrics_service.ExportMetricsServiceResponse,
            "logs": wire.logs_service.ExportLogsServiceResponse,
        }
        self._context = _context(options) if options.secure else None
        self._socket: socket.socket | None = None

    def send(self, signal: Signal, request: Any, seconds: float) -> Answer:
        deadline = time.monotonic() + seconds
        headers = {
            **self._options.headers(),
            "content-type": "application/x-protobuf",
            "content-encoding": "gzip",
            "user-agent": f"sdcwatch/{__version__}",
            "connection": "close",
        }
        body = gzip.compress(request.SerializeToString(), compresslevel=1)
        connection = self._connection(seconds)
        watch: threading.Timer | None = None
        try:
            connection.connect()
            self._socket = connection.sock
            left = max(0.05, deadline - time.monotonic())
            connection.sock.settimeout(left)
            # A peer that sends one byte a second never runs into the socket's own time-out; this ends it all the same.
            watch = threading.Timer(left, self.abort)
            watch.daemon = True
            watch.start()
            connection.request("POST", f"{self._options.path}/v1/{signal}", body, headers)
            answer = connection.getresponse()
            return self._judge(signal, answer, answer.read(_ANSWER_BYTES))
        except TimeoutError:
            return Answer("failed", f"no answer within {seconds:.0f} s")
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Answer("failed", str(error) or type(error).__name__)
        finally:
            if watch is not None:
                watch.cancel()
            self._socket = None
            connection.close()

    def abort(self) -> None:
        under_way = self._socket
        if under_way is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(under_way, socket.SHUT_RDWR)

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        host, port = self._options.host, self._options.port
        if self._context is None:
            return http.client.HTTPConnection(host, port, timeout=seconds)
        return http.client.HTTPSConnection(host, port, timeout=seconds, context=self._context)

    def _judge(self, signal: Signal, answer: http.client.HTTPResponse, body: bytes) -> Answer:
        if answer.status == 200:
            parsed = self._answers[signal]()
            try:
                parsed.ParseFromString(body)
            except Exception:  # protobuf's DecodeError; what counts is the status
                return Answer("taken")
            return Answer("taken", _partial(parsed))
        reason = f"status {answer.status} {answer.reason}".strip()
        if answer.status in _REFUSING_STATUSES:
            return Answer("refused", reason)
        try:
            wait = float(answer.headers.get("Retry-After", "0"))
        except ValueError:
            wait = 0.0
        return Answer("failed", reason, wait if 0 <= wait < 86400 else 0.0)


class GrpcSender:
    """OTLP/gRPC over one channel, which reconnects by itself."""

    def __init__(self, options: OtlpOptions, wire: Wire) -> None:
        try:
            self._grpc: Any = importlib.import_module("grpc")
        except ImportError as error:
            raise ConfigurationError(
                f"--otlp-protocol grpc needs the extra: pip install 'sdcwatch[otlp-grpc]' ({error})"
            ) from error
        self._options = options
        self._authorities = None
        if options.secure:
            _context(options)  # the same clear error as over HTTP for a file that is no certificate
            self._authorities = options.ca.read_bytes() if options.ca else None
        self._methods = {
            "metrics": ("metrics.v1.MetricsService", wire.metrics_service.ExportMetricsServiceResponse),
            "logs": ("logs.v1.LogsService", wire.logs_service.ExportLogsServiceResponse),
        }
        self._channel: Any = None

    def send(self, signal: Signal, request: Any, seconds: float) -> Answer:
        grpc = self._grpc
        headers = tuple(self._options.headers().items())
        if self._channel is None:
            self._channel = self._open()
        service, answer = self._methods[signal]
        call = self._channel.unary_unary(
            f"/opentelemetry.proto.collector.{service}/Export",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            return Answer("taken", _partial(call(request, timeout=seconds, metadata=headers)))
        except grpc.RpcError as error:
            code = error.code()
            detail = (error.details() or "").partition("\n")[0][:200]
            refused = code is grpc.StatusCode.INVALID_ARGUMENT
            return Answer("refused" if refused else "failed", f"{code.name}: {detail}")
        except ValueError as error:  # the channel was closed under the call
            return Answer("failed", str(error))

    def abort(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _open(self) -> Any:
        grpc, address = self._grpc, self._options.address
        settings = (("grpc.enable_http_proxy", 0), ("grpc.primary_user_agent", f"sdcwatch/{__version__}"))
        more = {"options": settings, "compression": grpc.Compression.Gzip}
        if self._options.secure:
            return grpc.secure_channel(address, grpc.ssl_channel_credentials(self._authorities), **more)
        return grpc.insecure_channel(address, **more)


def _context(options: OtlpOptions) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"--otlp-ca {options.ca}: {getattr(error, 'strerror', None) or error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _partial(answer: Any) -> str:
    """What the receiver refused of a request that it took; empty where it took all."""
    partial = answer.partial_success
    rejected = getattr(partial, "rejected_data_points", 0) or getattr(partial, "rejected_log_records", 0)
    return f"{rejected} refused: {partial.error_message[:200]}" if rejected else ""
