"""A real agent process: one a node, killed at any time, started by ranks, silent towards nobody."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sdcwatch.agent import start
from sdcwatch.agent.state import agent_is_alive, read_state
from sdcwatch.settings import Settings
from sdcwatch.spool.folders import user_root

PROMETHEUS = {"X-Prometheus-Scrape-Timeout-Seconds": "10"}
Make = Callable[..., Any]


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.02)
    return found


def value(text: str, name: str, **labels: str) -> list[float]:
    return [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


@pytest.fixture
def busy() -> Iterator[int]:
    """A port of the loopback that somebody else listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_it_serves_what_ranks_wrote_and_says_who_it_is(agent: Make, rank: Make, root: Path) -> None:
    """node.json, agent.json and /metrics agree about the node."""
    rank(0).metrics.set("sdc_training_step", 9)
    running = agent()
    assert value(running.metrics(), "sdc_mismatches_total", rank="0", check="replay") == [0]
    told = json.loads((user_root(root) / "node.json").read_text())
    assert (told["schema"], told["cluster"], told["node"], told["instance"]) == (1, "blue", "n0", "i-0")
    state = read_state(user_root(root))
    assert state is not None
    assert (state.alive, state.pid, state.port) == (True, running.process.pid, running.port)
    assert (state.outlives_ranks, state.scrapes) == (True, ())
    assert value(running.metrics(), "sdc_agent_ranks_seen") == [1]


def test_a_second_agent_ends_with_a_sentence(agent: Make, refused: Make) -> None:
    """The lock in the spool decides, not the port."""
    running = agent()
    status, said = refused()
    assert status == 1
    assert f"process {running.process.pid}" in said
    assert "one a node and user" in said
    assert running.metrics()


def test_a_busy_port_is_a_clear_error(refused: Make, busy: int, root: Path) -> None:
    """It names the port and the option, leaves no lock behind, and does not touch node.json."""
    status, said = refused("--port", busy)
    assert status == 1
    assert f"127.0.0.1:{busy}" in said
    assert "--port" in said
    assert not agent_is_alive(user_root(root))
    assert not (user_root(root) / "node.json").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--host", "0.0.0.0"], "other machines"),
        (["--tls-cert", "x.pem"], "belong together"),
        (["--tls-cert", "x.pem", "--tls-key", "y.pem"], "x.pem"),
        (["--events-token-file", "/nowhere/token"], "/nowhere/token"),
        (["--node", "../evil"], "no name"),
        (["--port", "99999"], "99999"),
        (["--keep", "nan"], "--keep nan"),
        (["--keep", "-1"], "--keep -1"),
        (["--linger", "inf"], "--linger inf"),
        (["--textfile", "/nowhere/sdcwatch.prom"], "no folder /nowhere"),
        (["--textfile", "/tmp"], "is a folder"),
    ],
)
def test_wrong_use_is_refused_with_a_sentence(refused: Make, options: list[str], sentence: str) -> None:
    """Before anything listens."""
    status, said = refused(*options)
    assert status in (1, 2)
    assert sentence in said
    assert "Traceback" not in said


def test_an_open_address_needs_both_a_token_and_tls(refused: Make, token_file: Make) -> None:
    """A token in the clear is no secret."""
    status, said = refused("--host", "0.0.0.0", "--metrics-token-file", token_file("metrics", "secret"))
    assert status == 2
    assert "--tls-cert" in said


def test_a_blank_token_file_refuses_to_start(refused: Make, token_file: Make) -> None:
    """An empty secret would admit an empty bearer."""
    status, said = refused("--latch-token-file", token_file("latch", "  "))
    assert status == 2
    assert "latch token file" in said
    assert "blank" in said


@pytest.mark.parametrize("secret", ["schl\u00fcssel", "a\x00b"])
def test_a_token_that_no_header_carries_refuses_to_start(refused: Make, token_file: Make, secret: str) -> None:
    """Nobody could ever present it; better told at start than by a 401 at three in the morning."""
    status, said = refused("--events-token-file", token_file("events", secret))
    assert status == 2
    assert "printable ASCII" in said


def test_more_than_two_secrets_in_a_file_refuse_to_start(refused: Make, token_file: Make) -> None:
    """Two are a rotation; three are a mistake."""
    status, said = refused("--events-token-file", token_file("events", "one\ntwo\nthree"))
    assert status == 2
    assert "two at once while rotating" in said


def test_a_user_without_a_password_refuses_to_start(refused: Make, token_file: Make) -> None:
    """And the other way round; neither is guessed at."""
    for options in (("--metrics-user", "p"), ("--metrics-password-file", token_file("password", "x"))):
        status, said = refused(*options)
        assert status == 2
        assert "belong together" in said
    status, said = refused("--metrics-user", "a:b", "--metrics-password-file", token_file("password", "x"))
    assert (status, "without a colon" in said) == (2, True)


def test_sigterm_ends_it_cleanly(agent: Make, root: Path) -> None:
    """Status 0, the lock is free, nothing on stderr."""
    running = agent()
    running.process.send_signal(signal.SIGTERM)
    _, said = running.process.communicate(timeout=20)
    assert (running.process.returncode, said) == (0, "")
    assert not agent_is_alive(user_root(root))


def test_counters_survive_kill_9_of_the_agent_and_of_a_rank(agent: Make, rank: Make) -> None:
    """Whatever is restarted in whatever order, no counter is ever seen lower."""
    seen = []
    running = agent("--keep", "3600")
    for epoch, (count, restore) in enumerate([(5, False), (3, False), (5, True), (5, False)]):
        one = rank(0, epoch, restore=restore)
        one.metrics.inc("sdc_checks_total", count, check="replay")
        one.write()
        seen += value(running.metrics(), "sdc_checks_total")
        running.kill()
        one.spool.close()
        running = agent()
        seen += value(running.metrics(), "sdc_checks_total")
    assert seen == [5, 5, 8, 8, 13, 13, 18, 18]


def test_only_a_scrape_of_prometheus_counts_and_survives_the_agent(agent: Make, rank: Make, root: Path) -> None:
    """A halt waits for scrapes; somebody's curl must not end that wait. The next agent knows of them too."""
    rank(0).event(time.time())
    running = agent()
    assert value(running.metrics(), "sdc_agent_events_pending") == [1]
    assert read_state(user_root(root)).scrapes == ()  # type: ignore[union-attr]
    before = time.time()
    running.metrics(**PROMETHEUS)
    (when,) = until(lambda: read_state(user_root(root)).scrapes)  # type: ignore[union-attr]
    assert before <= when <= time.time()
    text = running.metrics()
    assert value(text, "sdc_agent_events_pending") == [0]
    assert value(text, "sdc_agent_last_scrape_timestamp_seconds") == [when]
    running.kill()
    assert not read_state(user_root(root)).alive  # type: ignore[union-attr]
    assert value(agent().metrics(), "sdc_agent_last_scrape_timestamp_seconds") == [when]


def test_it_lingers_after_the_last_rank_and_then_goes(agent: Make, rank: Make) -> None:
    """A job's agent must still be there for the scrape after the job's end, and not for ever."""
    one = rank(0)
    running = agent("--linger", "0.5", "--started-by-rank")
    running.metrics()
    with pytest.raises(subprocess.TimeoutExpired):
        running.process.wait(timeout=2)
    one.spool.close()
    assert running.process.wait(timeout=20) == 0


def test_the_text_file_holds_the_same_families(agent: Make, rank: Make, tmp_path: Path) -> None:
    """For node_exporter's textfile collector, readable by its user, never half written."""
    rank(0)
    path = tmp_path / "sdcwatch.prom"
    agent("--textfile", path)
    until(path.exists)
    assert value(path.read_text(), "sdc_mismatches_total", check="replay") == [0]
    assert path.stat().st_mode & 0o777 == 0o644
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_expired_epochs_go_while_it_runs(agent: Make, rank: Make) -> None:
    """Expiry is the agent's own work, and is counted."""
    rank(0).age(100)
    running = agent("--keep", "1")
    until(lambda: value(running.metrics(), "sdc_agent_files_expired_total") == [2])
    assert value(running.metrics(), "sdc_mismatches_total") == []


def settings(root: Path, port: int, **more: Any) -> Settings:
    return Settings(spool_dir=str(root), node="n0", instance="i-0", cluster="blue", agent_port=port, **more)


@pytest.fixture
def started(root: Path) -> Iterator[None]:
    """Ends the agent that a test let a rank start."""
    yield
    for child in start._children:
        child.kill()
        child.wait(timeout=20)
    start._children.clear()


@pytest.fixture
def free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.usefixtures("started")
def test_a_rank_starts_one_agent_in_a_session_of_its_own(
    root: Path, free: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The signals that end a job do not reach it, a second call finds it, and its words are in the spool."""
    monkeypatch.setenv("SDCWATCH_CONFIG", "relative.toml")
    monkeypatch.chdir(tmp_path)
    assert start.ensure_agent(settings(root, free)) is None
    state = read_state(user_root(root))
    assert state is not None
    assert (state.alive, state.port) == (True, free)
    assert os.getsid(state.pid) == state.pid != os.getsid(0)
    assert start.ensure_agent(settings(root, free)) is None
    assert len(start._children) == 1
    until(lambda: "serves node n0" in (user_root(root) / "agent.log").read_text())


@pytest.mark.usefixtures("started")
def test_a_busy_port_is_one_sentence_for_the_training_log(root: Path, busy: int) -> None:
    """Training goes on; the reason is the agent's own."""
    said = start.ensure_agent(settings(root, busy))
    assert said is not None
    assert f"127.0.0.1:{busy}" in said
    assert "\n" not in said


def test_starting_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """A spool that cannot be used and an interpreter that is gone are sentences too."""
    (tmp_path / "file").write_text("")
    assert "could not be started" in (start.ensure_agent(settings(tmp_path / "file" / "x", 1)) or "")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "could not be started" in (start.ensure_agent(settings(root, 1)) or "")


@pytest.mark.usefixtures("started")
def test_inside_a_batch_job_the_rank_is_told_that_the_agent_will_not_last(
    root: Path, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a halt waits for scrapes, because the agent dies with the job."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "as a service" in (start.ensure_agent(settings(root, free)) or "")
    state = read_state(user_root(root))
    assert state is not None
    assert state.outlives_ranks is False
