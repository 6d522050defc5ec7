"""What several tests of the service share: a private PostgreSQL server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sdcwatch_remediation.testing.postgres import PostgresServer, programs


@pytest.fixture(scope="session")
def postgres(repository: Path) -> Iterator[PostgresServer]:
    """A server of our own on loopback; a skip by name where PostgreSQL is missing, and a failure in CI."""
    found = programs(repository / ".tools" / "postgresql" / "bin")
    if found is None:
        message = "initdb and postgres are missing: run `make setup-integrations`"
        if os.environ.get("CI") == "true":
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    with PostgresServer(found) as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.integration)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, once for each kind that the service supports."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'state.sqlite3'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()
