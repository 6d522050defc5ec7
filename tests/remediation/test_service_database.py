"""The database under the cases: schema, migrations, one writer at a time, a lease that fences off a late one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sdcwatch_remediation import schema
from sdcwatch_remediation.alertmanager import Alert
from sdcwatch_remediation.database import Database
from sdcwatch_remediation.errors import ConfigError, Conflict, StoreUnavailable
from sdcwatch_remediation.lease import Lease
from sdcwatch_remediation.ledger import Ledger
from sdcwatch_remediation.settings import Policy
from sdcwatch_remediation.signals import derive
from sdcwatch_remediation.store import Store
from sdcwatch_remediation.testing import Clock, alert, fleet

OF_SCHEMA_2 = ("leases", "retired_gpus")
INDEXES_OF_SCHEMA_3 = ("cases_of_instance", "cases_by_end", "cases_by_event")


def as_schema_1(url: str) -> None:
    """Make the database that the first version left behind, with a case in it."""
    database = Database(url)
    signal = derive(Alert(0, "firing", alert(fleet(3)[2], 2)["labels"], ""), "demo")
    Store(database, Policy(), Clock()).record_delivery(b"{}", [signal])
    database.close()
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        for table in (*OF_SCHEMA_2, "alembic_version"):
            connection.exec_driver_sql(f"DROP TABLE {table}")
        for index in INDEXES_OF_SCHEMA_3:
            connection.exec_driver_sql(f"DROP INDEX {index}")
        connection.exec_driver_sql("ALTER TABLE cases DROP COLUMN held_by")
        connection.exec_driver_sql("UPDATE meta SET value = '1' WHERE key = 'schema'")
        connection.exec_driver_sql("INSERT INTO deliveries (received_at, body) VALUES (1.0, 'kept')")
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql("DROP TRIGGER audit_append_only ON audit")
            connection.exec_driver_sql("DROP FUNCTION audit_append_only")
    engine.dispose()


def test_a_migrated_database_is_what_a_new_one_is(database_url: str) -> None:
    """An older schema is refused with what to do, migrated when asked, keeps its rows, and then differs in nothing."""
    as_schema_1(database_url)
    with pytest.raises(ConfigError, match=r"older schema 0001.*sdcwatch-remediation migrate"):
        Database(database_url)
    before = Database(database_url, migrates=True)
    assert not before.created
    with before.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
        assert 1.0 in connection.execute(sqlalchemy.select(schema.deliveries.c.received_at)).scalars().all()
    store = Store(before, Policy(), Clock())
    (case,) = store.cases()
    assert (case.state, case.held_by, case.instance_id) == ("received", "", fleet(3)[2].instance_id)
    assert [line["step"] for line in store.timeline(case.id)] == ["signal_received"]
    assert store.move(case, "proving").state == "proving"
    before.close()
    again = Database(database_url)
    assert again.id == before.id
    again.close()


def test_a_new_database_is_what_the_tables_say(database_url: str) -> None:
    """What is made at once and what the migrations lead to are one schema."""
    database = Database(database_url, new_id="an-id")
    assert (database.created, database.id) == (True, "an-id")
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
    database.close()


def test_the_audit_log_is_append_only_everywhere(database_url: str) -> None:
    """No statement of ours or anybody's changes a line that was written."""
    database = Database(database_url)
    Store(database, Policy(), Clock()).note("", "step", {})
    for statement in ("UPDATE audit SET step = 'x'", "DELETE FROM audit"):
        with (
            pytest.raises((StoreUnavailable, sqlalchemy.exc.IntegrityError), match="append-only"),
            database.write() as c,
        ):
            c.exec_driver_sql(statement)
    database.close()


@pytest.mark.parametrize(
    ("statements", "said"),
    [
        (["CREATE TABLE cases (id INTEGER)"], "holds other tables"),
        (["CREATE TABLE something (id INTEGER)"], "holds other tables"),
        (["UPDATE meta SET value = '0' WHERE key = 'schema'", "DROP TABLE alembic_version"], "holds other tables"),
        (["UPDATE alembic_version SET version_num = '9999'"], "schema 9999, which this version does not know"),
    ],
)
def test_a_database_that_is_not_ours_is_refused(tmp_path: Path, statements: list[str], said: str) -> None:
    """Foreign tables, an impossible version and a newer schema each end in one sentence, with nothing written."""
    url = f"sqlite:///{tmp_path / 'x.sqlite3'}"
    if not statements[0].startswith("CREATE"):
        Database(url).close()
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
        names = sqlalchemy.inspect(connection).get_table_names()
    for migrates in (False, True):
        with pytest.raises(ConfigError, match=said):
            Database(url, migrates=migrates)
    with engine.begin() as connection:
        assert sqlalchemy.inspect(connection).get_table_names() == names
    engine.dispose()


def test_writers_take_turns(database_url: str) -> None:
    """Sixteen writers that read and then write count without a lost update and without one error."""
    database = Database(database_url, busy_timeout_seconds=30.0, exclusive=False)
    with database.write() as connection:
        connection.execute(sqlalchemy.insert(schema.meta).values(key="count", value="0"))
    here = schema.meta.c.key == "count"

    def add() -> None:
        for _ in range(5):
            with database.write() as connection:
                now = int(connection.execute(sqlalchemy.select(schema.meta.c.value).where(here)).scalar() or 0)
                connection.execute(sqlalchemy.update(schema.meta).where(here).values(value=str(now + 1)))

    threads = [threading.Thread(target=add) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with database.read() as connection:
        assert connection.execute(sqlalchemy.select(schema.meta.c.value).where(here)).scalar() == "80"
    database.close()


def test_a_writer_that_waits_too_long_is_told_to_come_again(database_url: str) -> None:
    """A lock that is not given back is a `StoreUnavailable` (a 503), not a hang."""
    one, two = (Database(database_url, busy_timeout_seconds=0.1, exclusive=False) for _ in range(2))
    with one.write(), pytest.raises(StoreUnavailable), two.write():
        raise AssertionError("two writers at once")
    with two.write() as connection:
        connection.execute(sqlalchemy.insert(schema.meta).values(key="free", value="again"))
    one.close()
    two.close()


@pytest.fixture
def leases(database_url: str) -> Any:
    """Two processes' leases on one database, a clock, and their fenced stores."""
    clock = Clock()
    databases = [Database(database_url, exclusive=False) for _ in range(2)]
    found = [Lease(database, clock, seconds=60.0) for database in databases]
    stores = [Store(d, Policy(), clock, fence=lease.check) for d, lease in zip(databases, found, strict=True)]
    yield clock, found, stores
    for database in databases:
        database.close()


def test_one_holder_at_a_time_and_the_next_one_after_its_end(leases: Any) -> None:
    """Renewed, it stays; not renewed, it goes to the other with a higher token; given up, it goes at once."""
    clock, (one, two), _ = leases
    assert (one.hold(), two.hold()) == (True, False)
    first = one.token
    for _ in range(10):
        clock.now += 40
        assert (one.hold(), two.hold()) == (True, False)
    assert one.token == first
    clock.now += 61
    assert (two.hold(), one.hold()) == (True, False)
    assert two.token == first + 1
    two.give_up()
    assert one.hold()
    assert one.token == first + 2


def test_who_slept_through_its_lease_cannot_write(leases: Any) -> None:
    """Work that took longer than the lease: what it wants to write afterwards is refused, and nothing is written."""
    clock, (one, two), (store, _) = leases
    assert one.hold()
    store.note("", "while it holds", {})
    clock.now += 61
    assert two.hold()
    with pytest.raises(Conflict, match="taken over"):
        store.note("", "too late", {})
    with store.database.read() as connection:
        steps = connection.execute(sqlalchemy.select(schema.audit.c.step)).scalars().all()
    assert steps == ["while it holds"]
    assert not one.hold()


def test_a_service_with_its_own_file_does_not_wait_for_a_dead_one(tmp_path: Path) -> None:
    """After kill -9 the lock of the SQLite file says that the last holder is gone: the lease is taken over at once."""
    url, clock = f"sqlite:///{tmp_path / 'state.sqlite3'}", Clock()
    first = Database(url)
    assert Lease(first, clock, seconds=60.0).hold()
    first.close()
    second = Database(url)
    assert Lease(second, clock, seconds=60.0).hold()
    second.close()


def test_signals_of_two_processes_at_once_make_one_case(database_url: str) -> None:
    """Eight threads on two connections of their own deliver the same doorbell: one case, the others join it."""
    member = fleet(3)[2]
    signal = derive(Alert(0, "firing", alert(member, 2)["labels"], ""), "demo")
    databases = [Database(database_url, busy_timeout_seconds=30.0, exclusive=False) for _ in range(2)]
    results: list[str] = []

    def deliver(database: Database) -> None:
        store = Store(database, Policy(), Clock())
        for _ in range(5):
            results.extend(item["result"] for item in store.record_delivery(b"{}", [signal]))

    threads = [threading.Thread(target=deliver, args=(databases[n % 2],)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == ["accepted"] + ["joined"] * 39
    for database in databases:
        database.close()


def test_no_delivery_and_no_round_reads_every_case(tmp_path: Path) -> None:
    """What each delivery and each round asks about cases goes through an index, however many cases there were."""
    database = Database(f"sqlite:///{tmp_path / 'x.sqlite3'}")
    store = Store(database, Policy(), Clock())
    signal = derive(Alert(0, "firing", alert(fleet(3)[2], 2)["labels"], ""), "demo")
    store.record_delivery(b"{}", [signal])
    (case,) = store.cases()
    asked: list[tuple[str, Any]] = []

    def seen(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith("SELECT") and "cases" in statement:
            asked.append((statement, parameters))

    sqlalchemy.event.listen(database.engine, "before_cursor_execute", seen)
    store.record_delivery(b"{}", [signal])
    store.cases(open_only=True)
    store.watched()
    store.others(case)
    store.proven_lately(case)
    Ledger(store).handled_until(case)
    sqlalchemy.event.remove(database.engine, "before_cursor_execute", seen)
    assert len(asked) == 6
    with database.read() as connection:
        for statement, parameters in asked:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
            assert not [row for row in plan if str(row[3]).startswith("SCAN")], (statement, plan)
    database.close()
