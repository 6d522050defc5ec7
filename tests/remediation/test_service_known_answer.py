"""A first transient fault on a halted node: its own known-answer test is asked for, and only a failure confirms."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sdcwatch_remediation.settings import Actions
from sdcwatch_remediation.testing import fleet, make_rig
from sdcwatch_remediation.testing.rig import Rig

MEMBERS = fleet(4)
SUSPECT = MEMBERS[2]
Make = Callable[..., Rig]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Make]:
    opened = []

    def make(**policy: Any) -> Rig:
        manager = make_rig(tmp_path, MEMBERS, **{"confirm": "persistent", **policy})
        opened.append(manager)
        rig = manager.__enter__()
        for agent in rig.agents.agents.values():
            agent.tests = []
        return rig

    yield make
    for manager in opened:
        manager.__exit__(None, None, None)


def result(rig: Rig, latch_id: str, outcome: str = "fail", **changes: Any) -> dict[str, Any]:
    """What the suspect's agent tells."""
    device = {"device": "cuda:0", "name": "", "uuid": f"CPU-{SUSPECT.instance_id}-0", "serial": "1650522003820"}
    return {
        "latch_id": latch_id,
        "node": SUSPECT.node_name,
        "instance": SUSPECT.instance_id,
        "result": outcome,
        "detail": "preflight exited 1",
        "time": rig.clock.now + 1,
        "devices": [{**device, "outcome": outcome}],
        **changes,
    }


def asked(rig: Rig) -> list[str]:
    """Instances whose agents were asked for a test."""
    return [i for i, agent in rig.agents.agents.items() if any(p.startswith("/preflight") for p in agent.asked)]


def told(rig: Rig) -> list[dict[str, Any]]:
    return [line["detail"] for line in rig.case()["timeline"] if line["step"] == "known_answer_test"]


def test_a_failed_test_confirms_a_first_transient_and_the_instance_is_replaced(world: Make) -> None:
    """The case waits while the halted node judges itself; the failure is kept, and one replacement is asked for."""
    rig = world()
    latch = rig.fault(2, persistence="transient")
    rig.rounds(3, seconds=5)
    assert rig.case()["state"] == "settling"
    assert "waits up to" in rig.case()["reason"]
    rig.agents[SUSPECT.instance_id].tests = [result(rig, latch)]
    rig.rounds(4, seconds=5)
    assert rig.provider.calls == [SUSPECT.instance_id]
    assert asked(rig) == [SUSPECT.instance_id]
    assert [bool(line["test"]) for line in told(rig)] == [False, True]
    (gate,) = {g["reason"] for g in rig.case()["gates"] if g["name"] == "confirmed"}
    assert f"the known-answer test of CPU-{SUSPECT.instance_id}-0 failed" in gate


def test_what_was_told_survives_a_restart_and_an_agent_that_is_gone(world: Make) -> None:
    """The failure is in the audit log: it needs no second answer, and a later pass does not take it back."""
    rig = world(mode="approve")
    latch = rig.fault(2, persistence="transient")
    rig.agents[SUSPECT.instance_id].tests = [result(rig, latch)]
    rig.rounds(2, seconds=5)
    assert rig.case()["state"] == "awaiting_approval"
    rig.agents[SUSPECT.instance_id].tests = [result(rig, latch, "pass")]
    rig.restart()
    case = rig.case()
    sent = {"by": "Ada", "request_sha256": case["request_sha256"]}
    assert rig.send("POST", f"/v1/cases/{case['id']}/approve", token="approve", json=sent).status_code == 200
    rig.rounds(4, seconds=5)
    assert rig.provider.calls == [SUSPECT.instance_id]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"result": "pass"}, "passed, which neither confirms nor clears"),
        ({"result": "unknown"}, "could not judge"),
        ({"time": 1.0}, "older than the event"),
        ({"devices": []}, "a device that it does not name"),
        ({"latch_id": "sdc-0000000000000001"}, "has no result yet"),
        ({"instance": MEMBERS[1].instance_id}, "has no result yet"),
        ({"devices": "all"}, "devices is not a list"),
    ],
)
def test_every_other_answer_ends_as_suspected_with_its_reason(
    world: Make, changes: dict[str, Any], reason: str
) -> None:
    """Nothing is touched, every latch is released, and the timeline says what was missing."""
    rig = world()
    latch = rig.fault(2, persistence="transient")
    rig.agents[SUSPECT.instance_id].tests = [{**result(rig, latch), **changes}]
    rig.rounds(50, seconds=5)
    case = rig.case()
    assert (case["state"], case["outcome"], rig.provider.calls) == ("closed", "suspected", [])
    assert any(reason in json.dumps(line["detail"]) for line in case["timeline"])
    assert all(agent.released == [latch] for agent in rig.agents.agents.values())


def test_a_passing_report_of_the_suspect_never_clears_a_proven_fault(world: Make) -> None:
    """A persistent verdict is acted on whatever the suspect says of itself."""
    rig = world()
    latch = rig.fault(2, persistence="persistent")
    rig.agents[SUSPECT.instance_id].tests = [result(rig, latch, "pass")]
    rig.rounds(4, seconds=5)
    assert rig.provider.calls == [SUSPECT.instance_id]


def test_another_nodes_agent_cannot_report_a_failure_of_the_suspect(world: Make) -> None:
    """Only the suspect's own address is asked, and an agent there that is another instance does not count."""
    rig = world()
    latch = rig.fault(2, persistence="transient")
    for member in (MEMBERS[0], MEMBERS[1], MEMBERS[3]):
        rig.agents[member.instance_id].tests = [result(rig, latch)]
    rig.agents[SUSPECT.instance_id].tests = [result(rig, latch)]
    rig.agents[SUSPECT.instance_id].instance = MEMBERS[1].instance_id
    rig.rounds(5, seconds=5)
    assert (rig.case()["outcome"], rig.provider.calls) == ("suspected", [])
    assert asked(rig) == [SUSPECT.instance_id]


def test_an_agent_that_knows_no_such_road_is_not_waited_for(world: Make) -> None:
    """404 of an older agent, or a closed road, ends the waiting at once."""
    rig = world()
    rig.agents[SUSPECT.instance_id].tests = None
    rig.fault(2, persistence="transient")
    rig.rounds(2, seconds=1)
    assert rig.case()["outcome"] == "suspected"


def test_a_job_that_did_not_halt_is_not_asked(world: Make) -> None:
    """Without a halt nobody judged the node."""
    rig = world()
    rig.fault(2, persistence="transient", action="observe")
    rig.rounds(2, seconds=1)
    assert (rig.case()["outcome"], asked(rig)) == ("suspected", [])


def test_the_bundle_holds_the_serial_number_and_the_test(world: Make, tmp_path: Path) -> None:
    """What the node said of itself is kept before it is gone; then nothing about serial numbers is skipped."""
    rig = world()
    rig.config = replace(rig.config, actions=Actions(evidence_dir=str(tmp_path / "kept")))
    rig.restart()
    latch = rig.fault(2, persistence="transient")
    rig.agents[SUSPECT.instance_id].tests = [result(rig, latch)]
    rig.rounds(4, seconds=5)
    folder = tmp_path / "kept" / rig.case()["id"]
    gpu = {"uuid": f"CPU-{SUSPECT.instance_id}-0", "rank": 2, "node": SUSPECT.node_name, "serial": "1650522003820"}
    assert json.loads((folder / "gpus.json").read_text()) == [gpu]
    assert json.loads((folder / "known-answer-test.json").read_text())["result"] == "fail"
    assert not {"gpu serial numbers", "known-answer test"} & set(
        json.loads((folder / "manifest.json").read_text())["skipped"]
    )
