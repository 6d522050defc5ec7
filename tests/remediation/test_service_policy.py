"""The policy as a table: one change to facts in which all gates pass, and the gate and the answer that it leads to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sdcwatch_remediation.evidence import read_event
from sdcwatch_remediation.facts import Answer, Facts, OtherCase, PastEvent, Usage
from sdcwatch_remediation.known_answer import Device, KnownAnswerTest
from sdcwatch_remediation.policy import decide
from sdcwatch_remediation.proof import ProvenEvent
from sdcwatch_remediation.records import NodeView
from sdcwatch_remediation.settings import GroupModes, Policy
from sdcwatch_remediation.testing import event_line, fleet

NOW = 1_800_000_000.0
MEMBERS = fleet(20)
SUSPECT = MEMBERS[2]
POLICY = Policy(mode="auto", groups=("workers",), settle_seconds=90.0, per_day=5, concurrent=3)
GPU = f"CPU-{SUSPECT.instance_id}-0"


def proven(**changes: Any) -> ProvenEvent:
    line = event_line(MEMBERS[:4], changes.pop("suspects", [2]), **{"time": NOW - 200, **changes})
    return ProvenEvent(read_event(line), (MEMBERS[0].instance_id, MEMBERS[1].instance_id))


FACTS = Facts(
    now=NOW,
    cluster="demo",
    instance_id=SUSPECT.instance_id,
    node_name=SUSPECT.node_name,
    opened_at=NOW - 100,
    events=(proven(),),
    proof_reason="attested by two",
    past=(),
    members=MEMBERS,
    retired=False,
    others=(),
    failed_again=False,
    usage=Usage(0, 0, 0),
    stop="",
    held="",
    decided=False,
)


def proven_in(environment: str) -> ProvenEvent:
    """The event in which the suspect's rank alone has other software."""
    line = event_line(MEMBERS[:4], [2], time=NOW - 200)
    line["event"]["ranks"][2]["environment"] = environment
    return ProvenEvent(read_event(line), (MEMBERS[0].instance_id, MEMBERS[1].instance_id))


def other(job: str, *, is_proven: bool = True, ago: float = 1000.0) -> OtherCase:
    return OtherCase("case-other", job, is_proven, NOW - ago)


def members(**changes: Any) -> tuple[Any, ...]:
    return tuple(replace(m, **changes) if m is SUSPECT else m for m in MEMBERS)


def test_all_gates_pass() -> None:
    """The facts that the table starts from lead to both actions."""
    for action in ("quarantine", "replace"):
        decision = decide(action, FACTS, POLICY)
        assert (decision.answer, decision.mode, decision.reason) == (Answer.GO, "auto", "all gates passed")


TRANSIENT = proven(persistence="transient")


def of_gpu(uuid: str) -> ProvenEvent:
    """A first transient fault of a GPU."""
    line = event_line(MEMBERS[:4], [2], time=NOW - 200, persistence="transient")
    line["event"]["ranks"][2]["gpu_uuid"] = uuid
    return ProvenEvent(read_event(line), (MEMBERS[0].instance_id, MEMBERS[1].instance_id))


def said(result: str = "fail", *, device: str = "cpu", uuid: str = "", **changes: Any) -> KnownAnswerTest:
    """What the suspect's own agent says of its known-answer test under the transient event's latch."""
    about = {"latch_id": TRANSIENT.event.id, "node": SUSPECT.node_name, "instance": SUSPECT.instance_id}
    about |= {"result": result, "detail": "preflight exited 1", "time": NOW - 100}
    devices = (Device("cuda:0" if uuid else device, uuid, "", result),)
    return KnownAnswerTest(**{**about, "devices": devices, **changes})


TABLE: list[tuple[str, Answer, dict[str, Any], dict[str, Any]]] = [
    ("not_retired", Answer.REFUSE, {"retired": True}, {}),
    ("inventory_read", Answer.HOLD, {"members": None}, {}),
    ("one_member", Answer.REFUSE, {"members": tuple(m for m in MEMBERS if m is not SUSPECT)}, {}),
    ("one_member", Answer.REFUSE, {"members": (*MEMBERS, SUSPECT)}, {}),
    ("node_matches", Answer.REFUSE, {"node_name": "node-3"}, {}),
    ("not_forbidden", Answer.REFUSE, {}, {"forbidden_groups": ("workers",)}),
    ("proven", Answer.WAIT, {"events": ()}, {}),
    ("event_node_matches", Answer.REFUSE, {"members": members(node_name="n"), "node_name": "n"}, {}),
    ("launched_before", Answer.REFUSE, {"members": members(launch_time=NOW - 319.9)}, {}),
    ("launched_before", Answer.REFUSE, {"members": members(launch_time=NOW)}, {"clock_doubt_seconds": 0.0}),
    ("group_allowed", Answer.REFUSE, {}, {"groups": ()}),
    ("group_allowed", Answer.REFUSE, {"members": members(group="spare")}, {}),
    ("one_suspect", Answer.FREEZE, {"events": (proven(suspects=[1, 2]),)}, {}),
    ("one_case_in_job", Answer.FREEZE, {"others": (other("bytegpt"),)}, {}),
    ("new_failure", Answer.FREEZE, {"failed_again": True}, {}),
    ("clock", Answer.HOLD, {"events": (proven(time=NOW + 121),)}, {}),
    ("fresh", Answer.EXPIRE, {"events": (proven(time=NOW - 3601),)}, {}),
    ("settled", Answer.HOLD, {"opened_at": NOW - 89}, {}),
    ("settled", Answer.HOLD, {"others": (other("x", is_proven=False, ago=89.0),)}, {}),
    ("confirmed", Answer.SUSPECT, {"events": (proven(persistence="transient"),)}, {}),
    ("confirmed", Answer.SUSPECT, {"events": (proven(persistence=None),)}, {}),
    ("provider_idle", Answer.HOLD, {"members": members(status="SystemUpdating")}, {}),
    ("concurrent", Answer.HOLD, {"usage": Usage(3, 0, 3)}, {}),
    ("per_day", Answer.HOLD, {"usage": Usage(0, 0, 5)}, {}),
    ("group_share", Answer.HOLD, {"usage": Usage(2, 2, 2)}, {}),
    ("not_my_node", Answer.REFUSE, {"here": frozenset({SUSPECT.node_name, "elsewhere"})}, {}),
    ("not_my_node", Answer.REFUSE, {"here": frozenset({SUSPECT.address})}, {}),
    ("same_environment", Answer.FREEZE, {"events": (proven_in("other"),)}, {}),
    ("breaker", Answer.FREEZE, {"lately": ("i-1", "i-2", "i-3")}, {}),
    ("breaker", Answer.FREEZE, {"lately": ("i-1",)}, {"breaker_instances": 2}),
    ("not_cordoned", Answer.HOLD, {"node": NodeView((), "ann")}, {}),
    ("cooldown", Answer.HOLD, {"usage": Usage(0, 0, 1, NOW - 599)}, {}),
    ("capacity", Answer.ASK, {"members": members(group="few"), "short_groups": ()}, {"groups": ("few",)}),
    ("capacity", Answer.ASK, {"short_groups": ("workers",)}, {}),
    ("others_work", Answer.ASK, {"node": NodeView(("job 7 of eve",), "")}, {}),
    ("others_work", Answer.ASK, {}, {"shared_nodes": True}),
    ("window", Answer.ASK, {}, {"windows": ("Sat-Sun 00:00-24:00",)}),
    ("not_held", Answer.HOLD, {"held": "ann: looking"}, {}),
    ("not_stopped", Answer.HOLD, {"stop": "paused by Ada"}, {}),
]


@pytest.mark.parametrize(("gate", "answer", "facts", "policy"), TABLE)
def test_one_change_stops_it_at_one_gate(
    gate: str, answer: Answer, facts: dict[str, Any], policy: dict[str, Any]
) -> None:
    """Exactly the gate that the change is about is the first that fails, with its answer and a reason."""
    decision = decide("replace", replace(FACTS, **facts), replace(POLICY, **policy))
    failed = [g for g in decision.gates if not g.passed]
    assert (failed[0].name, decision.answer) == (gate, answer)
    assert decision.reason.startswith(f"{gate}: ")


PASSES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("launched exactly at the doubt", {"members": members(launch_time=NOW - 320)}, {}),
    ("no doubt about clocks", {"members": members(launch_time=NOW - 200)}, {"clock_doubt_seconds": 0.0}),
    ("another job's proven case", {"others": (other("other-job"),)}, {}),
    ("an unproven case of the same job", {"others": (other("bytegpt", is_proven=False),)}, {}),
    ("exactly settled", {"opened_at": NOW - 90}, {}),
    ("settled in all", {"opened_at": NOW - 600, "others": (other("x", is_proven=False, ago=1.0),)}, {}),
    ("as old as it may be", {"events": (proven(time=NOW - 3600),)}, {}),
    (
        "decided, so age and settle are over",
        {"decided": True, "opened_at": NOW, "events": (proven(time=NOW - 9e3),)},
        {},
    ),
    ("first verdict is enough", {"events": (proven(persistence="transient"),)}, {"confirm": "first"}),
    ("group share has a floor of one", {}, {"group_share": 0.0}),
    ("the share of 20 nodes is two", {"usage": Usage(1, 1, 1)}, {}),
    ("one instance below the breaker", {"lately": ("i-1", "i-2")}, {}),
    ("cooled down", {"usage": Usage(0, 0, 1, NOW - 600)}, {}),
    ("the last of the group, approved", {"members": members(group="few"), "approved": True}, {"groups": ("few",)}),
    ("others' work, approved", {"node": NodeView(("job 7",), ""), "approved": True}, {}),
    ("shared nodes, and this one is ours alone", {"node": NodeView((), "")}, {"shared_nodes": True}),
    ("outside of the window, approved", {"approved": True}, {"windows": ("Sat-Sun 00:00-24:00",)}),
    ("inside of the window", {}, {"windows": ("Sat-Sun 00:00-24:00", "Fri 08:00-08:01")}),
    (
        "a transient fault on hardware that came back",
        {"events": (proven(persistence=None),), "returned_gpus": (GPU,)},
        {},
    ),
    ("a transient fault and a failed test", {"events": (TRANSIENT,), "test": said()}, {}),
    ("the same, by the name that a device has", {"events": (of_gpu("GPU-1"),), "test": said(uuid="GPU-1")}, {}),
    ("a persistent fault and a test that passed", {"test": said("pass")}, {}),
    ("a persistent fault, and no test for now", {"no_test": "no result yet", "test_later": True}, {}),
]


@pytest.mark.parametrize(("facts", "policy"), [row[1:] for row in PASSES], ids=[row[0] for row in PASSES])
def test_the_boundary_passes(facts: dict[str, Any], policy: dict[str, Any]) -> None:
    """The last value that is still allowed is allowed."""
    decision = decide("replace", replace(FACTS, **facts), replace(POLICY, **policy))
    assert (decision.answer, decision.reason) == (Answer.GO, "all gates passed")


@pytest.mark.parametrize(
    ("events", "past", "confirmed"),
    [
        ((TRANSIENT, proven(persistence="transient", step=9)), (), True),
        ((TRANSIENT, proven(persistence="persistent", step=9)), (), True),
        ((TRANSIENT, TRANSIENT), (), False),
        ((TRANSIENT,), (PastEvent("sdc-1", TRANSIENT.event.epoch, 9, GPU),), True),
        ((TRANSIENT,), (PastEvent("sdc-1", "e-other", TRANSIENT.event.step, GPU),), True),
        ((TRANSIENT,), (PastEvent("sdc-1", TRANSIENT.event.epoch, TRANSIENT.event.step, GPU),), False),
        ((TRANSIENT,), (PastEvent("sdc-1", "e-other", 9, "CPU-other-1"),), False),
    ],
)
def test_two_faults_of_one_gpu_confirm(
    events: tuple[ProvenEvent, ...], past: tuple[PastEvent, ...], confirmed: bool
) -> None:
    """Only the same GPU at another step, now or remembered, confirms a transient fault."""
    decision = decide("quarantine", replace(FACTS, events=events, past=past), POLICY)
    assert decision.answer is (Answer.GO if confirmed else Answer.SUSPECT)


UNCONFIRMED: list[tuple[str, dict[str, Any], Answer]] = [
    ("passed, which neither confirms nor clears", {"test": said("pass")}, Answer.SUSPECT),
    ("could not judge", {"test": said("unknown")}, Answer.SUSPECT),
    ("is of another halt", {"test": said(latch_id="sdc-1")}, Answer.SUSPECT),
    ("is of i-other", {"test": said(instance="i-other")}, Answer.SUSPECT),
    ("is older than the event", {"test": said(time=NOW - 200)}, Answer.SUSPECT),
    ("is from the future", {"test": said(time=NOW + 121)}, Answer.SUSPECT),
    ("failed on GPU-9", {"test": said(uuid="GPU-9")}, Answer.SUSPECT),
    ("failed on cpu", {"test": said(), "events": (of_gpu("GPU-1"),)}, Answer.SUSPECT),
    ("a device that it does not name", {"test": said(devices=())}, Answer.SUSPECT),
    ("no known-answer test: status 404", {"no_test": "status 404"}, Answer.SUSPECT),
    ("waits up to 1 s", {"no_test": "none yet", "test_later": True, "now": NOW - 21}, Answer.HOLD),
    ("no known-answer test: none yet", {"no_test": "none yet", "test_later": True, "now": NOW - 20}, Answer.SUSPECT),
]


@pytest.mark.parametrize(("reason", "facts", "answer"), UNCONFIRMED, ids=[row[0] for row in UNCONFIRMED])
def test_only_the_failed_test_of_the_named_gpu_after_the_event_confirms(
    reason: str, facts: dict[str, Any], answer: Answer
) -> None:
    """Anything else leaves a first transient fault unconfirmed, and says why."""
    decision = decide("quarantine", replace(FACTS, **{"events": (TRANSIENT,), "opened_at": NOW - 200, **facts}), POLICY)
    (gate,) = [gate for gate in decision.gates if not gate.passed]
    assert (gate.name, decision.answer) == ("confirmed", answer)
    assert reason in gate.reason


def test_a_failed_test_accuses_nobody_without_a_proven_event() -> None:
    """The suspect's word about itself is no proof: without two witnesses of the event there is nothing to confirm."""
    decision = decide("quarantine", replace(FACTS, events=(), test=said()), POLICY)
    assert (decision.answer, decision.reason.partition(":")[0]) == (Answer.WAIT, "proven")


def test_what_must_not_be_done_unasked_still_gets_its_quarantine() -> None:
    """Scarce capacity, other work and the hour bound the replacement; the node leaves the job all the same."""
    facts = replace(FACTS, short_groups=("workers",), node=NodeView(("job 7",), ""))
    policy = replace(POLICY, windows=("Sat 00:00-01:00",))
    assert decide("quarantine", facts, policy).answer is Answer.GO
    assert decide("replace", facts, policy).answer is Answer.ASK


def test_every_gate_has_its_row() -> None:
    """A gate that is added to the policy is added to the table."""
    asked = {gate.name for gate in decide("replace", FACTS, POLICY).gates}
    assert asked == {row[0] for row in TABLE}


def test_budgets_bound_replacing_only() -> None:
    """A used-up budget never keeps a proven bad node in the job."""
    full = replace(FACTS, usage=Usage(9, 9, 9))
    assert decide("quarantine", full, POLICY).answer is Answer.GO
    assert decide("replace", full, POLICY).answer is Answer.HOLD


def test_an_already_replaced_name_says_by_whom() -> None:
    """The reason names the instance that has the node name now."""
    heir = replace(SUSPECT, instance_id="i-0000000000000beef")
    decision = decide("quarantine", replace(FACTS, members=(*MEMBERS[:2], heir)), POLICY)
    assert decision.reason == "one_member: already replaced: node-2 is i-0000000000000beef now"


def test_the_mode_is_the_groups() -> None:
    """A group's own mode is what the decision carries."""
    policy = replace(POLICY, group_modes={"workers": GroupModes(replace="approve")})
    assert decide("quarantine", FACTS, policy).mode == "auto"
    assert decide("replace", FACTS, policy).mode == "approve"
