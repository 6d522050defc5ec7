"""Events over OTLP: each once, none lost, whatever becomes of the collector or the agent."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from sdcwatch.agent.otlp_logs import severity
from sdcwatch.agent.otlp_outbox import Outbox
from sdcwatch.spool.folders import user_root

Make = Callable[..., Any]
WHEN = 1_764_600_123.25


def line(number: int, **changes: Any) -> dict[str, Any]:
    """A journal line as a rank writes it, naming rank 2 on node n2."""
    ranks = [
        {"rank": n, "cluster": "blue", "node": f"n{n}", "instance": f"i-{n}", "gpu_uuid": f"GPU-{n}"} for n in range(4)
    ]
    event = {
        "id": f"sdc-{number:016x}",
        "training_job": "gpt",
        "training_cluster": "blue",
        "epoch": "e1764600000000-00000000",
        "step": 1200 + number,
        "check": "replay",
        "kind": "attributed",
        "persistence": "transient",
        "time": WHEN + number,
        "suspects": [2],
        "differing": [2],
        "candidates": [2],
        "path": "backward compute",
        "sentence": f"both replays of rank 2 differ at step {1200 + number}",
        "evidence": {},
        "action": "observe",
        "drill": False,
        "world_size": 4,
        "last_clean_step": None,
        "ranks": ranks,
        **changes,
    }
    return {"schema": 1, "event": event, "reporter": {"rank": 0, "node": "n0"}, "detail": {}}


def write(rank: Any, *lines: dict[str, Any]) -> None:
    for one in lines:
        assert rank.spool.append_event(one), rank.spool.last_refusal


def plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [plain(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def attributes(record: Any) -> dict[str, Any]:
    return {a.key: plain(a.value) for a in record.attributes}


def ids(receiver: Any) -> Counter[str]:
    return Counter(attributes(record)["sdcwatch.event_id"] for record in receiver.records())


def numbered(*numbers: int) -> Counter[str]:
    return Counter(f"sdc-{n:016x}" for n in numbers)


@pytest.fixture
def black_hole() -> Iterator[str]:
    """The URL of a socket that accepts and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_an_event_arrives_as_a_log_record(road: Any, agent: Make, rank: Make) -> None:
    """Body, severity, time and fields are the event's own; the suspect stands under the names of metric labels."""
    collector, options = road
    write(rank(0), line(1))
    agent(*options)
    (record,) = collector.until(collector.records)
    assert record.body.string_value == "both replays of rank 2 differ at step 1201"
    assert (record.severity_number, record.severity_text) == (17, "ERROR")
    assert record.time_unix_nano == int((WHEN + 1) * 1e9)
    assert record.event_name == "sdcwatch.event"
    assert attributes(record) == {
        "sdcwatch.event_id": f"sdc-{1:016x}",
        "training_job": "gpt",
        "training_cluster": "blue",
        "check": "replay",
        "sdcwatch.epoch": "e1764600000000-00000000",
        "sdcwatch.step": 1201,
        "sdcwatch.kind": "attributed",
        "sdcwatch.persistence": "transient",
        "sdcwatch.path": "backward compute",
        "sdcwatch.action": "observe",
        "sdcwatch.drill": False,
        "sdcwatch.world_size": 4,
        "sdcwatch.suspects": [2],
        "sdcwatch.differing": [2],
        "sdcwatch.candidates": [2],
        "rank": "2",
        "training_node": "n2",
        "training_instance": "i-2",
        "gpu_uuid": "GPU-2",
        "sdcwatch.reporter_rank": 0,
    }


def test_an_exemplar_is_the_same_on_both_roads(receiver: Any, http_options: Any, agent: Make, rank: Make) -> None:
    """The counter that an event moved carries the exemplar that an OpenMetrics scrape shows."""
    mine = rank(0)
    suspect = {
        "training_job": "gpt",
        "training_cluster": "blue",
        "training_node": "n2",
        "training_instance": "i-2",
        "gpu_uuid": "GPU-2",
        "rank": "2",
    }
    mine.metrics.blame(suspect, "replay", WHEN + 1)
    mine.write()
    write(mine, line(1))
    running = agent(*http_options)
    text = running.metrics(Accept="application/openmetrics-text; version=1.0.0")
    scraped = [
        sample.exemplar
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.exemplar is not None
    ]
    families = receiver.next_snapshot()
    pushed = [
        ({a.key: plain(a.value) for a in exemplar.filtered_attributes}, exemplar.as_double, exemplar.time_unix_nano)
        for family in families.values()
        for point in family.sum.data_points
        for exemplar in point.exemplars
    ]
    assert len(scraped) == 1
    assert pushed == [(one.labels, one.value, int(float(one.timestamp) * 1e9)) for one in scraped]


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"kind": "attributed", "action": "halt"}, "FATAL"),
        ({"kind": "attributed", "action": "observe"}, "ERROR"),
        ({"kind": "inconclusive", "action": "halt"}, "ERROR"),
        ({"kind": "software", "action": "observe"}, "WARN"),
        ({"kind": "attributed", "action": "halt", "drill": True}, "INFO"),
        ({}, "WARN"),
    ],
)
def test_severity_follows_what_was_proven_and_done(event: dict[str, Any], text: str) -> None:
    """A named suspect weighs more than a difference, a halt more than a look, a drill nothing."""
    assert severity(event)[1] == text


@pytest.mark.integration
def test_each_event_is_sent_once_over_restarts_and_kills(
    receiver: Any, http_options: Any, agent: Make, rank: Make
) -> None:
    """Two reporters of one event, a SIGTERM, a kill -9 and events written between: each id arrives exactly once."""
    one, two = rank(0), rank(1)
    write(one, line(1), line(2))
    write(two, line(2))
    first = agent(*http_options)
    receiver.until(lambda: len(ids(receiver)) == 2)
    first.process.send_signal(signal.SIGTERM)
    first.process.wait(timeout=20)
    write(one, line(3))
    second = agent(*http_options)
    receiver.until(lambda: len(ids(receiver)) == 3)
    receiver.next_snapshot()  # the push after the one that was taken: nothing is under way for the events
    second.kill()
    write(two, line(4))
    agent(*http_options)
    receiver.until(lambda: len(ids(receiver)) == 4)
    receiver.next_snapshot()
    assert ids(receiver) == numbered(1, 2, 3, 4)


def test_an_event_of_the_last_moment_is_pushed_before_the_agent_ends(receiver: Any, agent: Make, rank: Make) -> None:
    """With an hour between two pushes, an event written before SIGTERM arrives all the same."""
    mine = rank(0)
    running = agent("--otlp-endpoint", receiver.url, "--otlp-interval", "3600")
    receiver.until(lambda: receiver.batches("metrics"))
    write(mine, line(9))
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(timeout=20) == 0
    assert ids(receiver) == numbered(9)


def pushed(running: Any, signal: str, result: str) -> float:
    """What the agent's own scrape says of its pushes."""
    (found,) = [
        sample.value
        for family in text_string_to_metric_families(
            running.metrics(Accept="application/openmetrics-text; version=1.0.0")
        )
        for sample in family.samples
        if sample.name == "sdc_agent_otlp_requests_total"
        and (sample.labels["signal"], sample.labels["result"]) == (signal, result)
    ]
    return found


def test_an_outage_loses_nothing(receiver: Any, http_options: Any, agent: Make, rank: Make) -> None:
    """An agent that met only refusals leaves the cursor alone; the next one sends everything, once."""
    receiver.refuse = lambda signal, request: 503
    mine = rank(0)
    write(mine, line(1))
    running = agent(*http_options)
    assert "events are not sent: status 503" in running.process.stderr.readline()
    assert pushed(running, "logs", "failed") > 0
    assert pushed(running, "logs", "taken") == pushed(running, "metrics", "taken") == 0
    running.kill()
    write(mine, line(2))
    receiver.refuse = lambda signal, request: 200
    running = agent(*http_options)
    receiver.until(lambda: len(ids(receiver)) == 2)
    receiver.next_snapshot()
    assert pushed(running, "logs", "taken") == 1
    assert pushed(running, "metrics", "taken") > 0
    assert pushed(running, "logs", "failed") == pushed(running, "metrics", "failed") == 0
    assert ids(receiver) == numbered(1, 2)


@pytest.mark.parametrize("protocol", ["http", pytest.param("grpc", marks=pytest.mark.integration)])
def test_a_black_hole_delays_neither_the_exit_nor_a_scrape(
    black_hole: str,
    receiver: Any,
    http_options: Any,
    agent: Make,
    rank: Make,
    root: Path,
    protocol: str,
    require: Make,
    record_property: Make,
) -> None:
    """A collector that accepts and never answers: scrapes take no longer, SIGTERM ends the agent in under 5 s with
    status 0, the cursor stands, and the next agent sends the event.
    """
    if protocol == "grpc":
        require("module:grpc")
    write(rank(0), line(1))
    running = agent("--otlp-endpoint", black_hole, "--otlp-protocol", protocol, "--otlp-interval", "0.1")
    slowest = 0.0
    for _ in range(20):
        begun = time.monotonic()
        assert "sdc_build_info" in running.metrics()
        slowest = max(slowest, time.monotonic() - begun)
    begun = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    status = running.process.wait(timeout=20)
    took = time.monotonic() - begun
    record_property("exit_seconds", round(took, 2))
    print(f"{protocol}: exit with a black-holed collector after {took:.2f} s, slowest scrape {slowest * 1000:.0f} ms")
    assert status == 0
    assert took < 5
    assert slowest < 2
    assert json.loads((user_root(root) / "agent-otlp.json").read_text())["sent"] == []
    agent(*http_options)
    receiver.until(lambda: ids(receiver) == numbered(1))


@pytest.mark.integration
def test_one_bad_event_does_not_hold_up_the_others(road: Any, agent: Make, rank: Make) -> None:
    """A collector that refuses one record for good still gets those before and after it; that one stays in line."""
    collector, options = road

    def refuse(signal: str, request: Any) -> int:
        text = str(request)
        return 400 if signal == "logs" and "step 1202" in text else 200

    collector.refuse = refuse
    write(rank(0), line(1), line(2), line(3))
    running = agent(*options)
    collector.until(lambda: len(ids(collector)) == 2)
    collector.next_snapshot()
    assert ids(collector) == numbered(1, 3)
    assert f"event sdc-{2:016x} was refused" in running.process.stderr.readline()
    running.kill()
    collector.refuse = lambda signal, request: 200
    agent(*options)
    collector.until(lambda: len(ids(collector)) == 3)
    assert ids(collector) == numbered(1, 2, 3)


def test_odd_lines_cost_no_batch(receiver: Any, http_options: Any, agent: Make, rank: Make) -> None:
    """Numbers beyond 64 bits, NaN, lone surrogates, missing fields and a torn line: every whole event arrives."""
    mine = rank(0)
    odd = line(1, step=2**70, world_size=-(2**63), sentence="\ud800 x", suspects=[2**80], path=None)
    with (mine.spool.directory / "rank-0.events.jsonl").open("ab") as journal:
        journal.write(json.dumps(odd).encode() + b"\n")
    bare = {"schema": 1, "event": {"id": "bare", "time": 5.0}, "reporter": None, "detail": {}}
    write(mine, bare, line(3, time=1e300, ranks="?", suspects="all", kind=7))
    with (mine.spool.directory / "rank-0.events.jsonl").open("ab") as journal:
        journal.write(b'{"event": {"id": "torn", "time": 1')
    agent(*http_options)
    receiver.until(lambda: len(ids(receiver)) == 3)
    told = {attributes(r)["sdcwatch.event_id"]: (r, attributes(r)) for r in receiver.records()}
    assert told[f"sdc-{1:016x}"][1]["sdcwatch.step"] == str(2**70)
    assert told[f"sdc-{1:016x}"][0].body.string_value == "? x"
    assert told["bare"][0].body.string_value == "event bare"
    assert told[f"sdc-{3:016x}"][0].time_unix_nano == 0


def test_the_outbox_gives_all_in_parts_and_survives_its_own_file(tmp_path: Path, rank: Make, root: Path) -> None:
    """More events than one request holds come in several; a cursor file that is nonsense repeats, and loses nothing."""
    write(rank(0), *(line(n) for n in range(5)))
    outbox = Outbox(user_root(root))
    seen: list[str] = []
    while part := outbox.waiting(2, 1 << 20):
        assert len(part) <= 2
        seen += [one.id for one in part]
        outbox.delivered(part)
    assert Counter(seen) == numbered(0, 1, 2, 3, 4)
    assert len(outbox.waiting(9, 1)) == 0
    assert Outbox(user_root(root)).waiting(9, 1 << 20) == []
    (user_root(root) / "agent-otlp.json").write_text('{"schema": 1, "sent": 5}')
    assert len(Outbox(user_root(root)).waiting(9, 1 << 20)) == 5
    assert len(Outbox(user_root(root)).waiting(9, 1)) == 1


def test_the_first_push_time_survives_the_agent(rank: Make, root: Path) -> None:
    """`since`, from which ranks' counters count, is the first agent's."""
    rank(0)
    first = Outbox(user_root(root)).since
    assert Outbox(user_root(root)).since == first
