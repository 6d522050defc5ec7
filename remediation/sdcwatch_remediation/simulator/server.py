"""The HTTP side of the simulator: SageMaker JSON 1.1 on `/`, the admin endpoints under `/_simulator/`.

What it does: speaks the wire protocol that botocore speaks (X-Amz-Target, JSON 1.1, AWS's error bodies), wants a SigV4
signature for SageMaker to be present, and carries out the faults that concern the connection.
What it never does: verify a signature (any credentials will do), or decide anything about the cluster.
Its place: in front of `Simulator`. Plain HTTP, made for loopback: whoever reaches it controls the simulated cluster.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from sdcwatch_remediation.simulator.admin import AdminError, answer_admin
from sdcwatch_remediation.simulator.operations import ServiceError, SimulatorDefect
from sdcwatch_remediation.simulator.shapes import OPERATIONS

if TYPE_CHECKING:
    from sdcwatch_remediation.simulator.simulator import Simulator

BODY_LIMIT = 1 << 20
JSON_TYPE = "application/x-amz-json-1.1"
_SIGNATURE = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/\s,]+)/\d{8}/[a-z0-9-]+/sagemaker/aws4_request, ?"
    r"SignedHeaders=[a-z0-9;-]+, ?Signature=[0-9a-f]{64}\Z"
)


class SimulatorServer(ThreadingHTTPServer):
    """A threading HTTP server that can be stopped while clients keep connections open."""

    daemon_threads = True
    # Every connection is shut down on stop, so its thread ends at once and is worth waiting for.
    block_on_close = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], simulator: Simulator) -> None:
        """Bind the address; serves nothing before `start`."""
        super().__init__(address, _Handler)
        self.simulator = simulator
        self.stopping = threading.Event()
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="simulator", daemon=True)

    def start(self) -> None:
        """Serve in a background thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening, close every open connection and wait for the threads."""
        self.stopping.set()
        self.shutdown()
        with self._open_lock:
            for connection in self._open:
                _shut(connection)
        self.server_close()
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Note the connection as open, then serve it in a thread."""
        with self._open_lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget the connection and close it."""
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about clients that went away; anything else is a defect and is printed."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SimulatorServer
    timeout = 60

    def do_GET(self) -> None:
        self._admin("GET")

    def do_DELETE(self) -> None:
        self._admin("DELETE")

    def do_POST(self) -> None:
        if self.path.startswith("/_simulator/"):
            self._admin("POST")
            return
        try:
            operation, request, access_key_id = self._operation()
            reply = self.server.simulator.call(operation, request, access_key_id=access_key_id)
        except ServiceError as error:
            self._send(error.status, {"__type": error.code, "message": str(error)}, JSON_TYPE)
            return
        except SimulatorDefect as defect:
            self._send(500, {"__type": "SimulatorDefect", "message": str(defect)}, JSON_TYPE)
            return
        if reply.delay_seconds:
            self.server.stopping.wait(reply.delay_seconds)
        if reply.status is None:
            self.close_connection = True
            _shut(self.connection)
            return
        self._send(reply.status, reply.body, JSON_TYPE)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet: the call log says more than an access log would."""

    def _operation(self) -> tuple[str, Any, str]:
        body = self._body()
        if self.path != "/":
            raise ServiceError("UnknownOperationException", f"no such path {self.path[:80]}", 404)
        service, _, operation = self.headers.get("X-Amz-Target", "").partition(".")
        if service != "SageMaker" or operation not in OPERATIONS:
            known = ", ".join(OPERATIONS)
            raise ServiceError("UnknownOperationException", f"the simulator knows only SageMaker's {known}")
        if self.headers.get("Content-Type") != JSON_TYPE:
            raise ServiceError("SerializationException", f"Content-Type must be {JSON_TYPE}")
        if "Authorization" not in self.headers:
            raise ServiceError("MissingAuthenticationTokenException", "Missing Authentication Token", 403)
        signed = _SIGNATURE.match(self.headers["Authorization"])
        if signed is None or "X-Amz-Date" not in self.headers:
            raise ServiceError("IncompleteSignatureException", "a SigV4 signature for sagemaker is needed", 403)
        try:
            return operation, json.loads(body), signed[1]
        except ValueError as error:
            raise ServiceError("SerializationException", "the body is not JSON") from error

    def _admin(self, method: str) -> None:
        try:
            raw = self._body()
            body = json.loads(raw) if raw else {}
            answer = answer_admin(self.server.simulator, method, self.path, body)
        except AdminError as error:
            self._send(error.status, {"error": str(error)}, "application/json")
        except (ServiceError, ValueError) as error:
            self._send(400, {"error": str(error)}, "application/json")
        else:
            self._send(200, answer, "application/json")

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length) > BODY_LIMIT:
            self.close_connection = True
            raise ServiceError("RequestEntityTooLargeException", f"a body has at most {BODY_LIMIT} bytes", 413)
        return self.rfile.read(int(length))

    def _send(self, status: int, body: Any, content_type: str) -> None:
        data = json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("x-amzn-RequestId", str(uuid.uuid4()))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            # The client gave up (a slow answer does that on purpose); the call log has the answer.
            self.close_connection = True


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        # The other side closed it first.
        return
