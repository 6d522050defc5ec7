"""What has gone wrong for people who replace nodes by machine, each as a test of its whole kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sdcwatch_remediation.actions.replace import ANSWER_SECONDS
from sdcwatch_remediation.errors import StoreUnavailable
from sdcwatch_remediation.records import Outcome, ReplaceResult
from sdcwatch_remediation.testing import Rig, alert, event_line, fleet, make_rig

FLEET = fleet(12, subnet=9)
SUSPECT = FLEET[2]
DAY = 86_400.0


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Makes a rig of twelve nodes with the given policy."""
    managers = []

    def make(**policy: Any) -> Rig:
        manager = make_rig(tmp_path, FLEET, **policy)
        managers.append(manager)
        return manager.__enter__()

    yield make
    for manager in managers:
        manager.__exit__(None, None, None)


def frozen(rig: Rig) -> float | None:
    return rig.service.telemetry.registry.get_sample_value("sdc_remediation_cases", {"state": "frozen"})


@pytest.mark.parametrize("restarts", [False, True], ids=["one life", "restarted after each"])
@pytest.mark.parametrize("how", ["one payload", "one at a time"])
def test_ten_suspected_nodes_are_a_bad_detector_and_none_is_touched(
    world: Callable[..., Rig], how: str, restarts: bool
) -> None:
    """However they come: no act, no quarantine, every case frozen, and a gauge that the page is made of."""
    rig = world(settle_seconds=90.0)
    named = range(1, 11)
    for number in named:
        rig.fault(number, ring=False, step=100 + number)
        if how == "one at a time":
            rig.ring(alert(FLEET[number], number))
            rig.rounds(1, seconds=8)
            if restarts:
                rig.restart()
    if how == "one payload":
        rig.ring(*(alert(FLEET[number], number) for number in named))
    rig.rounds(16, seconds=10)
    assert {case["state"] for case in rig.cases()} == {"frozen"}
    assert frozen(rig) == len(rig.cases()) == 10
    assert rig.provider.calls == []
    assert all(agent.posts == [] for agent in rig.agents.agents.values())


def test_a_slow_drip_of_suspects_ends_at_the_breaker(world: Callable[..., Rig]) -> None:
    """One an hour, restarted between: what was replaced before counts, and from the fourth on everything is frozen."""
    rig = world(per_day=99, breaker_instances=4)
    for number in range(1, 8):
        rig.fault(number, step=100 + number, training_job=f"job-{number}")
        rig.rounds(2, seconds=1)
        if rig.case(FLEET[number])["state"] == "proving_replacement":
            rig.provider.come_up(FLEET[number].instance_id, launched=rig.clock())
            rig.rounds(3, seconds=1)
        rig.clock.now += 3600
        rig.restart()
    assert len(rig.provider.calls) == 3
    assert [case["state"] for case in rig.cases()[3:]] == ["frozen"] * 4


def test_the_node_that_a_rank_ran_on_then_is_meant_not_where_it_runs_now(world: Callable[..., Rig]) -> None:
    """Rank 0 erred on one node and was moved to another: the event's identity counts, and the rank number never."""
    rig = world()
    then = [SUSPECT, *(member for member in FLEET if member is not SUSPECT)]
    rig.agents.say(event_line(then, [0], time=rig.clock()))
    rig.ring(alert(FLEET[0], 0))
    rig.rounds(3, seconds=1)
    assert (rig.case(FLEET[0])["state"], rig.provider.calls) == ("unproven", [])
    rig.ring(alert(SUSPECT, 0))
    rig.rounds(2, seconds=1)
    assert rig.provider.calls == [SUSPECT.instance_id]


@pytest.mark.parametrize("state", ["settling", "awaiting_approval", "replacing"])
def test_what_a_pause_of_days_held_up_is_not_done_when_it_ends(world: Callable[..., Rig], state: str) -> None:
    """Resumed after days, a case in any state before the act has expired; the request is not sent late."""
    rig = world(mode="approve" if state == "awaiting_approval" else "auto")
    if state == "replacing":
        rig.provider.answers = [ReplaceResult(Outcome.REFUSED, "ThrottlingException", "", retryable=True)]
        rig.fault(2)
        rig.rounds()
    pause = {"by": "Ada", "reason": "a drill"}
    if state == "settling":
        assert rig.send("POST", "/v1/pause", token="admin", json=pause).status_code == 200
    if state != "replacing":
        rig.fault(2)
        rig.rounds(2, seconds=1)
        rig.send("POST", "/v1/pause", token="admin", json=pause)
    assert rig.case()["state"] == state
    asked = list(rig.provider.calls)
    rig.rounds(3, seconds=1)
    rig.clock.now += 3 * DAY
    rig.restart()
    assert rig.send("POST", "/v1/resume", token="admin", json={"by": "Ada"}).status_code == 200
    rig.ring(alert(SUSPECT, 2))
    rig.rounds(4, seconds=1)
    assert rig.cases()[0]["state"] == "expired"
    assert rig.provider.calls == asked


@pytest.mark.parametrize("verb", ["cancel", "reject"])
def test_a_case_ended_between_quarantine_and_replacement_replaces_nothing(world: Callable[..., Rig], verb: str) -> None:
    """An ended drain is no success: no request follows it, also not after a restart and another doorbell."""
    rig = world(quarantine="auto", replace="approve")
    rig.fault(2)
    rig.rounds(2, seconds=1)
    case = rig.case()
    assert case["state"] == "awaiting_approval"
    assert rig.agents[SUSPECT.instance_id].quarantined == case["id"]
    path = f"/v1/cases/{case['id']}/{verb}"
    assert rig.send("POST", path, token="approve", json={"by": "Ada", "reason": "no"}).status_code == 200
    rig.restart()
    rig.ring(alert(SUSPECT, 2))
    rig.rounds(4, seconds=10)
    assert rig.provider.calls == []
    assert rig.cases()[0]["outcome"] in ("cancelled", "rejected")


@pytest.mark.parametrize("code", ["ExpiredTokenException", "ThrottlingException"])
def test_a_refusal_at_the_first_use_costs_an_attempt_and_never_the_case(world: Callable[..., Rig], code: str) -> None:
    """It surely had no effect: a new attempt under a new intent follows, bounded, and the case ends as replaced."""
    rig = world(backoff_seconds=10.0)
    rig.provider.answers = [ReplaceResult(Outcome.REFUSED, code, "", retryable=True)]
    rig.fault(2)
    rig.rounds(2, seconds=11)
    rig.provider.come_up(SUSPECT.instance_id, launched=rig.clock())
    rig.rounds(3, seconds=1)
    case = rig.case()
    assert [(intent["outcome"], intent["code"]) for intent in case["intents"]] == [("refused", code), ("accepted", "")]
    assert (case["outcome"], rig.provider.calls) == ("replaced", [SUSPECT.instance_id] * 2)


def test_a_database_that_locks_right_after_the_call_costs_no_second_call(
    world: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer could not be written down: the intent stands, the world is read, and the webhook still answers 200."""
    rig = world()
    ledger = rig.service.context.ledger
    record, refused = type(ledger).record, []

    def locked_once(self: Any, *args: Any) -> None:
        if not refused:
            refused.append(args)
            raise StoreUnavailable("the database is locked")
        record(self, *args)

    monkeypatch.setattr(type(ledger), "record", locked_once)
    rig.fault(2)
    with pytest.raises(StoreUnavailable):
        rig.rounds()
    assert rig.ring(alert(SUSPECT, 2))[0]["result"] == "joined"
    rig.rounds(2, seconds=1)
    assert rig.case()["state"] == "replacing"
    rig.provider.come_up(SUSPECT.instance_id, launched=rig.clock())
    rig.rounds(3, seconds=ANSWER_SECONDS)
    assert rig.case()["outcome"] == "replaced"
    assert rig.provider.calls == [SUSPECT.instance_id]
