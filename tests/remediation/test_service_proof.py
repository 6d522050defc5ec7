"""The proof: which answers of which agents count; over real loopback HTTP where the wire matters."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sdcwatch_remediation.evidence import Copy, canonical_json, read_event
from sdcwatch_remediation.proof import judge
from sdcwatch_remediation.testing import Rig, alert, event_line, fleet, make_rig

MEMBERS = fleet(4)
SUSPECT = MEMBERS[2]
TIME = 1_800_000_000.0


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with make_rig(tmp_path, MEMBERS) as made:
        yield made


def copy(member: Any, line: dict[str, Any]) -> Copy:
    return Copy(member.instance_id, member.node_name, member.address, TIME, read_event(line), canonical_json(line))


def verdict(*copies: Copy) -> tuple[int, str]:
    proof = judge(copies, instance_id=SUSPECT.instance_id, cluster="demo")
    return len(proof.events), proof.reason


LINE = event_line(MEMBERS, [2], time=TIME)


def changed(**fields: Any) -> dict[str, Any]:
    return {**LINE, "event": {**LINE["event"], **fields}}


def test_two_agents_of_other_nodes_prove_it() -> None:
    """Reporter and detail may differ; the event's canonical bytes may not."""
    other = {**LINE, "reporter": {"rank": 3}, "detail": {"norm": 1.5}}
    assert verdict(copy(MEMBERS[0], LINE), copy(MEMBERS[3], other))[0] == 1


@pytest.mark.parametrize(
    "copies",
    [
        [],
        [copy(MEMBERS[0], LINE)],
        [copy(MEMBERS[0], LINE), copy(MEMBERS[0], LINE)],
        [copy(MEMBERS[0], LINE), copy(SUSPECT, LINE)],
        [copy(MEMBERS[0], LINE), copy(MEMBERS[1], changed(step=58))],
        [copy(MEMBERS[0], LINE), copy(MEMBERS[0], changed(step=58)), copy(MEMBERS[1], LINE)],
        [copy(m, changed(kind="inconclusive")) for m in MEMBERS],
        [copy(m, changed(drill=True)) for m in MEMBERS],
        [copy(m, changed(drill=None)) for m in MEMBERS],
        [copy(m, changed(suspects=[1])) for m in MEMBERS],
        [copy(m, changed(suspects=[2, 9])) for m in MEMBERS],
        [copy(m, changed(training_cluster="other")) for m in MEMBERS],
        [copy(m, changed(ranks=LINE["event"]["ranks"] * 2)) for m in MEMBERS],
        [copy(m, changed(ranks=LINE["event"]["ranks"][2:3])) for m in MEMBERS],
        [copy(replace(m, instance_id=f"i-{9:017x}"), LINE) for m in MEMBERS[:2]],
        [copy(replace(m, node_name="elsewhere"), LINE) for m in MEMBERS[:2]],
        [copy(MEMBERS[0], LINE), copy(MEMBERS[1], LINE), copy(MEMBERS[3], changed(step=58)), copy(fleet(5)[4], LINE)][
            2:
        ],
    ],
)
def test_anything_less_proves_nothing(copies: list[Copy]) -> None:
    """One witness, the suspect's own, disagreement, other kinds, drills, other clusters, strangers: a reason each."""
    proven, reason = verdict(*copies)
    assert proven == 0
    assert reason


def test_two_contents_with_two_witnesses_each_prove_nothing() -> None:
    """When both sides have two agents nobody can say which is true."""
    members = fleet(6)
    ranks = event_line(members, [2], time=TIME)
    lie = {**ranks, "event": {**ranks["event"], "sentence": "another"}}
    copies = [copy(members[0], ranks), copy(members[1], ranks), copy(members[3], lie), copy(members[4], lie)]
    assert verdict(*copies)[0] == 0


def test_a_single_liar_does_not_block_two_who_agree() -> None:
    """A third agent with other content is noted, and the two still prove it."""
    proven, reason = verdict(copy(MEMBERS[0], LINE), copy(MEMBERS[1], LINE), copy(MEMBERS[3], changed(sentence="no")))
    assert proven == 1
    assert "other copies differ" in reason


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "sdc-xyz"},
        {"time": "now"},
        {"time": True},
        {"step": -1},
        {"step": 1.5},
        {"suspects": None},
        {"ranks": [1]},
        {"persistence": "maybe"},
        {"sentence": 5},
    ],
)
def test_an_event_out_of_form_is_no_event(fields: dict[str, Any]) -> None:
    """Each field is of its contract's type, or the copy does not exist."""
    with pytest.raises(ValueError, match=r"is|holds"):
        read_event(changed(**fields))


def test_a_forged_alert_opens_an_unproven_case_and_nothing_else(rig: Rig) -> None:
    """No agent knows the event: the case asks until the window ends, then expires; no call, no latch, ever."""
    rig.ring(alert(SUSPECT, 2))
    rig.rounds(3, seconds=10)
    assert rig.case()["state"] == "unproven"
    rig.rounds(40, seconds=100)
    assert (rig.case()["state"], rig.provider.calls) == ("expired", [])
    assert all(agent.posts == [] for agent in rig.agents.agents.values())


def test_an_unproven_case_goes_on_asking(rig: Rig) -> None:
    """The second copy comes minutes after the alert, without another alert."""
    event = rig.fault(2, by=[MEMBERS[0].instance_id])
    rig.rounds(3, seconds=10)
    assert (rig.case()["state"], rig.provider.calls) == ("unproven", [])
    rig.agents[MEMBERS[1].instance_id].events = rig.agents[MEMBERS[0].instance_id].events
    rig.rounds(1, seconds=10)
    assert (rig.case()["event_id"], rig.provider.calls) == (event, [SUSPECT.instance_id])


def test_only_the_other_running_agents_of_the_group_are_asked(rig: Rig) -> None:
    """The suspect, instances that do not run and other groups get no question."""
    away = replace(MEMBERS[3], group="others")
    rig.provider.members = (MEMBERS[0], replace(MEMBERS[1], status="Pending"), SUSPECT, away)
    rig.fault(2)
    rig.rounds()
    assert [bool(rig.agents[m.instance_id].asked) for m in MEMBERS] == [True, False, False, False]


def test_an_agent_that_is_somebody_else_does_not_count(rig: Rig) -> None:
    """The agent at an address must say that it is the inventory's member there."""
    rig.agents[MEMBERS[0].instance_id].instance = MEMBERS[1].instance_id
    rig.agents[MEMBERS[1].instance_id].node = "node-9"
    rig.fault(2)
    rig.rounds(2, seconds=1)
    assert (rig.case()["state"], rig.provider.calls) == ("unproven", [])


def test_a_redirect_is_not_followed(rig: Rig) -> None:
    """An agent cannot send the question, and its token, elsewhere."""
    target = rig.agents[MEMBERS[3].instance_id]
    for member in MEMBERS[:2]:
        rig.agents[member.instance_id].redirect_to = f"http://{MEMBERS[3].address}:{rig.agents.port}/elsewhere"
    rig.fault(2)
    rig.rounds()
    assert rig.case()["state"] == "unproven"
    assert [path for path in target.asked if "elsewhere" in path] == []


@pytest.mark.parametrize(
    "raw",
    [b"", b"nonsense", b"[]", b'{"schema":2}', b'{"schema":1,"agent":{},"events":[]}', b"[" * 200_000, b" " * 70_000],
)
def test_nonsense_from_agents_is_survived(rig: Rig, raw: bytes) -> None:
    """Whatever two of three agents send, the case stays unproven and the worker goes on."""
    limited = replace(rig.config, agents=replace(rig.config.agents, answer_limit_bytes=65_536))
    rig.config = limited
    rig.restart()
    rig.fault(2)
    for member in MEMBERS[:2]:
        rig.agents[member.instance_id].raw = raw
    rig.rounds(2, seconds=1)
    assert (rig.case()["state"], rig.provider.calls) == ("unproven", [])
    assert rig.service.telemetry.registry.get_sample_value("sdc_remediation_errors_total", {"where": "case"}) == 0


def test_an_agent_that_never_ends_its_answer_is_given_up(rig: Rig) -> None:
    """A drip-fed answer costs at most about the time-out, and the others still count."""
    rig.config = replace(rig.config, agents=replace(rig.config.agents, timeout_seconds=0.5))
    rig.restart()
    done = threading.Event()
    port = rig.agents.port
    listener = socket.create_server(("127.0.9.9", port))
    listener.settimeout(10)

    def drip() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            try:
                while not done.wait(0.1):
                    connection.sendall(b"1\r\n \r\n")
            except OSError:
                pass

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        rig.provider.members = (*MEMBERS[:3], replace(MEMBERS[3], address="127.0.9.9"))
        rig.fault(2)
        began = time.monotonic()
        rig.rounds()
        assert time.monotonic() - began < 5
        assert rig.provider.calls == [SUSPECT.instance_id]
    finally:
        done.set()
        thread.join(10)
        listener.close()


def test_an_address_that_is_a_name_is_not_looked_up(rig: Rig) -> None:
    """An inventory address that is no IP address is a problem of that member, not a DNS question."""
    rig.provider.members = (replace(MEMBERS[0], address="localhost"), *MEMBERS[1:])
    rig.fault(2, by=[m.instance_id for m in MEMBERS[:2]])
    rig.rounds()
    assert rig.case()["state"] == "unproven"


def test_the_evidence_is_kept_with_who_attested_it(rig: Rig) -> None:
    """The case shows each copy: event, hash, agent, node, address and time."""
    event = rig.fault(2)
    rig.rounds()
    evidence = rig.case()["evidence"]
    assert {row["agent"] for row in evidence} == {m.instance_id for m in MEMBERS if m is not SUSPECT}
    assert {(row["event"], row["fetched_at"]) for row in evidence} == {(event, TIME)}
    assert len({row["sha256"] for row in evidence}) == 1
    assert json.loads(rig.service.store.copies(rig.case()["id"])[0].line)["schema"] == 1
