"""The world of a random schedule: two processes of the service on one database, a simulated cluster, its agents.

What it does: starts, ends and kills the processes, gives each thing that is done a task of its own, and lets one task
of one process go on at a time (`turn`). It counts in which state the cases were when something happened.
What it never does: look into the service to decide what happens next, or reach beyond this process and its folder.
Its place: under `schedule_events`; `schedule_judge` says what must never have happened in it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sdcwatch_remediation import app
from sdcwatch_remediation.actions.eks import Eks
from sdcwatch_remediation.actions.handover import Handover
from sdcwatch_remediation.actions.slurm import Slurm, SlurmReplace
from sdcwatch_remediation.config import check
from sdcwatch_remediation.errors import Conflict
from sdcwatch_remediation.records import Member, Provider
from sdcwatch_remediation.service import Service
from sdcwatch_remediation.settings import Actions, Cluster, Config, Database, KillSwitch, Policy, Server, Worker
from sdcwatch_remediation.settings import Agents as AgentSettings
from sdcwatch_remediation.simulator import Simulator, SimulatorConfig
from sdcwatch_remediation.states import STATES
from sdcwatch_remediation.testing.agents import FakeAgent
from sdcwatch_remediation.testing.baton import Life, Task
from sdcwatch_remediation.testing.direct import DirectAgents, DirectHyperPod, PointDatabase
from sdcwatch_remediation.testing.kubernetes_memory import KubernetesMemory
from sdcwatch_remediation.testing.rig import START, Clock
from sdcwatch_remediation.testing.slurm_memory import SlurmMemory

REPLACE = "BatchReplaceClusterNodes"
JOB = "bytegpt"
NODES = 6
PROCESSES = 2
ROADS = ("hyperpod", "slurm", "eks", "handover")
ACT = (
    "reserve", "record", REPLACE, "scontrol update", "scontrol update fail", "requeuehold 1", "release 1", "entomb",
    "in replace", "in quarantine", "in _carry_out", "in contain", "in prove_replacement", "in _then", "in settle",
    "in _by_mode", "in _proven", "/latch/release", "in _judge", "_decide", "suspect", "reopen", "_commit",
    "in _expire", "in ask", "in replaced_by_others", "in _stopped", "hold",
    "patch nodes", "create pods/eviction", "patch nodes/status", "create events", "in hand_over", "withdraw",
)  # fmt: skip
"""Ends of the names of moments that kills are aimed at: what leads to an act, the act, and what follows from it."""

_ORDER = {name: number for number, name in enumerate(STATES)}


@dataclass(slots=True)
class Result:
    """What a schedule came to."""

    seed: int
    mode: str
    road: str
    """Who isolates and replaces: `hyperpod` (the API alone), `slurm`, `eks` (Kubernetes isolates, the API replaces), or
    `handover` (the owner of the nodes replaces; half of the time Kubernetes isolates)."""
    temper: str = ""
    problems: list[str] = field(default_factory=list)
    """What must never happen, one sentence each; empty when all is well."""
    ends: Counter[str] = field(default_factory=Counter)
    """Cases by final state and outcome."""
    asked: int = 0
    """Instances whose replacement was asked for."""
    turns: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    """`<what> @ <state>`: what happened, by the state of the case that was furthest then."""
    points: Counter[str] = field(default_factory=Counter)
    """Named moments of the service's own work that were come to."""
    killed: Counter[str] = field(default_factory=Counter)
    """Named moments at which a process was killed."""
    trace: list[str] = field(default_factory=list)


class Process:
    """One process of the service, started again after each of its ends."""

    def __init__(self, world: World) -> None:
        """Belong to a world; `open` starts it."""
        self.world = world
        self.life = Life()
        self.tasks: list[Task] = []
        self.service: Service | None = None

    def open(self) -> None:
        """Start."""
        world, life = self.world, Life(self.world.came_to)
        self.life = life
        database = PointDatabase(world.config.database.url, exclusive=False)
        database.point = life.point
        provider: Provider = DirectHyperPod(world.simulator, life.point)
        more: dict[str, Any] = {}
        if world.slurm is not None:
            slurm = Slurm(run=world.slurm.runner(life.point))
            provider = SlurmReplace(provider, slurm)
            more = {"schedulers": (slurm,), "orchestrator": slurm}
        if world.kubernetes is not None:
            client = world.kubernetes.client(life.point)
            if world.config.actions.isolate == "eks":
                eks = Eks(client)
                more = {"schedulers": (eks,), "orchestrator": eks}
            if world.result.road == "handover":
                more["handover"] = Handover(client, world.clock)
        self.service = Service(
            world.config,
            provider=provider,
            database=database,
            agents=DirectAgents(world.agents, world.clock, life.point),
            clock=world.clock,
            sink=world.heard,
            **more,
        )
        world.services.append(self.service)

    def bury(self) -> None:
        """Take a process that ended or was killed out of the world."""
        if self.service is not None:
            self.service.agents.close()
            self.service.database.close()
        self.service, self.tasks = None, []

    @property
    def up(self) -> bool:
        """Whether it runs."""
        return self.service is not None and self.life.alive


class World:
    """Everything that a schedule moves."""

    def __init__(self, seed: int, folder: Path) -> None:
        """Set the world up in an empty folder; nothing runs yet."""
        self.random = random.Random(seed)
        self.clock = Clock()
        mode = self.random.choices(("auto", "approve", "recommend"), (12, 7, 1))[0]
        road = self.random.choices(ROADS, (4, 3, 2, 3))[0]
        self.result = Result(seed, mode, road)
        self.confirm = self.random.choice(("first", "persistent"))
        self.switch = folder / "switch" / "STOP"
        self.switch.parent.mkdir()
        isolate = {"slurm": "slurm", "eks": "eks", "handover": self.random.choice(("", "eks"))}.get(road, "")
        self.config = _config(folder, mode, self.confirm, self.switch, (road, isolate))
        orchestrator = "slurm" if road == "slurm" else "eks"
        self.simulator = Simulator(
            SimulatorConfig.of_size(
                "demo", nodes=NODES, spares=4, clock_factor=0.0, clock_start=START, orchestrator=orchestrator
            )
        )
        self.slurm = SlurmMemory(self.simulator, JOB) if road == "slurm" else None
        of_kubernetes = road in ("eks", "handover")
        self.kubernetes = KubernetesMemory(self.simulator, JOB, self.random) if of_kubernetes else None
        self.agents: dict[str, FakeAgent] = {}
        self.services: list[Service] = []
        self.processes = [Process(self) for _ in range(PROCESSES)]
        self.bodies: list[bytes] = []
        self.acknowledged = 0
        self.states: dict[str, str] = {}
        self.blamed: dict[str, list[str]] = {}
        """Truthful events that blame one instance alone: their persistence, by instance."""
        self.step = 100
        self._met, self._answered = 0, False

    # What it notices

    def heard(self, line: dict[str, Any]) -> None:
        """Take in one audit line, as the log collector of a site would."""
        if line["step"] in STATES:
            self.states[line["case"]] = line["step"]
        elif line["step"] == "signal_received":
            self.states[line["case"]] = "received"

    def came_to(self, point: str) -> None:
        """Count one named moment of a process."""
        self.result.points[point] += 1
        self._answered = self._answered or point.startswith(("answer ", "ran "))

    def note(self, what: str) -> None:
        """Count something that happens now."""
        alive = [state for state in self.states.values() if STATES[state].kind != "terminal"]
        self.result.happened[f"{what} @ {max(alive, key=_ORDER.__getitem__, default='no case')}"] += 1

    # What can happen

    def members(self) -> list[Member]:
        """Return the running instances; each has an agent from its first showing on."""
        state = self.simulator.state()
        found = [
            Member(n["instance_id"], n["group"], n["node_name"], n["status"], n["launch_time"], n["address"], "")
            for n in state["nodes"]
        ]
        for member in found:
            if member.address not in self.agents:
                self.agents[member.address] = FakeAgent(member)
        return [member for member in found if member.status == "Running"]

    def deliver(self, body: bytes) -> None:
        """Deliver one body to one of the processes."""

        def work(service: Service) -> None:
            app.receive(service, body)
            self.acknowledged += 1

        self.begin("deliver", work)

    def round(self, process: Process | None = None) -> None:
        """Let one process, or that one, begin a round."""
        self.begin("round", lambda service: service.worker.round(), once=True, process=process)

    def rounds(self) -> None:
        """Let every process begin a round at the same time, as the same alert wakes them."""
        for process in self.processes:
            self.round(process)

    def advance(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.clock.now += seconds
        self.simulator.advance(seconds)
        if self.kubernetes is not None:
            self.kubernetes.end_pods()
        self.members()

    def kill(self) -> None:
        """Have one process killed: some points on, at work that leads to the act, or at something not seen before."""
        up = [process for process in self.processes if process.up]
        if not up:
            return
        process = self.random.choice(up)
        if process.life.ends_at is None or self.random.random() < 0.3:
            process.life.ends_at = self._moment()

    def _moment(self) -> Callable[[str], bool]:
        choice = self.random.random()
        if choice < 0.35:
            left = [self.random.randrange(1, 30)]
            return lambda name: _down(left)
        if choice < 0.75:
            # Its beginning, the moment before its commit, or after it: all three are named after the same work.
            work, left = self.random.choice(ACT), [self.random.randrange(1, 4)]
            return lambda name: name.endswith(work) and _down(left)
        seen, left = set(self.result.points), [self.random.randrange(1, 6)]

        def new(name: str) -> bool:
            if name in seen:
                return False
            seen.add(name)
            return _down(left)

        return new

    def restart(self) -> None:
        """End one process in order; it is started again later."""
        process = self.random.choice(self.processes)
        if process.up and not process.tasks:
            assert process.service is not None
            self.note("restart")
            process.life.ends_at = None
            process.service.close()
            process.bury()

    def begin(
        self, name: str, work: Callable[[Service], None], *, once: bool = False, process: Process | None = None
    ) -> None:
        """Begin a task in one of the processes that are up, or in that one if it is."""
        up = [one for one in self.processes if one.up and process in (None, one)]
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
        self.result.turns += 1
        if task.step():
            process.tasks.remove(task)
            if task.error is not None:
                self.result.problems.append(f"{task.name} ended with {task.error!r}")
        if self._answered:
            self._count_faults()
        if not process.life.alive:
            self.note("kill")
            self.result.killed[process.life.ended_at] += 1
            while process.tasks:
                if process.tasks[0].step():
                    process.tasks.pop(0)
            process.bury()
        return True

    def _count_faults(self) -> None:
        calls = self.simulator.calls()
        met = [f"{call.fault} ({call.operation})" for call in calls if call.fault]
        met += [f"{kind} (scontrol)" for kind in self.slurm.met] if self.slurm is not None else []
        met += [f"{kind} (kubernetes)" for kind in self.kubernetes.met] if self.kubernetes is not None else []
        for one in met[self._met :]:
            self.note(one)
        self._met, self._answered = len(met), False

    def drain(self) -> None:
        """Let every task go on to its end."""
        while self.turn():
            pass

    def working(self) -> bool:
        """Whether a case is in a state that the service moves."""
        service = next(process.service for process in self.processes if process.service is not None)
        return any(STATES[case.state].kind == "working" for case in service.store.cases(open_only=True))

    def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.bury()


def _down(left: list[int]) -> bool:
    left[0] -= 1
    return left[0] <= 0


def _config(folder: Path, mode: str, confirm: str, switch: Path, roads: tuple[str, str]) -> Config:
    road, isolate = roads
    for name in ("alerts", "events", "latch"):
        (folder / name).write_text(f"{name}-token\n")
    actions = Actions(isolate=isolate, replace="slurm" if road == "slurm" else "api")
    policy = Policy(mode=mode, confirm=confirm, groups=("workers",), settle_seconds=10.0, cooldown_seconds=60.0)
    if road == "handover":
        policy = replace(policy, handover_groups=("workers",))
    return check(
        Config(
            server=Server(alerts_token_file=str(folder / "alerts")),
            database=Database(url=f"sqlite:///{folder / 'state.sqlite3'}", busy_timeout_seconds=1.0),
            cluster=Cluster(name="demo"),
            agents=AgentSettings(events_token_file=str(folder / "events"), latch_token_file=str(folder / "latch")),
            policy=policy,
            actions=actions,
            kill_switch=KillSwitch(file=str(switch)),
            worker=Worker(lease_seconds=15.0),
        )
    )
