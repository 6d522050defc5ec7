"""Open the database: engine, pragmas, transactions, schema version and database id.

What it does: SQLite with WAL and synchronous=FULL, writes that begin IMMEDIATE, errors turned into `StoreUnavailable`;
PostgreSQL with writers in single file (an advisory lock). Holds a lock file beside a SQLite database, so
that a second service on the same file is refused at start.
What it never does: know what a case is.
Its place: under `store`.
"""

from __future__ import annotations

import fcntl
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError

from sdcwatch_remediation import migrate, schema
from sdcwatch_remediation.errors import ConfigError, StoreUnavailable
from sdcwatch_remediation.order import Order

WRITERS = 0x5DC0_3A7C
"""Key of the advisory lock that PostgreSQL's writers take in turn; any fixed number of our own will do."""

_REFUSED = {
    "older": "the database has the older schema {version}; make a backup, then run `sdcwatch-remediation migrate`",
    "newer": "the database has schema {version}, which this version does not know; use the version that wrote it",
    "foreign": "the database holds other tables than ours {version}; name another database.url",
}


class Database:
    """One open database; thread-safe."""

    def __init__(
        self,
        url: str,
        *,
        busy_timeout_seconds: float = 5.0,
        exclusive: bool = True,
        migrates: bool = False,
        new_id: str = "",
    ) -> None:
        """Open (and create, where empty) the database.

        Args:
            url: SQLAlchemy URL.
            busy_timeout_seconds: how long a write waits for its turn.
            exclusive: take the lock that keeps a second service off a SQLite file.
            migrates: take an older schema to the present one.
            new_id: the id that an empty database is given; empty: a random one.

        Raises:
            ConfigError: the URL cannot be used, another service holds the file, or its schema is another version.
            StoreUnavailable: it cannot be opened or written.
        """
        try:
            parsed = make_url(url)
        except (ArgumentError, ValueError) as error:
            raise ConfigError(f"database.url is not a SQLAlchemy URL: {error}") from error
        self._sqlite = parsed.get_backend_name() == "sqlite"
        self._postgresql = parsed.get_backend_name() == "postgresql"
        self._lock = _lock(parsed.database) if self._sqlite and exclusive and parsed.database else None
        self.exclusive = self._lock is not None
        """Whether no other process can have this database open."""
        self.created = False
        """Whether it was empty until now."""
        self._writing = Order()
        self._busy_milliseconds = max(1, int(busy_timeout_seconds * 1000))
        try:
            self.engine = self._open(parsed, busy_timeout_seconds)
            self._reader = self.engine.execution_options(
                **({"reads_only": True} if self._sqlite else {"isolation_level": "REPEATABLE READ"})
            )
            self.id = self._prepare(migrates, new_id)
        except (ArgumentError, ImportError, TypeError, ValueError) as error:
            # Unknown databases, missing drivers, and parameters in the URL that the driver does not take.
            self._unlock()
            raise ConfigError(f"database.url cannot be used: {error.__class__.__name__}: {error}") from error
        except BaseException:
            self._unlock()
            if opened := getattr(self, "engine", None):
                opened.dispose()
            raise

    def _open(self, url: URL, busy_timeout_seconds: float) -> Engine:
        if not self._sqlite:
            return create_engine(url, isolation_level="READ COMMITTED", pool_pre_ping=True, pool_size=20)
        arguments = {"timeout": busy_timeout_seconds, "check_same_thread": False}
        engine = create_engine(url, connect_args=arguments)
        event.listen(engine, "connect", _on_sqlite_connect)
        event.listen(engine, "begin", _on_sqlite_begin)
        return engine

    def _prepare(self, migrates: bool, new_id: str) -> str:
        with self.write() as connection:
            standing, version = migrate.state(connection)
            if standing == "older" and migrates:
                migrate.upgrade(connection, version)
                standing = "current"
            if standing == "empty":
                migrate.create(connection, new_id or uuid.uuid4().hex)
                self.created = True
            elif standing != "current":
                raise ConfigError(_REFUSED[standing].format(version=version))
            return str(connection.execute(select(schema.meta.c.value).where(schema.meta.c.key == "id")).scalar())

    @contextmanager
    def write(self, *, ahead: bool = False) -> Iterator[Connection]:
        """Open one write transaction, alone among all processes; it commits at the end of the block.

        Args:
            ahead: go before those of this process that wait already; for the intake, whose senders wait.

        Raises:
            StoreUnavailable: the database could not take it; nothing was written.
            IntegrityError: a unique index refused it; nothing was written.
        """
        with self._single_file(ahead), _translated(), self.engine.begin() as connection:
            if self._postgresql:
                # One writer at a time, as with SQLite's BEGIN IMMEDIATE: whoever has the lock sees all that was
                # committed before, so nothing has to be retried for a conflict.
                patience = f"SET LOCAL lock_timeout = {self._busy_milliseconds}"
                connection.exec_driver_sql(f"{patience}; SELECT pg_advisory_xact_lock({WRITERS})")
            yield connection

    @contextmanager
    def _single_file(self, ahead: bool) -> Iterator[None]:
        # SQLite's own waiting is a poll with growing pauses, in which the unlucky wait for seconds; among the threads
        # of one process a lock hands the turn on at once.
        if not self._sqlite:
            yield
            return
        if not self._writing.acquire(timeout=self._busy_milliseconds / 1000, ahead=ahead):
            raise StoreUnavailable("the database cannot be used now: others write for longer than busy_timeout_seconds")
        try:
            yield
        finally:
            self._writing.release()

    def wait_for(self, done: threading.Event) -> None:
        """Wait until another thread of this process has committed what was handed to it."""
        done.wait()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open one read transaction; a SQLite reader never waits for a writer."""
        with _translated(), self._reader.begin() as connection:
            yield connection

    def close(self) -> None:
        """Close all connections and give the lock back."""
        self.engine.dispose()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(path: str) -> int | None:
    if path == ":memory:":
        return None
    try:
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StoreUnavailable(f"the lock file beside the database cannot be opened: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(f"another service uses {path}; stop it, or set another database.url") from None
    return descriptor


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except IntegrityError:
        raise
    except (DBAPIError, SQLAlchemyError) as error:
        raise StoreUnavailable(f"the database cannot be used now: {error.__class__.__name__}: {error}") from error


def _on_sqlite_connect(connection: Any, _record: Any) -> None:
    # The driver's own implicit BEGIN is turned off, so that writers can begin IMMEDIATE (below) and never deadlock
    # between a read and the write that follows it.
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def _on_sqlite_begin(connection: Connection) -> None:
    reads_only = connection.get_execution_options().get("reads_only", False)
    connection.exec_driver_sql("BEGIN" if reads_only else "BEGIN IMMEDIATE")
