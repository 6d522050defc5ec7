"""Make and migrate the schema: the only module that knows Alembic.

What it does: says how a database's schema stands (`state`), makes a new one (`create`), and takes an older one to the
present one step by step (`upgrade`), all of it in the caller's transaction.
What it never does: migrate by itself. `serve` refuses an older schema; a person runs `sdcwatch-remediation migrate`,
after a backup.
Its place: `database` asks it at every start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, insert, inspect, select, update

from sdcwatch_remediation import schema

FOLDER = Path(__file__).parent / "migrations"

State = Literal["empty", "older", "current", "newer", "foreign"]


def state(connection: Connection) -> tuple[State, str]:
    """Return how the schema stands and its version (a revision such as `0002`, or empty)."""
    tables = set(inspect(connection).get_table_names())
    if not tables & {"meta", "cases", "audit"}:
        return ("empty" if not tables - {"alembic_version"} else "foreign"), ""
    if "meta" not in tables:
        return "foreign", ""
    revision = MigrationContext.configure(connection).get_current_revision()
    if revision is None:
        # Schema 1 was made before Alembic was.
        version = connection.execute(select(schema.meta.c.value).where(schema.meta.c.key == "schema")).scalar()
        return ("older", "0001") if version == "1" else ("foreign", str(version or ""))
    steps = [step.revision for step in _scripts(connection).walk_revisions()]
    if revision not in steps:
        return "newer", revision
    return ("current" if revision == steps[0] else "older"), revision


def create(connection: Connection, database_id: str) -> None:
    """Make every table in an empty database and give it an id."""
    schema.metadata.create_all(connection)
    append_only = {"sqlite": schema.SQLITE_APPEND_ONLY, "postgresql": schema.POSTGRESQL_APPEND_ONLY}
    for statement in append_only.get(connection.dialect.name, ()):
        connection.exec_driver_sql(statement)
    found = {"schema": str(schema.SCHEMA_VERSION), "id": database_id}
    connection.execute(insert(schema.meta), [{"key": key, "value": value} for key, value in found.items()])
    command.stamp(_config(connection), "head")


def upgrade(connection: Connection, revision: str) -> None:
    """Take a database of an older schema to the present one."""
    config = _config(connection)
    if MigrationContext.configure(connection).get_current_revision() is None:
        command.stamp(config, revision)
    command.upgrade(config, "head")
    version = {"value": str(schema.SCHEMA_VERSION)}
    connection.execute(update(schema.meta).where(schema.meta.c.key == "schema").values(version))


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _scripts(connection: Connection) -> ScriptDirectory:
    return ScriptDirectory.from_config(_config(connection))
