"""The tables of the database, in SQLAlchemy Core.

What it does: declares tables and the two partial unique indexes that carry invariants: one open case per (cluster,
instance), and one live intent per (cluster, instance, action).
What it never does: read or write rows (`store` and its neighbours do).
Its place: works the same on SQLite and PostgreSQL. Times are unix seconds, JSON is text.
"""

from __future__ import annotations

from sqlalchemy import (
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

SCHEMA_VERSION = 3
"""Raise it together with a new file in `migrations/versions`."""

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("received_at", Float, nullable=False),
    Column("body", LargeBinary, nullable=False),
)

signals = Table(
    "signals",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("delivery_id", ForeignKey("deliveries.id"), nullable=False),
    Column("alert_index", Integer, nullable=False),
    Column("result", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("case_id", String(32), nullable=False),
)

cases = Table(
    "cases",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("cluster", String(64), nullable=False),
    Column("instance_id", String(32), nullable=False),
    Column("node_name", String(255), nullable=False),
    Column("group_name", String(255), nullable=False),
    Column("job", String(128), nullable=False),
    Column("gpu_uuid", String(300), nullable=False),
    Column("state", String(32), nullable=False),
    Column("outcome", String(32), nullable=False),
    Column("reason", Text, nullable=False),
    Column("opened_at", Float, nullable=False),
    Column("state_since", Float, nullable=False),
    Column("deadline", Float),
    Column("next_at", Float, nullable=False),
    Column("closed_at", Float),
    Column("event_id", String(32), nullable=False),
    Column("event_time", Float, nullable=False),
    Column("event_key", String(255), nullable=False),
    Column("quarantined_at", Float),
    Column("released_at", Float),
    Column("replacement", String(32), nullable=False),
    Column("approved_by", String(128), nullable=False),
    Column("approved_sha256", String(64), nullable=False),
    Column("gates", Text, nullable=False),
    Column("request", Text, nullable=False),
    Column("before", Text, nullable=False),
    Column("held_by", Text, nullable=False, server_default=""),
    Index(
        "one_open_case",
        "cluster",
        "instance_id",
        unique=True,
        sqlite_where=text("closed_at IS NULL"),
        postgresql_where=text("closed_at IS NULL"),
    ),
    # For every delivery and every round; without them each reads all cases there ever were.
    Index("cases_of_instance", "cluster", "instance_id", "opened_at"),
    Index("cases_by_end", "closed_at"),
    Index("cases_by_event", "cluster", "event_time"),
)

copies = Table(
    "copies",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("case_id", ForeignKey("cases.id"), nullable=False),
    Column("event_id", String(32), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("agent_instance", String(32), nullable=False),
    Column("agent_node", String(255), nullable=False),
    Column("address", String(64), nullable=False),
    Column("fetched_at", Float, nullable=False),
    Column("line", Text, nullable=False),
    UniqueConstraint("case_id", "event_id", "sha256", "agent_instance", name="one_copy"),
)

intents = Table(
    "intents",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("case_id", ForeignKey("cases.id"), nullable=False),
    Column("cluster", String(64), nullable=False),
    Column("group_name", String(255), nullable=False),
    Column("instance_id", String(32), nullable=False),
    Column("action", String(32), nullable=False),
    Column("request", Text, nullable=False),
    Column("reserved_at", Float, nullable=False),
    Column("outcome", String(16)),
    Column("code", String(128), nullable=False),
    Column("message", Text, nullable=False),
    Column("recorded_at", Float),
    # A refused attempt had no effect, so another may follow; anything else blocks a second call for ever.
    Index(
        "one_live_intent",
        "cluster",
        "instance_id",
        "action",
        unique=True,
        sqlite_where=text("outcome IS NULL OR outcome <> 'refused'"),
        postgresql_where=text("outcome IS NULL OR outcome <> 'refused'"),
    ),
)

approvals = Table(
    "approvals",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("case_id", ForeignKey("cases.id"), nullable=False),
    Column("request_sha256", String(64), nullable=False),
    Column("by", String(128), nullable=False),
    Column("at", Float, nullable=False),
    Column("decision", String(16), nullable=False),
)

tombstones = Table(
    "tombstones",
    metadata,
    Column("cluster", String(64), primary_key=True),
    Column("instance_id", String(32), primary_key=True),
    Column("case_id", String(32), nullable=False),
    Column("replacement", String(32), nullable=False),
    Column("at", Float, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("holder", String(255), nullable=False),
    # The fencing token: it grows with every change of holder.
    Column("token", Integer, nullable=False),
    Column("until", Float, nullable=False),
)

retired_gpus = Table(
    "retired_gpus",
    metadata,
    Column("cluster", String(64), primary_key=True),
    Column("gpu_uuid", String(300), primary_key=True),
    Column("instance_id", String(32), nullable=False),
    Column("case_id", String(32), nullable=False),
    Column("at", Float, nullable=False),
)

suspicions = Table(
    "suspicions",
    metadata,
    Column("cluster", String(64), primary_key=True),
    Column("gpu_uuid", String(300), primary_key=True),
    Column("event_id", String(32), primary_key=True),
    Column("instance_id", String(32), nullable=False),
    Column("epoch", String(128), nullable=False),
    Column("step", Integer, nullable=False),
    Column("at", Float, nullable=False),
    Column("case_id", String(32), nullable=False),
)

audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("case_id", String(32), nullable=False, index=True),
    Column("step", String(64), nullable=False),
    Column("detail", Text, nullable=False),
)

SQLITE_APPEND_ONLY = tuple(
    f"CREATE TRIGGER IF NOT EXISTS audit_no_{verb.lower()} BEFORE {verb} ON audit "
    f"BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
    for verb in ("UPDATE", "DELETE")
)

POSTGRESQL_APPEND_ONLY = (
    "CREATE FUNCTION audit_append_only() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$",
    "CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
    "FOR EACH STATEMENT EXECUTE FUNCTION audit_append_only()",
)
