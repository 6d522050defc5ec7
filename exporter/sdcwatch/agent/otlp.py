"""Pushes what the agent serves over OTLP: the snapshot of `/metrics` at each interval, and each event once.

One thread that nothing waits for: a collector that is slow, silent or gone changes neither scrapes nor the spool. An
event counts as sent only once the collector has said so; until then the journal keeps it, over any number of agents.
At the end there is one more push within `FLUSH_SECONDS`. Flow: collector, otlp_outbox -> **otlp** -> otlp_senders.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sdcwatch.agent import otlp_senders, otlp_wire
from sdcwatch.agent.collector import Collector
from sdcwatch.agent.node import Node
from sdcwatch.agent.otlp_logs import request_of
from sdcwatch.agent.otlp_metrics import MetricsEncoder
from sdcwatch.agent.otlp_options import OtlpOptions
from sdcwatch.agent.otlp_outbox import Outbox, Waiting
from sdcwatch.errors import SpoolError

#: Longest wait for the answer to one request.
REQUEST_SECONDS = 10.0
#: A request that is under way at the end may take this long; then it is ended, and the last push begins.
GRACE_SECONDS = 0.5
FLUSH_SECONDS = 1.5
#: Events in one request, and bytes of their journal lines.
EVENTS_A_REQUEST = 100
EVENT_BYTES = 4 << 20
_LONGEST_WAIT = 300.0
_ENDING = "the agent ends"


def _print(sentence: str) -> None:
    print(f"sdcwatch agent: OTLP: {sentence}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def pushing(options: OtlpOptions, user_root: Path, node: Node, collector: Collector) -> Iterator[None]:
    """Pushes while the block runs.

    Raises:
        ConfigurationError: a package is missing, or a file that the options name cannot be used.
    """
    wire = otlp_wire.load()
    pusher = Pusher(options, wire, otlp_senders.make(options, wire), user_root, node, collector)
    pusher.start()
    try:
        yield
    finally:
        pusher.stop()


class Pusher:
    """The thread that pushes.

    Args:
        say: receives one sentence when something begins or ceases to go wrong; stderr by default.
    """

    def __init__(
        self,
        options: OtlpOptions,
        wire: otlp_wire.Wire,
        sender: otlp_senders.Sender,
        user_root: Path,
        node: Node,
        collector: Collector,
        say: Callable[[str], None] = _print,
    ) -> None:
        self._options = options
        self._wire = wire
        self._sender = sender
        self._node = node
        self._collector = collector
        self._say = say
        self._outbox = Outbox(user_root)
        self._encoder = MetricsEncoder(wire, node, since=self._outbox.since, started=time.time())
        self._stopping = threading.Event()
        self._ends: float | None = None
        self._keeping = threading.Lock()
        self._abandoned = False
        self._flushing = False
        self._wait = 0.0
        self._problems: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)

    def start(self) -> None:
        """Begins with a push at once."""
        self._thread.start()

    def stop(self) -> None:
        """Pushes once more and ends, within `GRACE_SECONDS + FLUSH_SECONDS` whatever the collector does."""
        self._ends = time.monotonic() + GRACE_SECONDS + FLUSH_SECONDS
        self._stopping.set()
        self._thread.join(GRACE_SECONDS)
        if not self._flushing:
            self._sender.abort()
        self._thread.join(max(0.0, self._ends - time.monotonic()))
        with self._keeping:  # a thread that is left behind must not write beside the next agent
            self._abandoned = True

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._push()
            self._stopping.wait(max(self._options.interval, min(self._wait, _LONGEST_WAIT)))
        self._flushing = True
        self._push()

    def _push(self) -> None:
        """Sends the events that wait, then one snapshot; each says once what is wrong with it."""
        self._wait = 0.0
        for what, push in (("events", self._push_events), ("metrics", self._push_metrics)):
            try:
                problem = push()
            except Exception as error:  # nothing in here may end the thread: the next push may work again
                problem = f"{type(error).__name__}: {error}"
            if problem not in (_ENDING, self._problems.get(what, "")):
                self._say(f"{what} are not sent: {problem}" if problem else f"{what} are sent again")
                self._problems[what] = problem

    def _push_events(self) -> str:
        while events := self._outbox.waiting(EVENTS_A_REQUEST, EVENT_BYTES):
            if problem := self._send_events(events):
                return f"{problem}; the journal keeps them"
        return ""

    def _send_events(self, events: Sequence[Waiting]) -> str:
        answer = self._send("logs", request_of(self._wire, self._node, events, time.time()))
        if answer.result == "failed":
            return answer.reason
        if answer.result == "taken":
            self._keep(events)
        elif len(events) == 1:
            self._outbox.set_aside(events[0])
            self._say(f"event {events[0].id} was refused ({answer.reason}); it is tried again later")
        else:  # one bad record must not stand in the way of the others
            return next((problem for event in events if (problem := self._send_events([event]))), "")
        return ""

    def _push_metrics(self) -> str:
        for request in self._encoder.encode(self._collector.collect()):
            answer = self._send("metrics", request)
            if answer.result != "taken":
                return answer.reason
        self._encoder.delivered()
        return ""

    def _send(self, signal: otlp_senders.Signal, request: Any) -> otlp_senders.Answer:
        seconds = REQUEST_SECONDS
        if self._ends is not None:
            seconds = self._ends - time.monotonic() if self._flushing else 0.0
        if seconds <= 0:
            return otlp_senders.Answer("failed", _ENDING)
        answer = self._sender.send(signal, request, seconds)
        self._collector.tally.push(signal, answer.result)
        self._wait = max(self._wait, answer.wait)
        if answer.result == "taken" and answer.reason:
            self._say(f"of {signal}, {answer.reason}")
        return answer

    def _keep(self, events: Sequence[Waiting]) -> None:
        with self._keeping:
            if not self._abandoned:
                try:
                    self._outbox.delivered(events)
                except SpoolError as error:
                    self._say(f"the next agent will send events again: {error}")
