"""Two processes, a kill, a second event: what happens beside a replacement must not lose or repeat anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sdcwatch_remediation.actions.replace import ANSWER_SECONDS
from sdcwatch_remediation.cases import inventory_json
from sdcwatch_remediation.errors import Conflict
from sdcwatch_remediation.records import Outcome, ReplaceResult
from sdcwatch_remediation.testing import Rig, fleet, make_rig
from sdcwatch_remediation.worker import Worker

MEMBERS = fleet(6, subnet=7)
SUSPECT = MEMBERS[2]
OTHERS = [member.instance_id for member in MEMBERS if member is not SUSPECT]
THROTTLED = ReplaceResult(Outcome.REFUSED, "ThrottlingException", "slow down", retryable=True)
FORBIDDEN = ReplaceResult(Outcome.REFUSED, "AccessDeniedException", "no", retryable=False)
DOWN = 1900.0
"""Seconds that a service is down for: longer than a case may stay in `replacing`."""


class Killed(BaseException):
    """The process ends here: nothing after it runs."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Makes a rig with the given policy."""
    managers = []

    def make(**policy: Any) -> Rig:
        manager = make_rig(tmp_path, MEMBERS, **policy)
        managers.append(manager)
        return manager.__enter__()

    yield make
    for manager in managers:
        manager.__exit__(None, None, None)


def kill_after_the_call(rig: Rig) -> None:
    """Let the service die between the accepted call about rank 2 and its record, and stay down."""

    def die(instance_id: str) -> None:
        raise Killed

    rig.fault(2)
    rig.provider.on_replace = die
    with pytest.raises(Killed):
        rig.rounds()
    rig.provider.on_replace = lambda instance_id: None
    assert rig.case(SUSPECT)["state"] == "replacing"
    rig.clock.now += DOWN
    rig.restart()


def retired(rig: Rig) -> bool:
    return rig.service.ledger.retired("demo", SUSPECT.instance_id)


def test_down_for_longer_than_the_deadline_still_reads_what_the_call_did(world: Callable[..., Rig]) -> None:
    """A call without a record is settled by the inventory, however late: replaced, released, entombed."""
    rig = world()
    kill_after_the_call(rig)
    rig.provider.come_up(SUSPECT.instance_id, launched=rig.clock())
    rig.rounds(2, seconds=1)
    assert (rig.case(SUSPECT)["state"], rig.case(SUSPECT)["outcome"]) == ("closed", "replaced")
    assert retired(rig)
    assert rig.provider.calls == [SUSPECT.instance_id]
    assert all(len(rig.agents[instance].released) == 1 for instance in OTHERS)


def test_an_unrecorded_call_keeps_the_budget_after_the_deadline(world: Callable[..., Rig]) -> None:
    """With one replacement at a time, a second node is not replaced while the first may be on its way."""
    rig = world()
    kill_after_the_call(rig)
    rig.rounds()
    assert rig.case(SUSPECT)["state"] == "proving_replacement"
    rig.fault(4, training_job="another")
    rig.rounds(3, seconds=1)
    assert rig.provider.calls == [SUSPECT.instance_id]


def test_replacing_without_a_request_under_way_still_expires(world: Callable[..., Rig]) -> None:
    """The deadline stands where every attempt was refused: nothing is asked for after it."""
    rig = world()
    rig.fault(2)
    rig.provider.answers = [THROTTLED]
    rig.rounds()
    rig.rounds(seconds=DOWN)
    assert rig.case()["state"] == "expired"
    assert rig.provider.calls == [SUSPECT.instance_id]


def test_a_case_that_gave_up_counts_until_the_inventory_shows_the_replacement(world: Callable[..., Rig]) -> None:
    """Failed by its deadline, it holds the budget; the late replacement frees it and gets its tombstone."""
    rig = world(replacement_seconds=100.0, per_day=5)
    rig.fault(2)
    rig.rounds()
    rig.rounds(seconds=101)
    assert rig.case(SUSPECT)["state"] == "failed"
    usage = rig.service.ledger.usage("demo", "workers", besides="")
    assert (usage.in_flight, usage.in_flight_in_group) == (1, 1)
    rig.fault(4, training_job="another")
    rig.rounds(2, seconds=1)
    assert rig.provider.calls == [SUSPECT.instance_id]
    rig.provider.come_up(SUSPECT.instance_id, launched=rig.clock())
    rig.rounds(2, seconds=1)
    assert retired(rig)
    assert "replacement_proven" in [line["step"] for line in rig.case(SUSPECT)["timeline"]]
    assert rig.provider.calls == [SUSPECT.instance_id, MEMBERS[4].instance_id]


def test_a_case_that_gave_up_does_not_hold_the_budget_for_ever(world: Callable[..., Rig]) -> None:
    """A day after the request, one that never had an effect no longer stops the others."""
    rig = world(replacement_seconds=100.0)
    rig.fault(2)
    rig.rounds()
    rig.rounds(seconds=101)
    rig.rounds(seconds=86_400)
    assert rig.service.ledger.usage("demo", "workers", besides="").in_flight == 0


@pytest.mark.parametrize("call_seconds", [0.0, ANSWER_SECONDS + 1], ids=["quick", "slower than is waited for"])
def test_a_twin_that_looks_in_during_a_throttled_call_does_not_end_the_attempts(
    world: Callable[..., Rig], call_seconds: float
) -> None:
    """Whatever the other process made of the open call, a retryable refusal is tried again, after its wait."""
    rig = world()
    twin = Worker(rig.service.worker.context)
    seen: list[str] = []

    def look_in(instance_id: str) -> None:
        rig.clock.now += call_seconds
        if len(rig.provider.calls) == 1:
            twin.round()
            seen.append(rig.case()["state"])

    rig.fault(2)
    rig.provider.on_replace = look_in
    rig.provider.answers = [THROTTLED]
    rig.rounds()
    assert seen == ["proving_replacement" if call_seconds else "replacing"]
    rig.rounds(2, seconds=1)
    assert len(rig.provider.calls) == 1
    rig.rounds(seconds=40)
    assert rig.provider.calls == [SUSPECT.instance_id] * 2
    assert rig.case()["state"] == "proving_replacement"


def test_a_final_refusal_behind_a_twin_fails_the_case(world: Callable[..., Rig]) -> None:
    """A refusal that cannot change is not tried again on the way back from the other process's reading."""
    rig = world()
    twin = Worker(rig.service.worker.context)

    def look_in(instance_id: str) -> None:
        rig.clock.now += ANSWER_SECONDS + 1
        twin.round()

    rig.fault(2)
    rig.provider.on_replace = look_in
    rig.provider.answers = [FORBIDDEN]
    rig.rounds(4, seconds=61)
    assert rig.provider.calls == [SUSPECT.instance_id]
    assert rig.case()["state"] == "failed"


def test_a_rejection_while_a_call_is_reserved_is_refused(world: Callable[..., Rig], monkeypatch: Any) -> None:
    """The look at the requests and the move are one step: a reservation made just before the move is seen."""
    rig = world()
    rig.fault(2)
    rig.provider.answers = [THROTTLED]
    rig.rounds()
    store, ledger, context = rig.service.store, rig.service.ledger, rig.service.context
    (case,) = store.cases()
    inventory = context.inventory()
    assert inventory is not None
    before, decide = inventory_json(inventory), ledger._decide

    def reserve_first(*args: Any, **more: Any) -> Any:  # another process's worker, right before the move
        ledger.reserve(case, rig.provider.replace_request(case.instance_id), before=before)
        return decide(*args, **more)

    monkeypatch.setattr(ledger, "_decide", reserve_first)
    with pytest.raises(Conflict, match="asked for already"):
        ledger.reject(case, by="ann", reason="no")
    kept = store.case(case.id)
    assert kept is not None
    assert kept.state == "replacing"
    assert [line["step"] for line in store.timeline(case.id)].count("rejected") == 0


def test_the_latch_of_a_later_event_is_released_too(world: Callable[..., Rig]) -> None:
    """The event that decided did not halt, a later one did: its latch stands, and is released after the replacement."""
    rig = world(quarantine="auto", replace="approve")
    first = rig.fault(2, action="observe", step=200)
    rig.rounds(5, seconds=1)
    rig.clock.now += 600
    second = rig.fault(2, action="halt", step=400)
    case = rig.case(SUSPECT)
    assert (case["state"], case["event_id"]) == ("awaiting_approval", first)
    body = {"by": "ann", "request_sha256": case["request_sha256"]}
    path = f"/v1/cases/{case['id']}/approve"
    assert rig.send("POST", path, token="approve", json=body).status_code == 200
    rig.rounds(2, seconds=1)
    rig.provider.come_up(SUSPECT.instance_id, launched=rig.clock())
    rig.rounds(3, seconds=1)
    case = rig.case(SUSPECT)
    assert (case["state"], case["reason"]) == ("closed", "latch released on 6 nodes")  # the new one too
    assert all(rig.agents[instance].released == [second] for instance in OTHERS)


def test_a_latch_that_one_agent_alone_tells_of_is_left_alone(world: Callable[..., Rig]) -> None:
    """An agent cannot have another event's latch released by claiming that it blames this instance."""
    rig = world()
    rig.fault(2)
    rig.rounds()
    other = rig.fault(2, ring=False, by=[OTHERS[0]], step=400)
    rig.provider.come_up(SUSPECT.instance_id, launched=rig.clock())
    rig.rounds(2, seconds=1)
    assert all(other not in rig.agents[instance].released for instance in OTHERS)


def test_a_second_event_during_a_suspicion_keeps_its_latch(world: Callable[..., Rig]) -> None:
    """While the instance stays, only the decided event is let go; the next one has a case of its own."""
    rig = world(confirm="persistent")
    first = rig.fault(2, persistence="transient")
    rig.rounds()
    assert rig.case()["outcome"] == "suspected"
    assert all(rig.agents[instance].released == [first] for instance in OTHERS)
    rig.clock.now += 10
    rig.fault(2, ring=False, persistence="transient", step=400)
    rig.rounds(2, seconds=1)
    assert len(rig.cases()) == 2
    assert all(rig.agents[instance].released == [first] for instance in OTHERS)


@pytest.mark.parametrize("changes", [{}, {"kind": "unattributed"}, {"drill": True}])
def test_a_watched_instance_is_reopened_only_for_a_fault_of_its_own(
    world: Callable[..., Rig], changes: dict[str, Any]
) -> None:
    """A newer event in which it is a mere rank, that blames nobody, or that is a drill opens no new case."""
    rig = world(confirm="persistent")
    rig.fault(2, persistence="transient")
    rig.rounds()
    assert rig.case()["outcome"] == "suspected"
    rig.clock.now += 10
    rig.fault(4 if not changes else 2, ring=False, persistence="transient", step=400, **changes)
    rig.rounds(2, seconds=1)
    assert len(rig.cases()) == 1
