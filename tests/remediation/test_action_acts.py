"""Acts of a scheduler inside a case: committed before they are done, settled by looking, and before any replacement."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sdcwatch_remediation.actions.acts import TRIES
from sdcwatch_remediation.actions.scheduler import Act, ActResult, Done, SchedulerProblem
from sdcwatch_remediation.actions.slurm import Answer, Slurm, SlurmReplace
from sdcwatch_remediation.config import check
from sdcwatch_remediation.errors import ConfigError
from sdcwatch_remediation.records import Member, Outcome
from sdcwatch_remediation.service import make_orchestrator
from sdcwatch_remediation.settings import Actions, Config
from sdcwatch_remediation.testing.provider import FakeProvider, fleet
from sdcwatch_remediation.testing.rig import Rig, make_rig

CASE = "case-0123456789ab"


class Drain:
    """A scheduler with one act, whose effect a test may withhold."""

    name = "fake"

    def __init__(self) -> None:
        self.drained: list[str] = []
        self.performed: list[Act] = []
        self.problem = ""
        self.works = True
        self.crash = False
        self.before: Any = lambda: None

    def next_act(self, member: Member, job: str, case_id: str, done: Sequence[Done]) -> Act | None:
        if self.problem:
            raise SchedulerProblem(self.problem)
        name = member.node_name
        return None if name in self.drained else Act("drain", name, {"argv": ["drain", name, case_id]})

    def next_restore(self, member: Member, case_id: str, done: Sequence[Done]) -> Act | None:
        return None

    def by_hand(self, member: Member) -> str:
        return f"undo {member.node_name}"

    def perform(self, act: Act) -> ActResult:
        self.before()
        self.performed.append(act)
        if self.works:
            self.drained.append(act.target)
        if self.crash:
            raise KeyboardInterrupt
        return ActResult(Outcome.ACCEPTED if self.works else Outcome.UNKNOWN)

    def plan(self, member: Member, job: str, case_id: str) -> list[dict[str, Any]]:
        return [{"argv": ["drain", member.node_name, case_id]}]

    def describe(self, member: Member) -> str:
        return "fine"

    def logs(self, member: Member, job: str) -> dict[str, str]:
        return {}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with make_rig(tmp_path, fleet(4)) as made:
        yield made


def use(rig: Rig, scheduler: Drain) -> None:
    rig.service.worker.context = dataclasses.replace(rig.service.worker.context, schedulers=(scheduler,))


def steps(case: dict[str, Any]) -> list[str]:
    return [line["step"] for line in case["timeline"]]


def test_the_exact_request_is_committed_before_it_is_done_and_the_node_isolated_before_it_is_replaced(rig: Rig) -> None:
    """When the act is performed its request stands in the audit log and nothing was replaced."""
    drain, seen = Drain(), []
    use(rig, drain)
    drain.before = lambda: seen.append((steps(rig.case())[-1], list(rig.provider.calls)))
    rig.fault(2)
    rig.rounds(4)
    case = rig.case()
    assert seen == [("act_requested", [])]
    assert rig.provider.calls == [rig.provider.members[2].instance_id]
    asked = next(line["detail"] for line in case["timeline"] if line["step"] == "act_requested")
    assert asked["request"] == {"argv": ["drain", "node-2", case["id"]]}
    order = steps(case)
    assert order.index("quarantined") < order.index("act_answered") < order.index("replace_requested")


def test_a_dry_run_shows_the_schedulers_requests_and_does_nothing(tmp_path: Path) -> None:
    """In mode observe the request of the case holds what would be sent, exactly, and nothing is performed."""
    with make_rig(tmp_path, fleet(4), mode="observe") as rig:
        drain = Drain()
        use(rig, drain)
        rig.fault(1)
        rig.rounds(4)
        case = rig.case()
        assert case["state"] == "observed"
        assert case["request"]["quarantine"]["fake"] == [{"argv": ["drain", "node-1", case["id"]]}]
        assert drain.performed == []


def test_a_crash_after_the_act_does_not_repeat_it(rig: Rig) -> None:
    """The act took and the process died: the next reading shows it, and it is performed once in all."""
    drain = Drain()
    use(rig, drain)
    drain.crash = True
    rig.fault(0)
    with pytest.raises(KeyboardInterrupt):
        rig.rounds(4)
    drain.crash = False
    rig.restart()
    use(rig, drain)
    rig.rounds(4)
    assert len(drain.performed) == 1
    assert len(rig.provider.calls) == 1


def test_an_act_that_never_shows_is_given_up_and_nothing_is_replaced(rig: Rig) -> None:
    """After a few tries the case waits with the reason, until its deadline ends it; the instance stays."""
    drain = Drain()
    drain.works = False
    use(rig, drain)
    rig.fault(3)
    rig.rounds(TRIES + 5, seconds=5)
    assert len(drain.performed) == TRIES
    assert rig.case()["state"] == "quarantining"
    rig.rounds(2, seconds=1000)
    assert rig.case()["state"] == "expired"
    assert rig.provider.calls == []


def test_a_node_that_others_took_out_of_service_holds_the_case(rig: Rig) -> None:
    """The scheduler's reason is the case's reason, and no act and no replacement follows."""
    drain = Drain()
    drain.problem = "n3 is DRAIN, fan is loud: left to whoever did it"
    use(rig, drain)
    rig.fault(3)
    rig.rounds(6, seconds=5)
    assert "fan is loud" in rig.case()["reason"]
    assert rig.provider.calls == []
    drain.problem = ""
    rig.rounds(3, seconds=5)
    assert len(rig.provider.calls) == 1


def test_a_pause_between_two_acts_stops_the_second(rig: Rig) -> None:
    """The kill switch is asked before every single act."""
    drain = Drain()
    use(rig, drain)
    drain.works = False
    drain.before = lambda: rig.service.ledger.pause(by="ada", reason="looking")
    rig.fault(1)
    rig.rounds(6, seconds=5)
    assert len(drain.performed) == 1


@pytest.mark.parametrize(
    ("answer", "outcome", "code"),
    [
        (Answer(0, "", ""), Outcome.ACCEPTED, ""),
        (Answer(None, "", "no answer within 30 s"), Outcome.UNKNOWN, "Timeout"),
        (Answer(1, "", "slurm_update error: Invalid node name specified"), Outcome.REFUSED, "Refused"),
        (Answer(1, "", "slurm_update error: Access/permission denied"), Outcome.REFUSED, "Refused"),
        (Answer(1, "", "Unable to contact slurm controller (connect failure)"), Outcome.REFUSED, "NotReached"),
        (Answer(127, "", "scontrol: No such file or directory"), Outcome.REFUSED, "NotReached"),
        (Answer(1, "", "slurm_update error: Socket timed out on send/recv operation"), Outcome.UNKNOWN, "Status1"),
    ],
)
def test_answers_of_scontrol_are_told_apart(answer: Answer, outcome: Outcome, code: str) -> None:
    """A definite no, or no way to the controller, is refused; whatever may have had its effect is unknown."""
    result = Slurm(run=lambda argv, seconds: answer).perform(Act("drain", "n1", {"argv": ["scontrol"]}))
    assert (result.outcome, result.code) == (outcome, code)


def test_a_hostile_job_name_or_comment_in_slurms_output_is_not_taken_for_ours() -> None:
    """Job names may hold `|`, and a Comment that only contains our mark is somebody else's."""
    node = "NodeName=n1 NodeAddr=127.0.0.1 State=IDLE+DRAIN Reason=x [root@1] Comment=not sdcwatch:" + CASE

    def run(argv: Sequence[str], seconds: float) -> Answer:
        return Answer(0, node if "show" in argv else f"7|RUNNING|eve|train|{CASE}\n;rm|RUNNING|eve|train\n", "")

    member = dataclasses.replace(fleet(1)[0], node_name="n1", address="127.0.0.1")
    view = Slurm(run=run).look(member, "train", CASE)
    assert view is not None
    assert view.others_work == ("job 7 of eve",)
    assert view.cordoned_by == "x"
    assert Slurm(run=run).fail(member).code == "NotIsolated"


def test_slurm_replaces_only_an_instance_of_the_live_inventory() -> None:
    """An id that the inventory lacks, or one that is not Running, reaches no scontrol."""
    asked: list[Sequence[str]] = []

    def run(argv: Sequence[str], seconds: float) -> Answer:
        asked.append(argv)
        return Answer(0, "", "")

    provider = FakeProvider(fleet(3))
    replace = SlurmReplace(provider, Slurm(run=run))
    assert replace.replace("i-0ffffffffffffffff").code == "NotOneMember"
    provider.set_status(provider.members[1].instance_id, "Pending")
    assert replace.replace(provider.members[1].instance_id).code == "NotOneMember"
    assert asked == []
    assert replace.replace_request(provider.members[0].instance_id) == {
        "argv": ["scontrol", "update", "nodename=node-0", "state=fail", "reason=Action:Replace"]
    }


def test_where_slurm_isolates_the_policy_asks_it_too() -> None:
    """Other people's work and foreign drains reach the gates; without Slurm nobody is asked."""
    assert isinstance(make_orchestrator(Config(actions=Actions(isolate="slurm"))), Slurm)
    assert make_orchestrator(Config()) is None


def test_replacing_by_slurm_needs_draining_by_slurm(rig: Rig) -> None:
    """A configuration that would fail nodes which nobody drained does not start."""
    with pytest.raises(ConfigError, match=r"actions\.isolate"):
        check(dataclasses.replace(rig.config, actions=Actions(replace="slurm")))
