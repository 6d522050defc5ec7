"""What `sdcwatch run` does between two lives of its launcher while a latch stands.

Says what stands, judges this machine once with preflight, leaves the result where all nodes look, releases a latch that
names nobody once every node passed (one in 24 hours), and otherwise waits: for a release anywhere, for this instance's
quarantine, for a signal, or for its time to run out. It never releases a latch that names somebody.
Flow: latch -> **halt_wait** -> run.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdcwatch import durable
from sdcwatch.errors import EXIT_HALTED, SpoolError
from sdcwatch.latch import files as latches
from sdcwatch.launch import launcher
from sdcwatch.launch.health_check import MOST_SECONDS, HealthCheck, judged
from sdcwatch.preflight import result
from sdcwatch.preflight.command import parse_outcome

#: A second latch that names nobody within this time is left to a person.
UNNAMED_WINDOW_SECONDS = 86400.0
#: Seconds between two lines that say the job is still halted.
_REMIND_SECONDS = 600.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WaitOptions:
    """How to wait. Seconds throughout; `checkpoint_dir` is None where no folder is shared."""

    node: str
    instance: str
    uid_root: Path
    checkpoint_dir: Path | None
    spool: Path
    latch_wait: float
    poll: float
    preflight: tuple[str, ...]


def preflight_command(given: str | None) -> tuple[str, ...]:
    """The health check as words: the caller's own, or `sdcwatch preflight` in this Python."""
    if given:
        return tuple(shlex.split(given))
    return (sys.executable, "-m", "sdcwatch.preflight.command", "--json")


def wait_until_free(places: tuple[Path, ...], options: WaitOptions, signals: launcher.Signals, say: Say) -> int | None:
    """Returns None when the launcher may start, else the status with which `sdcwatch run` ends."""
    deadline = time.monotonic() + options.latch_wait
    waits: _Wait | None = None
    try:
        while True:
            try:
                if (mark := latches.quarantined(options.uid_root, options.instance)) is not None:
                    say(f"instance {mark.instance} is quarantined (case {mark.case_id}); this node leaves the job")
                    return EXIT_HALTED
                latch = latches.standing(places)
                if latch is None:
                    if waits is not None:
                        waits.spread()
                        say(f"latch {waits.latch.latch_id} is released")
                    return None
                if waits is None or waits.latch.latch_id != latch.latch_id:
                    if waits is not None:
                        waits.ended()
                    waits = _Wait(latch, places, options, say)
                waits.look()
            except SpoolError as error:
                say(f"a latch, mark or result cannot be read or written, so nothing starts: {error}")
            if signals.ended_by is not None:
                return 128 + signals.ended_by
            if time.monotonic() >= deadline:
                say(f"waited {options.latch_wait:g} s for a release; this node leaves the job")
                return EXIT_HALTED
            launcher.pause(signals, min(options.poll, max(0.0, deadline - time.monotonic())))
    finally:
        if waits is not None:
            waits.ended()


class _Wait:
    """One latch being waited out by one node: its preflight, and whether the job may go on by itself."""

    def __init__(self, latch: latches.Latch, places: tuple[Path, ...], options: WaitOptions, say: Say) -> None:
        self.latch = latch
        self._places, self._options, self._say = latches.places(places), options, say
        self._results = self._result_place()
        self._since = self._reminded = time.monotonic()
        self._judged = False
        say("state=halted\n" + latches.explain(latch, places) + "\n  preflight runs on this node")
        self._check = HealthCheck(options.preflight)
        if self._check.problem:
            self._record("unknown", self._check.problem)

    def _result_place(self) -> Path | None:
        """Where all nodes of the latch see each other's results; None: nowhere, so a person has to release."""
        shared = self._options.checkpoint_dir or (
            Path(self.latch.checkpoint_dir) if self.latch.checkpoint_dir else None
        )
        if shared is None and {n.node for n in self.latch.nodes} <= {self._options.node}:
            shared = self._options.spool
        return shared

    def look(self) -> None:
        """One look: the preflight's end, a release by the job itself, a reminder in the log."""
        preflight = self._check.process
        if not self._judged and preflight is not None:
            status = preflight.poll()
            if status is not None:
                self._record(judged(status, self._check.printed()), f"preflight exited {status}")
            elif time.monotonic() - self._since > MOST_SECONDS:
                preflight.kill()
                preflight.wait()
                self._record("unknown", f"preflight took over {MOST_SECONDS:g} s")
        if self._judged and not self.latch.named and not self.latch.same_step_as:
            self._release_by_job()
        if time.monotonic() - self._reminded > _REMIND_SECONDS:
            self._reminded = time.monotonic()
            self._say(f"still halted by {self.latch.latch_id}; waiting for its release")

    def _record(self, outcome: str, detail: str) -> None:
        self._judged = True
        printed = self._check.printed()
        self._say(f"preflight on {self._options.node}: {outcome} ({detail})")
        kept = result.record(
            self.latch.latch_id,
            self._options.node,
            self._options.instance,
            result=outcome,
            detail=detail,
            output=printed,
            report=parse_outcome(printed),
            at=time.time(),
        )
        # The own spool first: from there the node's agent serves it, wherever the others look.
        own = self._options.spool if self._options.spool.is_dir() else None
        for place in dict.fromkeys((own, self._results)):
            if place is not None:
                self._keep(place, kept)

    def _keep(self, place: Path, kept: dict[str, Any]) -> None:
        path = result.path_in(place, self.latch.latch_id, self._options.node)
        try:
            path.parent.mkdir(mode=0o700 if place == self._options.spool else 0o777, parents=True, exist_ok=True)
            durable.replace_json(path, kept)
        except (OSError, SpoolError) as error:
            self._say(f"the preflight's result cannot be kept in {place}: {error}")

    def _release_by_job(self) -> None:
        if self._results is None or not self.latch.nodes:
            return
        results = {
            n.node: durable.read_json(result.path_in(self._results, self.latch.latch_id, n.node))
            for n in self.latch.nodes
        }
        if not all(r is not None and r.get("result") == "pass" for r in results.values()):
            return
        earlier = {
            entry.latch.latch_id
            for place in self._places
            for entry in latches.recent_unnamed(place, UNNAMED_WINDOW_SECONDS)
        } - {self.latch.latch_id}
        if earlier:
            if self._reminded == self._since:
                self._reminded = time.monotonic()
                self._say(
                    f"a second latch that names nobody within 24 h (before: {min(earlier)}): a person must release it"
                )
            return
        reason = f"nobody is named and preflight passed on {', '.join(sorted(results))}"
        for place in self._places:
            latches.release(place, self.latch.latch_id, by="job", reason=reason)
        self._say(f"{reason}; the job releases the latch itself")

    def spread(self) -> None:
        """Repeats a release made in one place in all of them, so that each node's own copy is released, too."""
        with contextlib.suppress(SpoolError):
            latches.spread_release(self._places, self.latch.latch_id)

    def ended(self) -> None:
        """Stops a preflight that still runs."""
        preflight = self._check.process
        if preflight is not None and preflight.poll() is None:
            preflight.kill()
            preflight.wait()
        self._check.close()
