"""Provider, agents and database of a service without sockets, each of which says when a step of it begins and ends.

What it does: `DirectHyperPod` is the real provider over the simulator's own `call`; `DirectAgents` the real client over
`FakeAgent`s; `PointDatabase` the real database. Each calls `point` at the moments at which a process may be stopped,
be killed, or be overtaken: around every call and every transaction, and inside a transaction before its commit.
What it never does: change what these do. The wire itself is tested through unmodified boto3 and real HTTP elsewhere.
Its place: under `schedules`.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from botocore.exceptions import ClientError, ConnectionClosedError, ReadTimeoutError
from sqlalchemy import Connection

from sdcwatch_remediation.actions.hyperpod import HyperPod
from sdcwatch_remediation.agents import AgentClient
from sdcwatch_remediation.database import Database
from sdcwatch_remediation.records import Member
from sdcwatch_remediation.settings import Agents
from sdcwatch_remediation.simulator import Simulator
from sdcwatch_remediation.testing.agents import FakeAgent

Point = Callable[[str], None]
"""Told the name of a moment; may wait there, or raise to end the process."""

READ_TIMEOUT_SECONDS = 30.0
_TIMES = ("LaunchTime", "CreationTime")


class PointDatabase(Database):
    """A database that says when a transaction begins, is about to be committed, and has been."""

    point: Point = staticmethod(lambda name: None)

    @contextmanager
    def write(self, *, ahead: bool = False) -> Iterator[Connection]:
        """Open one write transaction, as `Database.write` does."""
        what = _asked_by()
        self.point(f"begin {what}")
        with super().write(ahead=ahead) as connection:
            yield connection
            self.point(f"commit {what}")  # nobody else can go on here: the lock is held
        self.point(f"committed {what}")

    def wait_for(self, done: threading.Event) -> None:
        """Wait as `Database.wait_for` does, letting others go on meanwhile."""
        while not done.is_set():
            self.point("wait for the commit")


def _asked_by() -> str:
    """Return which method opened a transaction, and for the general ones also who called that."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in _PASSING:
        frame = frame.f_back
    name = frame.f_code.co_name
    if name in _GENERAL and frame.f_back is not None:
        return f"{name} in {frame.f_back.f_code.co_name}"
    return name


_PASSING = frozenset({"write", "__enter__", "__exit__", "_together"})
_GENERAL = frozenset({"move", "set", "note", "leave"})


class DirectHyperPod(HyperPod):
    """HyperPod without the wire."""

    def __init__(self, simulator: Simulator, point: Point) -> None:
        """Use a simulator that need not listen."""
        super().__init__("demo", region="us-west-2")
        self._direct = _Client(simulator, point)

    def _get_client(self) -> Any:
        return self._direct

    def _drop_client(self) -> None:
        """Keep the one client: it holds no credentials."""


class _Client:
    def __init__(self, simulator: Simulator, point: Point) -> None:
        self._simulator = simulator
        self._point = point

    def __getattr__(self, method: str) -> Callable[..., Any]:
        operation = re.sub(r"(?:^|_)(\w)", lambda found: found[1].upper(), method)
        return lambda **request: self._call(operation, request)

    def _call(self, operation: str, request: dict[str, Any]) -> Any:
        self._point(f"call {operation}")
        reply = self._simulator.call(operation, request)
        self._point(f"answer {operation}")
        if reply.status is None:
            raise ConnectionClosedError(endpoint_url="direct")
        if reply.delay_seconds > READ_TIMEOUT_SECONDS:
            raise ReadTimeoutError(endpoint_url="direct")
        if reply.status != 200:
            error = {"Code": reply.code, "Message": str(reply.body.get("message", ""))}
            answer: Any = {"Error": error, "ResponseMetadata": {"HTTPStatusCode": reply.status}}
            raise ClientError(answer, operation)
        return _with_times(reply.body)


def _with_times(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_times(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: datetime.fromtimestamp(item, tz=timezone.utc) if key in _TIMES else _with_times(item)
        for key, item in value.items()
    }


class DirectAgents(AgentClient):
    """The agents without HTTP, asked one after the other."""

    def __init__(self, agents: dict[str, FakeAgent], clock: Callable[[], float], point: Point) -> None:
        """Ask those of `agents` (by address) that are there; who is not does not answer."""
        # Without the real client's HTTP, whose certificates take longer to load than most schedules' databases to open.
        self._settings, self._clock = Agents(scheme="http"), clock
        self._by_address = agents
        self._point = point

    def close(self) -> None:
        """Nothing was opened."""

    def _each(self, members: Sequence[Member], ask: Callable[[Member], Any]) -> list[Any]:
        return [ask(member) for member in members]

    def _send(
        self,
        method: str,
        member: Member,
        path: str,
        token: str,
        *,
        parameters: dict[str, str] | None = None,
        body: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        self._point(f"ask {path}")
        agent = self._by_address.get(member.address)
        if agent is None:
            raise ValueError("no agent there")
        if body is not None:
            status, tree = agent.release(body)
        elif path == "/preflight":
            status, tree = agent.results((parameters or {})["latch"])
        else:
            status, tree = 200, agent.events_since(float((parameters or {})["since"]))
        self._point(f"told {path}")
        return status, json.dumps(tree).encode()
