"""Real OTLP receivers (HTTP with protobuf, and gRPC) on the loopback, and the agent's own fixtures to feed them."""

from __future__ import annotations

import gzip
import importlib.util
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _agent_fixtures() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "agent_fixtures", Path(__file__).resolve().parents[1] / "agent" / "conftest.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and annotations in it look it up there
    spec.loader.exec_module(module)
    return module


_fixtures = _agent_fixtures()
root, rank, agent, token_file, refused = (
    _fixtures.root,
    _fixtures.rank,
    _fixtures.agent,
    _fixtures.token_file,
    _fixtures.refused,
)


class Receiver:
    """What a collector got. `answer(signal, request)` may be replaced: it returns a status, 200 to take the request."""

    def __init__(self) -> None:
        self.url = ""
        self.headers: list[dict[str, str]] = []
        self.refuse: Callable[[str, Any], int] = lambda signal, request: 200
        self._got: list[tuple[str, Any]] = []
        self._changed = threading.Condition()

    def take(self, signal: str, request: Any, headers: dict[str, str]) -> int:
        status = self.refuse(signal, request)
        with self._changed:
            self.headers.append(headers)
            if status == 200:
                self._got.append((signal, request))
            self._changed.notify_all()
        return status

    def batches(self, signal: str) -> list[Any]:
        with self._changed:
            return [request for name, request in self._got if name == signal]

    def records(self) -> list[Any]:
        """Every log record so far."""
        return [
            record
            for request in self.batches("logs")
            for resource in request.resource_logs
            for scoped in resource.scope_logs
            for record in scoped.log_records
        ]

    def snapshot(self) -> dict[str, Any]:
        """The families of the newest metrics request, by name."""
        (resource,) = self.batches("metrics")[-1].resource_metrics
        (scoped,) = resource.scope_metrics
        return {family.name: family for family in scoped.metrics}

    def until(self, condition: Callable[[], Any], seconds: float = 15.0) -> Any:
        """Waits until something that was received makes the condition true; returns what it returned."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not (found := condition()):
                assert self._changed.wait(deadline - time.monotonic()), "never received"
            return found

    def next_snapshot(self) -> dict[str, Any]:
        """The families of a snapshot that was taken after this call."""
        before = len(self.batches("metrics"))
        self.until(lambda: len(self.batches("metrics")) > before + 1)
        return self.snapshot()


def _http(receiver: Receiver, context: ssl.SSLContext | None = None) -> ThreadingHTTPServer:
    from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics

    kinds = {"metrics": metrics.ExportMetricsServiceRequest, "logs": logs.ExportLogsServiceRequest}
    answers = {"metrics": metrics.ExportMetricsServiceResponse, "logs": logs.ExportLogsServiceResponse}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            signal = self.path.rpartition("/v1/")[2]
            assert self.headers["Content-Type"] == "application/x-protobuf"
            assert self.headers["Content-Encoding"] == "gzip"
            request = kinds[signal].FromString(gzip.decompress(body))
            status = receiver.take(signal, request, {k.lower(): v for k, v in self.headers.items()})
            answer = answers[signal]().SerializeToString()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    receiver.url = f"{'https' if context else 'http'}://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return server


def _grpc(receiver: Receiver, cert: Path | None = None, key: Path | None = None) -> Any:
    import grpc
    from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs
    from opentelemetry.proto.collector.logs.v1 import logs_service_pb2_grpc as logs_grpc
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc

    def export(signal: str, answer: Any) -> Callable[[Any, Any, Any], Any]:
        def handle(self: Any, request: Any, context: Any) -> Any:
            status = receiver.take(signal, request, {k: str(v) for k, v in context.invocation_metadata()})
            if status != 200:
                code = grpc.StatusCode.INVALID_ARGUMENT if status == 400 else grpc.StatusCode.UNAVAILABLE
                context.abort(code, "not now")
            return answer()

        return handle

    metrics_service = type(
        "Metrics",
        (metrics_grpc.MetricsServiceServicer,),
        {"Export": export("metrics", metrics.ExportMetricsServiceResponse)},
    )
    logs_service = type(
        "Logs", (logs_grpc.LogsServiceServicer,), {"Export": export("logs", logs.ExportLogsServiceResponse)}
    )
    server = grpc.server(futures.ThreadPoolExecutor(2))
    metrics_grpc.add_MetricsServiceServicer_to_server(metrics_service(), server)
    logs_grpc.add_LogsServiceServicer_to_server(logs_service(), server)
    if cert is not None and key is not None:
        credentials = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
        receiver.url = f"https://127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    else:
        receiver.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    return server


@pytest.fixture
def receiver(require: Callable[[str], Path]) -> Iterator[Receiver]:
    """An OTLP/HTTP collector that takes everything."""
    require("module:opentelemetry.proto")
    got = Receiver()
    server = _http(got)
    yield got
    server.shutdown()
    server.server_close()


@pytest.fixture
def secure_receiver(require: Callable[[str], Path]) -> Iterator[Callable[[ssl.SSLContext], Receiver]]:
    """`secure_receiver(context)` starts one behind TLS."""
    require("module:opentelemetry.proto")
    servers = []

    def start(context: ssl.SSLContext) -> Receiver:
        got = Receiver()
        servers.append(_http(got, context))
        return got

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def grpc_receiver(require: Callable[[str], Path]) -> Iterator[Receiver]:
    """An OTLP/gRPC collector that takes everything."""
    require("module:opentelemetry.proto")
    require("module:grpc")
    got = Receiver()
    server = _grpc(got)
    yield got
    server.stop(None).wait(5)


@pytest.fixture
def secure_grpc_receiver(require: Callable[[str], Path]) -> Iterator[Callable[[Path, Path], Receiver]]:
    """`secure_grpc_receiver(cert, key)` starts one behind TLS."""
    require("module:opentelemetry.proto")
    require("module:grpc")
    servers = []

    def start(cert: Path, key: Path) -> Receiver:
        got = Receiver()
        servers.append(_grpc(got, cert, key))
        return got

    yield start
    for server in servers:
        server.stop(None).wait(5)


@pytest.fixture(params=["http", "grpc"])
def road(request: pytest.FixtureRequest) -> tuple[Receiver, tuple[str, ...]]:
    """Each of the two receivers, and the agent's options that lead to it, at a quick pace."""
    got: Receiver = request.getfixturevalue("receiver" if request.param == "http" else "grpc_receiver")
    return got, pushing(got, request.param)


def pushing(receiver: Receiver, protocol: str = "http") -> tuple[str, ...]:
    return "--otlp-endpoint", receiver.url, "--otlp-protocol", protocol, "--otlp-interval", "0.2"


@pytest.fixture
def http_options(receiver: Receiver) -> tuple[str, ...]:
    """The agent's options that lead to `receiver`."""
    return pushing(receiver)
