"""What was reserved, done, approved, retired, suspected and stopped: the memory that keeps actions single and bounded.

What it does: reserves an intent with its exact request (budgets counted in the same transaction), records what came of
it, keeps tombstones, suspicions, approvals and the pause, and answers policy's questions about them.
What it never does: act on the outside world. A live intent (not refused) blocks a second one for the same instance for
ever, by a unique index.
Its place: beside `store`, on the same database.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, delete, exists, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from sdcwatch_remediation import schema
from sdcwatch_remediation.cases import Case, from_row
from sdcwatch_remediation.errors import Conflict
from sdcwatch_remediation.evidence import canonical_json
from sdcwatch_remediation.facts import PastEvent, Usage
from sdcwatch_remediation.records import ReplaceResult
from sdcwatch_remediation.store import GONE, AuditLine, Store

DAY_SECONDS = 86_400.0

_ENDED = ("expired", "failed")
_FLYING = (
    "replacing",
    "proving_replacement",
    # A handover that was not taken back may still be acted on by the node's owner.
    "handing_over",
    "handed_over",
    "awaiting_approval",
    "recommended",
    "frozen",
    "rejected",
    "giving_back",
    "not_given_back",
)
"""States in which an instance whose replacement was asked for may go away at any time."""


@dataclass(frozen=True, slots=True)
class Intent:
    """One reserved action."""

    id: int
    case_id: str
    request: str
    """Canonical JSON of the exact request."""
    reserved_at: float
    outcome: str | None
    """`accepted`, `refused`, `unknown`; None: reserved, and nothing was recorded (a crash)."""
    code: str


class Ledger:
    """Intents, approvals, tombstones, suspicions and the pause; thread-safe."""

    def __init__(self, store: Store) -> None:
        """Use the store's database, clock, policy and audit log."""
        self._store = store
        self._database = store.database

    # Intents

    def reserve(self, case: Case, request: dict[str, Any], *, before: str, step: str = "replace_requested") -> Intent:
        """Commit the intent to have a case's instance replaced, here or by its owner, before anything is sent.

        Args:
            case: the case, in state `replacing` or `handing_over`.
            request: the exact request.
            before: the inventory just read, as JSON; the proof of the replacement starts from it.
            step: of the audit line.

        Raises:
            Conflict: a live intent stands, a budget is used up, or the case moved on.
        """
        lines: list[AuditLine] = []
        now, text = self._store.clock(), canonical_json(request)
        try:
            with self._store.write() as connection:
                policy = self._store.policy
                if paused := _pause_in(connection):
                    raise Conflict(f"paused by {paused['by']}: {paused['reason']}")
                usage = self._usage(connection, case.cluster, case.group_name, case.id)
                if usage.in_flight >= policy.concurrent or usage.last_day >= policy.per_day:
                    raise Conflict("a budget was used up meanwhile")
                table = schema.cases
                still = update(table).where(table.c.id == case.id, table.c.state == case.state, table.c.held_by == "")
                if connection.execute(still.values(before=before)).rowcount != 1:
                    raise Conflict(f"{case.id} is held, or not {case.state} any more")
                key = connection.execute(
                    insert(schema.intents).values(
                        case_id=case.id,
                        cluster=case.cluster,
                        group_name=case.group_name,
                        instance_id=case.instance_id,
                        action="replace",
                        request=text,
                        reserved_at=now,
                        code="",
                        message="",
                    )
                ).inserted_primary_key
                assert key is not None
                detail = {"intent": key[0], "request": request, "approved_by": case.approved_by}
                self._store.audit_in(connection, lines, case.id, step, detail, now)
        except IntegrityError:
            raise Conflict(f"{case.instance_id} was asked to be replaced already") from None
        self._store.publish(lines)
        return Intent(int(key[0]), case.id, text, now, None, "")

    def record(self, intent: Intent, result: ReplaceResult, *, step: str = "replace_answered") -> None:
        """Write down what one attempt came to, with an audit line of that step."""
        lines: list[AuditLine] = []
        now = self._store.clock()
        # Not fenced: only the process that made the call knows its answer, whoever holds the lease by now.
        with self._store.write(fenced=False) as connection:
            connection.execute(
                update(schema.intents)
                .where(schema.intents.c.id == intent.id)
                .values(outcome=result.outcome.value, code=result.code, message=result.message, recorded_at=now)
            )
            detail = {
                "intent": intent.id,
                "outcome": result.outcome.value,
                "code": result.code,
                "message": result.message,
                "retryable": result.retryable,
            }
            self._store.audit_in(connection, lines, intent.case_id, step, detail, now)
        self._store.publish(lines)

    def withdraw(self, case: Case) -> None:
        """Let a later case ask anew, once a handover was taken back; it counts like a request that had no effect."""
        lines: list[AuditLine] = []
        table, now = schema.intents, self._store.clock()
        with self._store.write() as connection:
            live = update(table).where(table.c.case_id == case.id, _live())
            changed = connection.execute(live.values(outcome="refused", code="Withdrawn", recorded_at=now))
            if changed.rowcount:
                self._store.audit_in(connection, lines, case.id, "handover_withdrawn", {}, now)
        self._store.publish(lines)

    def intents(self, case_id: str) -> list[Intent]:
        """Return all intents of one case, oldest first."""
        table = schema.intents
        with self._database.read() as connection:
            rows = connection.execute(select(table).where(table.c.case_id == case_id).order_by(table.c.id)).all()
        return [Intent(r.id, r.case_id, r.request, r.reserved_at, r.outcome, r.code) for r in rows]

    def leave(self, case: Case, to: str, *, reason: str, **changes: Any) -> Case:
        """Move a case out of `replacing`, unless its replacement has been asked for.

        Raises:
            Conflict: a live intent stands (only the inventory can settle it), or the case has moved meanwhile.
        """
        lines: list[AuditLine] = []
        with self._store.write() as connection:
            moved = self._store.move_in(connection, lines, case, to, reason=reason, **changes)
            self._nothing_asked(connection, case)
        self._store.publish(lines)
        return moved

    def _nothing_asked(self, connection: Connection, case: Case) -> None:
        # Asked after the move: from then on `reserve` in another process fails, and what it reserved before is seen.
        table = schema.intents
        live = select(func.count()).where(table.c.case_id == case.id, _live())
        if connection.execute(live).scalar():
            raise Conflict(f"{case.id}: the replacement has been asked for already; wait for what the inventory shows")

    def unsettled(self) -> list[Case]:
        """Return the ended cases whose replacement was asked for lately and is neither refused nor proven."""
        cases, intents = schema.cases, schema.intents
        since = self._store.clock() - DAY_SECONDS
        asked = select(intents.c.case_id).where(_live(), intents.c.reserved_at > since)
        query = select(cases).where(cases.c.id.in_(asked), cases.c.state.in_(_ENDED), ~_buried(cases))
        with self._database.read() as connection:
            return [from_row(row) for row in connection.execute(query.order_by(cases.c.opened_at)).mappings()]

    # What policy asks

    def usage(self, cluster: str, group: str, *, besides: str) -> Usage:
        """Count replacements under way and in the last 24 hours, without those of case `besides`."""
        with self._database.read() as connection:
            return self._usage(connection, cluster, group, besides)

    def _usage(self, connection: Connection, cluster: str, group: str, besides: str) -> Usage:
        intents, cases = schema.intents, schema.cases
        live = (
            select(intents.c.group_name, intents.c.reserved_at, cases.c.state, _buried(cases).label("proven"))
            .join(cases, cases.c.id == intents.c.case_id)
            .where(intents.c.cluster == cluster, intents.c.action == "replace", intents.c.case_id != besides)
            .where(_live())
        )
        rows = connection.execute(live).all()
        since = self._store.clock() - DAY_SECONDS
        graves = schema.tombstones
        newest = (
            select(func.max(graves.c.at))
            .join(intents, (intents.c.case_id == graves.c.case_id) & _live())
            .where(graves.c.cluster == cluster)
        )
        # A case that gave up does not call its request back: it may still take an instance away.
        flying = [
            row
            for row in rows
            if row.state in _FLYING or (row.state in _ENDED and not row.proven and row.reserved_at > since)
        ]
        return Usage(
            in_flight=len(flying),
            in_flight_in_group=sum(row.group_name == group for row in flying),
            last_day=sum(row.reserved_at > since for row in rows),
            last_proven_at=float(connection.execute(newest).scalar() or 0.0),
        )

    def retired(self, cluster: str, instance_id: str) -> bool:
        """Whether an instance id was replaced before."""
        with self._database.read() as connection:
            return _is_retired(connection, cluster, instance_id)

    def suspicions(self, cluster: str, instance_id: str) -> tuple[PastEvent, ...]:
        """Return the remembered transient faults of one instance."""
        table = schema.suspicions
        since = self._store.clock() - self._store.policy.suspected_days * DAY_SECONDS
        query = select(table).where(table.c.cluster == cluster, table.c.instance_id == instance_id, table.c.at > since)
        with self._database.read() as connection:
            return tuple(PastEvent(r.event_id, r.epoch, r.step, r.gpu_uuid) for r in connection.execute(query))

    def suspect(self, case: Case, events: Iterable[PastEvent]) -> None:
        """Remember transient faults of one instance."""
        table = schema.suspicions
        with self._store.write() as connection:
            for event in events:
                key = {"cluster": case.cluster, "gpu_uuid": event.gpu_uuid, "event_id": event.event_id}
                connection.execute(delete(table).filter_by(**key))
                connection.execute(
                    insert(table).values(
                        **key,
                        instance_id=case.instance_id,
                        epoch=event.epoch,
                        step=event.step,
                        at=self._store.clock(),
                        case_id=case.id,
                    )
                )

    def failed_again(self, case: Case, event_key: str, job: str) -> bool:
        """Whether an earlier case of this job, since replaced, failed at the same step of the same check."""
        table = schema.cases
        query = select(func.count()).where(
            table.c.id != case.id,
            table.c.cluster == case.cluster,
            table.c.job == job,
            table.c.event_key == event_key,
            table.c.outcome.in_(GONE),
        )
        with self._database.read() as connection:
            return bool(connection.execute(query).scalar())

    def handled_until(self, case: Case) -> float:
        """Return the time of the newest event that an earlier, closed case of this instance dealt with, else 0."""
        table = schema.cases
        query = select(func.max(table.c.event_time)).where(
            table.c.cluster == case.cluster,
            table.c.instance_id == case.instance_id,
            table.c.closed_at.is_not(None),
            table.c.id != case.id,
        )
        with self._database.read() as connection:
            return float(connection.execute(query).scalar() or 0.0)

    def returned_gpus(self, cluster: str, gpus: Mapping[str, str]) -> tuple[str, ...]:
        """Return those GPUs that left the cluster with a replaced instance and are back in another one.

        Args:
            cluster: the cluster's name.
            gpus: instance id by GPU UUID, as an event tells it.
        """
        table = schema.retired_gpus
        query = select(table.c.gpu_uuid, table.c.instance_id).where(table.c.cluster == cluster)
        with self._database.read() as connection:
            left = connection.execute(query.where(table.c.gpu_uuid.in_(sorted(gpus)))).all()
        return tuple(sorted(row.gpu_uuid for row in left if row.instance_id != gpus[row.gpu_uuid]))

    def entomb(self, case: Case, replacement: str) -> None:
        """Write the tombstone of a case's instance and list the GPU that its event blamed; once is enough."""
        table = schema.tombstones
        with self._store.write() as connection:
            if not _is_retired(connection, case.cluster, case.instance_id):
                connection.execute(
                    insert(table).values(
                        cluster=case.cluster,
                        instance_id=case.instance_id,
                        case_id=case.id,
                        replacement=replacement,
                        at=self._store.clock(),
                    )
                )
            listed = schema.retired_gpus
            if case.event_id:
                same = (listed.c.cluster == case.cluster, listed.c.gpu_uuid == case.gpu_uuid)
                connection.execute(delete(listed).where(*same))
                connection.execute(
                    insert(listed).values(
                        cluster=case.cluster,
                        gpu_uuid=case.gpu_uuid,
                        instance_id=case.instance_id,
                        case_id=case.id,
                        at=self._store.clock(),
                    )
                )

    # People

    def approve(self, case: Case, *, by: str, request_sha256: str) -> Case:
        """Approve exactly the request that a case shows; it is used up by the move that it makes.

        Raises:
            Conflict: the case waits for nobody, waited too long, or shows another request.
        """
        now = self._store.clock()
        if case.state != "awaiting_approval" or (case.deadline is not None and now > case.deadline):
            raise Conflict(f"{case.id} does not wait for an approval (state {case.state})")
        if request_sha256 != case.request_sha256:
            raise Conflict(f"{case.id} asks for another request; look at it again with `show`")
        asked = json.loads(case.request)
        to = "containing" if "quarantine" in asked else "handing_over" if "handover" in asked else "replacing"
        return self._decide(case, to, by, "approved", approved_by=by, approved_sha256=request_sha256)

    def reject(self, case: Case, *, by: str, reason: str) -> Case:
        """Say no to a case; the latch is released where the service may do so.

        Raises:
            Conflict: the case is over, or its replacement has been asked for already.
        """
        return self._decide(case, "rejected", by, "rejected", reason=reason, outcome="rejected")

    def _decide(self, case: Case, to: str, by: str, decision: str, *, reason: str = "", **changes: Any) -> Case:
        lines: list[AuditLine] = []
        with self._store.write() as connection:
            moved = self._store.move_in(
                connection, lines, case, to, reason=reason or f"{decision} by {by}", detail={"by": by}, **changes
            )
            if case.state == "replacing":
                self._nothing_asked(connection, case)
            connection.execute(
                insert(schema.approvals).values(
                    case_id=case.id,
                    request_sha256=case.request_sha256,
                    by=by,
                    at=self._store.clock(),
                    decision=decision,
                )
            )
        self._store.publish(lines)
        return moved

    def cancel(self, case: Case, *, by: str, reason: str) -> Case:
        """End a case: only its scheduler gets a node back; a latch and the agent's mark stay for a person to lift.

        Raises:
            Conflict: the case is over, or its replacement has been asked for already.
        """
        why = f"{reason or f'cancelled by {by}'}{case.mark_left}"
        return self._decide(case, "cancelled", by, "cancelled", reason=why)

    def hold(self, case: Case, *, by: str, reason: str) -> Case:
        """Keep the service from acting on one case until `unhold`; its deadlines go on.

        Raises:
            Conflict: the case is over.
        """
        return self._hold(case, f"{by}: {reason}", "held_by_person", {"by": by, "reason": reason})

    def unhold(self, case: Case, *, by: str) -> Case:
        """End the hold of a case.

        Raises:
            Conflict: the case is over.
        """
        return self._hold(case, "", "hold_ended", {"by": by})

    def _hold(self, case: Case, value: str, step: str, detail: dict[str, Any]) -> Case:
        lines: list[AuditLine] = []
        table = schema.cases
        with self._store.write() as connection:
            still = update(table).where(table.c.id == case.id, table.c.closed_at.is_(None))
            if connection.execute(still.values(held_by=value, next_at=self._store.clock())).rowcount != 1:
                raise Conflict(f"{case.id} is over: there is nothing to hold")
            self._store.audit_in(connection, lines, case.id, step, detail, self._store.clock())
            row = connection.execute(select(table).where(table.c.id == case.id)).mappings().one()
        self._store.publish(lines)
        return from_row(row)

    def pause(self, *, by: str, reason: str) -> None:
        """Stop every action at its next step, until `resume`."""
        value = canonical_json({"by": by, "reason": reason, "time": self._store.clock()})
        self._set_pause(value, "paused", {"by": by, "reason": reason})

    def resume(self, *, by: str) -> None:
        """End the pause; what expired meanwhile stays expired."""
        self._set_pause("", "resumed", {"by": by})

    def _set_pause(self, value: str, step: str, detail: dict[str, Any]) -> None:
        table = schema.meta
        lines: list[AuditLine] = []
        with self._store.write() as connection:
            connection.execute(delete(table).where(table.c.key == "paused"))
            if value:
                connection.execute(insert(table).values(key="paused", value=value))
            self._store.audit_in(connection, lines, "", step, detail, self._store.clock())
        self._store.publish(lines)

    def paused(self) -> dict[str, Any] | None:
        """Return who paused the service, why and when, or None."""
        with self._database.read() as connection:
            return _pause_in(connection)


def _pause_in(connection: Connection) -> dict[str, Any] | None:
    value = connection.execute(select(schema.meta.c.value).where(schema.meta.c.key == "paused")).scalar()
    return dict(json.loads(value)) if value else None


def _live() -> ColumnElement[bool]:
    return schema.intents.c.outcome.is_(None) | (schema.intents.c.outcome != "refused")


def _buried(cases: Table) -> ColumnElement[bool]:
    table = schema.tombstones
    return exists().where(table.c.cluster == cases.c.cluster, table.c.instance_id == cases.c.instance_id)


def _is_retired(connection: Connection, cluster: str, instance_id: str) -> bool:
    table = schema.tombstones
    query = select(func.count()).where(table.c.cluster == cluster, table.c.instance_id == instance_id)
    return bool(connection.execute(query).scalar())
