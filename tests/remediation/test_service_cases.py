"""Cases from doorbell to end, in a fake world that the test moves: what is done, once, and what is never done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sdcwatch_remediation.records import Outcome, ReplaceResult
from sdcwatch_remediation.testing import Rig, alert, event_line, fleet, make_rig

MEMBERS = fleet(4)
SUSPECT = MEMBERS[2]
OTHERS = [member.instance_id for member in MEMBERS if member is not SUSPECT]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Any]:
    """Makes a rig with the given policy."""
    rigs = []

    def make(**policy: Any) -> Rig:
        manager = make_rig(tmp_path, MEMBERS, **policy)
        rigs.append(manager)
        return manager.__enter__()

    yield make
    for manager in rigs:
        manager.__exit__(None, None, None)


def finish(rig: Rig, member: Any = SUSPECT) -> dict[str, Any]:
    """Bring up the replacement and let the case end."""
    rig.provider.come_up(member.instance_id, launched=rig.clock())
    rig.rounds(3, seconds=1)
    return rig.case(member)


def steps(case: dict[str, Any]) -> list[str]:
    return [line["step"] for line in case["timeline"]]


def test_a_proven_fault_ends_as_one_replaced_node(world: Any) -> None:
    """Quarantine, one replace call, proof of the new instance, latch released on the others, tombstone."""
    rig = world()
    event = rig.fault(2)
    rig.rounds()
    assert rig.case()["state"] == "proving_replacement"
    assert rig.agents[SUSPECT.instance_id].quarantined == rig.case()["id"]
    assert all(rig.agents[instance].released == [] for instance in OTHERS)
    case = finish(rig)
    assert (case["state"], case["outcome"], case["event_id"]) == ("closed", "replaced", event)
    assert rig.provider.calls == [SUSPECT.instance_id]
    assert all(rig.agents[instance].released == [event] for instance in OTHERS)
    times = [case["times"][name] for name in case["times"]]
    assert None not in times
    assert times == sorted(times)


def test_it_is_not_done_before_another_instance_runs(world: Any) -> None:
    """Accepted is not done: the latch stays until the inventory shows the replacement Running."""
    rig = world()
    rig.fault(2)
    rig.rounds(5, seconds=10)
    new = rig.provider.come_up(SUSPECT.instance_id, launched=rig.clock())
    rig.provider.set_status(new.instance_id, "Pending")
    rig.rounds(5, seconds=10)
    assert rig.case()["state"] == "proving_replacement"
    assert all(rig.agents[instance].released == [] for instance in OTHERS)
    rig.provider.set_status(new.instance_id, "Running")
    rig.rounds(2, seconds=10)
    assert rig.case()["outcome"] == "replaced"


def test_fires_again_resolved_and_restarts_make_one_action(world: Any) -> None:
    """Re-fires in every state, a resolve and three restarts lead to one case and one replace call."""
    rig = world()
    rig.fault(2)
    for _ in range(3):
        rig.rounds(1, seconds=1)
        rig.restart()
        rig.ring(
            alert(SUSPECT, 2), {**alert(SUSPECT, 2), "status": "resolved"}, alert(SUSPECT, 2, check="weight_checksum")
        )
    finish(rig)
    rig.restart()
    (late,) = rig.ring(alert(SUSPECT, 2))
    rig.rounds(3, seconds=1)
    assert (late["result"], late["reason"]) == ("rejected", f"{SUSPECT.instance_id} was already replaced")
    assert rig.provider.calls == [SUSPECT.instance_id]
    assert len(rig.cases()) == 1


def test_a_name_reused_by_a_new_instance_is_refused(world: Any) -> None:
    """The alert names an instance that is gone while its node name lives on: already replaced, nothing is asked."""
    rig = world()
    new = rig.provider.come_up(SUSPECT.instance_id, launched=rig.clock())
    rig.ring(alert(SUSPECT, 2))
    rig.rounds()
    assert rig.case()["state"] == "refused"
    assert f"already replaced: {new.node_name} is {new.instance_id} now" in rig.case()["reason"]
    assert all(not agent.asked for agent in rig.agents.agents.values())


def test_a_node_name_that_does_not_fit_the_instance_is_refused(world: Any) -> None:
    """Instance id and node name must meet in one inventory member."""
    rig = world()
    rig.fault(2, ring=False)
    rig.ring(alert(SUSPECT, 2, training_node="node-1"))
    rig.rounds()
    assert rig.case()["state"] == "refused"
    assert rig.provider.calls == []


def test_an_instance_launched_after_the_fault_is_refused(world: Any) -> None:
    """An instance that was launched within the clock doubt of the fault may be another one than the faulty one."""
    rig = world()
    launched = rig.clock() - 60
    rig.provider.members = tuple(replace(m, launch_time=launched) if m is SUSPECT else m for m in MEMBERS)
    rig.fault(2)
    rig.rounds()
    assert (rig.case()["state"], rig.provider.calls) == ("refused", [])
    assert rig.case()["reason"].startswith("launched_before")


def test_the_demo_can_set_the_clock_doubt_to_nothing(world: Any) -> None:
    """With clock_doubt_seconds = 0 an instance launched just before its fault is acted on."""
    rig = world(clock_doubt_seconds=0.0)
    rig.provider.members = tuple(replace(m, launch_time=rig.clock() - 1) if m is SUSPECT else m for m in MEMBERS)
    rig.fault(2)
    rig.rounds()
    assert rig.provider.calls == [SUSPECT.instance_id]


def test_stale_evidence_expires(world: Any) -> None:
    """An event older than the window is never acted on, whatever the alert's own times say."""
    rig = world()
    rig.fault(2, time=rig.clock() - 7200)
    rig.rounds(3, seconds=1)
    assert rig.case()["state"] == "unproven"
    rig.rounds(1, seconds=4000)
    assert (rig.case()["state"], rig.provider.calls) == ("expired", [])


def test_a_service_that_was_down_for_days_replays_nothing(world: Any) -> None:
    """Cases in every state before the act expire when their time passed while the service was down."""
    rig = world(settle_seconds=30.0)
    rig.fault(2)
    rig.rounds()
    assert rig.case()["state"] == "settling"
    rig.clock.now += 3 * 86_400
    rig.restart()
    rig.rounds(2)
    assert (rig.case()["state"], rig.provider.calls) == ("expired", [])


def test_a_first_transient_is_suspected_and_the_job_goes_on(world: Any) -> None:
    """confirm = persistent: one transient fault closes as suspected, releases every latch and replaces nothing."""
    rig = world(confirm="persistent")
    event = rig.fault(2, persistence="transient")
    rig.rounds(2, seconds=1)
    assert (rig.case()["state"], rig.case()["outcome"], rig.provider.calls) == ("closed", "suspected", [])
    assert all(agent.released == [event] for agent in rig.agents.agents.values())


def test_the_second_transient_of_the_same_gpu_is_acted_on_without_a_new_alert(world: Any) -> None:
    """Alertmanager sends nothing new while the alert keeps firing, so the service itself finds the second event."""
    rig = world(confirm="persistent")
    rig.fault(2, persistence="transient")
    rig.rounds(2, seconds=1)
    rig.clock.now += 600
    rig.fault(2, ring=False, persistence="transient", step=900)
    rig.rounds(3, seconds=1)
    assert rig.provider.calls == [SUSPECT.instance_id]
    assert len(rig.cases()) == 2


def test_the_same_transient_event_twice_is_one(world: Any) -> None:
    """A refire of the event that made the node suspected neither opens another case nor confirms it."""
    rig = world(confirm="persistent")
    rig.fault(2, persistence="transient")
    for _ in range(5):
        rig.rounds(2, seconds=30)
        rig.ring(alert(SUSPECT, 2))
    assert (len(rig.cases()), rig.provider.calls) == (1, [])


def test_a_second_transient_of_another_gpu_stays_suspected(world: Any) -> None:
    """Two faults of two GPUs of one node do not confirm each other."""
    rig = world(confirm="persistent")
    rig.fault(2, persistence="transient")
    rig.rounds(2, seconds=1)
    rig.clock.now += 600
    line = event_line(MEMBERS, [2], time=rig.clock(), persistence="transient", step=900)
    line["event"]["ranks"][2]["gpu_uuid"] = "CPU-other-1"
    rig.agents.say(line)
    rig.rounds(3, seconds=1)
    assert ([c["outcome"] for c in rig.cases()], rig.provider.calls) == (["suspected", "suspected"], [])


def test_a_persistent_verdict_is_acted_on_at_once(world: Any) -> None:
    """confirm = persistent acts on one event that says so itself."""
    rig = world(confirm="persistent")
    rig.fault(2, persistence="persistent")
    rig.rounds()
    assert rig.provider.calls == [SUSPECT.instance_id]


@pytest.mark.parametrize(("mode", "state"), [("observe", "observed"), ("recommend", "recommended")])
def test_below_approve_nothing_is_touched(world: Any, mode: str, state: str) -> None:
    """observe and recommend record the exact request and touch neither node, provider nor latch."""
    rig = world(mode=mode)
    rig.fault(2)
    rig.rounds(5, seconds=1)
    case = rig.case()
    assert (case["state"], rig.provider.calls) == (state, [])
    assert case["request"]["replace"] == {"ClusterName": "demo", "NodeIds": [SUSPECT.instance_id]}
    assert case["request"]["quarantine"]["body"]["decision"] == "leave"
    assert all(agent.posts == [] for agent in rig.agents.agents.values())


def test_the_default_policy_only_observes(world: Any) -> None:
    """Out of the box the mode is observe."""
    rig = world(mode="observe", confirm="persistent")
    assert type(rig.config.policy)().mode == "observe"
    assert type(rig.config.policy)().confirm == "persistent"


def test_quarantine_and_replace_are_separate_permissions(world: Any) -> None:
    """quarantine = auto with replace = recommend keeps the node out of the job and replaces nothing."""
    rig = world(mode="auto", replace="recommend")
    rig.fault(2)
    rig.rounds(3, seconds=1)
    assert (rig.case()["state"], rig.provider.calls) == ("recommended", [])
    assert rig.agents[SUSPECT.instance_id].quarantined


def test_an_approval_names_a_person_and_fits_one_request(world: Any) -> None:
    """Approve: wrong scope, wrong hash and no name are refused; the right one acts once; a second is a conflict."""
    rig = world(mode="approve")
    rig.fault(2)
    rig.rounds(2, seconds=1)
    case = rig.case()
    assert (case["state"], rig.provider.calls) == ("awaiting_approval", [])
    path = f"/v1/cases/{case['id']}/approve"
    good = {"by": "Ada Example", "request_sha256": case["request_sha256"]}
    assert rig.send("POST", path, token="alerts", json=good).status_code == 403
    assert rig.send("POST", path, token="cases", json=good).status_code == 403
    assert rig.send("POST", path, token="approve", json={**good, "by": " "}).status_code == 422
    assert rig.send("POST", path, token="approve", json={**good, "request_sha256": "0" * 64}).status_code == 409
    assert rig.send("POST", path, token="approve", json=good).status_code == 200
    assert rig.send("POST", path, token="approve", json=good).status_code == 409
    rig.rounds()
    assert rig.provider.calls == [SUSPECT.instance_id]
    assert next(x for x in rig.case()["timeline"] if x["step"] == "replace_requested")["detail"]["approved_by"] == (
        "Ada Example"
    )


def test_an_approval_that_comes_too_late_is_refused(world: Any) -> None:
    """The request for an approval expires; nobody answering means that nothing is replaced."""
    rig = world(mode="approve", approval_seconds=60.0)
    rig.fault(2)
    rig.rounds(2, seconds=1)
    case = rig.case()
    rig.clock.now += 61
    body = {"by": "Ada", "request_sha256": case["request_sha256"]}
    assert rig.send("POST", f"/v1/cases/{case['id']}/approve", token="approve", json=body).status_code == 409
    rig.rounds()
    assert (rig.case()["state"], rig.provider.calls) == ("expired", [])


def test_a_quarantined_node_waits_for_the_approval_of_its_replacement(world: Any) -> None:
    """quarantine = auto, replace = approve: out of the job at once, replaced after a person agreed."""
    rig = world(mode="auto", replace="approve")
    rig.fault(2)
    rig.rounds(2, seconds=1)
    case = rig.case()
    assert case["state"] == "awaiting_approval"
    assert set(case["request"]) == {"case", "event", "instance", "replace"}
    body = {"by": "Ada", "request_sha256": case["request_sha256"]}
    assert rig.send("POST", f"/v1/cases/{case['id']}/approve", token="approve", json=body).status_code == 200
    rig.rounds()
    assert rig.provider.calls == [SUSPECT.instance_id]


def test_a_rejected_case_releases_the_latch_and_is_not_taken_up_again(world: Any) -> None:
    """A person's no lets the job go on, and the same event never comes back as another case."""
    rig = world(mode="approve")
    event = rig.fault(2)
    rig.rounds(2, seconds=1)
    path = f"/v1/cases/{rig.case()['id']}/reject"
    assert rig.send("POST", path, token="alerts", json={"by": "Ada"}).status_code == 403
    assert rig.send("POST", path, token="approve", json={"by": "Ada", "reason": "known"}).status_code == 200
    rig.rounds(2, seconds=1)
    assert (rig.case()["outcome"], rig.provider.calls) == ("rejected", [])
    assert all(agent.released == [event] for agent in rig.agents.agents.values())
    rig.ring(alert(SUSPECT, 2))
    rig.rounds(3, seconds=1)
    assert len(rig.cases()) == 1


def test_an_old_event_does_not_come_back_with_a_new_doorbell(world: Any) -> None:
    """One agent's word about a newer event opens a case; the event that a person rejected is no proof in it."""
    rig = world(mode="approve")
    rig.fault(2)
    rig.rounds(2, seconds=1)
    path = f"/v1/cases/{rig.case()['id']}/reject"
    assert rig.send("POST", path, token="approve", json={"by": "Ada"}).status_code == 200
    rig.rounds(2, seconds=1)
    rig.fault(2, ring=False, by=[MEMBERS[0].instance_id], step=900)
    rig.rounds(3, seconds=1)
    assert [case["state"] for case in rig.cases()] == ["closed", "unproven"]
    assert rig.provider.calls == []


def test_two_suspects_in_one_event_freeze(world: Any) -> None:
    """An event that names two instances is a bad detector or build: frozen, nothing touched."""
    rig = world()
    rig.agents.say(event_line(MEMBERS, [1, 2], time=rig.clock()))
    rig.ring(alert(MEMBERS[1], 1), alert(SUSPECT, 2))
    rig.rounds(3, seconds=1)
    assert [case["state"] for case in rig.cases()] == ["frozen", "frozen"]
    assert rig.provider.calls == []
    assert all(agent.posts == [] for agent in rig.agents.agents.values())


def test_two_cases_in_one_job_freeze_though_they_come_one_at_a_time(world: Any) -> None:
    """The second suspect arrives inside the settle time of the first: both freeze."""
    rig = world(settle_seconds=90.0)
    rig.fault(2)
    rig.rounds(6, seconds=10)
    rig.fault(1, step=58)
    rig.rounds(12, seconds=10)
    assert [case["state"] for case in rig.cases()] == ["frozen", "frozen"]
    assert rig.provider.calls == []
    reject = f"/v1/cases/{rig.cases()[0]['id']}/reject"
    assert rig.send("POST", reject, token="approve", json={"by": "Ada"}).status_code == 200


def test_a_forged_second_case_does_not_freeze_the_first(world: Any) -> None:
    """An unproven doorbell can delay by the settle time, never block: the proven case is acted on."""
    rig = world(settle_seconds=30.0)
    rig.fault(2)
    rig.ring(alert(MEMBERS[1], 1))
    rig.rounds(5, seconds=10)
    assert rig.provider.calls == [SUSPECT.instance_id]
    assert rig.case(MEMBERS[1])["state"] == "unproven"


def test_nothing_is_done_before_the_settle_time(world: Any) -> None:
    """Settle counts from the newest case of the cluster and is bounded in all."""
    rig = world(settle_seconds=90.0, max_settle_seconds=120.0)
    rig.fault(2)
    rig.rounds(8, seconds=10)
    assert (rig.case()["state"], rig.provider.calls) == ("settling", [])
    rig.ring(alert(MEMBERS[1], 1))
    rig.rounds(3, seconds=10)
    assert rig.provider.calls == []
    rig.rounds(2, seconds=10)
    assert rig.provider.calls == [SUSPECT.instance_id]


def test_the_same_step_failing_on_new_hardware_freezes(world: Any) -> None:
    """A second node failing at the same step of the same check is not the hardware's fault."""
    rig = world(per_day=9)
    rig.fault(2)
    rig.rounds()
    finish(rig)
    rig.clock.now += 5000
    rig.fault(1)
    rig.rounds(2, seconds=1)
    assert rig.case(MEMBERS[1])["state"] == "frozen"
    assert rig.provider.calls == [SUSPECT.instance_id]


def test_budgets_count_across_restarts(world: Any) -> None:
    """What is under way and what was done in 24 hours is read from the database, not remembered."""
    rig = world(per_day=1)
    rig.fault(2)
    rig.rounds()
    finish(rig)
    rig.clock.now += 5000
    rig.restart()
    rig.fault(1, step=900, training_job="other")
    rig.rounds(3, seconds=1)
    case = rig.case(MEMBERS[1])
    assert (case["state"], rig.provider.calls) == ("replacing", [SUSPECT.instance_id])
    assert case["reason"] == "per_day: 1 of 1 in 24 h"
    rig.rounds(1, seconds=4000)
    assert rig.case(MEMBERS[1])["state"] == "expired"


def test_one_replacement_is_under_way_at_a_time(world: Any) -> None:
    """A second job's proven fault waits until the first replacement is proven, also after a restart."""
    rig = world(per_day=9, replacement_seconds=9000.0)
    rig.fault(2)
    rig.rounds()
    rig.restart()
    rig.fault(1, step=900, training_job="other")
    rig.rounds(3, seconds=1)
    assert rig.provider.calls == [SUSPECT.instance_id]
    rig.provider.come_up(SUSPECT.instance_id, launched=rig.clock())
    rig.rounds(4, seconds=1)
    assert rig.provider.calls == [SUSPECT.instance_id, MEMBERS[1].instance_id]


def test_a_definite_refusal_is_tried_again_with_a_new_intent(world: Any) -> None:
    """Throttled twice, then accepted: three intents, three calls, with growing pauses between them."""
    rig = world(backoff_seconds=30.0)
    throttled = ReplaceResult(Outcome.REFUSED, "ThrottlingException", "slow down", retryable=True)
    rig.provider.answers = [throttled, throttled]
    rig.fault(2)
    rig.rounds()
    rig.rounds(2, seconds=10)
    assert len(rig.provider.calls) == 1
    rig.rounds(1, seconds=11)
    assert len(rig.provider.calls) == 2
    rig.rounds(5, seconds=10)
    assert len(rig.provider.calls) == 2
    rig.rounds(1, seconds=11)
    assert [i["outcome"] for i in rig.case()["intents"]] == ["refused", "refused", "accepted"]
    assert finish(rig)["outcome"] == "replaced"


def test_refusals_end_after_three_attempts(world: Any) -> None:
    """A provider that goes on refusing is asked three times; then a person takes over."""
    rig = world()
    rig.provider.answers = [ReplaceResult(Outcome.REFUSED, "InstanceIdInUse", "", retryable=True)] * 9
    rig.fault(2)
    rig.rounds(20, seconds=60)
    assert (rig.case()["state"], len(rig.provider.calls)) == ("failed", 3)


def test_a_refusal_that_cannot_change_is_not_repeated(world: Any) -> None:
    """Access denied: one call, then a person takes over."""
    rig = world()
    rig.provider.answers = [ReplaceResult(Outcome.REFUSED, "AccessDeniedException", "no", retryable=False)]
    rig.fault(2)
    rig.rounds(5, seconds=60)
    assert (rig.case()["state"], len(rig.provider.calls)) == ("failed", 1)


@pytest.mark.parametrize("effect", [True, False])
def test_an_unknown_outcome_is_settled_by_reading(world: Any, effect: bool) -> None:
    """A dropped connection is never repeated: the inventory shows the replacement, or a person takes over."""
    rig = world(replacement_seconds=600.0)
    rig.provider.answers = [ConnectionError("dropped")]
    rig.fault(2)
    rig.rounds(3, seconds=10)
    assert rig.case()["state"] == "proving_replacement"
    if effect:
        assert finish(rig)["outcome"] == "replaced"
    else:
        rig.rounds(10, seconds=100)
        assert rig.case()["state"] == "failed"
    assert rig.provider.calls == [SUSPECT.instance_id]


def test_somebody_else_replaced_it_first(world: Any) -> None:
    """While a person is asked, another hand replaces the node: no call of ours, the job goes on."""
    rig = world(mode="approve")
    event = rig.fault(2)
    rig.rounds(2, seconds=1)
    case = finish(rig)
    assert (case["outcome"], rig.provider.calls) == ("replaced_by_others", [])
    assert all(rig.agents[instance].released == [event] for instance in OTHERS)
    assert rig.ring(alert(SUSPECT, 2))[0]["result"] == "rejected"


def test_a_pause_stops_at_the_next_step_and_resume_goes_on(world: Any) -> None:
    """Only the admin token pauses; while paused a proven case is held, without a call."""
    rig = world()
    assert rig.send("POST", "/v1/pause", token="approve", json={"by": "Ada"}).status_code == 403
    assert rig.send("POST", "/v1/pause", token="admin", json={"by": "Ada", "reason": "drill"}).status_code == 200
    rig.fault(2)
    rig.restart()
    rig.rounds(3, seconds=1)
    assert (rig.case()["state"], rig.provider.calls) == ("settling", [])
    assert rig.case()["reason"] == "not_stopped: paused by Ada: drill"
    assert rig.send("POST", "/v1/resume", token="admin", json={"by": "Ada"}).status_code == 200
    rig.rounds(1, seconds=1)
    assert rig.provider.calls == [SUSPECT.instance_id]


def test_the_kill_switch_file_stops_between_quarantine_and_replace(world: Any, tmp_path: Path) -> None:
    """The file is looked at afresh before every act; a folder that cannot be looked at counts as on."""
    folder = tmp_path / "switch"
    rig = world()
    rig.config = replace(rig.config, kill_switch=replace(rig.config.kill_switch, file=str(folder / "STOP")))
    rig.restart()
    rig.fault(2)
    rig.rounds(2, seconds=1)
    assert "cannot be looked at" in rig.case()["reason"]
    folder.mkdir()
    rig.restart(replace="approve")
    rig.rounds(1, seconds=1)
    case = rig.case()
    assert case["state"] == "awaiting_approval"
    (folder / "STOP").touch()
    body = {"by": "Ada", "request_sha256": case["request_sha256"]}
    assert rig.send("POST", f"/v1/cases/{case['id']}/approve", token="approve", json=body).status_code == 200
    rig.rounds(3, seconds=1)
    assert (rig.case()["state"], rig.provider.calls) == ("replacing", [])
    (folder / "STOP").unlink()
    rig.rounds(1, seconds=1)
    assert rig.provider.calls == [SUSPECT.instance_id]


@pytest.mark.parametrize(
    "policy", [{"groups": ()}, {"groups": ("others",)}, {"forbidden_groups": ("workers",), "groups": ()}]
)
def test_only_allow_listed_groups_are_touched(world: Any, policy: dict[str, Any]) -> None:
    """A group that is not listed, or is forbidden, is refused with the reason."""
    rig = world(**policy)
    rig.fault(2)
    rig.rounds(2, seconds=1)
    assert (rig.case()["state"], rig.provider.calls) == ("refused", [])


def test_an_instance_that_its_provider_works_on_is_left_alone(world: Any) -> None:
    """An instance that is not Running is the provider's; when it is Running again the case goes on."""
    rig = world(settle_seconds=5.0)
    rig.fault(2)
    rig.rounds()
    rig.provider.set_status(SUSPECT.instance_id, "SystemUpdating")
    rig.rounds(10, seconds=1)
    assert (rig.case()["state"], rig.provider.calls) == ("settling", [])
    assert rig.case()["reason"].startswith("provider_idle")


def test_an_unreadable_inventory_is_waited_for(world: Any) -> None:
    """Nothing is decided on an inventory that cannot be read, and nothing is lost meanwhile."""
    rig = world()
    rig.provider.readable = False
    rig.fault(2)
    rig.rounds(20, seconds=60)
    assert (rig.case()["state"], rig.provider.calls) == ("proving", [])
    rig.provider.readable = True
    rig.rounds(1, seconds=60)
    assert rig.provider.calls == [SUSPECT.instance_id]


def test_a_dead_agent_of_the_suspect_does_not_stop_its_replacement(world: Any) -> None:
    """Quarantine is best effort: three tries, all recorded, then the replacement stops the node."""
    rig = world()
    rig.agents[SUSPECT.instance_id].instance = "another"
    rig.fault(2)
    rig.agents[SUSPECT.instance_id].latch = "none"
    rig.rounds(5, seconds=1)
    assert rig.provider.calls == [SUSPECT.instance_id]
    assert steps(rig.case()).count("quarantine_unconfirmed") == 3
    assert rig.case()["times"]["quarantined"] is None


def test_a_broken_case_does_not_stop_the_others(world: Any) -> None:
    """An unexpected error in one case is counted and the next case is still moved."""
    rig = world(concurrent=2, per_day=9, group_share=1.0)
    rig.fault(1, training_job="one", step=1)
    rig.fault(2, training_job="two", step=2)
    original = rig.provider.replace_request

    def broken(instance_id: str) -> dict[str, Any]:
        if instance_id == MEMBERS[1].instance_id:
            raise RuntimeError("broken")
        return dict(original(instance_id))

    rig.provider.replace_request = broken
    rig.rounds(2, seconds=1)
    assert rig.provider.calls == [SUSPECT.instance_id]
    assert rig.service.telemetry.registry.get_sample_value("sdc_remediation_errors_total", {"where": "case"}) >= 1


def test_the_audit_log_only_grows(world: Any) -> None:
    """Lines can be neither changed nor deleted, and each went to the sink after its commit."""
    rig = world()
    rig.fault(2)
    rig.rounds()
    from sdcwatch_remediation.errors import StoreUnavailable
    from sqlalchemy import text

    for statement in ("UPDATE audit SET step = 'x'", "DELETE FROM audit"):
        with pytest.raises(Exception, match="append-only") as caught, rig.service.database.write() as connection:
            connection.execute(text(statement))
        assert caught.type is StoreUnavailable or "Integrity" in caught.type.__name__
    assert [line["step"] for line in rig.audit if line["case"] == rig.case()["id"]] == steps(rig.case())
