"""Write a batch of deliveries inside one transaction: three looks and four inserts, however many there are.

What it does: keeps each raw body, decides for each signal whether it opens a case or joins one, and writes deliveries,
signals, cases and audit lines as many rows a statement.
What it never does: commit, retry or answer (`intake` does), or act on a signal.
Its place: `intake` calls `keep` under the writers' lock, so nothing changes between its looks and its inserts.
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import BindParameter, Connection, and_, bindparam, func, insert, or_, select

from sdcwatch_remediation import schema
from sdcwatch_remediation.settings import Policy
from sdcwatch_remediation.signals import NoSignal, Signal
from sdcwatch_remediation.states import INITIAL, STATES

Results = list[dict[str, Any]]
"""What became of each alert of one delivery: `index`, `result`, `reason`, `case`."""

AGAIN_SECONDS = 300.0
"""How long a refused case answers for the same alert: a reminder after that is judged afresh."""

NAMES_A_LOOK = 500
"""Most instance ids in one query; databases bound the number of parameters."""

_Key = tuple[str, str]
"""Cluster and instance id."""

_graves, _cases = schema.tombstones, schema.cases
_IDS: BindParameter[Any] = bindparam("ids", expanding=True)
_CLUSTERS: BindParameter[Any] = bindparam("clusters", expanding=True)
_RETIRED = select(_graves.c.cluster, _graves.c.instance_id).where(
    _graves.c.cluster.in_(_CLUSTERS), _graves.c.instance_id.in_(_IDS)
)
# A case that ended a moment ago with an event is watched: the worker looks for newer events of its instance.
_JOINS = or_(_cases.c.closed_at.is_(None), and_(_cases.c.closed_at > bindparam("watched"), _cases.c.event_id != ""))
_STANDING = (
    select(
        _cases.c.id,
        _cases.c.cluster,
        _cases.c.instance_id,
        _cases.c.node_name,
        _cases.c.job,
        _cases.c.gpu_uuid,
        _JOINS.label("joins"),
    )
    .where(
        _cases.c.cluster.in_(_CLUSTERS),
        _cases.c.instance_id.in_(_IDS),
        or_(
            _JOINS,
            and_(_cases.c.closed_at > bindparam("again"), _cases.c.state == "refused"),
        ),
    )
    .order_by(_cases.c.opened_at)
)
_DELIVERIES = insert(schema.deliveries)
_KEYS = _DELIVERIES.returning(schema.deliveries.c.id, sort_by_parameter_order=True)
_NEWEST = select(func.max(schema.deliveries.c.id))
_SIGNALS, _CASES, _AUDIT = insert(schema.signals), insert(schema.cases), insert(schema.audit)


@dataclass(slots=True)
class Kept:
    """What a batch came to; true once its transaction has been committed."""

    results: list[Results] = field(default_factory=list)
    """One a delivery, in order."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Audit lines to publish."""


def keep(
    connection: Connection,
    deliveries: Sequence[tuple[bytes, Sequence[Signal | NoSignal]]],
    policy: Policy,
    now: float,
    began: float,
) -> Kept:
    """Write deliveries inside an open write transaction.

    Args:
        connection: of that transaction.
        deliveries: each raw body with what was derived from it.
        policy: for deadlines and windows.
        now: unix seconds.
        began: when this process began, in unix seconds: what was refused before may have been by another configuration.
    """
    kept = Kept()
    door = _Door(connection, [item for _, derived in deliveries for item in derived], policy, now, began)
    rows: list[list[dict[str, Any]]] = []
    for _, derived in deliveries:
        answers = [door.answer(item) for item in derived]
        kept.results.append([{**answer, "case": answer["case"] or None} for answer in answers])
        rows.append(
            [
                {"alert_index": a["index"], "result": a["result"], "reason": a["reason"], "case_id": a["case"]}
                for a in answers
            ]
        )
    keys = _insert_deliveries(connection, [{"received_at": now, "body": body} for body, _ in deliveries])
    signals = [{"delivery_id": key, **row} for key, own in zip(keys, rows, strict=True) for row in own]
    for statement, values in ((_SIGNALS, signals), (_CASES, door.opened), (_AUDIT, audit_rows(door.lines))):
        if values:
            connection.execute(statement, values)
    kept.lines = door.lines
    return kept


def _insert_deliveries(connection: Connection, rows: list[dict[str, Any]]) -> Sequence[int]:
    if connection.dialect.name != "sqlite":
        return connection.execute(_KEYS, rows).scalars().all()
    # SQLite promises no order of what several rows return, so that would be a statement a row. Under the writers' lock
    # the next ids are known.
    first = int(connection.execute(_NEWEST).scalar() or 0) + 1
    keys = range(first, first + len(rows))
    connection.execute(_DELIVERIES, [{"id": key, **row} for key, row in zip(keys, rows, strict=True)])
    return keys


def new_case(signal: Signal, policy: Policy, now: float) -> dict[str, Any]:
    """Return the row of a case that a signal opens."""
    seconds = STATES[INITIAL].seconds(policy)
    assert seconds is not None
    unknown = ("outcome", "reason", "event_id", "event_key", "approved_by", "approved_sha256", "replacement")
    return {
        "id": f"case-{secrets.token_hex(6)}",
        "cluster": signal.cluster,
        "instance_id": signal.instance_id,
        "node_name": signal.node_name,
        "job": signal.job,
        "gpu_uuid": signal.gpu_uuid,
        "state": INITIAL,
        "opened_at": now,
        "state_since": now,
        "deadline": now + seconds,
        "next_at": now,
        "event_time": 0.0,
        **dict.fromkeys((*unknown, "group_name", "gates", "request", "before", "held_by"), ""),
    }


def audit_rows(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of audit lines."""
    return [
        {
            "at": line["time"],
            "case_id": line["case"],
            "step": line["step"],
            "detail": json.dumps(line["detail"], sort_keys=True),
        }
        for line in lines
    ]


class _Door:
    """Who rings, who is known, and what is opened for them; the state of one transaction."""

    def __init__(
        self, connection: Connection, items: Sequence[Signal | NoSignal], policy: Policy, now: float, began: float
    ) -> None:
        self.opened: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        self._policy, self._now = policy, now
        self._retired: set[_Key] = set()
        self._joined: dict[_Key, str] = {}
        self._refused: dict[_Key, dict[tuple[str, ...], str]] = defaultdict(dict)
        """By node, job and GPU."""
        since = {"watched": now - policy.evidence_max_age_seconds, "again": max(now - AGAIN_SECONDS, began)}
        signals = [item for item in items if isinstance(item, Signal)]
        clusters = sorted({item.cluster for item in signals})
        for ids in _chunks(sorted({item.instance_id for item in signals})):
            asked = {"clusters": clusters, "ids": ids}
            self._retired.update((row[0], row[1]) for row in connection.execute(_RETIRED, asked))
            for case_id, cluster, instance, *what, joins in connection.execute(_STANDING, {**asked, **since}):
                # The newest is read last.
                if joins:
                    self._joined[cluster, instance] = case_id
                else:
                    self._refused[cluster, instance][tuple(what)] = case_id

    def answer(self, item: Signal | NoSignal) -> dict[str, Any]:
        if isinstance(item, NoSignal):
            if item.drill:
                self._note("", "drill_received", {"drill": item.drill})
            return _answer(item, item.result, item.reason)
        key = (item.cluster, item.instance_id)
        if key in self._retired:
            return _answer(item, "rejected", f"{item.instance_id} was already replaced")
        if case_id := self._joined.get(key, ""):
            self._note(case_id, "signal_again", {"job": item.job, "check": item.check})
            return _answer(item, "joined", "a case of this instance stands or has just ended", case_id)
        if case_id := self._refused[key].get((item.node_name, item.job, item.gpu_uuid), ""):
            self._note(case_id, "signal_again", {"job": item.job, "check": item.check})
            return _answer(item, "joined", "the same alert was refused a moment ago", case_id)
        row = new_case(item, self._policy, self._now)
        self.opened.append(row)
        self._joined[key] = case_id = row["id"]
        detail = {"node": item.node_name, "instance": item.instance_id, "job": item.job, "check": item.check}
        self._note(case_id, "signal_received", detail)
        return _answer(item, "accepted", "a case was opened; the proof is fetched next", case_id)

    def _note(self, case_id: str, step: str, detail: dict[str, Any]) -> None:
        self.lines.append({"time": self._now, "case": case_id, "step": step, "detail": detail})


def _answer(item: Signal | NoSignal, result: str, reason: str, case_id: str = "") -> dict[str, Any]:
    return {"index": item.index, "result": result, "reason": reason, "case": case_id}


def _chunks(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), NAMES_A_LOOK):
        yield names[start : start + NAMES_A_LOOK]
