"""Tell a webhook of the operator's about the state changes that the configuration lists.

What it does: reads the audit log for moves into `notify.states`, posts each as signed JSON to `notify.url`, a bounded
number of times, and writes `notify_delivered` or `notify_failed` into the log. The log is the queue, so a crash loses
nothing; an answer that was lost means a repetition under the same delivery id.
What it never does: call anything while `notify.url` is empty, follow a redirect, use a proxy, read an answer's body,
or make a case wait: it has a thread of its own, and no step asks what became of a notice.
Its place: beside `worker`; only the process that holds the worker's lease sends.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import select

from sdcwatch_remediation import schema
from sdcwatch_remediation._version import __version__
from sdcwatch_remediation.errors import RemediationError
from sdcwatch_remediation.evidence import canonical_json
from sdcwatch_remediation.lease import Lease
from sdcwatch_remediation.settings import Notify
from sdcwatch_remediation.store import Store

log = logging.getLogger(__name__)

DELIVERED, FAILED = "notify_delivered", "notify_failed"
RETRY_SECONDS = 5.0
"""Wait before the second attempt; doubled for each one after."""
A_ROUND = 20
"""Most notices sent in one round."""
STOP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Notice:
    """One state change that is to be told."""

    line: int
    """Id of the audit line."""
    at: float
    """When the case moved, in unix seconds."""
    case_id: str
    state: str
    detail: dict[str, Any]
    attempts: int
    """Attempts that failed so far."""
    due: float
    """Not before this time."""


class Notifier:
    """The thread that sends notices."""

    def __init__(
        self,
        settings: Notify,
        store: Store,
        lease: Lease,
        *,
        cluster: str,
        pause_seconds: float,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """Remember the settings; nothing is sent before `start` or `round`.

        Args:
            settings: checked, with a URL.
            store: fenced by `lease`.
            lease: who may send.
            cluster: told in each notice.
            pause_seconds: between two looks at the audit log.
            failed: called for each attempt that failed.
        """
        self._settings, self._store, self._lease, self._cluster = settings, store, lease, cluster
        self._pause, self._failed = max(0.05, pause_seconds), failed
        self._verify = _authorities(settings)
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End within `STOP_SECONDS`; what was not sent is sent after the next start."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)

    def round(self) -> int:
        """Send what is due, oldest first; return how many were delivered.

        Raises:
            RemediationError: the database could not be used, or another process has the lease by now.
        """
        if not self._lease.ours():
            return 0
        delivered, sent = 0, 0
        for notice in list(self._waiting()):
            now = self._store.clock()
            if self._ending.is_set() or sent >= A_ROUND:
                break
            if now - notice.at > self._settings.max_age_seconds:
                self._note(notice, FAILED, notice.attempts, "too old to be told", last=True)
            elif notice.due <= now:
                sent += 1
                delivered += self._attempt(notice)
        return delivered

    def _attempt(self, notice: Notice) -> bool:
        attempt = notice.attempts + 1
        problem, again = self._send(notice)
        if not problem:
            self._note(notice, DELIVERED, attempt, "", last=True)
            return True
        self._failed()
        self._note(notice, FAILED, attempt, problem, last=not again or attempt >= self._settings.attempts)
        return False

    def _note(self, notice: Notice, step: str, attempt: int, problem: str, *, last: bool) -> None:
        detail = {"line": notice.line, "told": notice.state, "attempt": attempt, "last": last}
        self._store.note(notice.case_id, step, {**detail, **({"problem": problem[:300]} if problem else {})})

    def _waiting(self) -> Iterator[Notice]:
        table = schema.audit
        since = self._store.clock() - 2 * self._settings.max_age_seconds
        steps = (*self._settings.states, DELIVERED, FAILED)
        query = select(table).where(table.c.at > since, table.c.step.in_(steps), table.c.case_id != "")
        with self._store.database.read() as connection:
            rows = connection.execute(query.order_by(table.c.id)).all()
        done: set[int] = set()
        failures: dict[int, list[float]] = {}
        for row in rows:
            if row.step in (DELIVERED, FAILED):
                detail = json.loads(row.detail)
                failures.setdefault(int(detail["line"]), []).append(float(row.at))
                if detail["last"]:
                    done.add(int(detail["line"]))
        for row in rows:
            if row.step in self._settings.states and row.id not in done:
                times = failures.get(row.id, [])
                due = times[-1] + RETRY_SECONDS * 2 ** (len(times) - 1) if times else row.at
                yield Notice(row.id, row.at, row.case_id, row.step, json.loads(row.detail), len(times), due)

    def _send(self, notice: Notice) -> tuple[str, bool]:
        """Send once; return what went wrong, and whether another attempt may help."""
        try:
            secret = read_secret(self._settings.secret_file)
        except ValueError as error:
            return str(error), True
        body = canonical_json(self._body(notice)).encode()
        moment = f"{self._store.clock():.0f}"
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"sdcwatch-remediation/{__version__}",
            "X-Sdcwatch-Delivery": self._id(notice),
            "X-Sdcwatch-Timestamp": moment,
            "X-Sdcwatch-Signature": signature(secret, moment, body),
        }
        seconds = self._settings.timeout_seconds
        client = httpx.Client(verify=self._verify, timeout=seconds, trust_env=False, follow_redirects=False)
        # A receiver that dribbles its answer is ended too: each wait is bounded by httpx, all of them by this.
        end = threading.Timer(seconds, client.close)
        end.daemon = True
        try:
            end.start()
            with client.stream("POST", self._settings.url, content=body, headers=headers) as answer:
                status = answer.status_code
        except Exception as error:  # whatever the network, TLS or a client closed amid the answer makes of it
            return f"{type(error).__name__}: {error}", True
        finally:
            end.cancel()
            client.close()
        if 200 <= status < 300:
            return "", False
        if 300 <= status < 400:
            return f"status {status}: a redirect is not followed", False
        return f"status {status}", status >= 500 or status in (408, 425, 429)

    def _id(self, notice: Notice) -> str:
        return f"{self._store.database.id}-{notice.line}"

    def _body(self, notice: Notice) -> dict[str, Any]:
        case = self._store.case(notice.case_id)
        known = {
            "instance": case.instance_id if case else "",
            "node": case.node_name if case else "",
            "group": case.group_name if case else "",
            "job": case.job if case else "",
            "gpu_uuid": case.gpu_uuid if case else "",
            "event": case.event_id if case else "",
            "outcome": case.outcome if case else "",
        }
        moved = {"from": str(notice.detail.get("from", "")), "reason": str(notice.detail.get("reason", ""))[:1000]}
        head = {"schema": 1, "id": self._id(notice), "time": notice.at, "cluster": self._cluster}
        return {**head, "case": notice.case_id, "state": notice.state, **moved, **known}

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self.round()
            except RemediationError as error:
                log.info("notices wait: %s", error)
            except Exception:  # a notice is never worth a thread: the next round may work
                log.exception("a notice could not be made")
                self._failed()
            self._ending.wait(self._pause)


def signature(secret: bytes, timestamp: str, body: bytes) -> str:
    """Return the value of `X-Sdcwatch-Signature`: HMAC-SHA256 over the timestamp, a dot and the body."""
    return "sha256=" + hmac.new(secret, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def read_secret(path: str) -> bytes:
    """Return the first line of the file with the secret.

    Raises:
        ValueError: it cannot be read, or holds none; the message names the setting.
    """
    try:
        words = Path(path).read_bytes().split()
    except OSError as error:
        raise ValueError(f"notify.secret_file {path} cannot be read: {error.strerror}") from error
    if not words:
        raise ValueError(f"notify.secret_file {path} holds no secret; write one line into it")
    return words[0]


def problems(settings: Notify) -> Iterator[str]:
    """Yield one sentence for each file of `[notify]` that could not be used; sends nothing."""
    if not settings.url:
        return
    if settings.secret_file:
        try:
            read_secret(settings.secret_file)
        except ValueError as error:
            yield str(error)
    try:
        _authorities(settings)
    except (OSError, ValueError) as error:
        yield f"notify.ca_file {settings.ca_file} cannot be read as PEM certificates: {error}"


def _authorities(settings: Notify) -> ssl.SSLContext | bool:
    return ssl.create_default_context(cafile=settings.ca_file) if settings.ca_file else True
