"""Random schedules of everything that can happen to the service, on a virtual clock, repeatable by their seed.

What it does: `run(seed)` puts two processes of the service on one database, before a simulated HyperPod and its agents,
and mixes faults, forged and repeated alerts, resolves, provider faults, other people's replacements, decisions, pauses,
kills at any commit or call, and restarts; then lets everything come to rest. `problems` of the result says what must
never have happened.
What it never does: look into the service to decide what happens next, or reach beyond this process and its folder.
Its place: the campaign `make campaign-remediation`, and a few seeds of it in the core tests.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import select

from sdcwatch_remediation import app, schema
from sdcwatch_remediation.config import check
from sdcwatch_remediation.errors import Conflict
from sdcwatch_remediation.records import Member
from sdcwatch_remediation.service import Service
from sdcwatch_remediation.settings import Agents as AgentSettings
from sdcwatch_remediation.settings import Cluster, Config, Database, KillSwitch, Policy, Server
from sdcwatch_remediation.simulator import Simulator, SimulatorConfig
from sdcwatch_remediation.simulator.faults import MENU
from sdcwatch_remediation.states import STATES
from sdcwatch_remediation.testing.agents import FakeAgent
from sdcwatch_remediation.testing.baton import Life, Task
from sdcwatch_remediation.testing.direct import DirectAgents, DirectHyperPod, PointDatabase
from sdcwatch_remediation.testing.events import alert, delivery, event_line
from sdcwatch_remediation.testing.rig import START, Clock

REPLACE = "BatchReplaceClusterNodes"
NODES = 6
PROCESSES = 2
OPERATIONS = 50
REST_ROUNDS = 80
REST_SECONDS = 600.0
"""Rounds after a schedule and virtual seconds between them: longer than every deadline but `frozen`'s."""


@dataclass(slots=True)
class Result:
    """What a schedule came to."""

    seed: int
    mode: str
    problems: list[str] = field(default_factory=list)
    """What must never happen, one sentence each; empty when all is well."""
    ends: Counter[str] = field(default_factory=Counter)
    """Cases by final state and outcome."""
    replaced: int = 0
    kills: int = 0
    points: int = 0
    trace: list[str] = field(default_factory=list)


class _Process:
    def __init__(self, world: _World) -> None:
        self.world = world
        self.life = Life()
        self.tasks: list[Task] = []
        self.service: Service | None = None

    def open(self) -> None:
        world, self.life = self.world, Life()
        database = PointDatabase(world.config.database.url, exclusive=False)
        life = self.life
        database.point = life.point
        self.service = Service(
            world.config,
            provider=DirectHyperPod(world.simulator, life.point),
            database=database,
            agents=DirectAgents(world.agents, world.clock, life.point),
            clock=world.clock,
            sink=lambda line: None,
        )
        world.services.append(self.service)

    def bury(self) -> None:
        """Take a process that was killed out of the world."""
        if self.service is not None:
            self.service.agents.close()
            self.service.database.close()
        self.service, self.tasks = None, []

    @property
    def up(self) -> bool:
        return self.service is not None and self.life.alive


class _World:
    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.clock = Clock()
        self.result = Result(seed, self.random.choice(("auto", "auto", "auto", "approve", "recommend")))
        self.confirm = self.random.choice(("first", "persistent"))
        self.switch = folder / "switch" / "STOP"
        self.switch.parent.mkdir()
        self.config = _config(folder, self.result.mode, self.confirm, self.switch)
        self.simulator = Simulator(
            SimulatorConfig.of_size("demo", nodes=NODES, spares=4, clock_factor=0.0, clock_start=START)
        )
        self.agents: dict[str, FakeAgent] = {}
        self.services: list[Service] = []
        self.processes = [_Process(self) for _ in range(PROCESSES)]
        self.bodies: list[bytes] = []
        self.acknowledged = 0
        self.blamed: dict[str, list[str]] = {}
        """Truthful events that blame one instance alone: their persistence, by instance."""
        self.step = 100

    # What can happen

    def members(self) -> list[Member]:
        state = self.simulator.state()
        found = [
            Member(n["instance_id"], n["group"], n["node_name"], n["status"], n["launch_time"], n["address"], "")
            for n in state["nodes"]
        ]
        for member in found:
            if member.address not in self.agents:
                self.agents[member.address] = FakeAgent(member)
        return [member for member in found if member.status == "Running"]

    def fault(self, *, lie: bool = False) -> None:
        members = self.members()
        if len(members) < 3:
            return
        self.step += 1
        named = sorted(self.random.sample(range(len(members)), self.random.choice((1, 1, 1, 1, 2))))
        persistence = self.random.choice(("persistent", "persistent", "transient"))
        job = self.random.choice(("bytegpt", "bytegpt", "other"))
        line = event_line(members, named, time=self.clock(), step=self.step, persistence=persistence, training_job=job)
        tellers = [self.random.choice(members)] if lie else members
        for member in tellers:
            self.agents[member.address].events.append(line)
        if not lie:
            for member in members:
                self.agents[member.address].latch = line["event"]["id"]
            if len(named) == 1:
                self.blamed.setdefault(members[named[0]].instance_id, []).append(persistence)
        for rank in named:
            body = delivery(alert(members[rank], rank, training_job=job))
            self.bodies.append(body)
            if self.random.random() < 0.8:
                self.deliver(body)

    def forge(self) -> None:
        members = self.members()
        if members:
            rank = self.random.randrange(len(members))
            self.deliver(delivery(alert(members[rank], rank)))

    def deliver(self, body: bytes) -> None:
        def work(service: Service) -> None:
            app.receive(service, body)
            self.acknowledged += 1

        self.begin("deliver", work)

    def again(self) -> None:
        if self.bodies:
            body = self.random.choice(self.bodies)
            if self.random.random() < 0.3:
                body = body.replace(b'"status": "firing"', b'"status": "resolved"')
            self.deliver(body)

    def round(self) -> None:
        self.begin("round", lambda service: service.worker.round(), once=True)

    def decide(self) -> None:
        choice = self.random.random()
        stale = self.random.random() < 0.2

        def work(service: Service) -> None:
            for case in service.store.cases(open_only=True):
                if case.state == "awaiting_approval" and choice < 0.7:
                    digest = "0" * 64 if stale else case.request_sha256
                    service.ledger.approve(case, by="ann", request_sha256=digest)
                elif 0.7 <= choice < 0.76:
                    service.ledger.reject(case, by="ann", reason="no")
                elif 0.76 <= choice < 0.8:
                    service.ledger.cancel(case, by="ann", reason="no")
                elif 0.8 <= choice < 0.88:
                    service.ledger.hold(case, by="ann", reason="looking")
                elif choice >= 0.88:
                    service.ledger.unhold(case, by="ann")

        self.begin("decide", work)

    def stop(self) -> None:
        what = self.random.randrange(6)
        if what == 0:
            self.begin("pause", lambda service: service.ledger.pause(by="ann", reason="drill"))
        elif what in (1, 2):
            self.begin("resume", lambda service: service.ledger.resume(by="ann"))
        elif what == 3:
            self.switch.touch()
        else:
            self.switch.unlink(missing_ok=True)

    def provider_fault(self) -> None:
        kind = self.random.choice([kind for kind in MENU if kind != "paging_changes"])
        operation = self.random.choice((None, REPLACE, REPLACE))
        if kind in ("no_capacity", "bad_replacement"):
            operation = None
        self.simulator.order(kind, operation=operation, seconds=self.random.choice((1.0, 60.0)))

    def others_act(self) -> None:
        members = self.members()
        if members and self.random.random() < 0.4:
            self.simulator.others_replace(self.random.choice(members).instance_id)
        elif members:
            status = self.random.choice(("SystemUpdating", "Failure"))
            self.simulator.set_status(self.random.choice(members).instance_id, status)
        for node in self.simulator.state()["nodes"]:
            if node["status"] in ("SystemUpdating", "Failure") and self.random.random() < 0.5:
                self.simulator.set_status(node["instance_id"], "Running")

    def time_passes(self) -> None:
        self.advance(self.random.choice((0.5, 2.0, 5.0, 5.0, 11.0, 11.0, 20.0, 40.0, 61.0, 300.0, 1900.0)))

    def advance(self, seconds: float) -> None:
        self.clock.now += seconds
        self.simulator.advance(seconds)
        self.members()

    def kill(self) -> None:
        process = self.random.choice(self.processes)
        if process.up:
            process.life.points_left = self.random.randrange(1, 40)

    def begin(self, name: str, work: Callable[[Service], None], *, once: bool = False) -> None:
        """Begin a task in one of the processes that are up."""
        up = [process for process in self.processes if process.up]
        if not up:
            return
        process = self.random.choice(up)
        service = process.service
        assert service is not None
        if once and any(task.name == name for task in process.tasks):
            return

        def tolerant() -> None:
            try:
                work(service)
            except Conflict:
                return  # somebody else was first: a person is told, a case waits for the next round

        # No two things happen at the very same time, so that their order is that of the schedule.
        self.advance(0.001)
        process.tasks.append(Task(name, process.life, tolerant))

    # How it goes on

    def turn(self) -> bool:
        """Let one task of one process go on; return whether there was one."""
        ready = [(process, task) for process in self.processes for task in process.tasks]
        if not ready:
            return False
        process, task = self.random.choice(ready)
        self.result.points += 1
        if task.step():
            process.tasks.remove(task)
            if task.error is not None:
                self.result.problems.append(f"{task.name} ended with {task.error!r}")
        if not process.life.alive:
            while process.tasks:
                if process.tasks[0].step():
                    process.tasks.pop(0)
            process.bury()
            self.result.kills += 1
        return True

    def drain(self) -> None:
        while self.turn():
            pass

    def rest(self) -> None:
        """Take away whatever stands in the way, and let everything come to its end."""
        self.simulator.clear_faults()
        self.switch.unlink(missing_ok=True)
        for process in self.processes:
            process.life.points_left = None
        self.drain()
        for process in self.processes:
            if not process.up:
                process.open()
        for node in self.simulator.state()["nodes"]:
            if node["status"] in ("SystemUpdating", "Failure"):
                self.simulator.set_status(node["instance_id"], "Running")
        self.begin("resume", lambda service: service.ledger.resume(by="ann"))
        self.drain()
        for _ in range(REST_ROUNDS):
            self.advance(REST_SECONDS)
            self.round()
            self.drain()
            if not self.working():
                return

    def working(self) -> bool:
        """Whether a case is in a state that the service moves."""
        service = next(process.service for process in self.processes if process.service is not None)
        return any(STATES[case.state].kind == "working" for case in service.store.cases(open_only=True))

    def close(self) -> None:
        for process in self.processes:
            process.bury()


def run(seed: int, folder: Path, *, operations: int = OPERATIONS) -> Result:
    """Run one schedule in an empty folder and judge it."""
    world = _World(seed, folder)
    choices: list[tuple[Callable[[], None], int]] = [
        (world.fault, 3),
        (lambda: world.fault(lie=True), 1),
        (world.forge, 1),
        (world.again, 4),
        (world.round, 20),
        (world.decide, 5),
        (world.stop, 2),
        (world.provider_fault, 5),
        (world.others_act, 2),
        (world.time_passes, 12),
        (world.kill, 3),
    ]
    names = ["fault", "lie", "forge", "again", "round", "decide", "stop", "provider", "others", "time", "kill"]
    try:
        for process in world.processes:
            process.open()
        world.fault()
        for _ in range(operations):
            index = world.random.choices(range(len(choices)), [weight for _, weight in choices])[0]
            world.result.trace.append(f"{world.clock() - START:.3f} {names[index]}")
            choices[index][0]()
            if world.random.random() < 0.6:
                world.drain()
            for _ in range(world.random.randrange(20)):
                world.turn()
            for process in world.processes:
                if not process.up and world.random.random() < 0.5:
                    process.open()
        world.rest()
        world.result.problems += _problems(world)
    finally:
        world.close()
    return world.result


def _problems(world: _World) -> Iterator[str]:
    service = world.services[-1]
    certain = Counter(call.request["NodeIds"][0] for call in world.simulator.calls(REPLACE) if not _refused(call))
    for instance, count in certain.items():
        world.result.replaced += 1
        if count > 1:
            yield f"{instance} was asked to be replaced {count} times"
        kinds = world.blamed.get(instance, [])
        if not kinds:
            yield f"{instance} was asked to be replaced, and nothing true blames it alone"
        elif world.confirm == "persistent" and "persistent" not in kinds and len(kinds) < 2:
            yield f"{instance} was replaced after one transient fault"
    if world.result.mode == "recommend" and certain:
        yield "something was replaced in mode recommend"
    for other in world.services:
        for where in ("case", "round"):
            labels = {"where": where}
            errors = other.telemetry.registry.get_sample_value("sdc_remediation_errors_total", labels)
            if errors:
                yield f"{errors:.0f} unexpected errors ({where})"
    with service.database.read() as connection:
        stored = len(connection.execute(select(schema.deliveries.c.id)).all())
        audit = connection.execute(select(schema.audit).order_by(schema.audit.c.id)).all()
        approvals = {row.case_id for row in connection.execute(select(schema.approvals)) if row.decision == "approved"}
    if stored < world.acknowledged:
        yield f"{world.acknowledged} deliveries were acknowledged, {stored} are kept"
    yield from _audit_problems(world, [(line.step, line.case_id) for line in audit], approvals)
    for case in service.store.cases():
        world.result.ends[f"{case.state} {case.outcome}".strip()] += 1
        if STATES[case.state].kind == "working":
            yield f"{case.id} is still {case.state}: {case.reason}"
        if case.outcome == "replaced" and case.quarantined_at:
            own = [agent for agent in world.agents.values() if agent.quarantined == case.id]
            if any(case.event_id in agent.released for agent in own):
                yield f"{case.id}: the replaced node itself was told to go on"


def _audit_problems(world: _World, lines: list[tuple[str, str]], approvals: set[str]) -> Iterator[str]:
    paused, held = False, set()
    for step, case_id in lines:
        if step in ("paused", "resumed"):
            paused = step == "paused"
        elif step == "held_by_person":
            held.add(case_id)
        elif step == "hold_ended":
            held.discard(case_id)
        elif step == "replace_requested":
            if paused or case_id in held:
                yield f"{case_id} asked for a replacement while paused or held"
            if world.result.mode == "approve" and case_id not in approvals:
                yield f"{case_id} asked for a replacement that nobody approved"


def _refused(call: Any) -> bool:
    """Whether the caller could know for certain that a call had no effect."""
    if call.affected or call.status is None or call.status >= 500:
        return False
    return call.status != 200 or bool(call.response.get("Failed"))


def _config(folder: Path, mode: str, confirm: str, switch: Path) -> Config:
    for name in ("alerts", "events", "latch"):
        (folder / name).write_text(f"{name}-token\n")
    return check(
        Config(
            server=Server(alerts_token_file=str(folder / "alerts")),
            database=Database(url=f"sqlite:///{folder / 'state.sqlite3'}", busy_timeout_seconds=1.0),
            cluster=Cluster(name="demo"),
            agents=AgentSettings(events_token_file=str(folder / "events"), latch_token_file=str(folder / "latch")),
            policy=Policy(mode=mode, confirm=confirm, groups=("workers",), settle_seconds=10.0, cooldown_seconds=60.0),
            kill_switch=KillSwitch(file=str(switch)),
        )
    )


def describe(result: Result) -> str:
    """Return one result as one JSON line."""
    return json.dumps(
        {"seed": result.seed, "mode": result.mode, "problems": result.problems, "ends": dict(result.ends)}
    )
