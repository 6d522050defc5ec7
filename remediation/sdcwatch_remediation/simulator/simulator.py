"""The simulator as one object: a world, a clock, a menu of faults, a call log, and a loopback server in front.

What it does: `Simulator(config).start()` serves unmodified boto3 at `.url`; the same things that the admin endpoints
offer (advance, faults, calls, state) are methods here, for tests that live in the same process.
What it never does: import boto3, need credentials, or reach beyond the address that it was told to listen on.
Its place: the other end of `actions.hyperpod` in every test and in the demo; nothing of the service imports it except
the `simulate` command.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from sdcwatch_remediation.simulator.clock import VirtualClock
from sdcwatch_remediation.simulator.cluster import Cluster, NodeRefused
from sdcwatch_remediation.simulator.config import SimulatorConfig, check_address
from sdcwatch_remediation.simulator.faults import Fault, FaultMenu
from sdcwatch_remediation.simulator.operations import Answer, ServiceError, cluster_arn, perform
from sdcwatch_remediation.simulator.server import SimulatorServer
from sdcwatch_remediation.simulator.shapes import enum_values

CALLS_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class Call:
    """One call that reached the simulator, as the log keeps it."""

    number: int
    time: float
    """Virtual unix seconds at which it was carried out or refused."""
    real_time: float
    """Unix seconds of the machine's own clock."""
    operation: str
    request: Any
    status: int | None
    """HTTP status sent; None: the connection was closed without an answer."""
    code: str
    """AWS's error code; empty for a success."""
    response: Any
    fault: str | None
    """The kind of fault that it met."""
    affected: tuple[str, ...]
    """Instance ids that it took effect on, whatever was answered."""
    access_key_id: str
    """Whose signature the call carried: the public part of the credentials."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server has to send: nothing at all when `status` is None."""

    status: int | None
    body: dict[str, Any]
    code: str = ""
    delay_seconds: float = 0.0


class Simulator:
    """One simulated HyperPod cluster behind a loopback HTTP endpoint.

    Usable as a context manager. Safe to use from several threads.
    """

    def __init__(self, config: SimulatorConfig, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Set up the cluster; nothing listens before `start`.

        Args:
            config: What the cluster looks like.
            host: The address to listen on.
            port: The port to listen on; 0 takes a free one.
        """
        self._config = config
        self._lock = threading.RLock()
        self._address = (host, port)
        self._server: SimulatorServer | None = None
        self.reset()

    def __enter__(self) -> Simulator:
        return self if self._server is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The endpoint URL for boto3, without a trailing slash.

        Raises:
            RuntimeError: It has not been started.
        """
        if self._server is None:
            raise RuntimeError("the simulator has no URL before start()")
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def start(self) -> Simulator:
        """Listen and serve in the background; returns itself.

        Raises:
            OSError: The address or port cannot be had.
        """
        if self._server is None:
            self._server = SimulatorServer(self._address, self)
            self._server.start()
        return self

    def stop(self) -> None:
        """Stop serving and close every connection; safe to call twice."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def reset(self) -> None:
        """Go back to the configured cluster: no faults, no calls, the clock at its start."""
        with self._lock:
            self.clock = VirtualClock(start=self._config.clock_start, factor=self._config.clock_factor)
            self.faults = FaultMenu()
            self._calls: deque[Call] = deque(maxlen=CALLS_KEPT)
            self._number = 0
            self._cluster = Cluster(
                self._config,
                self.clock.now(),
                has_capacity=lambda: not self.faults.stands("no_capacity"),
                comes_up_bad=lambda: self.faults.use("bad_replacement"),
            )

    def order(self, kind: str, **members: Any) -> None:
        """Order one fault; `members` are those of `Fault`.

        Raises:
            ValueError: It is not on the menu.
        """
        self.order_fault(Fault.from_json({"kind": kind, **members}))

    def order_fault(self, fault: Fault) -> None:
        """Order one fault that is already built; what fell due before it is carried out without it."""
        with self._lock:
            self.settled()
            self.faults.order(fault)

    def clear_faults(self, kind: str | None = None) -> None:
        """Cancel all faults on order, or those of one kind; replacements that waited for capacity now come."""
        with self._lock:
            self.settled()
            self.faults.clear(kind)
            self.settled()

    def advance(self, seconds: float) -> float:
        """Let virtual time pass, carry out what falls due, and return the new virtual time in unix seconds."""
        self.settled()
        self.clock.advance(seconds)
        return self.settled()

    def settled(self) -> float:
        """Carry out what is due and return the virtual time."""
        with self._lock:
            now = self.clock.now()
            self._cluster.settle(now)
            return now

    def add_spares(self, addresses: list[str]) -> None:
        """Add capacity, one address a spare instance.

        Raises:
            ValueError: One is not an IPv4 address, or is already in use.
        """
        with self._lock:
            self.settled()
            taken = {node.address for node in self._cluster.present()} | set(self._cluster.spares)
            for address in addresses:
                check_address(address)
            if taken & set(addresses) or len(set(addresses)) != len(addresses):
                raise ValueError(f"every address only once; in use: {', '.join(sorted(taken))}")
            self._cluster.spares += addresses
            self.settled()

    def set_status(self, instance_id: str, status: str) -> None:
        """Put one instance into a state by hand.

        Raises:
            ValueError: No such instance, or no such state.
        """
        allowed = enum_values("ClusterInstanceStatus")
        if status not in allowed:
            raise ValueError(f"unknown status {status!r}; choose one of {', '.join(allowed)}")
        with self._lock:
            self.settled()
            self._cluster.set_status(instance_id, status)

    def others_replace(self, instance_id: str) -> None:
        """Have HyperPod itself, or another person, replace one instance.

        Raises:
            ValueError: It cannot be replaced now.
        """
        with self._lock:
            try:
                self._cluster.replace(instance_id, self.settled(), by="others")
            except NodeRefused as refused:
                raise ValueError(f"{refused.code}: {refused}") from refused

    def calls(self, operation: str | None = None) -> list[Call]:
        """Return the logged calls, oldest first; the newest 10,000 are kept."""
        with self._lock:
            return [call for call in self._calls if operation in (None, call.operation)]

    def replacements(self) -> dict[str, int]:
        """Return how often each instance id was accepted for replacement, by whomever; 1 at most, or it is a bug."""
        with self._lock:
            counts: dict[str, int] = {}
            for order in self._cluster.orders:
                counts[order.instance_id] = counts.get(order.instance_id, 0) + 1
            return counts

    def state(self) -> dict[str, Any]:
        """Return the whole state as one JSON object (see docs/simulator.md)."""
        with self._lock:
            now = self.settled()
            cluster, config = self._cluster, self._config
            nodes = [
                asdict(node)
                | {"node_name": f"hyperpod-{node.instance_id}" if config.orchestrator == "eks" else node.host}
                for node in sorted(cluster.nodes.values(), key=lambda n: (n.launch_time, n.instance_id))
            ]
            return {
                "schema": 1,
                "cluster": config.cluster,
                "cluster_arn": cluster_arn(cluster),
                "orchestrator": config.orchestrator,
                "now": now,
                "clock_factor": self.clock.factor,
                "spares": list(cluster.spares),
                "nodes": [n for n in nodes if n["status"] != "gone"],
                "gone": [n for n in nodes if n["status"] == "gone"],
                "replacements": [asdict(order) for order in cluster.orders],
                "faults": self.faults.listing(),
            }

    def call(self, operation: str, request: Any, *, access_key_id: str = "") -> Reply:
        """Carry out one call as SageMaker would, with whatever fault it meets, and log it."""
        with self._lock:
            now = self.settled()
            ids = request.get("NodeIds") or [request.get("NodeId")] if isinstance(request, dict) else []
            ids = ids if isinstance(ids, list) else []
            fault = self.faults.meet(operation, tuple(i for i in ids if isinstance(i, str)))
            answer, reply = self._reply(now, operation, request, fault)
            self._number += 1
            self._calls.append(
                Call(
                    number=self._number,
                    time=now,
                    real_time=time.time(),
                    operation=operation,
                    request=request,
                    status=reply.status,
                    code=reply.code,
                    response=reply.body,
                    fault=None if fault is None else fault.kind,
                    affected=answer.affected,
                    access_key_id=access_key_id,
                )
            )
            self.settled()
            return reply

    def _reply(self, now: float, operation: str, request: Any, fault: Fault | None) -> tuple[Answer, Reply]:
        kind = None if fault is None else fault.kind
        if kind == "error_before":
            return Answer({}), _error(ServiceError("InternalFailure", "We encountered an internal error.", 500))
        if kind == "drop_before":
            return Answer({}), Reply(None, {})
        try:
            answer = perform(self._cluster, now, operation, request, fault)
        except ServiceError as error:
            return Answer({}), _error(error)
        if kind == "error_after":
            return answer, _error(ServiceError("InternalFailure", "We encountered an internal error.", 500))
        if kind == "drop_after":
            return answer, Reply(None, {})
        if kind == "empty_answer":
            empty: dict[str, Any] = {"Successful": [], "Failed": []} if operation.startswith("Batch") else {}
            return answer, Reply(200, empty)
        delay = fault.seconds if fault is not None and kind == "slow_answer" else 0.0
        return answer, Reply(200, answer.body, delay_seconds=delay)


def _error(error: ServiceError) -> Reply:
    return Reply(error.status, {"__type": error.code, "message": str(error)}, error.code)
