"""A Slurm in memory, for schedules on a virtual clock: the few commands of scontrol and squeue that the service runs.

What it does: answers `Slurm`'s argument vectors from the simulated cluster's nodes and one training job; a node that is
set to fail with `Action:Replace` is replaced by the simulator, as HyperPod's agent does it; meets faults on order.
What it never does: understand more than those commands. The real ones are tried against a real slurmctld elsewhere.
Its place: under `schedules`, as `actions.slurm.Slurm(run=...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sdcwatch_remediation.actions.slurm import ACTION_REPLACE, Answer, Run
from sdcwatch_remediation.simulator import Simulator

FAULTS = ("timeout_before", "timeout_after", "unreachable", "refused")
"""No answer, without or with the effect; no way to the controller; its definite no."""


@dataclass(slots=True)
class SlurmNode:
    """What Slurm remembers about one node name."""

    instance_id: str
    state: str = "IDLE"
    reason: str = ""
    comment: str = ""


@dataclass(slots=True)
class SlurmAct:
    """One command that asks for a change."""

    argv: tuple[str, ...]
    instance_id: str
    """Which instance had the node's name then; empty for a job."""
    effect: bool
    status: int | None


@dataclass(slots=True)
class SlurmMemory:
    """One controller; `acts` is its log."""

    simulator: Simulator
    job: str
    nodes: dict[str, SlurmNode] = field(default_factory=dict)
    acts: list[SlurmAct] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    met: list[str] = field(default_factory=list)
    """Faults that a command met, oldest first."""
    on: set[str] = field(default_factory=set)
    """Names of the nodes that the job runs on; empty while it is held."""

    def __post_init__(self) -> None:
        """Start the job on every node."""
        self._look()
        self.on = set(self.nodes)

    def runner(self, point: Callable[[str], None]) -> Run:
        """Return what runs a command for one process, with a point before and after it."""

        def run(argv: Sequence[str], seconds: float) -> Answer:
            words = [word.rpartition("/")[2] for word in argv[:3] if not word.startswith("--")]
            name = " ".join(word for word in words if "=" not in word) + (" fail" if "state=fail" in argv else "")
            point(f"run {name}")
            answer = self.answer(argv)
            point(f"ran {name}")
            return answer

        return run

    def answer(self, argv: Sequence[str]) -> Answer:
        """Carry out one command, with the next fault if it asks for a change."""
        addresses = self._look()
        if "squeue" in argv[0]:
            return Answer(0, self._queue(argv), "")
        if "show" in argv:
            name = argv[-1]
            if name not in self.nodes:
                return Answer(1, "", f"Node {name} not found")
            node = self.nodes[name]
            words = f"NodeName={name} NodeAddr={addresses[name]} State={node.state}"
            reason = f" Reason={node.reason} [root@2027-01-15T08:00:00]" if node.reason else ""
            comment = f" Comment={node.comment}" if node.comment else ""
            return Answer(0, words + reason + comment + "\n", "")
        fault = self.faults.pop(0) if self.faults else ""
        if fault:
            self.met.append(fault)
        effect = fault in ("", "timeout_after")
        instance = self._change(argv) if effect else self._instance(argv)
        answer = {
            "timeout_before": Answer(None, "", "no answer"),
            "timeout_after": Answer(None, "", "no answer"),
            "unreachable": Answer(1, "", "Unable to contact slurm controller (connect failure)"),
            "refused": Answer(1, "", "slurm_update error: Requested operation is presently disabled"),
        }.get(fault, Answer(0, "", ""))
        self.acts.append(SlurmAct(tuple(argv), instance, effect, answer.status))
        return answer

    def drain_by_others(self, name: str) -> None:
        """Let somebody else take a node out of service."""
        self._look()
        if name in self.nodes and self.nodes[name].state == "IDLE":
            node = self.nodes[name]
            node.state, node.reason, node.comment = "IDLE+DRAIN", "maintenance", ""

    def others_resume(self) -> None:
        """Let whoever drained a node give it back; nodes of ours stay as they are."""
        for node in self.nodes.values():
            if node.reason == "maintenance":
                node.state, node.reason = "IDLE", ""

    def _look(self) -> dict[str, str]:
        """Take in what became of the instances: a new one under an old name registers with nothing remembered."""
        addresses = {}
        for found in self.simulator.state()["nodes"]:
            if found["status"] == "ShuttingDown" and found["node_name"] in addresses:
                continue
            addresses[found["node_name"]] = found["address"]
            known = self.nodes.get(found["node_name"])
            if known is None or (known.instance_id != found["instance_id"] and found["status"] != "ShuttingDown"):
                self.nodes[found["node_name"]] = SlurmNode(found["instance_id"])
                self.on.discard(found["node_name"])
        for name in [name for name in self.nodes if name not in addresses]:
            del self.nodes[name]
        return addresses

    def _queue(self, argv: Sequence[str]) -> str:
        name = next(word.partition("=")[2] for word in argv if word.startswith("--nodelist="))
        return f"1|RUNNING|trainer|{self.job}\n" if name in self.on else ""

    def _words(self, argv: Sequence[str]) -> dict[str, str]:
        return dict(word.split("=", 1) for word in argv if "=" in word)

    def _instance(self, argv: Sequence[str]) -> str:
        node = self.nodes.get(self._words(argv).get("nodename", ""))
        return node.instance_id if node else ""

    def _change(self, argv: Sequence[str]) -> str:
        if "requeuehold" in argv:
            self.on = set()
        elif "release" in argv:
            self.on = {name for name, node in self.nodes.items() if node.state == "IDLE"}
        words = self._words(argv)
        node = self.nodes.get(words.get("nodename", ""))
        if node is None:
            return ""
        if words["state"] == "drain":
            node.state, node.reason, node.comment = "IDLE+DRAIN", words["reason"], words["comment"]
        elif words["state"] == "fail":
            node.state, node.reason = "FAIL", words["reason"]
            if node.reason == ACTION_REPLACE:
                self._replace(node.instance_id)
        else:
            node.state, node.reason, node.comment = "IDLE", "", ""
        return node.instance_id

    def _replace(self, instance_id: str) -> None:
        try:
            self.simulator.others_replace(instance_id)
        except ValueError:
            return  # HyperPod's agent cannot have it replaced now
