"""Read and write cases: every change of state, every reservation, every line of the audit log.

What it does: each public method is one transaction. A move compares the state it expects (so two processes cannot both
make it), asks the transition table, and writes its audit line in the same transaction.
What it never does: act on the outside world, or decide.
Its place: between `app`/`casework`/`actions` and the database; audit lines also go to `sink` after their commit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from sdcwatch_remediation import schema
from sdcwatch_remediation.batch import audit_rows, new_case
from sdcwatch_remediation.cases import Case, from_row
from sdcwatch_remediation.database import Database
from sdcwatch_remediation.errors import Conflict
from sdcwatch_remediation.evidence import Copy, read_event
from sdcwatch_remediation.facts import OtherCase
from sdcwatch_remediation.highwater import HighWater
from sdcwatch_remediation.intake import Intake
from sdcwatch_remediation.settings import Policy
from sdcwatch_remediation.signals import NoSignal, Signal
from sdcwatch_remediation.states import STATES, allowed

AuditLine = dict[str, Any]
"""`time`, `case`, `step` and `detail`, as it goes to stdout."""

DRILLS_SHOWN = 16
"""Most drills that `/metrics` shows: the newest."""

DRILL_WINDOW = 10_000
"""Newest signals among which drills are looked for, so that a scrape stays cheap however old the database is."""

ASKED = ("act_requested", "handover_requested")
"""Audit steps after which somebody else may have something of a case's that can be given back."""

LEAVING = ("suspected", "rejected", "giving_back", "not_given_back")
"""States of an open case after which nothing more is done to its node."""

GONE = ("replaced", "replaced_by_others")
"""Outcomes after which the instance is gone: there is nothing to watch."""


class Store:
    """The service's memory; thread-safe."""

    def __init__(
        self,
        database: Database,
        policy: Policy,
        clock: Callable[[], float],
        sink: Callable[[AuditLine], None] = lambda line: None,
        *,
        fence: Callable[[Connection], None] | None = None,
        high_water: HighWater | None = None,
    ) -> None:
        """Use an open database.

        Args:
            database: where the rows are.
            policy: for deadlines and windows.
            clock: returns unix seconds.
            sink: receives every audit line after its commit.
            fence: asked at the beginning of every write transaction; raises when this writer's lease is lost.
            high_water: where it is kept how far the database has come.
        """
        self.database = database
        self.policy = policy
        self.clock = clock
        self._sink = sink
        self._fence = fence
        self.intake = Intake(self)
        self.high_water = high_water

    @contextmanager
    def write(self, *, fenced: bool = True, ahead: bool = False) -> Iterator[Connection]:
        """Open one write transaction, refused with `Conflict` when this writer's lease is lost."""
        with self.database.write(ahead=ahead) as connection:
            if fenced and self._fence is not None:
                self._fence(connection)
            yield connection

    # Deliveries

    def record_delivery(self, body: bytes, derived: Iterable[Signal | NoSignal]) -> list[dict[str, Any]]:
        """Commit one raw delivery with what was derived from it; return one result per alert; see `intake`.

        Raises:
            StoreUnavailable: nothing was kept; the sender must try again.
        """
        return self.intake.record(body, derived)

    def reopen(self, case: Case, event_id: str, *, check: str) -> bool:
        """Open a new case for an instance whose closed case is watched, because an agent reports a new event."""
        signal = Signal(
            index=0,
            cluster=case.cluster,
            instance_id=case.instance_id,
            node_name=case.node_name,
            job=case.job,
            gpu_uuid=case.gpu_uuid,
            rank=0,
            check=check,
        )
        lines: list[AuditLine] = []
        try:
            with self.write() as connection:
                now = self.clock()
                row = new_case(signal, self.policy, now)
                connection.execute(insert(schema.cases).values(row))
                detail = {"node": case.node_name, "instance": case.instance_id, "event": event_id, "after": case.id}
                self.audit_in(connection, lines, row["id"], "signal_received", detail, now)
        except IntegrityError:
            return False
        self.publish(lines)
        return True

    # Cases

    def case(self, case_id: str) -> Case | None:
        """Return one case."""
        with self.database.read() as connection:
            row = connection.execute(select(schema.cases).where(schema.cases.c.id == case_id)).mappings().first()
        return from_row(row) if row else None

    def cases(self, *, open_only: bool = False, limit: int = 1000) -> list[Case]:
        """Return cases, newest first; open ones oldest first, so that they are worked in order."""
        table = schema.cases
        query = select(table)
        if open_only:
            query = query.where(table.c.closed_at.is_(None)).order_by(table.c.opened_at, table.c.id)
        else:
            query = query.order_by(table.c.opened_at.desc(), table.c.id).limit(limit)
        with self.database.read() as connection:
            return [from_row(row) for row in connection.execute(query).mappings()]

    def others(self, case: Case) -> tuple[OtherCase, ...]:
        """Return the other open cases of a cluster that are not on their way out, oldest first."""
        table = schema.cases
        query = (
            select(table.c.id, table.c.job, table.c.event_id, table.c.opened_at)
            .where(table.c.closed_at.is_(None), table.c.cluster == case.cluster, table.c.id != case.id)
            .where(table.c.state.not_in(LEAVING))
            .order_by(table.c.opened_at, table.c.id)
        )
        with self.database.read() as connection:
            rows = connection.execute(query).all()
        return tuple(OtherCase(row.id, row.job, bool(row.event_id), row.opened_at) for row in rows)

    def outcomes(self) -> dict[str, int]:
        """Count closed cases by outcome."""
        table = schema.cases
        query = select(table.c.outcome, func.count()).where(table.c.closed_at.is_not(None)).group_by(table.c.outcome)
        with self.database.read() as connection:
            return {str(outcome): int(count) for outcome, count in connection.execute(query)}

    def last_delivery(self) -> float | None:
        """Return when the newest delivery came, in unix seconds; None: never."""
        table = schema.deliveries
        with self.database.read() as connection:
            newest = connection.execute(select(table.c.received_at).order_by(table.c.id.desc()).limit(1)).scalar()
        return None if newest is None else float(newest)

    def drills(self) -> dict[str, float]:
        """Return when the alert of each of the newest drills first arrived, in unix seconds, by drill id."""
        table, times = schema.signals, schema.deliveries
        newest = select(func.max(table.c.id)).scalar_subquery()
        query = (
            select(table.c.reason, times.c.received_at)
            .join(times, table.c.delivery_id == times.c.id)
            .where(table.c.id > newest - DRILL_WINDOW, table.c.result == "drill")
            .order_by(table.c.id.desc())
        )
        found: dict[str, float] = {}
        with self.database.read() as connection:
            for reason, received_at in connection.execute(query):
                drill = str(reason).partition(":")[0]
                if drill in found or len(found) < DRILLS_SHOWN:
                    found[drill] = float(received_at)  # newest first, so the first arrival is written last
        return found

    def watched(self) -> list[Case]:
        """Return the newest closed case of each instance that may still report something new."""
        table = schema.cases
        since = self.clock() - self.policy.evidence_max_age_seconds
        query = select(table).where(table.c.closed_at > since, table.c.event_id != "", table.c.outcome.not_in(GONE))
        with self.database.read() as connection:
            found = [from_row(row) for row in connection.execute(query.order_by(table.c.opened_at)).mappings()]
        return list({(case.cluster, case.instance_id): case for case in found}.values())

    def proven_lately(self, case: Case) -> tuple[str, ...]:
        """Return the other instances of the cluster about which an event was proven within `breaker_seconds`."""
        table = schema.cases
        since = self.clock() - self.policy.breaker_seconds
        query = select(table.c.instance_id).where(
            table.c.cluster == case.cluster,
            table.c.instance_id != case.instance_id,
            table.c.event_id != "",
            table.c.event_time > since,
        )
        with self.database.read() as connection:
            return tuple(sorted(set(connection.execute(query).scalars())))

    def move(
        self, case: Case, to: str, *, reason: str = "", detail: dict[str, Any] | None = None, **changes: Any
    ) -> Case:
        """Move a case to another state and write the audit line, in one transaction.

        Args:
            case: the case as last read; it must still be in that state.
            to: the new state.
            reason: one sentence.
            detail: more for the audit line.
            changes: other columns to set.

        Raises:
            Conflict: the table does not allow it, or the case has moved meanwhile.
        """
        lines: list[AuditLine] = []
        with self.write() as connection:
            moved = self.move_in(connection, lines, case, to, reason=reason, detail=detail, **changes)
        self.publish(lines)
        return moved

    def move_in(
        self,
        connection: Connection,
        lines: list[AuditLine],
        case: Case,
        to: str,
        *,
        reason: str = "",
        detail: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Case:
        """Do what `move` does inside a transaction that is already open; its lines go to `lines`."""
        if not allowed(case.state, to):
            raise Conflict(f"{case.id} is {case.state} and cannot become {to}")
        if self._owes(connection, case, to):
            # In the same transaction, so that no crash lets the case end before the node is given back.
            changes.setdefault("outcome", case.outcome or to)
            to = "giving_back"
        now = self.clock()
        state = STATES[to]
        seconds = state.seconds(self.policy)
        values = {
            "state": to,
            "state_since": now,
            "reason": reason,
            "next_at": now,
            "deadline": None if seconds is None else now + seconds,
            **changes,
        }
        if state.kind == "terminal":
            values["closed_at"] = now
            values.setdefault("outcome", case.outcome or to)
        table = schema.cases
        changed = connection.execute(
            update(table)
            .where(table.c.id == case.id, table.c.state == case.state, table.c.closed_at.is_(None))
            .values(**values)
        )
        if changed.rowcount != 1:
            raise Conflict(f"{case.id} is not {case.state} any more")
        self.audit_in(connection, lines, case.id, to, {"from": case.state, "reason": reason, **(detail or {})}, now)
        row = connection.execute(select(table).where(table.c.id == case.id)).mappings().one()
        return from_row(row)

    def _owes(self, connection: Connection, case: Case, to: str) -> bool:
        """Whether a case that ends like this asked a scheduler for something that it must give back first."""
        # A rejected case lets the job go on first: there the end is when it would close.
        end = "rejected" if (case.state, to) == ("rejected", "closed") else "" if to == "rejected" else to
        if end not in self.policy.give_back or not allowed(case.state, "giving_back"):
            return False
        table = schema.audit
        asked = select(func.count()).where(table.c.case_id == case.id, table.c.step.in_(ASKED))
        return bool(connection.execute(asked).scalar())

    def set(self, case: Case, *, step: str = "", detail: dict[str, Any] | None = None, **changes: Any) -> Case:
        """Set columns of a case that stays in its state; with `step`, an audit line is written too."""
        lines: list[AuditLine] = []
        table = schema.cases
        with self.write() as connection:
            same = (table.c.id == case.id, table.c.state == case.state)
            if changes and connection.execute(update(table).where(*same).values(**changes)).rowcount != 1:
                raise Conflict(f"{case.id} is not {case.state} any more")
            if step:
                self.audit_in(connection, lines, case.id, step, detail or {}, self.clock())
            row = connection.execute(select(table).where(table.c.id == case.id)).mappings().one()
        self.publish(lines)
        return from_row(row)

    def timeline(self, case_id: str) -> list[AuditLine]:
        """Return the audit lines of one case, oldest first."""
        table = schema.audit
        with self.database.read() as connection:
            rows = connection.execute(select(table).where(table.c.case_id == case_id).order_by(table.c.id)).all()
        return [{"time": row.at, "step": row.step, "detail": json.loads(row.detail)} for row in rows]

    # Evidence

    def keep_copies(self, case: Case, copies: Iterable[Copy]) -> int:
        """Keep copies of events that are not kept yet; return how many are new."""
        fresh = 0
        with self.write() as connection:
            table = schema.copies
            query = select(table.c.event_id, table.c.sha256, table.c.agent_instance).where(table.c.case_id == case.id)
            known = {tuple(row) for row in connection.execute(query)}
            for copy in copies:
                key = (copy.event.id, copy.event.sha256, copy.agent_instance)
                if key in known:
                    continue
                known.add(key)
                fresh += 1
                connection.execute(
                    insert(table).values(
                        case_id=case.id,
                        event_id=key[0],
                        sha256=key[1],
                        agent_instance=key[2],
                        agent_node=copy.agent_node,
                        address=copy.address,
                        fetched_at=copy.fetched_at,
                        line=copy.line,
                    )
                )
        return fresh

    def copies(self, case_id: str) -> list[Copy]:
        """Return every copy kept for one case."""
        table = schema.copies
        with self.database.read() as connection:
            rows = connection.execute(select(table).where(table.c.case_id == case_id).order_by(table.c.id)).all()
        return [
            Copy(
                row.agent_instance,
                row.agent_node,
                row.address,
                row.fetched_at,
                read_event(json.loads(row.line)),
                row.line,
            )
            for row in rows
        ]

    # Audit

    def note(self, case_id: str, step: str, detail: dict[str, Any]) -> None:
        """Write one audit line; `case_id` is empty for what concerns the whole service."""
        lines: list[AuditLine] = []
        with self.write() as connection:
            self.audit_in(connection, lines, case_id, step, detail, self.clock())
        self.publish(lines)

    def audit_in(
        self,
        connection: Connection,
        lines: list[AuditLine],
        case_id: str,
        step: str,
        detail: dict[str, Any],
        now: float,
    ) -> None:
        """Write one audit line inside a transaction that is already open; it is published after the commit."""
        lines.append({"time": now, "case": case_id, "step": step, "detail": detail})
        connection.execute(insert(schema.audit), audit_rows(lines[-1:]))

    def publish(self, lines: Iterable[AuditLine]) -> None:
        """Hand committed audit lines to the sink."""
        lines = list(lines)
        if self._fence is not None and any(line["step"].endswith("_requested") for line in lines):
            self.remember()  # before the act that was requested: a copy of the database from before it is told by this
        for line in lines:
            self._sink(line)

    def remember(self) -> None:
        """Write down outside the database how far it has come."""
        if self.high_water is not None:
            self.high_water.rise(self.database.id, self.newest_line())

    def newest_line(self) -> int:
        """Return the id of the newest audit line; 0 while there is none."""
        with self.database.read() as connection:
            return int(connection.execute(select(func.max(schema.audit.c.id))).scalar() or 0)
