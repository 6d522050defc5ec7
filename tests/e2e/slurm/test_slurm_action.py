"""The Slurm action against a real controller: containment, drain, Action:Replace, Comment, and refused names."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from sdcwatch_remediation.actions.scheduler import Act, Done, NotOurs, SchedulerProblem
from sdcwatch_remediation.actions.slurm import Slurm, SlurmReplace, run
from sdcwatch_remediation.records import Inventory, Member, Outcome
from sdcwatch_remediation.testing.provider import FakeProvider
from sdcwatch_remediation.testing.slurm import SlurmCluster

pytestmark = [pytest.mark.integration, pytest.mark.needs("slurmctld")]

CASE = "case-0123456789ab"
LOOP = "trap '' TERM\nwhile true; do sleep 0.2; done\n"


def member(name: str, number: int = 1, **changes: Any) -> Member:
    values = {"instance_id": f"i-{number:017x}", "group": "workers", "node_name": name, "status": "Running"}
    return Member(
        **{**values, "launch_time": 0.0, "address": "127.0.0.1", "instance_type": "ml.p5.48xlarge", **changes}
    )


def action(cluster: SlurmCluster, **settings: Any) -> Slurm:
    folder = cluster.program("scontrol").rpartition("/")[0]
    return Slurm(bin_dir=folder, run=partial(run, environment=cluster.environment), **settings)


class Isolation:
    """Does what `actions/acts` does, and keeps what was done."""

    def __init__(self, cluster: SlurmCluster, slurm: Slurm, node: Member) -> None:
        self.cluster, self.slurm, self.node = cluster, slurm, node
        self.acts: list[Act] = []
        self.done: list[Done] = []

    def step(self) -> bool:
        try:
            act = self.slurm.next_act(self.node, "train", CASE, self.done)
        except SchedulerProblem as error:
            if "waiting" not in str(error):
                raise
            return False
        if act is None:
            return True
        self.acts.append(act)
        result = self.slurm.perform(act)
        self.done.append(Done(act.name, act.target, result.outcome.value))
        return False

    def run(self) -> list[Act]:
        self.cluster.wait(self.step, "the node is isolated")
        return self.acts


def test_a_running_job_is_contained_first_then_the_node_drained_and_failed(slurm: SlurmCluster) -> None:
    """Requeue and hold, drain with the case in Comment, release, Action:Replace; the job goes on elsewhere."""
    job = slurm.submit(LOOP, "--requeue", "-w", "n1")
    slurm.wait(lambda: slurm.job_state(job) == "RUNNING", "the job runs")
    nodes = FakeProvider(tuple(member(f"n{i}", i) for i in (1, 2, 3)))
    action_ = action(slurm)
    replace = SlurmReplace(nodes, action_)
    replace.inventory()
    early = replace.replace(nodes.members[0].instance_id)
    assert (early.outcome, early.code) == (Outcome.REFUSED, "NotIsolated")

    acts = Isolation(slurm, action_, nodes.members[0]).run()

    assert [(act.name, act.target) for act in acts] == [("stop_job", job), ("drain", "n1"), ("release_job", job)]
    assert [act.request["argv"][1:] for act in acts] == [
        ["requeuehold", job],
        ["update", "nodename=n1", "state=drain", f"reason=sdcwatch:{CASE}", f"comment=sdcwatch:{CASE}"],
        ["release", job],
    ]
    assert "DRAIN" in slurm.state("n1")
    assert slurm.field("node", "n1", "Comment") == f"sdcwatch:{CASE}"
    slurm.wait(lambda: "COMPLETING" not in slurm.state("n1"), "the job has left the node")
    assert action_.look(nodes.members[0], "train", CASE).cordoned_by == ""  # type: ignore[union-attr]

    result = replace.replace(nodes.members[0].instance_id)
    assert result.outcome is Outcome.ACCEPTED, result
    assert slurm.state("n1") == {"IDLE", "FAIL"}
    assert slurm.field("node", "n1", "Reason").startswith("Action:Replace ")
    assert slurm.field("node", "n1", "Comment") == f"sdcwatch:{CASE}"
    assert slurm.state("n2") == slurm.state("n3") == {"IDLE"}
    slurm.start_soon(job, "reqnodelist=")
    slurm.wait(lambda: slurm.job_state(job) == "RUNNING", "the job starts again, on another node")
    assert slurm.field("job", job, "NodeList") in ("n2", "n3")


def test_no_replace_while_any_job_runs_on_the_node(slurm: SlurmCluster) -> None:
    """Another person's job is not stopped; it keeps Action:Replace back, and shows as other work for the policy."""
    other = slurm.submit(LOOP, "-w", "n1", name="somebody-elses")
    slurm.wait(lambda: slurm.job_state(other) == "RUNNING", "the job runs")
    node, action_ = member("n1"), action(slurm)
    assert [act.name for act in Isolation(slurm, action_, node).run()] == ["drain"]
    view = action_.look(node, "train", CASE)
    assert view is not None
    assert view.others_work[0].startswith(f"job {other} of ")
    result = action_.fail(node)
    assert (result.outcome, result.code, result.retryable) == (Outcome.REFUSED, "NodeBusy", True)
    assert slurm.job_state(other) == "RUNNING"
    assert "FAIL" not in slurm.state("n1")


def test_a_job_that_may_not_be_requeued_keeps_the_case_waiting_with_the_node_drained(slurm: SlurmCluster) -> None:
    """Slurm refuses the requeue; the node is drained all the same, and the reason says what a person can do."""
    job = slurm.submit(LOOP, "--no-requeue", "-w", "n1")
    slurm.wait(lambda: slurm.job_state(job) == "RUNNING", "the job runs")
    isolation = Isolation(slurm, action(slurm), member("n1"))
    with pytest.raises(SchedulerProblem, match="slurm_stop = 'cancel'"):
        isolation.run()
    assert "DRAIN" in slurm.state("n1")
    cancelling = Isolation(slurm, action(slurm, stop="cancel"), member("n1"))
    assert [act.name for act in cancelling.run()] == ["stop_job"]
    slurm.wait(lambda: slurm.job_state(job) == "CANCELLED", "the job is over")


NAMES = ("all", "ALL", "n[1-3]", "n1,n2", "n1 n2", "", "-n1", "n1\nn2", "localhost", "$(id)")


def test_names_that_could_mean_other_nodes_are_refused(slurm: SlurmCluster) -> None:
    """Nothing is sent for them, although scontrol itself takes some: `nodename=all` answers 0 and drains every node."""
    for name in NAMES:
        with pytest.raises(NotOurs):
            action(slurm).next_act(member(name), "train", CASE, ())
        with pytest.raises(NotOurs):
            action(slurm).fail_request(member(name))
        assert action(slurm).fail(member(name)).outcome is Outcome.REFUSED
    assert all(slurm.state(node) == {"IDLE"} for node in slurm.nodes)
    slurm.run("scontrol", "update", "nodename=all", "state=drain", "reason=x")  # what we keep ourselves from
    assert all("DRAIN" in slurm.state(node) for node in slurm.nodes)


def test_a_node_that_slurm_has_elsewhere_or_not_at_all_is_refused(slurm: SlurmCluster) -> None:
    """The name must be exactly one of Slurm's nodes, at the address that the inventory has; `n1` is not `N1`."""
    for wrong in (member("n9"), member("N1"), member("n1", address="10.0.0.7")):
        with pytest.raises(SchedulerProblem):
            action(slurm).next_act(wrong, "train", CASE, ())
    two = FakeProvider((member("n1", 1), member("n1", 2)))
    replace = SlurmReplace(two, action(slurm))
    assert replace.replace(two.members[0].instance_id).code == "NotOneMember"
    assert isinstance(replace.inventory(), Inventory)
    assert slurm.state("n1") == {"IDLE"}


def test_a_node_that_somebody_else_drained_is_left_to_them(slurm: SlurmCluster) -> None:
    """Neither isolated nor resumed; restore takes back only what this very case did."""
    slurm.run("scontrol", "update", "nodename=n2", "state=drain", "reason=fan is loud")
    node = member("n2")
    with pytest.raises(NotOurs, match="fan is loud"):
        action(slurm).next_act(node, "train", CASE, ())
    assert action(slurm).look(node, "train", CASE).cordoned_by == "fan is loud"  # type: ignore[union-attr]
    assert action(slurm).next_restore(node, CASE, ()) is None

    mine = member("n3")
    Isolation(slurm, action(slurm), mine).run()
    assert action(slurm).next_restore(mine, "case-ffffffffffff", ()) is None
    act = action(slurm).next_restore(mine, CASE, ())
    assert act is not None
    assert action(slurm).perform(act).outcome is Outcome.ACCEPTED
    slurm.wait(lambda: slurm.state("n3") == {"IDLE"}, "the node is idle again")
    assert slurm.field("node", "n3", "Comment") == ""
    assert action(slurm).next_restore(mine, CASE, ()) is None


def test_a_node_is_given_back_only_while_reason_and_comment_are_ours(slurm: SlurmCluster) -> None:
    """Drained again by somebody else, set to be replaced, or down besides: left alone, or only undrained."""
    taken, failed, down = member("n1", 1), member("n2", 2), member("n3", 3)
    for node in (taken, failed, down):
        Isolation(slurm, action(slurm), node).run()
    slurm.run("scontrol", "update", "nodename=n1", "state=drain", "reason=fan is loud")
    slurm.run("scontrol", "update", "nodename=n2", "state=fail", "reason=Action:Replace")
    assert action(slurm).next_restore(taken, CASE, ()) is None
    assert action(slurm).next_restore(failed, CASE, ()) is None

    slurm.run("scontrol", "update", "nodename=n3", "state=down", f"reason=sdcwatch:{CASE}")
    act = action(slurm).next_restore(down, CASE, ())
    assert act is not None
    assert " ".join(act.request["argv"][1:]) == "update nodename=n3 state=undrain comment="
    assert action(slurm).by_hand(down).endswith("scontrol update nodename=n3 state=undrain comment=")
    assert action(slurm).perform(act).outcome is Outcome.ACCEPTED
    assert slurm.state("n3") - {"NOT_RESPONDING"} == {"DOWN"}
    assert action(slurm).next_restore(down, CASE, ()) is None
    assert "DRAIN" in slurm.state("n1")


def test_a_controller_that_is_gone_is_a_definite_refusal(slurm: SlurmCluster) -> None:
    """scontrol never reached it, so nothing happened; the attempt may be made again later."""
    node, action_ = member("n1"), action(slurm)
    Isolation(slurm, action_, node).run()
    request = action_.fail_request(node)
    slurm.stop_controller()
    result = action_.perform(Act("fail", "n1", request))
    assert (result.outcome, result.code) == (Outcome.REFUSED, "NotReached")
