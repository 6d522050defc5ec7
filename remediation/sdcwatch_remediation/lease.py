"""The lease that lets one worker at a time move the cases of a database, with a token that fences off a late one.

What it does: `hold` takes or renews the lease; `check`, inside a write transaction, refuses whoever lost it. The token
grows with every change of holder, so a process that slept through its lease cannot write on top of the next one.
What it never does: say that a call outside is safe. Two processes may both believe for a moment; a second call for one
instance is what the unique index of intents refuses.
Its place: `worker` holds it around its steps, `store` checks it in each of the worker's transactions. Clocks of two
processes may differ: that costs a change of holder, never a second act.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable

from sqlalchemy import Connection, insert, select, update

from sdcwatch_remediation import schema
from sdcwatch_remediation.database import Database
from sdcwatch_remediation.errors import Conflict

NAME = "worker"


class Lease:
    """The worker's lease of one process."""

    def __init__(self, database: Database, clock: Callable[[], float], *, seconds: float) -> None:
        """Prepare to ask for the lease; nothing is written yet.

        Args:
            database: where it stands.
            clock: returns unix seconds.
            seconds: how long one renewal lasts.
        """
        self._database = database
        self._clock = clock
        self._seconds = seconds
        self.holder = f"{socket.gethostname()[:128]}:{os.getpid()}:{secrets.token_hex(4)}"
        self._token = 0
        self._until = 0.0

    @property
    def token(self) -> int:
        """The fencing token; 0 while the lease was never ours."""
        return self._token

    def hold(self) -> bool:
        """Take the lease, or renew it when half of it is over; return whether it is ours.

        Raises:
            StoreUnavailable: the database could not be asked.
        """
        now = self._clock()
        if self._token and self._until - self._seconds / 2 > now >= self._until - self._seconds:
            return True
        table = schema.leases
        with self._database.write() as connection:
            row = connection.execute(select(table).where(table.c.name == NAME)).first()
            if row is not None and row.holder == self.holder and row.token == self._token:
                token = row.token
            elif row is None or row.until <= now or self._database.exclusive:
                # Whoever has a SQLite file to itself holds its lock, so the last holder is dead.
                token = (row.token if row is not None else 0) + 1
            else:
                self._token = 0
                return False
            values = {"holder": self.holder, "token": token, "until": now + self._seconds}
            if row is None:
                connection.execute(insert(table).values(name=NAME, **values))
            else:
                connection.execute(update(table).where(table.c.name == NAME).values(**values))
        self._token, self._until = token, now + self._seconds
        return True

    def ours(self) -> bool:
        """Look whether the lease is ours now, without asking for it or renewing it.

        Raises:
            StoreUnavailable: the database could not be asked.
        """
        table = schema.leases
        with self._database.read() as connection:
            row = connection.execute(select(table).where(table.c.name == NAME)).first()
        mine = row is not None and (row.token, row.holder) == (self._token, self.holder)
        return bool(mine and row is not None and row.until > self._clock())

    def check(self, connection: Connection) -> None:
        """Refuse the open transaction unless the lease is still ours.

        Raises:
            Conflict: another process has taken it over.
        """
        table = schema.leases
        row = connection.execute(select(table.c.token, table.c.holder).where(table.c.name == NAME)).first()
        if row is None or (row.token, row.holder) != (self._token, self.holder):
            self._until = 0.0
            raise Conflict("another process has taken over the worker's lease")

    def give_up(self) -> None:
        """Let another process take the lease at once; for an orderly end."""
        if not self._token:
            return
        table = schema.leases
        with self._database.write() as connection:
            ours = (table.c.name == NAME, table.c.token == self._token, table.c.holder == self.holder)
            connection.execute(update(table).where(*ours).values(until=0.0))
        self._token = 0
