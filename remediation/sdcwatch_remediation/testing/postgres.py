"""A private PostgreSQL server on loopback, for tests: one process tree of our own, one folder, gone afterwards.

What it does: finds `initdb` and `postgres`, makes a cluster in a folder of its own with durable commits, and serves it
on a free port of 127.0.0.1. PostgreSQL refuses to run as root, so root gives the folder to another user first.
What it never does: use or start a server of the machine, listen on a socket file, or leave anything behind.
Its place: tests, and the campaigns that measure the service with more than one process.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text

START_SECONDS = 30.0


def programs(*folders: Path) -> Path | None:
    """Return the folder that holds `initdb` and `postgres`: one of those given, PATH's, or Debian's newest."""
    for folder in (*folders, *_usual()):
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    return None


def _usual() -> Iterator[Path]:
    if found := shutil.which("initdb"):
        yield Path(found).resolve().parent
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: p.parent.name.zfill(4), reverse=True)


class PostgresServer:
    """One server; a context manager."""

    def __init__(self, folder_of_programs: Path) -> None:
        """Remember where the programs are; nothing is started yet."""
        self._programs = folder_of_programs
        self._folder = Path(tempfile.mkdtemp(prefix="sdcwatch-postgres-"))
        self._databases = 0
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = next(name for name in ("postgres", "nobody") if _exists(name))
            entry = pwd.getpwnam(user)
            self._as = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
            os.chown(self._folder, entry.pw_uid, entry.pw_gid)

    def __enter__(self) -> PostgresServer:
        data = self._folder / "data"
        environment = {"PATH": f"{self._programs}:/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}
        # Unpacked packages keep their libraries beside them.
        libraries = sorted(self._programs.resolve().parents[3].glob("lib/*-linux-gnu"))
        if libraries and self._programs.resolve().parents[3] != Path("/usr"):
            environment["LD_LIBRARY_PATH"] = str(libraries[0])
        made = subprocess.run(
            [self._programs / "initdb", "-D", data, "-U", "sdcwatch", "-A", "trust", "-E", "UTF8", "--no-sync"],
            capture_output=True,
            text=True,
            check=False,
            cwd=self._folder,
            env=environment,
            **self._as,
        )
        if made.returncode:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise RuntimeError(f"initdb failed: {made.stderr[-2000:]}")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        options = ["-h", "127.0.0.1", "-p", str(self.port), "-k", "", "-c", "max_connections=100"]
        self._log = (self._folder / "log").open("wb")
        self._process = subprocess.Popen(
            [self._programs / "postgres", "-D", data, *options],
            stdout=self._log,
            stderr=self._log,
            cwd=self._folder,
            env=environment,
            **self._as,
        )
        self._await()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.send_signal(2)  # a fast shutdown, which does not wait for clients
            self._process.wait(20)
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def new_database(self) -> str:
        """Make an empty database and return its SQLAlchemy URL."""
        self._databases += 1
        name = f"case{self._databases}"
        engine = create_engine(self._url("postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return self._url(name)

    def _url(self, database: str) -> str:
        return f"postgresql+psycopg://sdcwatch@127.0.0.1:{self.port}/{database}"

    def _await(self) -> None:
        end = time.monotonic() + START_SECONDS
        ask = [str(self._programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ask, check=False).returncode:
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError(f"postgres does not start; its log: {(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
