"""A lock that goes on in the order of asking, in which one kind of caller goes to the front.

What it does: hands itself over from whoever gives it back to the one who waits longest, so nobody is overtaken by a
thread that happens to run. A caller `ahead` waits for the present holder only. It is at the back again once it gave the
lock back: two such turns in a row happen only where nobody else waits, so it starves no one.
What it never does: know what it guards.
Its place: `database` has its SQLite writers take turns with it; a plain `threading.Lock` lets the thread that runs
take it again and again.
"""

from __future__ import annotations

import threading
from collections import deque


class Order:
    """The lock; not reentrant."""

    def __init__(self) -> None:
        """Begin free."""
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False

    def acquire(self, *, timeout: float, ahead: bool = False) -> bool:
        """Wait for the turn, at most `timeout` seconds; return whether it has come."""
        with self._guard:
            if not self._taken:
                self._taken = True
                return True
            mine = threading.Lock()
            mine.acquire()
            if ahead:
                self._waiting.appendleft(mine)
            else:
                self._waiting.append(mine)
        if mine.acquire(timeout=timeout):
            return True
        with self._guard:
            if mine in self._waiting:
                self._waiting.remove(mine)
                return False
        return True  # it was handed over while the time ran out

    def release(self) -> None:
        """Give the turn to whoever is next."""
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
