"""A whole service around a fake world, moved by hand: for tests.

What it does: puts a `Service` on a SQLite file with a clock that only the test moves, a `FakeProvider` and
`FakeAgents`; `ring` delivers alerts through the real ASGI app, `rounds` moves the cases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from sdcwatch_remediation.app import case_view, make_app
from sdcwatch_remediation.config import check
from sdcwatch_remediation.records import Member
from sdcwatch_remediation.service import Service
from sdcwatch_remediation.settings import Actions, Agents, Cluster, Config, Database, Policy, Server, Worker
from sdcwatch_remediation.store import AuditLine
from sdcwatch_remediation.testing.agents import EVENTS_TOKEN, LATCH_TOKEN, FakeAgents
from sdcwatch_remediation.testing.events import alert, delivery, event_line
from sdcwatch_remediation.testing.provider import FakeProvider

START = 1_800_000_000.0
NO_ACTIONS = Actions()


class Clock:
    """Unix seconds that stand still until they are moved."""

    def __init__(self, now: float = START) -> None:
        """Begin at `now`."""
        self.now = now

    def __call__(self) -> float:
        return self.now


class Rig:
    """One service and its fake world."""

    def __init__(self, config: Config, provider: FakeProvider, agents: FakeAgents, clock: Clock) -> None:
        """Start from a checked configuration; `restart` opens the same database again."""
        self.config, self.provider, self.agents, self.clock = config, provider, agents, clock
        self.audit: list[AuditLine] = []
        self._open()

    def _open(self) -> None:
        self.service = Service(self.config, provider=self.provider, clock=self.clock, sink=self.audit.append)
        self.app = make_app(self.service)

    def restart(self, **policy: Any) -> None:
        """Close the service and open it again on the same database, with other policy settings if given."""
        self.service.close()
        self.config = check(replace(self.config, policy=replace(self.config.policy, **policy)))
        self._open()

    def send(
        self, method: str, path: str, *, token: str | None = "alerts", content: bytes | None = None, **more: Any
    ) -> httpx.Response:
        """Send one request to the app; `token` is a role (`alerts`, `cases`, `approve`, `admin`) or any text."""

        async def call() -> httpx.Response:
            headers = {"Authorization": f"Bearer {token}-token"} if token else {}
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
                return await client.request(
                    method, path, content=content, headers={**headers, **more.pop("headers", {})}, **more
                )

        return asyncio.run(call())

    def ring(self, *alerts: Any) -> list[dict[str, Any]]:
        """Deliver alerts as Alertmanager does and return the per-alert results."""
        answer = self.send("POST", "/v1/alerts", content=delivery(*alerts))
        assert answer.status_code == 200, answer.text
        return list(answer.json()["alerts"])

    def fault(self, rank: int, *, ring: bool = True, by: list[str] | None = None, **changes: Any) -> str:
        """Let an event name one rank now, and ring its doorbell; return the event id."""
        members = self.provider.members
        changes.setdefault("time", self.clock())
        line = event_line(members, [rank], **changes)
        self.agents.say(line, by=by)
        if ring:
            self.ring(alert(members[rank], rank))
        return str(line["event"]["id"])

    def rounds(self, count: int = 1, *, seconds: float = 0.0) -> None:
        """Do rounds of the worker, moving the clock by `seconds` before each."""
        for _ in range(count):
            self.clock.now += seconds
            self.service.worker.round()

    def cases(self) -> list[dict[str, Any]]:
        """Return all cases as the API shows them, oldest first."""
        return [case_view(self.service, case) for case in reversed(self.service.store.cases())]

    def case(self, member: Member | None = None) -> dict[str, Any]:
        """Return the newest case (of one member)."""
        found = [c for c in self.cases() if member is None or c["instance_id"] == member.instance_id]
        return found[-1]


@contextmanager
def make_rig(
    folder: Path, members: tuple[Member, ...], *, actions: Actions = NO_ACTIONS, **policy: Any
) -> Iterator[Rig]:
    """Build a rig in a folder; `policy` are settings of `[policy]` (defaults: auto, first, no settle time)."""
    for name in ("alerts", "cases", "approve", "admin"):
        (folder / f"{name}.token").write_text(f"{name}-token\n")
    (folder / "events.token").write_text(EVENTS_TOKEN)
    (folder / "latch.token").write_text(LATCH_TOKEN)
    settings = {
        "mode": "auto",
        "confirm": "first",
        "groups": ("workers",),
        "settle_seconds": 0.0,
        "cooldown_seconds": 0.0,
        **policy,
    }
    with FakeAgents(members) as agents:
        config = Config(
            server=Server(
                alerts_token_file=str(folder / "alerts.token"),
                cases_token_file=str(folder / "cases.token"),
                approve_token_file=str(folder / "approve.token"),
                admin_token_file=str(folder / "admin.token"),
            ),
            database=Database(url=f"sqlite:///{folder / 'state.sqlite3'}", busy_timeout_seconds=0.2),
            cluster=Cluster(name="demo"),
            agents=Agents(
                port=agents.port,
                events_token_file=str(folder / "events.token"),
                latch_token_file=str(folder / "latch.token"),
                timeout_seconds=2.0,
            ),
            policy=Policy(**settings),
            actions=actions,
            worker=Worker(poll_seconds=1.0),
        )
        rig = Rig(check(config), FakeProvider(members), agents, Clock())
        try:
            yield rig
        finally:
            rig.service.close()
