"""The provisioning side of the demo: what a cluster does with instances, done with processes on loopback addresses.

Watches the simulator's inventory. An instance that becomes Running gets a node agent and `sdcwatch run -- torchrun`;
one that is shutting down loses both. It knows nothing of faults, verdicts or cases, and takes no decision.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stage import plan, render, web
from stage.processes import Processes, Started


@dataclass(slots=True)
class Node:
    """One instance with what runs on it."""

    instance: str
    name: str
    address: str
    spool: Path
    state: str = "Pending"
    agent: Started | None = None
    run: Started | None = None
    replaces: str | None = None
    started: list[Started] = field(default_factory=list)

    def describe(self) -> str:
        """What this node does, in a word or two."""
        if self.state != "Running":
            return {"ShuttingDown": "shutting down", "Pending": "booting", "gone": "gone"}.get(self.state, self.state)
        if self.run is None:
            return "running"
        status = self.run.status
        return (
            "training job" if status is None else {0: "finished", 86: "left the job (86)"}.get(status, f"exit {status}")
        )


class Cluster:
    """All instances that ever were, by instance id, in the order in which they came."""

    def __init__(
        self, out: Path, ports: plan.Ports, rendered: render.Rendered, processes: Processes, training: Training
    ) -> None:
        self.nodes: dict[str, Node] = {}
        self._out = out
        self._ports = ports
        self._rendered = rendered
        self._processes = processes
        self._training = training
        self._targets: list[str] = []

    def tick(self) -> None:
        """Looks at the inventory once and follows it."""
        state = web.get_json(f"http://127.0.0.1:{self._ports.simulator}/_simulator/state")
        if state is None:
            return
        for entry in (*state["nodes"], *state["gone"]):
            self._follow(entry)
        targets = [n.address for n in self.nodes.values() if n.agent is not None and n.agent.status is None]
        if targets != self._targets:
            self._targets = targets
            render.write_targets(self._rendered.targets, targets, self._ports)

    def _follow(self, entry: dict[str, Any]) -> None:
        instance = entry["instance_id"]
        node = self.nodes.get(instance)
        if node is None:
            spool = self._out / "nodes" / instance / "spool"
            node = Node(instance, entry["node_name"], entry["address"], spool, replaces=entry["replaces"])
            self.nodes[instance] = node
        node.state = entry["status"]
        if node.state == "Running" and node.agent is None:
            self._boot(node)
        elif node.state in ("ShuttingDown", "gone"):
            running = [s for s in (node.run, node.agent) if s is not None and s.status is None]
            if running:
                self._processes.end(running, patience=5.0)

    def _environment(self, node: Node) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SDCWATCH_", "SLURM_", "KUBERNETES_"))}
        return clean | {
            "SDCWATCH_JOB": plan.JOB,
            "SDCWATCH_CLUSTER": plan.CLUSTER,
            "SDCWATCH_NODE": node.name,
            "SDCWATCH_INSTANCE": node.instance,
            "SDCWATCH_SPOOL_DIR": str(node.spool),
        }

    def _boot(self, node: Node) -> None:
        node.spool.mkdir(parents=True, exist_ok=True)
        environment = self._environment(node)
        node.agent = self._processes.start(
            f"agent-{node.address}",
            [
                *_command("sdcwatch", "agent"),
                *("--host", node.address, "--port", str(self._ports.agent)),
                *("--events-token-file", str(self._rendered.events_token)),
                *("--latch-token-file", str(self._rendered.latch_token)),
            ],
            environment,
        )
        node.run = self._processes.start(
            f"run-{node.address}",
            [
                *_command("sdcwatch", "run", "--checkpoint-dir", str(self._training.checkpoints)),
                *("--poll", "0.3", "--halt-grace", "3"),
                *("--preflight", shlex.join(_command("sdcwatch", "preflight", "--json", "--seconds", "2")), "--"),
                *self._training.torchrun(node.address, self._ports.rendezvous),
            ],
            environment | self._training.environment,
        )


@dataclass(frozen=True, slots=True)
class Training:
    """How the training script is started on a node."""

    steps: int
    pace: float
    checkpoints: Path
    step_log: Path
    environment: dict[str, str]

    def torchrun(self, address: str, port: int) -> list[str]:
        """torchrun for one of the four nodes; the first node's launcher holds the rendezvous."""
        host = plan.NODES[0]
        return [
            *_command("torch.distributed.run", f"--nnodes={len(plan.NODES)}", "--nproc-per-node=1", "--max-restarts=2"),
            f"--rdzv-id={plan.JOB}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={host}:{port}",
            f"--rdzv-conf=is_host={int(address == host)},join_timeout=120,last_call_timeout=1",
            f"--local-addr={address}",
            "--monitor-interval=0.2",
            *self.script(),
        ]

    def script(self) -> list[str]:
        """The training script and its words."""
        return [
            str(plan.ROOT / "demo" / "train.py"),
            *("--steps", str(self.steps), "--pace", str(self.pace), "--save-every", str(plan.SAVE_EVERY)),
            *("--checkpoints", str(self.checkpoints), "--step-log", str(self.step_log)),
        ]

    def reference(self) -> list[str]:
        """The same script with the same four ranks on one node, for the run that never had a fault."""
        size = len(plan.NODES)
        return [
            *_command("torch.distributed.run", "--nnodes=1", f"--nproc-per-node={size}", "--rdzv-backend=c10d"),
            "--rdzv-endpoint=127.0.0.1:0",
            *self.script(),
        ]


#: Every rank on one core, gloo on loopback whatever the machine's name resolves to.
QUIET = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}


def _command(module: str, *words: str) -> list[str]:
    """A program of ours or torch's in the Python that runs the demo, whatever PATH says."""
    if module.startswith("torch."):
        return [sys.executable, "-m", module, *words]
    name = {"sdcwatch": "sdcwatch.cli", "sdcwatch-remediation": "sdcwatch_remediation.cli"}[module]
    return [sys.executable, "-c", f"import sys; from {name} import main; sys.exit(main())", *words]


def service_command(*words: str) -> list[str]:
    """`sdcwatch-remediation ...` in the Python that runs the demo."""
    return _command("sdcwatch-remediation", *words)
