"""kill -9 of real processes while a node is replaced: at chosen lines of the audit log, amid the call, or at random.

What it does: `run(seed)` starts `serve` (on SQLite alone, on PostgreSQL twice), rings for one proven fault, kills what
runs at the moments that the seed chooses, starts it again, and waits for the end of the case. The provider may answer
late, drop the connection or throttle meanwhile, and the alert is delivered again after each start.
What it never does: ask the service what to do next; what it judges is the far side's call log and the database.
Its place: the campaign `make campaign-kill`, and five runs of it in the tests.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import select

from sdcwatch_remediation import schema
from sdcwatch_remediation.database import Database
from sdcwatch_remediation.states import STATES
from sdcwatch_remediation.testing.events import alert, delivery, event_line
from sdcwatch_remediation.testing.processes import Serve, Site, post, wait_for

REPLACE = "BatchReplaceClusterNodes"
MOMENTS = (
    "listening", "signal_received", "proving", "agents_asked", "proven", "settling", "containing", "evidence_kept",
    "quarantining", "quarantine_requested", "quarantined", "replacing", "replace_requested", "replace_answered",
    "proving_replacement", "replacement_proven", "resuming", "latch_released", "amid the call", "at random",
)  # fmt: skip
"""Lines of the audit log, and two more, at which a process is killed."""
RANDOM_LINES, RANDOM_SECONDS = range(1, 12), 0.05
"""A kill at random comes so many lines after the start (a run without a kill has more of them), and so much later."""
FAULTS = ("", "", "slow_answer", "drop_after", "error_after", "throttle", "empty_answer")
END_SECONDS = 240.0
SUSPECT = 2


@dataclass(slots=True)
class KillResult:
    """What one run came to."""

    seed: int
    database: str
    fault: str
    moments: list[str] = field(default_factory=list)
    """Moments at which a process was killed."""
    end: str = ""
    calls: int = 0
    """Replacement requests that the provider saw."""
    effects: int = 0
    acknowledged: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class _Run:
    def __init__(self, seed: int, site: Site, configs: list[Path], database: str) -> None:
        self.random = random.Random(seed)
        self.site, self.configs = site, configs
        self.plan = [MOMENTS[seed % len(MOMENTS)], *self.random.sample(MOMENTS, self.random.randrange(3))]
        fault = "slow_answer" if "amid the call" in self.plan else self.random.choice(FAULTS)
        self.result = KillResult(seed, database, fault)
        self.serves: list[Serve] = []
        self.states: dict[str, str] = {}
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._lines = self.random.choice(RANDOM_LINES)
        """Lines of the audit log until a kill at random."""

    def heard(self, serve: Serve, line: dict[str, Any]) -> None:
        """Kill at once where this line is the next moment of the plan."""
        with self._lock:
            if line["step"] in STATES:
                self.states[line["case"]] = line["step"]
            self._lines -= 1
            if not self.plan:
                return
            if line["step"] == self.plan[0]:
                self._kill(serve)
            elif self.plan[0] == "at random" and self._lines <= 0:
                time.sleep(self.random.uniform(0.0, RANDOM_SECONDS))
                self._kill_all()

    def _kill(self, serve: Serve) -> None:
        if serve.alive:
            self.result.moments.append(self.plan.pop(0))
            serve.kill()
            self._lines = self.random.choice(RANDOM_LINES)

    def go(self) -> None:
        """Start, kill and start again until the case has ended; a moment that never comes again is left out."""
        site, body = self.site, delivery(alert(self.site.members[SUSPECT], SUSPECT))
        if self.result.fault:
            site.simulator.order(self.result.fault, operation=REPLACE, seconds=1.5)
        site.agents.say(event_line(site.members, [SUSPECT], time=time.time()))
        until = self._began + END_SECONDS
        self.serves = [Serve(config, heard=self.heard) for config in self.configs]
        rung = [False] * len(self.serves)
        while not self._ended() and time.monotonic() < until:
            for number, serve in enumerate(self.serves):
                if not serve.alive:
                    serve.end()
                    self.serves[number], rung[number] = Serve(self.configs[number], heard=self.heard), False
                elif not rung[number] and (line := serve.until("listening", 0.01)):
                    rung[number] = post(line["detail"]["url"], body) == 200
                    self.result.acknowledged += rung[number]
            self._kill_amid_the_call()
            time.sleep(0.01)

    def _kill_amid_the_call(self) -> None:
        with self._lock:
            if not self.plan:
                return
            if self.plan[0] == "amid the call" and self.site.simulator.calls(REPLACE):
                self._kill_all()

    def _kill_all(self) -> None:
        """Only the holder of the lease acts; which one that is, nobody outside knows."""
        for serve in self.serves[1:]:
            serve.kill()
        self._kill(self.serves[0])

    def _ended(self) -> bool:
        with self._lock:
            states = list(self.states.values())
        return bool(states) and all(STATES[state].kind != "working" for state in states)

    def judge(self, url: str) -> None:
        """Count what the provider saw and what the database holds."""
        result, suspect = self.result, self.site.members[SUSPECT].instance_id
        calls = self.site.simulator.calls(REPLACE)
        certain = [call for call in calls if call.affected or call.status is None or call.status >= 500]
        result.calls, result.effects = len(calls), sum(bool(call.affected) for call in calls)
        if len(certain) > 1:
            result.problems.append(f"asked {len(certain)} times")
        if any(call.request.get("NodeIds") != [suspect] for call in calls):
            result.problems.append("another instance was asked to be replaced")
        database = Database(url, exclusive=False)
        try:
            with database.read() as connection:
                cases = connection.execute(select(schema.cases)).all()
                kept = len(connection.execute(select(schema.deliveries.c.id)).all())
        finally:
            database.close()
        result.end = ", ".join(sorted(f"{case.state} {case.outcome}".strip() for case in cases))
        if kept < result.acknowledged:
            result.problems.append(f"{result.acknowledged} deliveries were acknowledged, {kept} are kept")
        if len(cases) != 1:
            result.problems.append(f"{len(cases)} cases for one fault")
        if any(STATES[case.state].kind == "working" for case in cases):
            result.problems.append("a case did not end")
        if result.effects and cases and cases[0].outcome != "replaced":
            result.problems.append(f"replaced, and the case says {cases[0].outcome or cases[0].state}")


def run(seed: int, folder: Path, *, postgres: str = "") -> KillResult:
    """Run one schedule of kills in an empty folder and judge it.

    Args:
        seed: chooses everything but the machine's own timing.
        folder: empty.
        postgres: URL of an empty PostgreSQL database, for two processes; empty: SQLite and one.
    """
    url = postgres or f"sqlite:///{folder / 'state.sqlite3'}"
    with Site(folder) as site:
        configs = [
            site.config(
                name, database=url, worker="lease_seconds = 2.0", backoff_seconds=1.0, replacement_seconds=100.0
            )
            for name in (("one", "two") if postgres else ("one",))
        ]
        made = _Run(seed, site, configs, "postgresql" if postgres else "sqlite")
        try:
            made.go()
        finally:
            for serve in made.serves:
                serve.end()
        wait_for(lambda: not any(serve.alive for serve in made.serves), 10.0)
        made.judge(url)
        made.result.seconds = round(time.monotonic() - made._began, 1)
    return made.result
