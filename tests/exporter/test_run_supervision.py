"""`sdcwatch run` with real child processes: it waits out a latch, starts afresh, and otherwise is not there."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sdcwatch.latch import files as latches
from sdcwatch.launch import launcher
from sdcwatch.spool.folders import job_root, user_root

LATCH = latches.Latch(
    latch_id="sdc-00112233445566aa",
    training_job="job",
    epoch="e1-00000000",
    step=20,
    check="replay",
    kind="attributed",
    time=1_800_000_000.0,
    named=(latches.NamedRank(1, "node-b", "i-b", "CPU-i-b-0"),),
    nodes=(latches.LatchNode("node-a", "i-a"), latches.LatchNode("node-b", "i-b")),
    last_clean_step=10,
    trust_needed="verified",
    checkpoint_dir=None,
    sentence="rank 1 computes wrong gradients",
)


def unnamed(number: int) -> latches.Latch:
    return dataclasses.replace(
        LATCH, latch_id=f"sdc-000000000000000{number}", named=(), kind="inconclusive", time=time.time()
    )


def until(condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)


@dataclasses.dataclass
class Node:
    """One node: its spool, its `sdcwatch run`, and the log that each life of its launcher adds a line to."""

    name: str
    root: Path
    shared: Path | None
    process: subprocess.Popen[str] | None = None

    @property
    def spool(self) -> Path:
        return job_root(self.root / "spool", "job")

    @property
    def uid_root(self) -> Path:
        return user_root(self.root / "spool")

    def lives(self) -> int:
        log = self.root / "lives"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def said(self) -> str:
        return (self.root / "stderr").read_text()

    def start(self, script: str, *options: str, preflight: str = "true") -> None:
        """Starts `sdcwatch run` over a launcher that logs its life and then runs `script` (`life` counts from 1)."""
        self.root.mkdir(parents=True, exist_ok=True)
        program = self.root / "launcher.py"
        program.write_text(
            "import os, signal, sys, time\n"
            f"log = open({str(self.root / 'lives')!r}, 'a+'); log.write('x\\n'); log.flush(); log.seek(0)\n"
            "life = len(log.readlines())\n" + textwrap.dedent(script)
        )
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SDCWATCH_")}
        environment |= {
            "SDCWATCH_JOB": "job",
            "SDCWATCH_MAX_OVERHEAD": "0",
            "SDCWATCH_NODE": f"node-{self.name}",
            "SDCWATCH_INSTANCE": f"i-{self.name}",
            "SDCWATCH_SPOOL_DIR": str(self.root / "spool"),
        }
        if self.shared is not None:
            environment["SDCWATCH_CHECKPOINT_DIR"] = str(self.shared)
        command = ["-c", "import sys; from sdcwatch.cli import main; sys.exit(main())", "run", "--poll", "0.05"]
        with open(self.root / "stderr", "w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--preflight", preflight, *options, "--", sys.executable, str(program)],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                text=True,
            )

    def status(self, seconds: float = 20.0) -> int:
        assert self.process is not None
        return self.process.wait(timeout=seconds)


MakeNode = Callable[..., Node]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[MakeNode]:
    """`node("a")` makes a node; what it started is ended with the test."""
    made: list[Node] = []

    def make(name: str = "a", *, shared: bool = True) -> Node:
        made.append(Node(name, tmp_path / name, tmp_path / "shared" if shared else None))
        return made[-1]

    yield make
    for one in made:
        if one.process is not None and one.process.poll() is None:
            one.process.terminate()
            try:
                one.process.wait(10)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()


def halting(latch: latches.Latch, *places: Path | None, beside: tuple[Node, ...] = ()) -> str:
    """A launcher script whose first life leaves a latch and fails as torchrun would, and whose second succeeds.

    The first life waits until the launchers of the nodes `beside` it live, too.
    """
    lines = json.dumps(latches.latch_record(latch))
    return f"""
        if life == 1:
            while not all(map(os.path.exists, {[str(n.root / "lives") for n in beside]!r})):
                time.sleep(0.01)
            for place in {[str(p) for p in places]!r}:
                os.makedirs(place, exist_ok=True)
                open(os.path.join(place, 'new'), 'w').write({lines!r})
                os.rename(os.path.join(place, 'new'), os.path.join(place, 'HALTED.json'))
            sys.exit(1)
        sys.exit(0)
    """


@pytest.mark.parametrize(
    ("script", "status"),
    [("sys.exit(0)", 0), ("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
def test_without_a_latch_the_launchers_own_status_comes_back(node: MakeNode, script: str, status: int) -> None:
    """A normal end, a failure and a death by signal (128 + number) are passed on and nothing is started again."""
    a = node()
    a.start(script)
    assert a.status() == status
    assert a.lives() == 1


def test_halted_launcher_is_started_afresh_after_the_release(node: MakeNode) -> None:
    """While a named latch stands nothing starts; the preflight result is left for all; after the release it goes on."""
    a = node()
    assert a.shared is not None
    a.start(halting(LATCH, a.spool, a.shared))
    result = a.shared / "preflight" / LATCH.latch_id / "node-a.json"
    until(result.exists, "preflight result")
    assert json.loads(result.read_text())["result"] == "pass"
    assert "state=halted" in a.said()
    assert a.lives() == 1
    assert latches.release(a.shared, LATCH.latch_id, by="service", reason="replaced") == "released"
    assert a.status() == 0
    assert a.lives() == 2
    assert latches.read_release(a.spool, LATCH.latch_id).by == "service"  # type: ignore[union-attr]


def test_latch_that_names_somebody_is_never_released_by_the_job(node: MakeNode) -> None:
    """Every node passes preflight, and still the named node's case decides, not the job."""
    a = node()
    assert a.shared is not None
    a.start(
        halting(dataclasses.replace(LATCH, nodes=(latches.LatchNode("node-a", "i-a"),)), a.shared), "--latch-wait", "1"
    )
    assert a.status() == 86
    assert "preflight on node-a: pass" in a.said()
    assert latches.read_latch(a.shared) is not None


def test_release_in_the_own_spool_frees_the_shared_folder_too(node: MakeNode) -> None:
    """The agent of one node released its own copy: every node that shares the checkpoint folder goes on."""
    a, b = node("a"), node("b")
    a.start(halting(LATCH, a.spool, a.shared, beside=(b,)))
    b.start(halting(LATCH, b.spool, beside=(a,)))
    for one in (a, b):
        until(lambda one=one: "state=halted" in one.said(), f"{one.name} waits")  # type: ignore[misc]
    latches.release(a.spool, LATCH.latch_id, by="service", reason="replaced")
    assert (a.status(), b.status()) == (0, 0)
    assert (a.lives(), b.lives()) == (2, 2)


def test_latch_that_stands_before_the_first_start_is_waited_out(node: MakeNode) -> None:
    """A rescheduled job, or the node that replaces a bad one, does not start under a latch."""
    a = node()
    latches.write_latch([a.shared], LATCH)  # type: ignore[list-item]
    a.start("sys.exit(0)")
    until(lambda: "state=halted" in a.said(), "a waits")
    assert a.lives() == 0
    latches.release(a.shared, LATCH.latch_id, by="ada", reason="ok")  # type: ignore[arg-type]
    assert a.status() == 0
    assert a.lives() == 1


def test_quarantined_node_leaves_and_its_peers_go_on(node: MakeNode) -> None:
    """The case decided replace: the bad node's run exits 86, the good one starts once the latch is released."""
    a, b = node("a"), node("b")
    a.start(halting(LATCH, a.spool, a.shared, beside=(b,)))
    b.start(halting(LATCH, b.spool, beside=(a,)))
    until(lambda: "state=halted" in b.said(), "b waits")
    latches.write_quarantine(b.uid_root, "i-b", "case-1", "service")
    assert b.status() == 86
    assert b.lives() == 1
    until(lambda: "state=halted" in a.said(), "a waits")
    latches.release(a.shared, LATCH.latch_id, by="service", reason="replaced")  # type: ignore[arg-type]
    assert a.status() == 0


def test_quarantine_of_another_instance_is_ignored(node: MakeNode) -> None:
    """A mark that a re-used disk brought along does not keep a new instance out."""
    a = node()
    latches.write_quarantine(a.uid_root, "i-old", "case-1", "service")
    a.start("sys.exit(0)")
    assert a.status() == 0


def test_a_quarantined_node_does_not_even_start(node: MakeNode) -> None:
    """Requeued or restarted onto the machine that is to go: 86 before the launcher lives once; it says which case."""
    a = node()
    latches.write_quarantine(a.uid_root, "i-a", "case-7", "service")
    a.start("sys.exit(0)", "--preflight-first", preflight="sh -c 'touch judged'")
    assert a.status() == 86
    assert a.lives() == 0
    assert "instance i-a is quarantined (case case-7)" in a.said()
    assert "preflight" not in a.said()  # nothing needs to be judged here


FAILS = """sh -c 'echo "{\\"outcome\\": \\"fail\\"}"; exit 1'"""


@pytest.mark.parametrize(
    ("check", "status", "lives", "said"),
    [
        (FAILS, 86, 0, "preflight before the first step: fail (exited 1); nothing is started"),
        ("true", 0, 1, "preflight before the first step: pass"),
        ("false", 0, 1, "preflight before the first step: unknown (exited 1)"),
        ("no-such-program", 0, 1, "preflight before the first step: unknown (cannot start no-such-program"),
    ],
    ids=["fails", "passes", "crashes", "missing"],
)
def test_preflight_first_keeps_out_a_machine_that_fails_it(
    node: MakeNode, check: str, status: int, lives: int, said: str
) -> None:
    """A proven failure ends with 86 before any step; a check that could not judge accuses nobody, and that is said."""
    a = node()
    a.start("sys.exit(0)", "--preflight-first", preflight=check)
    assert (a.status(), a.lives()) == (status, lives)
    assert said in a.said()


def test_a_signal_ends_a_preflight_that_runs_first(node: MakeNode) -> None:
    """Preempted before the first step: the check ends at once, and nothing starts."""
    a = node()
    mark = a.root / "judging"
    a.start("sys.exit(0)", "--preflight-first", preflight=f"sh -c 'touch {mark}; sleep 600'")
    until(mark.exists, "the check runs")
    assert a.process is not None
    a.process.send_signal(signal.SIGTERM)
    assert a.status() == 128 + signal.SIGTERM
    assert a.lives() == 0


@pytest.mark.integration
def test_the_real_preflight_lets_a_healthy_machine_start(node: MakeNode) -> None:
    """`sdcwatch preflight` itself, on this machine's CPU, before the first step."""
    a = node()
    a.start("sys.exit(0)", "--preflight-first", preflight=f"{sys.executable} -m sdcwatch.preflight.command --json")
    assert (a.status(120), a.lives()) == (0, 1)
    assert "preflight before the first step: pass" in a.said()


BROKEN = """
import sys
from sdcwatch.cli import main
from sdcwatch.testing import BrokenDevice
with BrokenDevice(["mm"]):
    status = main(["preflight", "--json", "--seconds", "0.1", "--device", "cpu"])
sys.exit(status)
"""


@pytest.mark.integration
@pytest.mark.parametrize("device", ["healthy", "broken"])
def test_a_replacement_is_taken_after_a_real_preflight_and_a_broken_one_is_not(node: MakeNode, device: str) -> None:
    """It comes up under the latch that named the node before it, is judged, and starts after the release, or leaves."""
    a, fresh = node("a"), node("fresh")
    assert a.shared is not None
    words = ["-m", "sdcwatch.preflight.command", "--json", "--seconds", "0.1", "--device", "cpu"]
    command = shlex.join([sys.executable, *(words if device == "healthy" else ["-c", BROKEN])])
    latches.write_latch([a.shared], LATCH)
    fresh.start("sys.exit(0)", "--preflight-first", preflight=command)
    result = a.shared / "preflight" / LATCH.latch_id / "node-fresh.json"
    until(result.exists, "the replacement judged itself", 120.0)
    kept = json.loads(result.read_text())
    assert kept["result"] == ("pass" if device == "healthy" else "fail")
    (tested,) = kept["devices"]
    assert (tested["device"], tested["outcome"]) == ("cpu", kept["result"])
    assert ("not the recorded bits" in kept["output"]) == (device == "broken")
    assert fresh.lives() == 0
    latches.release(a.shared, LATCH.latch_id, by="service", reason="replaced")
    assert fresh.status(120.0) == (0 if device == "healthy" else 86)
    assert fresh.lives() == (1 if device == "healthy" else 0)
    assert "preflight before the first step: " + kept["result"] in fresh.said()


def test_wait_that_runs_out_ends_with_86(node: MakeNode) -> None:
    """Nobody released it in time: this node leaves the job, the latch stays."""
    a = node()
    a.start(halting(LATCH, a.spool), "--latch-wait", "0.5")
    assert a.status() == 86
    assert a.lives() == 1
    assert latches.read_latch(a.spool) == LATCH


def test_nobody_named_and_all_nodes_pass_restarts_by_itself(node: MakeNode) -> None:
    """A reduce-path halt: each node passes preflight, the job releases the latch itself, all start again."""
    a, b = node("a"), node("b")
    latch = unnamed(1)
    gate = a.root.parent / "gate"
    a.start(halting(latch, a.spool, a.shared, beside=(b,)))
    b.start(halting(latch, b.spool, beside=(a,)), preflight=f"sh -c 'while ! test -e {gate}; do sleep 0.02; done'")
    until(lambda: "preflight on node-a: pass" in a.said(), "a judged itself")
    assert latches.read_latch(a.shared) == latch  # type: ignore[arg-type]
    gate.touch()
    assert (a.status(), b.status()) == (0, 0)
    assert (a.lives(), b.lives()) == (2, 2)
    assert latches.read_release(a.shared, latch.latch_id).by == "job"  # type: ignore[arg-type,union-attr]


@pytest.mark.parametrize("preflight", ["false", "sh -c 'exit 3'", "/no/such/program"])
def test_node_that_fails_or_cannot_judge_keeps_the_job_waiting(node: MakeNode, preflight: str) -> None:
    """Only a pass on every node lets the job go on by itself; the rest waits for a person."""
    a, b = node("a"), node("b")
    latch = unnamed(1)
    a.start(halting(latch, a.spool, a.shared, beside=(b,)))
    b.start(halting(latch, b.spool, beside=(a,)), "--latch-wait", "1.5", preflight=preflight)
    assert b.status() == 86
    assert latches.read_latch(a.shared) == latch  # type: ignore[arg-type]
    assert a.lives() == 1


def test_second_latch_that_names_nobody_within_a_day_waits_for_a_person(node: MakeNode) -> None:
    """One reduce-path fault is weather, two are a fault that somebody has to look for."""
    a = node()
    assert a.shared is not None
    latches.write_latch([a.shared], unnamed(1))
    latches.release(a.shared, unnamed(1).latch_id, by="job", reason="passed")
    second = dataclasses.replace(unnamed(2), nodes=(latches.LatchNode("node-a", "i-a"),))
    a.start(halting(second, a.shared))
    until(lambda: "a person must release it" in a.said(), "a says that it waits for a person")
    assert a.lives() == 1
    latches.release(a.shared, second.latch_id, by="ada", reason="cable replaced")
    assert a.status() == 0


def test_latch_of_steps_that_failed_before_on_other_hardware_waits_for_a_person(node: MakeNode) -> None:
    """Nobody is named and every node passes, as where the job releases by itself; `same_step_as` alone keeps it."""
    a = node()
    latch = dataclasses.replace(
        unnamed(1), nodes=(latches.LatchNode("node-a", "i-a"),), same_step_as="sdc-00112233445566bb"
    )
    a.start(halting(latch, a.spool, a.shared), "--latch-wait", "2")
    until(lambda: "preflight on node-a: pass" in a.said(), "a judged itself")
    assert a.status() == 86
    assert a.lives() == 1
    assert latches.read_latch(a.shared) == latch  # type: ignore[arg-type]
    assert "only a person releases this" in a.said()
    latches.release(a.shared, latch.latch_id, by="ada", reason="the data of that step was bad")  # type: ignore[arg-type]
    a.start("sys.exit(0)")
    assert a.status() == 0


def test_single_node_without_a_shared_folder_releases_itself(node: MakeNode) -> None:
    """Where the spool is the only place, a job of one node can still go on by itself."""
    a = node(shared=False)
    a.start(halting(dataclasses.replace(unnamed(1), nodes=(latches.LatchNode("node-a", "i-a"),)), a.spool))
    assert a.status() == 0
    assert a.lives() == 2


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_ending_signals_reach_the_whole_group_and_end_the_run(node: MakeNode, number: int, status: int) -> None:
    """What a scheduler sends arrives at the launcher and its children, and no latch keeps a preempted job alive."""
    a = node()
    a.start(
        f"""
        import subprocess
        note = {str(a.root / "heard")!r}
        child = "import signal, sys\\n"
        child += "signal.signal(%d, lambda *x: (open(%r, 'w').write('child'), sys.exit(0)))\\n" % ({int(number)}, note)
        child += "open(%r, 'w').write('')\\nsignal.pause()" % (note + '.ready')
        child = subprocess.Popen([sys.executable, "-c", child])
        os.makedirs({str(a.spool)!r}, exist_ok=True)
        def heard(number, frame):
            child.wait(10)
            open({str(a.spool / "HALTED.json")!r}, 'w').write({json.dumps(latches.latch_record(LATCH))!r})
            sys.exit(128 + number)
        signal.signal({int(number)}, heard)
        while not os.path.exists(note + '.ready'):
            time.sleep(0.01)
        open({str(a.root / "ready")!r}, 'w').write('')
        while True:
            signal.pause()
        """
    )
    until((a.root / "ready").exists, "launcher is ready")
    a.process.send_signal(number)  # type: ignore[union-attr]
    assert a.status() == status
    assert (a.root / "heard").read_text() == "child"
    assert a.lives() == 1


def test_telling_signals_are_passed_on_and_nothing_ends(node: MakeNode) -> None:
    """SIGUSR1 ("write a checkpoint, time is nearly up") reaches the launcher, which goes on."""
    a = node()
    a.start(
        f"""
        got = []
        signal.signal(signal.SIGUSR1, lambda *x: got.append(1))
        open({str(a.root / "ready")!r}, 'w').write('')
        end = time.monotonic() + 15
        while not got and time.monotonic() < end:
            time.sleep(0.01)
        sys.exit(0 if got else 9)
        """
    )
    until((a.root / "ready").exists, "launcher is ready")
    a.process.send_signal(signal.SIGUSR1)  # type: ignore[union-attr]
    assert a.status() == 0


def test_signal_while_halted_ends_the_wait(node: MakeNode) -> None:
    """A job that waits for its new node can still be cancelled."""
    a = node()
    a.start(halting(LATCH, a.spool))
    until(lambda: "preflight on" in a.said(), "a waits")
    a.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
    assert a.status() == 143
    assert a.lives() == 1


def test_launcher_that_catches_everything_is_ended_and_started_afresh(node: MakeNode) -> None:
    """A wrapper that restarts its ranks for ever and ignores SIGTERM's meaning does not train under a latch."""
    a = node()
    record = json.dumps(latches.latch_record(LATCH))
    a.start(
        f"""
        if life > 1:
            sys.exit(0)
        os.makedirs({str(a.spool)!r}, exist_ok=True)
        open({str(a.spool / "new")!r}, 'w').write({record!r})
        os.rename({str(a.spool / "new")!r}, {str(a.spool / "HALTED.json")!r})
        while True:
            try:
                time.sleep(0.05)
                raise RuntimeError
            except Exception:
                pass
        """,
        "--halt-grace",
        "0.3",
    )
    until(lambda: "preflight on" in a.said(), "the launcher was ended and a waits")
    assert "outstays the latch" in a.said()
    latches.release(a.spool, LATCH.latch_id, by="ada", reason="ok")
    assert a.status() == 0
    assert a.lives() == 2


def test_latch_released_while_the_launcher_spends_its_restarts_starts_it_afresh(node: MakeNode) -> None:
    """The release came before torchrun gave up: that failure is the halt's, not the end of the job."""
    a = node()
    record = json.dumps(latches.latch_record(LATCH))
    a.start(
        f"""
        if life > 1:
            sys.exit(0)
        os.makedirs({str(a.spool)!r}, exist_ok=True)
        open({str(a.spool / "new")!r}, 'w').write({record!r})
        os.rename({str(a.spool / "new")!r}, {str(a.spool / "HALTED.json")!r})
        while os.path.exists({str(a.spool / "HALTED.json")!r}):
            time.sleep(0.02)
        sys.exit(1)
        """
    )
    until((a.spool / "HALTED.json").exists, "latch")
    latches.release(a.spool, LATCH.latch_id, by="ada", reason="ok")
    assert a.status() == 0
    assert a.lives() == 2


def test_identity_that_contradicts_the_agent_is_refused(node: MakeNode) -> None:
    """`node.json` and the environment name this machine differently: wrong use, both are printed."""
    a = node()
    a.uid_root.mkdir(parents=True)
    (a.uid_root / "node.json").write_text(json.dumps({"schema": 1, "node": "node-x", "instance": "i-a", "cluster": ""}))
    a.start("sys.exit(0)")
    assert a.status() == 2
    assert "node-x" in a.said()
    assert "node-a" in a.said()


@pytest.mark.parametrize(
    ("options", "words"),
    [([], "nothing to run"), (["--poll", "0", "--", "true"], "--poll"), (["--", "/no/such"], "cannot start")],
)
def test_wrong_use_is_said_and_is_2(options: list[str], words: str, tmp_path: Path) -> None:
    """Each mistake is one sentence that names what to change."""
    environment = {**os.environ, "SDCWATCH_JOB": "job", "SDCWATCH_SPOOL_DIR": str(tmp_path)}
    command = [sys.executable, "-c", "import sys; from sdcwatch.cli import main; sys.exit(main())", "run", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert words in done.stderr


def test_job_name_comes_from_torchruns_own_words(node: MakeNode, tmp_path: Path) -> None:
    """Without any setting the ranks take `--rdzv-id` as the job's name, so this command does, too."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SDCWATCH_", "SLURM_", "TORCHELASTIC_"))}
    environment["SDCWATCH_SPOOL_DIR"] = str(tmp_path / "spool")
    note = tmp_path / "job"
    program = f"import os; open({str(note)!r}, 'w').write(os.environ['SDCWATCH_JOB'])"
    command = [sys.executable, "-c", "import sys; from sdcwatch.cli import main; sys.exit(main())", "run", "--"]
    base = [sys.executable, "-c", program]
    done = subprocess.run(
        [*command, *base, "--rdzv-id=llm-7"], env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert note.read_text() == "llm-7"
    nameless = subprocess.run(
        [*command, *base], env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert nameless.returncode == 2
    assert "SDCWATCH_JOB" in nameless.stderr


DEAF = """
import signal, subprocess, sys, time
if sys.argv[1:]:
    subprocess.Popen(["sleep", "60"], start_new_session=True)  # as torchrun's workers: only their launcher can end them
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("worker", [False, True])
def test_a_launcher_that_hears_nothing_is_killed_soon_once_its_workers_are_gone(
    worker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torchrun that waits in its store for peers has nothing left to end; one with a living worker keeps its time."""
    monkeypatch.setattr(launcher, "ALONE_SECONDS", 0.5)
    command = [sys.executable, "-c", DEAF, *(["worker"] if worker else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert launcher.workers(child) is worker
        living = [int(pid) for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
        began = time.monotonic()
        launcher.end(child, kill_after=3.0, had_workers=True)
        assert (time.monotonic() - began > 2.5) is worker
        for pid in living:
            os.kill(pid, signal.SIGKILL)
