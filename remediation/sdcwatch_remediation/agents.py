"""Talk to the node agents: fetch events and known-answer tests, release latches.

What it does: asks the agents of given inventory members, in parallel and bounded in number, time and size. An answer is
kept only if the agent says that it *is* the member the inventory has at that address.
What it never does: take an address from anything but an inventory member, follow a redirect, use a proxy, or raise for
what an agent does: a bad answer is an `Answer` with a problem.
Its place: `casework` asks for events, `actions/*` release latches; both behind their own bearer token.
"""

from __future__ import annotations

import ipaddress
import json
import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx

from sdcwatch_remediation.errors import ConfigError
from sdcwatch_remediation.evidence import Copy, canonical_json, read_event
from sdcwatch_remediation.known_answer import KnownAnswerTest
from sdcwatch_remediation.known_answer import read as read_test
from sdcwatch_remediation.records import Member
from sdcwatch_remediation.settings import Agents

MAX_EVENTS = 1000
"""Events read from one answer; more are left out."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one agent answered to `GET /events`."""

    member: Member
    copies: tuple[Copy, ...]
    problem: str
    """Why the answer does not count; empty when it does."""


@dataclass(frozen=True, slots=True)
class LatchAnswer:
    """What one agent answered to `POST /latch/release`."""

    member: Member
    result: str
    """`released`, `already_released`, `quarantined`, `no_latch` (404), or `failed`."""
    problem: str


@dataclass(frozen=True, slots=True)
class TestAnswer:
    """What one agent answered to `GET /preflight` about its own node."""

    test: KnownAnswerTest | None
    """None: there is no result yet, or the answer does not count."""
    problem: str
    """Why there is none."""
    later: bool
    """Whether there may be one later: none yet, or no answer; not where the road is closed or unknown."""


class AgentClient:
    """Asks agents; safe to use from several threads."""

    def __init__(self, settings: Agents, clock: Callable[[], float]) -> None:
        """Use the `[agents]` settings; `clock` returns unix seconds and stamps what was fetched.

        Raises:
            ConfigError: `agents.ca_file` cannot be used.
        """
        self._settings = settings
        self._clock = clock
        limits = httpx.Limits(max_connections=settings.parallel)
        self._http = httpx.Client(
            timeout=settings.timeout_seconds,
            follow_redirects=False,
            trust_env=False,
            limits=limits,
            verify=_authorities(settings),
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def events(self, members: Sequence[Member], instance_id: str, since: float) -> list[Answer]:
        """Ask the agents of all given members for the events of one instance since a time in unix seconds."""
        token = _first_line(self._settings.events_token_file)
        parameters = {"instance": instance_id, "since": f"{since:.3f}"}
        return self._each(members, lambda member: self._events(member, token, parameters))

    def known_answer(self, member: Member, latch_id: str) -> TestAnswer:
        """Ask one member's own agent what its node's known-answer test under a latch showed."""
        try:
            token = _first_line(self._settings.events_token_file)
            status, body = self._send("GET", member, "/preflight", token, parameters={"latch": latch_id})
            if status != 200:
                return TestAnswer(None, f"its agent answers status {status}", later=status >= 500)
            tree = json.loads(body)
            if problem := _not_of(member, tree, "results"):
                return TestAnswer(None, problem, later=False)
            tests = [read_test(item) for item in tree["results"][:MAX_EVENTS]]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError) as error:
            return TestAnswer(None, f"{error.__class__.__name__}: {error}"[:300], later=True)
        own = [t for t in tests if (t.instance, t.node) == (member.instance_id, member.node_name)]
        if not own:
            return TestAnswer(None, "its node has no result yet", later=True)
        return TestAnswer(max(own, key=lambda test: test.time), "", later=False)

    def latch(
        self, members: Sequence[Member], *, latch_id: str, decision: str, instance_id: str, case_id: str, by: str
    ) -> list[LatchAnswer]:
        """Tell the agents of all given members to release a latch (`release`) or to leave the job (`leave`)."""
        token = _first_line(self._settings.latch_token_file)
        body = latch_body(latch_id=latch_id, decision=decision, instance_id=instance_id, case_id=case_id, by=by)
        return self._each(members, lambda member: self._latch(member, token, body))

    def clocks(self, members: Sequence[Member]) -> list[float | None]:
        """Return by how many seconds each agent's clock is ahead of ours (whole seconds), None where none was shown."""
        return self._each(members, self._ahead)

    def _ahead(self, member: Member) -> float | None:
        name = {"sni_hostname": self._settings.server_name} if self._settings.server_name else {}
        try:
            url = self._url(member, "/healthz")
            with self._http.stream("GET", url, extensions=name) as response:
                return parsedate_to_datetime(response.headers["Date"]).timestamp() - self._clock()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError):
            return None

    def _url(self, member: Member, path: str) -> httpx.URL:
        # A host name here would be looked up, so the address must be an address.
        host = str(ipaddress.ip_address(member.address))
        return httpx.URL(scheme=self._settings.scheme, host=host, port=self._settings.port, path=path)

    def _each(self, members: Sequence[Member], ask: Callable[[Member], Any]) -> list[Any]:
        if not members:
            return []
        with ThreadPoolExecutor(max_workers=min(self._settings.parallel, len(members))) as pool:
            return list(pool.map(ask, members))

    def _events(self, member: Member, token: str, parameters: dict[str, str]) -> Answer:
        try:
            status, body = self._send("GET", member, "/events", token, parameters=parameters)
            if status != 200:
                return Answer(member, (), f"status {status}")
            return self._read(member, json.loads(body))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError) as error:
            return Answer(member, (), f"{error.__class__.__name__}: {error}"[:300])

    def _read(self, member: Member, tree: Any) -> Answer:
        if wrong := _not_of(member, tree, "events"):
            return Answer(member, (), wrong)
        copies, problem = [], ""
        for line in tree["events"][:MAX_EVENTS]:
            try:
                event = read_event(line)
                text = canonical_json(line)
            except ValueError as error:
                problem = f"an event cannot be read: {error}"
                continue
            copies.append(Copy(member.instance_id, member.node_name, member.address, self._clock(), event, text))
        return Answer(member, tuple(copies), problem)

    def _latch(self, member: Member, token: str, body: dict[str, str]) -> LatchAnswer:
        try:
            status, raw = self._send("POST", member, "/latch/release", token, body=body)
            if status == 404:
                return LatchAnswer(member, "no_latch", "")
            if status != 200:
                return LatchAnswer(member, "failed", f"status {status}")
            result = json.loads(raw).get("result")
            if result not in ("released", "already_released", "quarantined"):
                return LatchAnswer(member, "failed", "no known result in the answer")
            return LatchAnswer(member, result, "")
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, AttributeError, RecursionError) as error:
            return LatchAnswer(member, "failed", f"{error.__class__.__name__}: {error}"[:300])

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
        url = self._url(member, path)
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json", "Accept-Encoding": "identity"}
        until = time.monotonic() + self._settings.timeout_seconds
        chunks, size = [], 0
        # One certificate for all agents is checked against its name; the address still decides who is asked.
        name = {"sni_hostname": self._settings.server_name} if self._settings.server_name else {}
        with self._http.stream(method, url, params=parameters, json=body, headers=headers, extensions=name) as response:
            for chunk in response.iter_raw():
                size += len(chunk)
                if size > self._settings.answer_limit_bytes:
                    raise ValueError(f"the answer is longer than {self._settings.answer_limit_bytes} bytes")
                if time.monotonic() > until:
                    raise ValueError("the answer took too long")
                chunks.append(chunk)
            return response.status_code, b"".join(chunks)


def _not_of(member: Member, tree: Any, items: str) -> str:
    """Why an answer is none of this member's own agent; empty where it is."""
    agent = tree.get("agent") if isinstance(tree, dict) else None
    if not isinstance(agent, dict) or tree.get("schema") != 1 or not isinstance(tree.get(items), list):
        return "not an answer of schema 1"
    if (agent.get("instance"), agent.get("node")) != (member.instance_id, member.node_name):
        return f"the agent at {member.address} is not {member.instance_id} {member.node_name}"
    return ""


def latch_body(*, latch_id: str, decision: str, instance_id: str, case_id: str, by: str) -> dict[str, str]:
    """Return the exact body of `POST /latch/release`."""
    return {"latch_id": latch_id, "decision": decision, "instance": instance_id, "case_id": case_id, "by": by}


def _authorities(settings: Agents) -> ssl.SSLContext | bool:
    if not settings.ca_file:
        return True
    try:
        return ssl.create_default_context(cafile=settings.ca_file)
    except OSError as error:
        raise ConfigError(f"agents.ca_file {settings.ca_file} cannot be read as PEM certificates: {error}") from error


def _first_line(path: str) -> str:
    if not path:
        return ""
    try:
        lines = Path(path).read_text(encoding="utf-8").split()
    except OSError:
        return ""
    return lines[0] if lines else ""
