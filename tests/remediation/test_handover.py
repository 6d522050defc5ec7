"""Handing a node over to whoever owns its replacement: one condition, one Event, no replacement from here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client.models.core_v1_event import CoreV1Event
from kubernetes.client.models.v1_node_condition import V1NodeCondition
from sdcwatch_remediation.actions.acts import TRIES
from sdcwatch_remediation.actions.eks import Eks
from sdcwatch_remediation.actions.eks_client import EksClient
from sdcwatch_remediation.actions.handover import CONDITION, EVENT_TRIES, Handover
from sdcwatch_remediation.actions.scheduler import Act, Scheduler
from sdcwatch_remediation.settings import Actions
from sdcwatch_remediation.testing.kubernetes import FakeKubernetes, Fault
from sdcwatch_remediation.testing.provider import fleet
from sdcwatch_remediation.testing.rig import Rig, make_rig

NAME = "node-2"


@pytest.fixture
def api() -> Iterator[FakeKubernetes]:
    with FakeKubernetes(fleet(4)).serving() as fake:
        yield fake


@pytest.fixture
def rig(tmp_path: Path, api: FakeKubernetes) -> Iterator[Rig]:
    actions = Actions(eks_kubeconfig_file=str(api.kubeconfig(tmp_path / "kubeconfig")))
    with make_rig(tmp_path, fleet(4), actions=actions, handover_groups=("workers",), breaker_instances=9) as made:
        yield made


def condition(api: FakeKubernetes, name: str = NAME) -> dict[str, Any]:
    found = [c for c in api.world.nodes[name]["status"]["conditions"] if c["type"] == CONDITION]
    assert len(found) <= 1
    return found[0] if found else {}


def handed_over(rig: Rig) -> dict[str, Any]:
    """Let a fault on the third node be handed over."""
    rig.fault(2)
    rig.rounds(6, seconds=1)
    case = rig.case()
    assert case["state"] == "handed_over", case["reason"]
    return case


def dying(act: str, *, sends: bool) -> Any:
    """Return a way to have the process end at one act: before its request is sent, or before its answer is kept."""
    done = EksClient.act

    def ends(self: EksClient, request: dict[str, Any]) -> Any:
        if ("events" in request["path"]) is (act == "announce"):
            if sends:
                done(self, request)
            raise KeyboardInterrupt
        return done(self, request)

    return ends


def test_the_owner_is_told_once_and_its_replacement_closes_the_case(rig: Rig, api: FakeKubernetes) -> None:
    """Quarantined first; then the condition and one Event; a new instance is the proof; nothing is replaced."""
    case = handed_over(rig)
    told = condition(api)
    assert (told["status"], told["reason"]) == ("True", "SilentDataCorruption")
    for words in (f"sdcwatch:{case['id']}:", case["event_id"], case["event_key"], "2027-01-15T08:00:00Z", "bytegpt"):
        assert words in told["message"]
    ((name, event),) = api.world.events.items()
    assert name == f"{NAME}.{case['id']}"
    assert (event["involvedObject"]["name"], event["involvedObject"]["uid"]) == (NAME, "node-uid-2")
    assert (event["type"], event["reason"], event["message"]) == ("Warning", CONDITION, told["message"])
    assert rig.agents[rig.provider.members[2].instance_id].quarantined == case["id"]
    rig.rounds(20, seconds=30)
    assert api.writes() == [("patch", "nodes/status", 200), ("create", "events", 201)]
    new = rig.provider.come_up(rig.provider.members[2].instance_id, launched=rig.clock())
    rig.rounds(3, seconds=1)
    case = rig.case()
    assert (case["state"], case["outcome"], case["replacement"]) == ("closed", "replaced_by_others", new.instance_id)
    assert case["released_at"] is not None
    assert rig.provider.calls == []
    steps = [line["step"] for line in case["timeline"]]
    assert steps.index("handover_requested") < steps.index("act_requested") < steps.index("handover_answered")


def test_the_requests_are_those_of_the_official_client_and_other_conditions_stay(rig: Rig, api: FakeKubernetes) -> None:
    """Its models read the condition and the Event; the strategic merge leaves Ready alone."""
    before = json.dumps(api.world.nodes[NAME]["status"]["conditions"])
    handed_over(rig)
    patch, event = (c.body for c in api.calls if c.verb not in ("get", "list"))
    assert V1NodeCondition.from_dict(patch["status"]["conditions"][0]).type == CONDITION
    assert CoreV1Event.from_dict(event).involved_object.kind == "Node"
    assert set(patch["metadata"]) == {"uid", "resourceVersion"}
    after = [c for c in api.world.nodes[NAME]["status"]["conditions"] if c["type"] != CONDITION]
    assert json.dumps(after) == before


@pytest.mark.integration
@pytest.mark.parametrize("mode", ["observe", "recommend", "approve"])
def test_a_dry_run_shows_the_exact_requests_and_sends_nothing(rig: Rig, api: FakeKubernetes, mode: str) -> None:
    """What would be sent is in the case's request; an approval is of exactly that, and is needed."""
    rig.restart(mode=mode)
    rig.fault(2)
    rig.rounds(5, seconds=1)
    case = rig.case()
    assert api.calls == []
    planned = case["request"]["handover"]
    if mode != "approve":
        return
    content = json.dumps({"by": "ada", "request_sha256": case["request_sha256"]}).encode()
    assert rig.send("POST", f"/v1/cases/{case['id']}/approve", token="approve", content=content).status_code == 200
    rig.rounds(4, seconds=1)
    assert rig.case()["state"] == "handed_over"
    asked = [line["detail"]["request"] for line in rig.case()["timeline"] if line["step"] == "act_requested"]
    for dry, sent in zip(planned, asked, strict=True):
        assert (dry["method"], dry["path"]) == (sent["method"], sent["path"])
        assert _said(dry["body"]) == _said(sent["body"])
        assert dry["content_type"] == sent["content_type"]


def _said(body: dict[str, Any]) -> str:
    return str(body["message"] if "message" in body else body["status"]["conditions"][0]["message"])


@pytest.mark.parametrize("sends", [False, True], ids=["before it is sent", "after it took effect"])
@pytest.mark.parametrize("act", ["suspect", "announce"])
def test_a_crash_amid_an_act_leaves_one_condition_and_one_event(
    rig: Rig, api: FakeKubernetes, monkeypatch: pytest.MonkeyPatch, act: str, sends: bool
) -> None:
    """The intent is on record first; after the restart the node is read, and the Event is not made again."""
    with monkeypatch.context() as patched:
        patched.setattr(EksClient, "act", dying(act, sends=sends))
        rig.fault(2)
        with pytest.raises(KeyboardInterrupt):
            rig.rounds(6, seconds=1)
    requested = [line["detail"].get("act") for line in rig.audit if line["step"] == "act_requested"]
    assert requested[-1] == act
    assert any(line["step"] == "handover_requested" for line in rig.audit)
    rig.restart()
    rig.rounds(4, seconds=1)
    assert rig.case()["state"] == "handed_over", rig.case()["reason"]
    took = [(verb, resource) for verb, resource, status in api.writes() if status in (200, 201)]
    assert took == [("patch", "nodes/status"), ("create", "events")]
    assert len(api.world.events) == 1
    assert len([line for line in rig.audit if line["step"] == "handover_requested"]) == 1


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["before", "after", "drop_before", "drop_after"])
@pytest.mark.parametrize(("verb", "resource"), [("patch", "nodes/status"), ("create", "events")])
def test_whatever_becomes_of_an_answer_there_is_one_condition_and_one_event(
    rig: Rig, api: FakeKubernetes, kind: str, verb: str, resource: str
) -> None:
    """An unknown outcome is settled by reading the node, and by the Event's own name."""
    api.faults.append(Fault(kind, verb, resource, 503))
    handed_over(rig)
    took = [(v, r) for v, r, status in api.writes() if status in (200, 201)]
    lost = [(verb, resource)] if kind.endswith("after") else []
    assert sorted(took + lost) == [("create", "events"), ("patch", "nodes/status")]
    assert (condition(api)["status"], len(api.world.events)) == ("True", 1)


@pytest.mark.parametrize(("word", "state"), [("reject", "closed"), ("cancel", "cancelled")])
def test_a_no_sets_the_condition_to_false_and_a_later_case_may_hand_over_again(
    rig: Rig, api: FakeKubernetes, word: str, state: str
) -> None:
    """What was said is taken back once, budgets are free again, and a new fault of the same node is told anew."""
    first = handed_over(rig)
    content = json.dumps({"by": "ada", "reason": "false alarm"}).encode()
    assert rig.send("POST", f"/v1/cases/{first['id']}/{word}", token="approve", content=content).status_code == 200
    rig.rounds(4, seconds=1)
    case = rig.case()
    assert (case["state"], condition(api)["status"]) == (state, "False"), case["reason"]
    assert "withdraw" in case["reason"]
    assert [c.body["status"]["conditions"][0]["status"] for c in api.calls if c.resource == "nodes/status"] == [
        "True",
        "False",
    ]
    usage = rig.service.ledger.usage("demo", "workers", besides="")
    assert (usage.in_flight, usage.last_day) == (0, 0)
    rig.clock.now += 10
    rig.fault(2, step=99)
    rig.rounds(6, seconds=1)
    second = rig.case()
    assert (second["state"], condition(api)["status"]) == ("handed_over", "True"), second["reason"]
    assert second["id"] != first["id"]
    assert len(api.world.events) == 2


@pytest.mark.integration
def test_an_owner_who_does_nothing_is_waited_for_and_then_a_person_is_asked(rig: Rig, api: FakeKubernetes) -> None:
    """After `handover_seconds` the case waits for a person; a replacement still closes it, silence ends it."""
    rig.restart(handover_seconds=600.0)
    handed_over(rig)
    rig.rounds(5, seconds=100)
    assert rig.case()["state"] == "handed_over"
    rig.rounds(1, seconds=200)
    case = rig.case()
    assert case["state"] == "recommended"
    assert condition(api)["status"] == "True"
    assert rig.service.ledger.usage("demo", "workers", besides="").in_flight == 1
    rig.provider.come_up(rig.provider.members[2].instance_id, launched=rig.clock())
    rig.rounds(3, seconds=1)
    assert (rig.case()["state"], rig.case()["outcome"]) == ("closed", "replaced_by_others")


def test_a_replacement_is_seen_although_the_service_was_down_past_the_deadline(rig: Rig) -> None:
    """The world is read before the deadline is applied."""
    rig.restart(handover_seconds=600.0)
    handed_over(rig)
    rig.provider.come_up(rig.provider.members[2].instance_id, launched=rig.clock())
    rig.rounds(2, seconds=10_000)
    assert (rig.case()["state"], rig.case()["outcome"]) == ("closed", "replaced_by_others")


@pytest.mark.integration
def test_a_condition_that_others_set_or_a_node_that_others_took_is_left_to_them(rig: Rig, api: FakeKubernetes) -> None:
    """Nothing is written; a person is asked when the state's time is over."""
    theirs = {"type": CONDITION, "status": "True", "message": "sdcwatch:case-ffffffffffff: theirs"}
    api.world.nodes[NAME]["status"]["conditions"].append(dict(theirs))
    api.world.nodes["node-1"]["spec"]["unschedulable"] = True
    rig.fault(2)
    rig.rounds(6, seconds=1)
    assert "left to that" in rig.case()["reason"]
    rig.rounds(1, seconds=1000)
    assert rig.case()["state"] == "recommended"
    assert rig.service.ledger.usage("demo", "workers", besides="").in_flight == 0
    rig.fault(1, training_job="other")
    rig.rounds(6, seconds=1)
    assert "somebody cordoned it" in rig.case()["reason"]
    assert condition(api) == theirs
    assert api.writes() == []


@pytest.mark.integration
def test_an_owner_who_takes_the_mark_back_at_once_is_not_argued_with(rig: Rig, api: FakeKubernetes) -> None:
    """Between condition and Event somebody sets it to False: it is not set again."""
    api.faults.append(Fault("before", "create", "events", 403))
    rig.fault(2)
    rig.rounds(4, seconds=1)
    condition(api)["status"] = "False"
    rig.rounds(6, seconds=10)
    assert "taken SDCSuspected" in rig.case()["reason"]
    assert [c.status for c in api.calls if c.resource == "nodes/status"] == [200]


@pytest.mark.integration
def test_an_event_that_is_refused_is_done_without_and_the_reason_says_so(rig: Rig, api: FakeKubernetes) -> None:
    """The condition is what a destroyer acts on; RBAC without `create events` does not keep it from being seen."""
    api.faults.append(Fault("before", "create", "events", 403, count=99))
    rig.fault(2)
    rig.rounds(12, seconds=10)
    case = rig.case()
    assert case["state"] == "handed_over"
    assert f"without the Event, which was tried {EVENT_TRIES} times" in case["reason"]
    assert condition(api)["status"] == "True"


@pytest.mark.integration
def test_a_condition_that_is_refused_is_given_up_and_a_person_is_asked(rig: Rig, api: FakeKubernetes) -> None:
    """Every request was a definite no, so nothing is in flight, and the case says what to do."""
    api.faults.append(Fault("before", "patch", "nodes/status", 403, count=99))
    rig.fault(2)
    rig.rounds(30, seconds=10)
    case = rig.case()
    assert case["state"] == "recommended"
    assert f"tried {TRIES} times" in case["reason"]
    assert "tell its owner" in case["reason"]
    assert [s for _, resource, s in api.writes() if resource == "nodes/status"] == [403] * TRIES
    assert rig.service.ledger.usage("demo", "workers", besides="").in_flight == 0


@pytest.mark.integration
def test_what_holds_a_replacement_holds_a_handover(rig: Rig, api: FakeKubernetes) -> None:
    """Budgets count both alike, a pause and a hold stop it, scarce capacity asks a person; nothing is written."""
    rig.restart(per_day=0)
    rig.fault(2)
    rig.rounds(5, seconds=1)
    assert (rig.case()["state"], rig.case()["reason"].partition(":")[0]) == ("handing_over", "per_day")
    rig.service.ledger.pause(by="ada", reason="drill")
    rig.restart(per_day=2)
    rig.rounds(2, seconds=1)
    assert "paused" in rig.case()["reason"]
    rig.service.ledger.resume(by="ada")
    rig.restart(min_running=9)
    rig.rounds(2, seconds=1)
    case = rig.case()
    assert (case["state"], list(case["request"])) == ("awaiting_approval", ["case", "event", "handover", "instance"])
    assert api.writes() == []
    content = json.dumps({"by": "ada", "request_sha256": case["request_sha256"]}).encode()
    assert rig.send("POST", f"/v1/cases/{case['id']}/approve", token="approve", content=content).status_code == 200
    rig.rounds(2, seconds=1)
    assert rig.case()["state"] == "handed_over", rig.case()["reason"]
    assert rig.provider.calls == []


@pytest.mark.integration
def test_one_handover_under_way_counts_as_a_replacement_under_way(rig: Rig, api: FakeKubernetes) -> None:
    """`concurrent` is 1: a second node, of another job, waits until the first has been replaced."""
    handed_over(rig)
    rig.fault(1, training_job="other")
    rig.rounds(6, seconds=1)
    assert (rig.case()["state"], rig.case()["reason"].partition(":")[0]) == ("handing_over", "concurrent")
    assert condition(api, "node-1") == {}


@pytest.mark.integration
def test_a_group_that_is_not_handed_over_is_replaced_as_before(rig: Rig, api: FakeKubernetes) -> None:
    """Only the groups that are named are handed over."""
    rig.restart(handover_groups=())
    rig.fault(2)
    rig.rounds(6, seconds=1)
    assert rig.provider.calls == [rig.provider.members[2].instance_id]
    assert api.calls == []


@pytest.mark.integration
def test_isolated_through_kubernetes_too_the_suspicion_is_taken_back_before_the_cordon(
    rig: Rig, api: FakeKubernetes
) -> None:
    """Otherwise the owner would still be asked to replace a node that trains again."""
    context = rig.service.worker.context
    assert isinstance(context.handover, Handover)
    eks: Scheduler = Eks(context.handover.client)
    rig.service.worker.context = dataclasses.replace(context, schedulers=(eks,))
    case = handed_over(rig)
    assert api.world.nodes[NAME]["spec"]["unschedulable"] is True
    rig.send("POST", f"/v1/cases/{case['id']}/cancel", token="approve", content=b'{"by": "ada", "reason": "no"}')
    rig.rounds(3, seconds=1)
    assert rig.case()["state"] == "cancelled", rig.case()["reason"]
    assert [resource for _, resource, _ in api.writes()] == ["nodes", "nodes/status", "events", "nodes/status", "nodes"]
    assert "unschedulable" not in api.world.nodes[NAME]["spec"]


@pytest.mark.integration
def test_a_new_node_under_the_old_name_is_not_taken_for_the_suspect(rig: Rig, api: FakeKubernetes) -> None:
    """Neither told of nor given back: name, instance id, address and group must fit."""
    api.world.nodes[NAME]["spec"]["providerID"] = "aws:///z/sagemaker/cluster/hyperpod-a-i-0ffffffffffffffff"
    rig.fault(2)
    rig.rounds(6, seconds=1)
    assert "nothing was sent" in rig.case()["reason"]
    assert api.writes() == []


@pytest.mark.integration
def test_the_event_of_the_longest_node_name_has_a_name_that_kubernetes_takes(rig: Rig, api: FakeKubernetes) -> None:
    """At most 253 letters, small ones, without a dot or dash before the dot."""
    context = rig.service.worker.context
    assert context.handover is not None
    case = handed_over(rig)
    stored = rig.service.store.case(case["id"])
    assert stored is not None
    long = dataclasses.replace(rig.provider.members[2], node_name="A" * 199 + "-" + "b" * 50)
    name = context.handover.of(stored).plan(long, "train", stored.id)[1]["body"]["metadata"]["name"]
    assert name == "a" * 199 + f".{stored.id}"


@pytest.mark.integration
def test_without_a_name_of_ours_on_it_nothing_is_taken_back(rig: Rig, api: FakeKubernetes) -> None:
    """The owner has written its own words into the condition: `reject` leaves them, and ends the case."""
    case = handed_over(rig)
    condition(api)["message"] = "our destroyer is at it"
    rig.send("POST", f"/v1/cases/{case['id']}/cancel", token="approve", content=b'{"by": "ada", "reason": "no"}')
    rig.rounds(3, seconds=1)
    assert rig.case()["state"] == "cancelled"
    assert (condition(api)["status"], condition(api)["message"]) == ("True", "our destroyer is at it")


@pytest.mark.integration
def test_acts_of_a_handover_are_what_the_client_sends(rig: Rig, api: FakeKubernetes) -> None:
    """What the audit log holds is what went over the wire."""
    case = handed_over(rig)
    logged = [line["detail"]["request"] for line in case["timeline"] if line["step"] == "act_requested"]
    sent = [(c.path.partition("?")[0], c.body) for c in api.calls if c.verb not in ("get", "list")]
    assert [Act("", "", request).request["path"] for request in logged] == [path for path, _ in sent]
    for request, (_, body) in zip(logged, sent, strict=True):
        kept = {key: value for key, value in body["metadata"].items() if key in request["body"]["metadata"]}
        assert {**body, "metadata": kept} == request["body"]


def test_the_doctor_says_that_a_group_is_handed_over_and_whether_the_road_is_open(
    rig: Rig, api: FakeKubernetes
) -> None:
    """One that may not read nodes, or finds another instance under the name, is told before a case needs it."""
    found = _findings(rig)
    assert "by handing over to its owner" in found["mode"]["detail"]
    assert found["road"]["status"] == "pass"
    api.faults.append(Fault("before", "get", "nodes", 403))
    found = _findings(rig)
    assert (found["road"]["status"], "403" in found["road"]["detail"]) == ("fail", True)
    assert api.writes() == []


def _findings(rig: Rig) -> dict[str, dict[str, str]]:
    return {one["name"]: one for one in rig.send("GET", "/v1/doctor", token="cases").json()["findings"]}
