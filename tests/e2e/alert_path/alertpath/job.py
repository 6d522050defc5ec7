"""Jobs of a few ranks on nodes with real agents: what writes an event, without a training loop."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from alertpath.programs import Program, fetch
from sdcwatch import event as events

RANK = Path(__file__).with_name("rank.py")


@dataclass
class Node:
    """One node: its agent and its spool."""

    name: str
    instance: str
    address: str
    port: int
    root: Path
    agent: Program

    @property
    def target(self) -> str:
        return f"{self.address}:{self.port}"


def node(folder: Path, name: str, instance: str, address: str, port: int, cluster: str, *tokens: str) -> Node:
    """A node whose agent is not started yet; `tokens` are the agent's own options."""
    root = folder / name / "spool"
    root.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "sdcwatch.cli", "agent", "--spool-dir", str(root), "--host", address, "--port", str(port),
        "--node", name, "--instance", instance, "--cluster", cluster, *tokens,
    ]  # fmt: skip
    url = f"http://{address}:{port}/healthz"
    agent = Program(f"agent-{name}", command, folder / f"agent-{name}.log", lambda: fetch(url))
    return Node(name, instance, address, port, root, agent)


def make_event(
    job: str, nodes: Sequence[Node], suspect: int, when: float, cluster: str, step: int = 57
) -> events.Event:
    """An attributed, persistent replay event of a job with one rank on each node."""
    epoch = f"e{int(when * 1000) - 60_000}-0000abcd"
    ranks = tuple(
        events.RankIdentity(n, 0, one.name, one.instance, one.name, f"GPU-{one.instance}", cluster, "0" * 16)
        for n, one in enumerate(nodes)
    )
    return events.Event(
        id=events.event_id(job, epoch, step, "replay", "attributed", [suspect], [suspect]),
        training_job=job, training_cluster=cluster, epoch=epoch, step=step, check="replay", kind="attributed",
        persistence="persistent", time=round(when, 3), suspects=(suspect,), differing=(suspect,), candidates=(suspect,),
        path="backward compute", sentence=f"the gradients of rank {suspect} cannot be reproduced on other nodes",
        evidence={}, action="observe", drill=False, world_size=len(nodes), last_clean_step=step - 1,
        trust_needed="verified", ranks=ranks,
    )  # fmt: skip


class Job:
    """A job under way: one process a rank."""

    def __init__(self, event: events.Event, nodes: Sequence[Node]) -> None:
        self.event, self.nodes = event, list(nodes)
        self.ranks: list[subprocess.Popen[bytes]] = []

    def start(self, *, born: float, dies: float, silent: Sequence[int] = (), torn: bool = False) -> Job:
        """Starts every rank. `silent` ranks die at the event without a word of it; `torn`: all die before the journal.

        Args:
            born: when the ranks' first files appear, unix seconds.
            dies: seconds from the event to the end of every rank.
        """
        outsiders = [r.rank for r in self.event.ranks if r.rank not in self.event.suspects][:2]
        for one, place in zip(self.event.ranks, self.nodes, strict=True):
            reporter = events.Reporter(one.rank, one.node, one.instance, one.gpu_uuid)
            spec = {
                "root": str(place.root), "rank": one.rank, "event": events.as_dict(self.event), "born": born,
                "reporter": asdict(reporter), "reports": one.rank in outsiders,
                "write": one.rank in {*outsiders, *self.event.suspects} - set(silent),
                "dies": 0.0 if one.rank in silent else dies, "torn": torn,
            }  # fmt: skip
            self.ranks.append(subprocess.Popen([sys.executable, str(RANK), json.dumps(spec)]))
        return self

    def await_end(self, seconds: float = 60.0) -> float:
        """Waits until every rank was killed; when that was, unix seconds."""
        until = time.monotonic() + seconds
        for rank in self.ranks:
            status = rank.wait(max(0.1, until - time.monotonic()))
            assert status == -signal.SIGKILL, f"a rank ended with {status}"
        return time.time()

    def end(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait(10)


@contextlib.contextmanager
def running(*programs: Program) -> Iterator[None]:
    """Starts programs side by side, and ends them, newest first."""
    try:
        for program in programs:
            program.start(await_ready=False)
        for program in programs:
            program.await_ready()
        yield
    finally:
        for program in reversed(programs):
            program.end()
