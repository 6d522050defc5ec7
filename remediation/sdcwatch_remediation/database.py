"""Open the database: engine, pragmas, transactions, schema version and database id.

What it does: SQLite with WAL and synchronous=FULL, writes that begin IMMEDIATE, errors turned into `StoreUnavailable`;
any other URL as SQLAlchemy knows it, with serializable transactions. Holds a lock file beside a SQLite database, so
that a second service on the same file is refused at start.
What it never does: know what a case is.
Its place: under `store`.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, insert, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError

from sdcwatch_remediation import schema
from sdcwatch_remediation.errors import ConfigError, StoreUnavailable


class Database:
    """One open database; thread-safe."""

    def __init__(self, url: str, *, busy_timeout_seconds: float = 5.0, exclusive: bool = True) -> None:
        """Open (and create, where empty) the database.

        Args:
            url: SQLAlchemy URL.
            busy_timeout_seconds: how long a SQLite write waits for a lock.
            exclusive: take the lock that keeps a second service off a SQLite file.

        Raises:
            ConfigError: the URL cannot be used, another service holds the file, or its schema is another version.
            StoreUnavailable: it cannot be opened or written.
        """
        try:
            parsed = make_url(url)
        except (ArgumentError, ValueError) as error:
            raise ConfigError(f"database.url is not a SQLAlchemy URL: {error}") from error
        self._sqlite = parsed.get_backend_name() == "sqlite"
        self._lock = _lock(parsed.database) if self._sqlite and exclusive and parsed.database else None
        try:
            self.engine = self._open(parsed, busy_timeout_seconds)
            self._reader = self.engine.execution_options(reads_only=True)
            self.id = self._prepare()
        except (ArgumentError, ImportError, TypeError, ValueError) as error:
            # Unknown databases, missing drivers, and parameters in the URL that the driver does not take.
            self._unlock()
            raise ConfigError(f"database.url cannot be used: {error.__class__.__name__}: {error}") from error

    def _open(self, url: URL, busy_timeout_seconds: float) -> Engine:
        if not self._sqlite:
            return create_engine(url, isolation_level="SERIALIZABLE", pool_pre_ping=True)
        arguments = {"timeout": busy_timeout_seconds, "check_same_thread": False}
        engine = create_engine(url, connect_args=arguments)
        event.listen(engine, "connect", _on_sqlite_connect)
        event.listen(engine, "begin", _on_sqlite_begin)
        return engine

    def _prepare(self) -> str:
        with self.write() as connection:
            schema.metadata.create_all(connection)
            if self._sqlite:
                for statement in schema.SQLITE_APPEND_ONLY:
                    connection.exec_driver_sql(statement)
            found: dict[str, str] = {row.key: row.value for row in connection.execute(select(schema.meta))}
            if not found:
                found = {"schema": str(schema.SCHEMA_VERSION), "id": uuid.uuid4().hex}
                connection.execute(insert(schema.meta), [{"key": k, "value": v} for k, v in found.items()])
        if found.get("schema") != str(schema.SCHEMA_VERSION):
            raise ConfigError(
                f"the database has schema {found.get('schema')}, this version needs {schema.SCHEMA_VERSION}; "
                "use the version that wrote it, or another database.url"
            )
        return found["id"]

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open one write transaction; it commits at the end of the block.

        Raises:
            StoreUnavailable: the database could not take it; nothing was written.
            IntegrityError: a unique index refused it; nothing was written.
        """
        with _translated(), self.engine.begin() as connection:
            yield connection

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
