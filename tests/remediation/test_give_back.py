"""A case that ends without a replacement gives its node back to the scheduler: only what is ours, once, or a person."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sdcwatch_remediation.actions.acts import TRIES
from sdcwatch_remediation.actions.eks import CASE, TAINT, Eks
from sdcwatch_remediation.actions.eks_client import EksClient
from sdcwatch_remediation.actions.give_back import PATIENCE_SECONDS
from sdcwatch_remediation.actions.scheduler import Scheduler
from sdcwatch_remediation.actions.slurm import Answer, Slurm
from sdcwatch_remediation.config import check
from sdcwatch_remediation.errors import ConfigError
from sdcwatch_remediation.testing.kubernetes import FakeKubernetes, Fault
from sdcwatch_remediation.testing.provider import fleet
from sdcwatch_remediation.testing.rig import Rig, make_rig

NAME = "node-2"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with make_rig(tmp_path, fleet(4), replace="approve") as made:
        yield made


@pytest.fixture
def api(rig: Rig) -> Iterator[FakeKubernetes]:
    with FakeKubernetes(rig.provider.members).serving() as fake:
        yield fake


@pytest.fixture
def eks(api: FakeKubernetes, tmp_path: Path) -> Eks:
    return Eks(EksClient.connect(str(api.kubeconfig(tmp_path / "kubeconfig")), timeout_seconds=5))


class Controller:
    """The few words of scontrol and squeue, for one node."""

    def __init__(self) -> None:
        self.state, self.reason, self.comment, self.held = "IDLE", "", "", False
        self.running = True
        self.writes: list[list[str]] = []

    def __call__(self, argv: Sequence[str], seconds: float) -> Answer:
        if argv[0] == "squeue":
            return Answer(0, "7|RUNNING|eve|bytegpt\n" if self.running else "", "")
        if "show" in argv:
            words = f"NodeName={NAME} NodeAddr={ADDRESS} State={self.state}"
            reason = f" Reason={self.reason} [root@2027-01-15T08:00:00]" if self.reason else ""
            return Answer(0, words + reason + (f" Comment={self.comment}" if self.comment else ""), "")
        self.writes.append(list(argv))
        if "requeuehold" in argv:
            self.running, self.held = False, True
        elif "release" in argv:
            self.held = False
        elif "state=drain" in argv:
            self.state, self.reason, self.comment = "IDLE+DRAIN", argv[-2][7:], argv[-1][8:]
        else:
            self.state, self.reason, self.comment = "IDLE", "", ""
        return Answer(0, "", "")


ADDRESS = fleet(4)[2].address


def use(rig: Rig, *schedulers: Scheduler) -> None:
    rig.service.worker.context = dataclasses.replace(rig.service.worker.context, schedulers=schedulers)


def isolated(rig: Rig, scheduler: Scheduler) -> dict[str, Any]:
    """Let a case quarantine and isolate its node, and ask before it replaces."""
    use(rig, scheduler)
    rig.fault(2)
    rig.rounds(4, seconds=1)
    case = rig.case()
    assert case["state"] == "awaiting_approval", case["reason"]
    return case


def say(rig: Rig, word: str) -> int:
    """Decide about the newest case as a person does, over HTTP."""
    content = json.dumps({"by": "ada", "reason": "false alarm"}).encode()
    return rig.send("POST", f"/v1/cases/{rig.case()['id']}/{word}", token="approve", content=content).status_code


def node(api: FakeKubernetes) -> dict[str, Any]:
    return api.world.nodes[NAME]


def is_free(api: FakeKubernetes) -> bool:
    taints = [taint["key"] for taint in node(api)["spec"]["taints"]]
    marked = CASE in node(api)["metadata"]["annotations"]
    return "unschedulable" not in node(api)["spec"] and TAINT not in taints and not marked


def restores(case: dict[str, Any]) -> list[dict[str, Any]]:
    names = ("undrain", "uncordon")
    asked = [line["detail"] for line in case["timeline"] if line["step"] == "act_requested"]
    return [detail for detail in asked if detail["act"] in names]


@pytest.mark.parametrize(("word", "state"), [("reject", "closed"), ("cancel", "cancelled")])
def test_a_no_gives_the_node_back_to_kubernetes(rig: Rig, api: FakeKubernetes, eks: Eks, word: str, state: str) -> None:
    """Cordon, taint and annotation go in one patch, in the audit log first; only `reject` frees the latch."""
    isolated(rig, eks)
    assert not is_free(api)
    assert say(rig, word) == 200
    rig.rounds(4, seconds=1)
    case = rig.case()
    assert (case["state"], is_free(api)) == (state, True), case["reason"]
    assert [(r["scheduler"], r["act"], r["target"]) for r in restores(case)] == [("eks", "uncordon", NAME)]
    assert restores(case)[0]["request"]["body"] == [call.body for call in api.calls if call.verb == "patch"][-1]
    assert "QUARANTINE.json" in case["reason"]
    assert (case["released_at"] is not None) == (word == "reject")
    assert case["outcome"] == ("rejected" if word == "reject" else "cancelled")
    assert rig.provider.calls == []


def test_slurm_gets_the_node_back_by_undrain_and_held_jobs_go_on(rig: Rig) -> None:
    """`state=undrain comment=`, and nothing that would bring back a node which Slurm took for down."""
    controller = Controller()
    isolated(rig, Slurm(run=controller))
    assert controller.state == "IDLE+DRAIN"
    assert say(rig, "reject") == 200
    rig.rounds(3, seconds=1)
    assert controller.writes[-1] == ["scontrol", "update", f"nodename={NAME}", "state=undrain", "comment="]
    assert (controller.state, controller.held, rig.case()["state"]) == ("IDLE", False, "closed")
    assert f"given back: undrain {NAME}" in next(
        line["detail"]["reason"] for line in rig.case()["timeline"] if line["step"] == "closed"
    )


def test_a_rejection_amid_the_isolation_lets_the_held_job_go(rig: Rig) -> None:
    """The job was held and the node not drained yet: what was taken is given back all the same."""
    controller = Controller()
    slurm = Slurm(run=controller)
    perform = slurm.perform

    def stops_after_the_hold(act: Any) -> Any:
        answer = perform(act)
        if act.name == "stop_job":
            rig.service.ledger.pause(by="ada", reason="looking")
        return answer

    slurm.perform = stops_after_the_hold  # type: ignore[method-assign]
    use(rig, slurm)
    rig.fault(2)
    rig.rounds(3, seconds=1)
    assert (controller.held, controller.state, rig.case()["state"]) == (True, "IDLE", "quarantining")
    rig.service.ledger.resume(by="ada")
    assert say(rig, "reject") == 200
    rig.rounds(3, seconds=1)
    assert (controller.held, controller.state, rig.case()["state"]) == (False, "IDLE", "closed")


TAKEN: dict[str, Callable[[Controller], None]] = {
    "drained again with another reason": lambda c: setattr(c, "reason", "fan is loud"),
    "marked by another case": lambda c: setattr(c, "comment", "sdcwatch:case-ffffffffffff"),
    "failed for a replacement": lambda c: (setattr(c, "state", "FAIL"), setattr(c, "reason", "Action:Replace"))[0],
    "back in service": lambda c: setattr(c, "state", "IDLE"),
}


@pytest.mark.parametrize("how", sorted(TAKEN))
def test_a_node_that_somebody_else_took_over_is_left_to_them(rig: Rig, how: str) -> None:
    """Not one command is sent about the node, and the case ends."""
    controller = Controller()
    isolated(rig, Slurm(run=controller))
    before = len(controller.writes)
    TAKEN[how](controller)
    assert say(rig, "reject") == 200
    rig.rounds(3, seconds=1)
    assert controller.writes[before:] == []
    assert "nothing of ours is left" in rig.case()["reason"]
    assert rig.case()["state"] == "closed"


def test_a_cordon_that_is_also_somebody_elses_stays(rig: Rig, api: FakeKubernetes, eks: Eks) -> None:
    """HyperPod repairs the node by now: our taint and mark go, the cordon does not."""
    isolated(rig, eks)
    node(api)["metadata"]["labels"]["sagemaker.amazonaws.com/node-health-status"] = "UnschedulablePendingReboot"
    assert say(rig, "reject") == 200
    rig.rounds(3, seconds=1)
    assert node(api)["spec"]["unschedulable"] is True
    assert CASE not in node(api)["metadata"]["annotations"]
    assert rig.case()["state"] == "closed"


def test_nobodys_answer_gives_nothing_back_unless_the_operator_says_so(rig: Rig, eks: Eks, api: FakeKubernetes) -> None:
    """By default a proven node stays out when the time for an approval is over; with `expired` it is given back."""
    isolated(rig, eks)
    rig.rounds(2, seconds=20_000)
    assert (rig.case()["state"], is_free(api)) == ("expired", False)
    rig.restart(give_back=("rejected", "cancelled", "expired"))
    use(rig, eks)
    del node(api)["metadata"]["annotations"][CASE]
    node(api)["spec"] = {k: v for k, v in node(api)["spec"].items() if k != "unschedulable"}
    rig.fault(2, step=99)
    rig.rounds(4, seconds=1)
    assert rig.case()["state"] == "awaiting_approval"
    rig.rounds(3, seconds=10_000)
    assert (rig.case()["state"], rig.case()["outcome"], is_free(api)) == ("expired", "expired", True)


@pytest.mark.parametrize("kind", ["before", "after", "drop_before", "drop_after"])
def test_whatever_becomes_of_the_answer_the_node_is_given_back_once(
    rig: Rig, api: FakeKubernetes, eks: Eks, kind: str
) -> None:
    """An unknown outcome is settled by reading, and repeated only where the reading shows no effect."""
    isolated(rig, eks)
    before = len(api.writes())
    api.faults.append(Fault(kind, "patch", "nodes", 503))
    assert say(rig, "cancel") == 200
    rig.rounds(4, seconds=2)
    assert (rig.case()["state"], is_free(api)) == ("cancelled", True)
    assert len(api.writes()) - before == (1 if kind.endswith("after") else 2)


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_around_the_act_gives_the_node_back_once(rig: Rig, api: FakeKubernetes, eks: Eks, after: bool) -> None:
    """The process dies before or after the patch, with the request committed: the next one reads, and ends the case."""
    isolated(rig, eks)
    before = len(api.writes())
    perform = eks.perform

    def dies(act: Any) -> Any:
        if after:
            perform(act)
        raise KeyboardInterrupt

    eks.perform = dies  # type: ignore[method-assign]
    assert say(rig, "reject") == 200
    with pytest.raises(KeyboardInterrupt):
        rig.rounds(3, seconds=1)
    assert (rig.case()["state"], len(restores(rig.case()))) == ("giving_back", 1)
    rig.restart()
    eks.perform = perform  # type: ignore[method-assign]
    use(rig, eks)
    rig.rounds(2, seconds=1)
    assert (rig.case()["state"], is_free(api)) == ("closed", True)
    assert len(api.writes()) - before == 1


def test_a_kill_between_the_decision_and_the_first_round_loses_nothing(rig: Rig, api: FakeKubernetes, eks: Eks) -> None:
    """The decision itself makes the debt, in one transaction: `cancelled` is not reached before it is paid."""
    isolated(rig, eks)
    assert say(rig, "cancel") == 200
    assert rig.case()["state"] == "giving_back"
    rig.restart()
    use(rig, eks)
    rig.rounds(2, seconds=1)
    assert (rig.case()["state"], is_free(api)) == ("cancelled", True)


def test_what_cannot_be_given_back_waits_for_a_person_with_the_commands(
    rig: Rig, api: FakeKubernetes, eks: Eks
) -> None:
    """After TRIES refusals nothing more is sent; once somebody did it by hand the case ends by itself."""
    isolated(rig, eks)
    api.faults.append(Fault("before", "patch", "nodes", 403, count=99))
    assert say(rig, "reject") == 200
    rig.rounds(25, seconds=20)
    case = rig.case()
    assert (case["state"], len(restores(case))) == ("not_given_back", TRIES)
    assert f"kubectl uncordon {NAME}" in case["reason"]
    assert "QUARANTINE.json" in case["reason"]
    api.faults.clear()
    spec = node(api)["spec"]
    spec["taints"] = [taint for taint in spec["taints"] if taint["key"] != TAINT]
    del spec["unschedulable"], node(api)["metadata"]["annotations"][CASE]
    rig.rounds(1, seconds=20)
    assert (rig.case()["state"], rig.case()["outcome"]) == ("closed", "rejected")


def test_a_pause_or_a_hold_stops_it_and_patience_ends(rig: Rig, api: FakeKubernetes, eks: Eks) -> None:
    """Nothing is sent meanwhile, and after a quarter of an hour a person is asked; a day later it has failed."""
    isolated(rig, eks)
    before = len(api.writes())
    rig.service.ledger.pause(by="bob", reason="looking")
    assert say(rig, "cancel") == 200
    rig.rounds(3, seconds=10)
    assert rig.case()["state"] == "giving_back"
    rig.service.ledger.resume(by="bob")
    assert say(rig, "hold") == 200
    rig.rounds(2, seconds=PATIENCE_SECONDS)
    assert rig.case()["state"] == "not_given_back"
    assert "held by ada" in rig.case()["reason"]
    assert len(api.writes()) == before
    rig.rounds(1, seconds=90_000)
    assert rig.case()["state"] == "failed"


def test_an_instance_that_is_gone_and_a_scheduler_that_is_not_configured(rig: Rig, eks: Eks) -> None:
    """Without the instance there is nothing to do; without its scheduler a person is told where."""
    isolated(rig, eks)
    use(rig)
    assert say(rig, "reject") == 200
    rig.rounds(2, seconds=1)
    assert rig.case()["state"] == "not_given_back"
    assert "eks acted on the node" in rig.case()["reason"]
    rig.provider.members = tuple(m for m in rig.provider.members if m.node_name != NAME)
    rig.rounds(1, seconds=5)
    assert rig.case()["state"] == "closed"
    assert "is gone" in rig.case()["reason"]


def test_a_case_that_took_nothing_gives_nothing_back(tmp_path: Path) -> None:
    """Rejected before anything was asked of a scheduler, it ends as before."""
    with make_rig(tmp_path, fleet(4), mode="approve") as rig:
        use(rig, Slurm(run=Controller()))
        rig.fault(2)
        rig.rounds(3, seconds=1)
        assert say(rig, "reject") == 200
        rig.rounds(2, seconds=1)
        assert "giving_back" not in [line["step"] for line in rig.case()["timeline"]]
        assert rig.case()["state"] == "closed"


def test_an_end_that_is_none_is_refused_at_start(rig: Rig) -> None:
    """A misspelt word would otherwise leave nodes drained in silence."""
    policy = dataclasses.replace(rig.config.policy, give_back=("reject",))
    with pytest.raises(ConfigError, match=r"policy\.give_back: 'reject'"):
        check(dataclasses.replace(rig.config, policy=policy))
