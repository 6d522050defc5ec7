"""Take deliveries in: what waits at the same time is committed together, each with a result of its own.

What it does: `record` and `arrive` end once a delivery and what was derived from it are durable. Where nobody commits,
a caller begins to, and goes on until nothing waits; all others wait for the word that theirs is done, in a thread
(`record`) or on an event loop (`arrive`), never for the database. A commit costs a write to the disk, and all that
came during the one before share it. Where a transaction fails with several deliveries in it, each is tried by itself.
What it never does: answer before the commit, let one delivery cost another its place, or read what a delivery says
(`batch` does).
Its place: behind `Store.record_delivery` and `POST /v1/alerts`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy.exc import IntegrityError

from sdcwatch_remediation import batch
from sdcwatch_remediation.batch import Results
from sdcwatch_remediation.errors import StoreUnavailable
from sdcwatch_remediation.signals import NoSignal, Signal

if TYPE_CHECKING:
    from sdcwatch_remediation.store import Store

log = logging.getLogger(__name__)

TOGETHER = 64
"""Most deliveries in one transaction."""

ALERTS_TOGETHER = 2_000
"""Most alerts in one transaction, unless a single delivery has more."""

TRY_AGAIN = "the delivery was not kept; send it again"


class _Waiting:
    """One delivery, and how its sender is told."""

    __slots__ = ("body", "derived", "done", "error", "future", "results")

    def __init__(self, body: bytes, derived: Iterable[Signal | NoSignal]) -> None:
        self.body, self.derived = body, tuple(derived)
        self.results: Results | None = None
        self.error: StoreUnavailable | None = None
        self.done: threading.Event | None = None
        self.future: asyncio.Future[Results] | None = None

    def outcome(self) -> Results:
        if self.results is None:
            raise self.error or StoreUnavailable(TRY_AGAIN)
        return self.results

    def tell(self) -> None:
        """End the wait on an event loop; runs there."""
        assert self.future is not None
        if self.future.done():  # whoever waited was cancelled
            return
        if self.results is None:
            self.future.set_exception(self.error or StoreUnavailable(TRY_AGAIN))
        else:
            self.future.set_result(self.results)


class Intake:
    """Deliveries on their way into the database; thread-safe."""

    def __init__(self, store: Store) -> None:
        """Use the store's transactions, clock, policy and audit log."""
        self._store = store
        self._waiting: list[_Waiting] = []
        self._lock = threading.Lock()
        self._led = False
        """Whether somebody commits now, and will look for what waits before ending."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="intake")
        self.began = store.clock()
        """When this process began to take deliveries, in unix seconds."""

    def record(self, body: bytes, derived: Iterable[Signal | NoSignal]) -> Results:
        """Commit one raw delivery with what was derived from it; return one result per alert.

        A signal opens a case, or joins the one that stands or has only just ended for the same instance.

        Raises:
            StoreUnavailable: nothing was kept; the sender must try again.
        """
        mine = _Waiting(body, derived)
        mine.done = threading.Event()
        if self._queue(mine):
            self._lead()
        else:
            self._store.database.wait_for(mine.done)
        return mine.outcome()

    async def arrive(self, body: bytes, derived: Iterable[Signal | NoSignal]) -> Results:
        """Do what `record` does, waiting on the event loop.

        Raises:
            StoreUnavailable: nothing was kept; the sender must try again.
        """
        mine, loop = _Waiting(body, derived), asyncio.get_running_loop()
        mine.future = loop.create_future()
        if self._queue(mine):
            self._thread.submit(self._lead_here)
        return await mine.future

    def close(self) -> None:
        """End the thread once nothing waits any more."""
        self._thread.shutdown()

    def _queue(self, mine: _Waiting) -> bool:
        # Whether the caller has to lead.
        with self._lock:
            self._waiting.append(mine)
            leads, self._led = not self._led, True
        return leads

    def _lead_here(self) -> None:
        try:
            self._lead()
        except Exception:  # the thread's border: every sender has been told to come again
            log.exception("deliveries could not be kept")

    def _lead(self) -> None:
        taken: list[_Waiting] = []
        try:
            while taken := self._take():
                self._commit(taken)
                _tell(taken)
        except BaseException:
            # Whatever it is, it goes to the one who leads; all others are told to come again.
            with self._lock:
                left, self._waiting, self._led = [*taken, *self._waiting], [], False
            _tell(left)
            raise

    def _take(self) -> list[_Waiting]:
        with self._lock:
            count = alerts = 0
            for one in self._waiting[:TOGETHER]:
                alerts += len(one.derived)
                if count and alerts > ALERTS_TOGETHER:
                    break
                count += 1
            taken, self._waiting = self._waiting[:count], self._waiting[count:]
            self._led = bool(taken)
        return taken

    def _commit(self, taken: Sequence[_Waiting]) -> None:
        try:
            self._together(taken)
        except StoreUnavailable as error:
            if len(taken) == 1:
                taken[0].error = error
                return
            for one in taken:
                self._commit([one])

    def _together(self, taken: Sequence[_Waiting]) -> None:
        store = self._store
        with _one_winner(), store.write(ahead=True) as connection:
            now = store.clock()
            kept = batch.keep(connection, [(one.body, one.derived) for one in taken], store.policy, now, self.began)
        for one, results in zip(taken, kept.results, strict=True):
            one.results = results
        store.publish(kept.lines)


def _tell(taken: Sequence[_Waiting]) -> None:
    # One call a loop, not one a delivery: each wakes the loop's thread.
    on_loops: dict[asyncio.AbstractEventLoop, list[_Waiting]] = {}
    for one in taken:
        if one.done is not None:
            one.done.set()
        if one.future is not None:
            on_loops.setdefault(one.future.get_loop(), []).append(one)
    for loop, ended in on_loops.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_tell_on_loop, ended)


def _tell_on_loop(ended: Sequence[_Waiting]) -> None:
    for one in ended:
        one.tell()


@contextmanager
def _one_winner() -> Iterator[None]:
    try:
        yield
    except IntegrityError as error:
        # Another process opened the same case between our look and our insert; the retry will join it.
        raise StoreUnavailable("another process opened this case at the same time; send it again") from error
