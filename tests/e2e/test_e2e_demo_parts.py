"""The demo's own parts: what it calls success, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def stage() -> Iterator[Any]:
    """The demo's modules, imported as `demo/main.py` imports them."""
    sys.path.insert(0, str(ROOT / "demo"))
    try:
        yield lambda name: importlib.import_module(f"stage.{name}")
    finally:
        sys.path.remove(str(ROOT / "demo"))


def story(stage: Any, name: str) -> tuple[Any, Any]:
    """A scenario and the facts of a run in which everything went as it must."""
    plan, facts = stage("plan"), stage("facts")
    scenario, expected, bad = plan.SCENARIOS[name], plan.SCENARIOS[name].expected, plan.instance_id(plan.BAD)
    ranks = {r: {"instance": plan.instance_id(r), "node": f"hyperpod-{plan.instance_id(r)}"} for r in range(4)}
    log = [
        {"kind": "start", "rank": r, "instance": ranks[r]["instance"], "time": 1.0, "resumed_from": None} for r in ranks
    ]
    log += [{"kind": "begin", "rank": r, "instance": ranks[r]["instance"], "time": 2.0, "step": 1} for r in ranks]
    after = {r: "i-new" if expected.named and r == plan.BAD else ranks[r]["instance"] for r in ranks}
    if expected.check is not None:
        trust = {"resumed_from": expected.resumed_from_step, "trust": expected.resumed_from_trust}
        log += [{"kind": "start", "rank": r, "instance": after[r], "time": 20.0, **trust} for r in ranks]
        log += [{"kind": "begin", "rank": r, "instance": after[r], "time": 21.0, "step": 16} for r in ranks]
    log += [{"kind": "done", "rank": r, "instance": after[r], "time": 30.0, "sha256": "same"} for r in ranks]
    events = ()
    if expected.check is not None:
        event = facts.Event(
            id="sdc-1",
            step=expected.detected_step,
            check=expected.check,
            kind=expected.verdict,
            time=10.0,
            suspects=(plan.BAD,) if expected.named else (),
            differing=(plan.BAD,),
            candidates=() if expected.named else (1, 2),
            path="reduce",
            sentence="s",
            ranks=ranks,
            durable=10.1,
        )
        events = (event,)
    return scenario, facts.Facts(
        events=events,
        log=tuple(log),
        moments={"detection": 10.0, "webhook": 14.5, "proven": 19.0, "paged": 15.0} if events else {},
        case={"state": "closed", "outcome": "replaced"} if expected.named else None,
        released={"released": {"by": "service" if expected.named else "job", "time": 19.5}} if events else None,
        preflight={f"n{r}": "pass" for r in ranks},
        replace_calls=expected.replace_calls,
        replacements={bad: "i-new"},
        alerts=frozenset({"SDCWatchdog"}),
    )


NAMES = ("compute", "weight", "optimizer", "gradient", "none")


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_went_as_it_must_has_no_problem_and_every_key(stage: Any, name: str) -> None:
    """Each fault's good story is accepted, and the report has exactly the promised keys in their order."""
    report = stage("report")
    scenario, facts = story(stage, name)
    built = report.build(scenario, facts, "same")
    assert tuple(built) == report.KEYS
    assert report.problems(scenario, built, facts) == []
    assert json.loads(json.dumps(built)) == built
    if name != "none":
        assert built["seconds_event_to_webhook"] == 4.5


def spoil(stage: Any, name: str, facts: Any, what: str) -> tuple[Any, str]:
    """Facts with one thing wrong, and the clean run's hash."""
    replace = dataclasses.replace
    bad = stage("plan").instance_id(stage("plan").BAD)
    if what == "other weights":
        return facts, "another"
    if what == "a step on the bad node":
        late = {"kind": "begin", "rank": 2, "instance": bad, "time": 12.0, "step": 22}
        return replace(facts, log=(*facts.log, late)), "same"
    if what == "a second replace call":
        return replace(facts, replace_calls=facts.replace_calls + 1), "same"
    if what == "an alert":
        return replace(facts, alerts=facts.alerts | {"SDCReplicaMismatch"}), "same"
    if what == "no watchdog":
        return replace(facts, alerts=frozenset()), "same"
    event = facts.events[0] if facts.events else story(stage, "weight")[1].events[0]
    if what == "a healthy rank is named":
        return replace(facts, events=(replace(event, suspects=(0,)),)), "same"
    if what == "one more event":
        extra = replace(event, id="sdc-2", step=event.step + 5, kind="software", suspects=())
        return replace(facts, events=(*facts.events, extra)), "same"
    assert what == "one rank's weights differ"
    return replace(facts, log=(*facts.log[:-1], {**facts.log[-1], "sha256": "odd"})), "same"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *((n, w) for n in NAMES for w in ("other weights", "a second replace call", "one more event", "no watchdog")),
        *((n, "a healthy rank is named") for n in NAMES),
        *((n, "one rank's weights differ") for n in NAMES),
        *((n, "a step on the bad node") for n in NAMES if n != "none"),
        ("none", "an alert"),
    ],
)
def test_one_thing_wrong_is_a_problem(stage: Any, name: str, what: str) -> None:
    """No fault's story is accepted when a single fact of it is not what it must be."""
    report = stage("report")
    scenario, good = story(stage, name)
    facts, clean = spoil(stage, name, good, what)
    wrong = report.problems(scenario, report.build(scenario, facts, clean), facts)
    assert wrong
    assert report.sentence(scenario, report.build(scenario, facts, clean), facts, wrong).startswith("NOT as expected")


def test_gradient_story_needs_the_jobs_own_release_and_the_same_nodes(stage: Any) -> None:
    """A release by anybody else, a failed preflight or a replaced node spoils the reduce-path story."""
    report = stage("report")
    scenario, good = story(stage, "gradient")
    for change in (
        {"released": {"released": {"by": "service", "time": 19.5}}},
        {"preflight": {"n0": "pass", "n1": "unknown", "n2": "pass", "n3": "pass"}},
        {
            "log": (
                *good.log,
                {"kind": "start", "rank": 2, "instance": "i-new", "time": 25.0, "resumed_from": 15, "trust": "checked"},
            )
        },
        {"moments": {"detection": 10.0}},
    ):
        facts = dataclasses.replace(good, **change)
        assert report.problems(scenario, report.build(scenario, facts, "same"), facts)


def test_rendered_files_are_those_that_ship_with_this_runs_ports(stage: Any, tmp_path: Path, require: Any) -> None:
    """promtool and amtool accept what is rendered, the service accepts its settings, and tokens are private."""
    plan, render = stage("plan"), stage("render")
    ports = plan.Ports(agent=1001, remediation=1002, pager=1003, simulator=1004, prometheus=1005, alertmanager=1006)
    out = tmp_path.resolve()
    files = render.render(out, ports)
    render.write_targets(files.targets, plan.NODES, ports)
    for command in (
        [require("promtool"), "check", "config", files.prometheus],
        [require("amtool"), "check-config", files.alertmanager],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "127.0.0.1:1006" in files.prometheus.read_text()
    assert "127.0.0.1:1002/v1/alerts" in files.alertmanager.read_text()
    assert "9479" not in files.alertmanager.read_text() + files.prometheus.read_text()
    config = importlib.import_module("sdcwatch_remediation.config").load(files.remediation)
    assert (config.policy.mode, config.policy.confirm, config.policy.settle_seconds) == ("auto", "first", 2.0)
    assert config.agents.port == 1001
    simulator = importlib.import_module("sdcwatch_remediation.simulator.config").SimulatorConfig.from_file(
        files.simulator
    )
    assert [n.address for n in simulator.groups[0].nodes] == list(plan.NODES)
    assert simulator.spares == (plan.SPARE,)
    for token in (files.events_token, files.latch_token, files.webhook_token, files.cases_token):
        assert token.stat().st_mode & 0o077 == 0
        assert len(token.read_text().strip()) >= 32


def run_demo(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "demo" / "main.py"), *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def free_ports(names: tuple[str, ...]) -> dict[str, str]:
    """A free port for each of the demo's variables."""
    probes = {f"DEMO_{name.upper()}_PORT": socket.create_server(("127.0.0.1", 0)) for name in names}
    found = {variable: str(probe.getsockname()[1]) for variable, probe in probes.items()}
    for probe in probes.values():
        probe.close()
    return found


def test_busy_port_is_one_sentence_that_names_the_flag(stage: Any, tmp_path: Path) -> None:
    """Somebody else's Prometheus on the port: nothing is started, status 2."""
    ports = free_ports(stage("plan").PORT_NAMES)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_demo("--out", str(tmp_path / "out"), **(ports | {"DEMO_PROMETHEUS_PORT": str(port)}))
    assert done.returncode == 2, done.stderr
    assert f"127.0.0.1:{port}" in done.stderr
    assert "--prometheus-port" in done.stderr
    assert not (tmp_path / "out" / "logs").exists()


def test_folder_that_is_not_the_demos_own_is_left_alone(tmp_path: Path) -> None:
    """`--out` with somebody's files in it is refused, not emptied."""
    (tmp_path / "thesis.tex").write_text("precious")
    done = run_demo("--out", str(tmp_path))
    assert done.returncode == 2
    assert "--out" in done.stderr
    assert (tmp_path / "thesis.tex").read_text() == "precious"


@pytest.mark.needs("prometheus", "alertmanager", "module:torch")
def test_interrupt_ends_everything_that_was_started(stage: Any, tmp_path: Path) -> None:
    """Ctrl-C in the middle of the reference run: status 130, and no process of this run is left."""
    out = tmp_path / "out"
    words = [sys.executable, str(ROOT / "demo" / "main.py"), "--fault", "none", "--out", str(out)]
    environment = {**os.environ, **free_ports(stage("plan").PORT_NAMES)}
    with open(tmp_path / "said", "wb") as said:
        demo = subprocess.Popen(words, env=environment, stdout=said, stderr=said)
    log = out / "logs" / "reference.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and left(out) > 6):
        assert demo.poll() is None, (tmp_path / "said").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    demo.send_signal(signal.SIGINT)
    assert demo.wait(60) == 130, (tmp_path / "said").read_text()
    assert left(out) == 0


def left(out: Path) -> int:
    """How many processes have this run's folder in their words."""
    found = 0
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += str(out).encode() in words.read_bytes()
        except OSError:
            continue
    return found


def test_end_reaches_grandchildren_that_outlive_their_parent(stage: Any, tmp_path: Path) -> None:
    """A process in a session of its own, whose parent dies at once on SIGTERM, is ended by its id."""
    processes = stage("processes").Processes(tmp_path)
    note = tmp_path / "pid"
    grandchild = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    child = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {grandchild!r}], start_new_session=True)\n"
        f"open({str(note)!r}, 'w').write(str(p.pid))\ntime.sleep(60)"
    )
    started = processes.start("child", [sys.executable, "-c", child])
    deadline = time.monotonic() + 20
    while not (note.exists() and note.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pid = int(note.read_text())
    processes.end([started], patience=2.0)
    assert started.status is not None
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_batches_depend_on_step_and_rank_only(stage: Any) -> None:
    """A run that goes back sees the same bytes again; two ranks and two steps see others."""
    torch: ModuleType = pytest.importorskip("torch")
    gpt = stage("gpt")
    text = torch.arange(4096, dtype=torch.int64).remainder(251).to(torch.uint8)
    shape = gpt.Shape()
    one = gpt.batch_of(text, shape, seed=7, step=3, rank=1)
    again = gpt.batch_of(text, shape, seed=7, step=3, rank=1)
    assert torch.equal(one[0], again[0])
    assert torch.equal(one[0][:, 1:], one[1][:, :-1])
    for step, rank in ((4, 1), (3, 2)):
        assert not torch.equal(one[0], gpt.batch_of(text, shape, seed=7, step=step, rank=rank)[0])


def test_a_loop_changes_two_lines_for_the_watch() -> None:
    """What the training script says it needs for sdcwatch: imports, one constructor, one `with`, one resume."""
    script = (ROOT / "demo" / "train.py").read_text()
    assert script.count("sdcwatch: line 1") == script.count("sdcwatch: line 2") == 1
    assert "monitor.step(step) as s" in script
