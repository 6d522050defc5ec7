"""Take deliveries in: what waits at the same time is committed together, each with a result of its own.

What it does: `record` returns once a delivery and what was derived from it are durable. Whoever finds the turn free
commits all that waits, in one transaction, and the others find theirs done: a commit costs a write to the disk, and
fifty senders share it. Where a transaction fails with several deliveries in it, each is tried again by itself.
What it never does: answer before the commit, or let one delivery cost another its place.
Its place: behind `Store.record_delivery`, which `app` calls for `POST /v1/alerts`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, func, insert, select
from sqlalchemy.exc import IntegrityError

from sdcwatch_remediation import schema
from sdcwatch_remediation.errors import StoreUnavailable
from sdcwatch_remediation.signals import NoSignal, Signal

if TYPE_CHECKING:
    from sdcwatch_remediation.store import Store

TOGETHER = 64
"""Most deliveries in one transaction."""

Results = list[dict[str, Any]]


class _Delivery:
    __slots__ = ("body", "derived", "error", "results")

    def __init__(self, body: bytes, derived: Iterable[Signal | NoSignal]) -> None:
        self.body, self.derived = body, list(derived)
        self.results: Results | None = None
        self.error: StoreUnavailable | None = None

    @property
    def done(self) -> bool:
        return self.results is not None or self.error is not None


class Intake:
    """Deliveries on their way into the database; thread-safe."""

    def __init__(self, store: Store) -> None:
        """Use the store's transactions, clock, policy and audit log."""
        self._store = store
        self._waiting: list[_Delivery] = []
        self._lock = threading.Lock()

    def record(self, body: bytes, derived: Iterable[Signal | NoSignal]) -> Results:
        """Commit one raw delivery with what was derived from it; return one result per alert.

        A signal opens a case, or joins the one that stands or has only just ended for the same instance.

        Raises:
            StoreUnavailable: nothing was kept; the sender must try again.
        """
        mine = _Delivery(body, derived)
        with self._lock:
            self._waiting.append(mine)
        while not mine.done:
            with self._store.database.turn():
                if not mine.done:
                    with self._lock:
                        batch, self._waiting = self._waiting[:TOGETHER], self._waiting[TOGETHER:]
                    self._commit(batch)
        if mine.results is None:
            raise mine.error or StoreUnavailable("the delivery was not kept; send it again")
        return mine.results

    def _commit(self, batch: Sequence[_Delivery]) -> None:
        try:
            self._together(batch)
        except StoreUnavailable as error:
            if len(batch) == 1:
                batch[0].error = error
                return
            for one in batch:
                self._commit([one])
        except BaseException:
            # Whatever it is, it goes to the one who has the turn; the others are told to come again.
            for one in batch:
                one.error = one.error or StoreUnavailable("the delivery was not kept; send it again")
            raise

    def _together(self, batch: Sequence[_Delivery]) -> None:
        lines: list[dict[str, Any]] = []
        found: list[Results] = []
        with _one_winner(), self._store.write() as connection:
            for one in batch:
                found.append(self._keep(connection, one, lines))
        for one, results in zip(batch, found, strict=True):
            one.results = results
        self._store.publish(lines)

    def _keep(self, connection: Connection, one: _Delivery, lines: list[dict[str, Any]]) -> Results:
        store, now = self._store, self._store.clock()
        inserted = connection.execute(insert(schema.deliveries).values(received_at=now, body=one.body))
        delivery = inserted.inserted_primary_key
        assert delivery is not None
        results = []
        for item in one.derived:
            if isinstance(item, NoSignal):
                result, reason, case_id = item.result, item.reason, ""
                if item.drill:
                    store.audit_in(connection, lines, "", "drill_received", {"drill": item.drill}, now)
            else:
                result, reason, case_id = self._ring(connection, item, now, lines)
            row = {"result": result, "reason": reason, "case_id": case_id}
            connection.execute(insert(schema.signals).values(delivery_id=delivery[0], alert_index=item.index, **row))
            results.append({"index": item.index, "result": result, "reason": reason, "case": case_id or None})
        return results

    def _ring(
        self, connection: Connection, signal: Signal, now: float, lines: list[dict[str, Any]]
    ) -> tuple[str, str, str]:
        store, key = self._store, (signal.cluster, signal.instance_id)
        if is_retired(connection, *key):
            return "rejected", f"{signal.instance_id} was already replaced", ""
        table = schema.cases
        # A case that ended a moment ago with an event is watched: the worker looks for newer events of its instance.
        since = now - store.policy.evidence_max_age_seconds
        standing = connection.execute(
            select(table.c.id)
            .where(table.c.cluster == key[0], table.c.instance_id == key[1])
            .where(table.c.closed_at.is_(None) | ((table.c.closed_at > since) & (table.c.event_id != "")))
            .order_by(table.c.opened_at.desc())
            .limit(1)
        ).scalar()
        if standing is not None:
            store.audit_in(connection, lines, standing, "signal_again", {"job": signal.job, "check": signal.check}, now)
            return "joined", "a case of this instance stands or has just ended", standing
        case_id = store.open_in(connection, signal, now)
        detail = {"node": signal.node_name, "instance": signal.instance_id, "job": signal.job, "check": signal.check}
        store.audit_in(connection, lines, case_id, "signal_received", detail, now)
        return "accepted", "a case was opened; the proof is fetched next", case_id


@contextmanager
def _one_winner() -> Iterator[None]:
    try:
        yield
    except IntegrityError as error:
        # Another process opened the same case between our look and our insert; the retry will join it.
        raise StoreUnavailable("another process opened this case at the same time; send it again") from error


def is_retired(connection: Connection, cluster: str, instance_id: str) -> bool:
    """Whether a tombstone says that an instance id was replaced before."""
    table = schema.tombstones
    query = select(func.count()).where(table.c.cluster == cluster, table.c.instance_id == instance_id)
    return bool(connection.execute(query).scalar())
