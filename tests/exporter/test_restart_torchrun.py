"""`sdcwatch run` over a real torchrun on two nodes: what ends ranks, nodes and loops, and how the job starts again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sdcwatch.agent.collector import Collector
from sdcwatch.agent.node import Node
from sdcwatch.agent.state import StateFile
from sdcwatch.agent.tally import Tally
from sdcwatch.latch import files as latches
from sdcwatch.spool.folders import user_root

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

TRAIN = Path(__file__).with_name("restart_train.py")
#: torchrun's rendezvous forgets a dead node after three of these seconds, and waits so long for a further one.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout={wait},is_host={host}"


class Job:
    """A job on the nodes `a` and `b`: two `sdcwatch run`, each over a torchrun of its own. `b` hosts the rendezvous.

    Process ids order torchrun's nodes: `a`, started first, has the first rank, until it is started again.
    """

    def __init__(
        self, folder: Path, story: str, *, ranks_on_b: int = 1, least_nodes: int = 2, restarts: int = 3
    ) -> None:
        self.folder, self.story = folder, story
        self._ranks = {"a": 1, "b": ranks_on_b}
        self._least, self._restarts = least_nodes, restarts
        (folder / "checkpoints").mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> Job:
        for name in names or ("a", "b"):
            environment = {k: v for k, v in os.environ.items() if not k.startswith(("SDCWATCH_", "SLURM_"))} | {
                "SDCWATCH_JOB": "job", "SDCWATCH_AGENT": "off", "SDCWATCH_NODE": name, "SDCWATCH_MAX_OVERHEAD": "0",
                "SDCWATCH_SPOOL_DIR": str(self.spool(name)), "OMP_NUM_THREADS": "1",
                "SDCWATCH_CHECKPOINT_DIR": str(self.folder / "checkpoints"),
                # Otherwise torchrun keeps one store over its restarts: a new rank may find a dead one's address there.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            }  # fmt: skip
            run = ["-c", "import sys; from sdcwatch.cli import main; sys.exit(main())", "run", "--poll", "0.1"]
            # Two torchruns whose ranks end at the same moment can wait for one another in the rendezvous for minutes.
            run += ["--halt-grace", "60", "--preflight", "false", "--", sys.executable, "-m", "torch.distributed.run"]
            run += [f"--max-restarts={self._restarts}"]
            run += [f"--nnodes={self._least}:2", f"--nproc-per-node={self._ranks[name]}", "--rdzv-backend=c10d"]
            run += [f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=job", "--local-addr=127.0.0.1"]
            run += ["--rdzv-conf", RENDEZVOUS.format(wait=10 if self._least == 1 else 1, host=int(name == "b"))]
            with open(self.folder / f"log-{name}", "ab") as log:
                self.nodes[name] = subprocess.Popen(
                    [sys.executable, *run, str(TRAIN), str(self.folder), self.story],
                    env=environment,
                    stdout=log,
                    stderr=log,
                )
            self.until(lambda name=name: self._launched(name), f"torchrun of node {name} is there")
        return self

    def _launched(self, name: str) -> bool:
        """Whether the node's torchrun has its process id; `sdcwatch run` names it in its arguments, too."""
        for pid in self.processes(name):
            with contextlib.suppress(OSError):
                if (
                    pid != self.nodes[name].pid
                    and b"torch.distributed.run" in Path(f"/proc/{pid}/cmdline").read_bytes()
                ):
                    return True
        return self.nodes[name].poll() is not None

    def spool(self, name: str) -> Path:
        return self.folder / f"spool-{name}"

    def log(self, name: str) -> str:
        return (self.folder / f"log-{name}").read_text(errors="replace")

    def until(self, condition: Callable[[], object], what: str, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"never happened: {what}\n{self._last_words()}"
            time.sleep(0.05)

    def statuses(self, *names: str) -> list[int]:
        """Waits for the `sdcwatch run` of these nodes (all)."""
        waited = [self.nodes[name] for name in names or self.nodes]
        self.until(lambda: all(p.poll() is not None for p in waited), "the job ends", 250.0)
        return [int(p.returncode) for p in waited]

    def processes(self, name: str) -> list[int]:
        """Process ids of everything that runs on a node, `sdcwatch run` included."""
        wanted, found = f"SDCWATCH_SPOOL_DIR={self.spool(name)}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def kill(self, name: str) -> None:
        """Takes a node away: SIGKILL to all of its processes."""
        for pid in self.processes(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes[name].wait(20)

    def final(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("final-*"))]

    def lives(self, rank: int) -> list[list[str]]:
        """(node, world size, "from", first step, "at", trust of the checkpoint) of each life of a rank."""
        return [line.split() for line in (self.folder / f"lives-{rank}").read_text().splitlines()]

    def steps(self, rank: int) -> list[int]:
        return [int(line) for line in (self.folder / f"steps-{rank}").read_text().split()]

    def epochs(self) -> set[str]:
        return {path.name for path in self.folder.glob("spool-*/*/job/e*")}

    def events(self) -> list[dict[str, object]]:
        lines = [p.read_text().splitlines() for p in self.folder.glob("spool-*/*/job/e*/*.events.jsonl")]
        return [json.loads(line)["event"] for one in lines for line in one]

    def latch(self) -> latches.Latch | None:
        return latches.read_latch(self.folder / "checkpoints")

    def scrape(self, name: str) -> str:
        """What this node's agent would serve now."""
        root = user_root(self.spool(name))
        state = StateFile(root, host="127.0.0.1", port=0, outlives_ranks=True)
        return Collector(root, Node("", name, "", name), state, Tally()).collect().text

    def end(self) -> None:
        for name in self.nodes:
            for pid in self.processes(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self.nodes.values():
            process.wait(20)

    def _last_words(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name)[-3000:]}" for name in self.nodes)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> str:
    """SHA-256 of the final weights of an undisturbed run on two ranks."""
    job = Job(tmp_path_factory.mktemp("clean") / "job", "clean").start()
    try:
        assert job.statuses() == [0, 0], job._last_words()
        assert len(job.final()) == 2
        assert len(set(job.final())) == 1
        return job.final()[0]
    finally:
        job.end()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """`job(story)` makes a job; what it started is ended with the test."""
    made: list[Job] = []

    def make(story: str, **options: int) -> Job:
        made.append(Job(tmp_path / story, story, **options))
        return made[-1]

    yield make
    for one in made:
        one.end()


def test_kill_9_of_one_rank_ends_with_the_weights_of_an_undisturbed_run(job: Callable[..., Job], clean: str) -> None:
    """torchrun restarts by itself: a new epoch from a checked checkpoint, no event, no latch, no release needed."""
    one = job("kill").start()
    assert one.statuses() == [0, 0]
    assert one.final() == [clean] * 2
    assert len(one.lives(0)) == len(one.epochs()) == 2
    assert int(one.lives(0)[1][3]) > 0  # resumed, not begun again
    assert one.events() == []
    assert one.latch() is None
    assert "state=halted" not in one.log("a") + one.log("b")


def test_node_that_is_lost_and_comes_back_takes_other_ranks_and_the_weights_are_the_same(
    job: Callable[..., Job], clean: str
) -> None:
    """Every process of a node gets SIGKILL in the middle of a step. Its successor joins: the ranks have moved, no
    verdict spans the two epochs, nobody is accused, and the final weights are those of an undisturbed run."""
    one = job("wait").start()
    one.until((one.folder / "struck").exists, "node a stands in its fifth step")
    one.kill("a")
    one.start("a")
    ended = one.statuses()
    if ended == [1, 1] and "role_info" in one.log("b"):
        # torchrun's own race: its new round still counted the dead node, and it gave up after a minute, before any
        # rank had started. A scheduler starts such a job again.
        assert len(one.lives(0)) == 1
        one.start("b", "a")
        ended = one.statuses()
    assert ended == [0, 0]
    assert one.final() == [clean] * 2
    assert [life[0] for life in one.lives(0)] == ["a", "b"]
    assert [life[0] for life in one.lives(1)] == ["b", "a"]
    assert len(one.epochs()) == 2
    assert one.events() == []
    assert one.latch() is None


def test_world_that_is_smaller_after_a_lost_node_is_a_new_epoch_without_a_verdict(job: Callable[..., Job]) -> None:
    """Elastic: two of three ranks go on from a checked checkpoint, checks run on them, and nobody is accused."""
    one = job("wait", ranks_on_b=2, least_nodes=1).start()
    one.until((one.folder / "struck").exists, "node a stands in its fifth step")
    one.kill("a")
    assert one.statuses("b") == [0]
    assert len(one.final()) == 2
    assert len(set(one.final())) == 1
    assert [life[1] for life in one.lives(0)] == ["3", "2"]
    assert int(one.lives(0)[1][3]) > 0
    assert one.steps(0)[-1] == 11
    assert len(one.epochs()) == 2
    assert one.events() == []
    scraped = one.scrape("b")
    assert 'sdc_world_size{training_job="job",training_cluster=""} 2' in scraped
    assert 'sdc_checks_total{training_job="job",training_cluster="",check="weight_checksum"} 0' not in scraped


def test_loop_that_catches_everything_cannot_swallow_a_halt(job: Callable[..., Job], clean: str) -> None:
    """No rank takes a further step, torchrun's restarts meet the latch, and `sdcwatch run` waits; once released, both
    nodes start afresh from a clean checkpoint, to the weights of an undisturbed run."""
    one = job("swallow", restarts=1).start()
    one.until(lambda: all("state=halted" in one.log(n) for n in "ab"), "both nodes wait", 180.0)
    halted = one.latch()
    assert halted is not None
    assert halted.step == 5
    assert one.steps(0) == one.steps(1) == [0, 1, 2, 3, 4]
    assert one.final() == []
    latches.release(one.folder / "checkpoints", halted.latch_id, by="ada", reason="the cable was replaced")
    assert one.statuses() == [0, 0]
    assert one.final() == [clean] * 2
    assert len(one.lives(0)) == 2  # restarts under the latch never got past the monitor
    assert {(e["check"], e["step"], tuple(e["suspects"])) for e in one.events()} == {("gradient_checksum", 5, ())}  # type: ignore[arg-type]


def test_preemption_pages_nobody_and_the_next_start_ends_with_the_same_weights(
    job: Callable[..., Job], clean: str
) -> None:
    """SIGTERM to `sdcwatch run` on every node in the middle of a step: torchrun's own status, no event, no latch, and
    the agents say at once that nothing trains, so no liveness alert is left burning."""
    one = job("wait").start()
    one.until((one.folder / "struck").exists, "node a stands in its fifth step")
    assert 'state="training"} 1' in one.scrape("a")
    for process in one.nodes.values():
        process.send_signal(signal.SIGTERM)
    assert one.statuses() == [torchruns_own_status_after_sigterm(one.folder)] * 2
    assert one.processes("a") == one.processes("b") == []
    assert one.events() == []
    assert one.latch() is None
    for name in "ab":
        scraped = one.scrape(name)
        assert 'state="training"} 0' in scraped
        assert 'state="halted"} 1' not in scraped
        assert f'training_node="{name}"' in scraped  # what the ranks counted is still served
    one.start()
    assert one.statuses() == [0, 0]
    assert one.final() == [clean] * 2
    assert one.events() == []


def torchruns_own_status_after_sigterm(folder: Path) -> int:
    """How a torchrun without `sdcwatch run` ends when it is told to."""
    ready, script = folder / "ready", folder / "stand.py"
    script.write_text(f"import pathlib, signal\npathlib.Path({str(ready)!r}).touch()\nsignal.pause()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as torchrun:
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        torchrun.terminate()
        status = torchrun.wait(60)
    return 128 - status if status < 0 else status
