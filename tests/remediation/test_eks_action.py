"""The EKS action through the official client: identity, one attempt, evictions, and giving back only what is ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sdcwatch_remediation.actions.eks import CASE, LOG_BYTES, TAINT, Eks
from sdcwatch_remediation.actions.eks_client import EksClient
from sdcwatch_remediation.actions.scheduler import Act, Done, NotOurs, SchedulerProblem
from sdcwatch_remediation.errors import ConfigError
from sdcwatch_remediation.records import Member, Outcome
from sdcwatch_remediation.testing.kubernetes import FakeKubernetes, Fault
from sdcwatch_remediation.testing.provider import fleet

MINE, OTHER = "case-0123456789ab", "case-ffffffffffff"
MEMBERS = tuple(dataclasses.replace(m, node_name=f"hyperpod-{m.instance_id}") for m in fleet(3))
NODE = MEMBERS[1]


@pytest.fixture
def api() -> Iterator[FakeKubernetes]:
    with FakeKubernetes(MEMBERS).serving() as fake:
        yield fake


@pytest.fixture
def eks(api: FakeKubernetes, tmp_path: Path) -> Eks:
    return Eks(EksClient.connect(str(api.kubeconfig(tmp_path / "kubeconfig")), timeout_seconds=5))


def isolate(eks: Eks, member: Member = NODE, case: str = MINE) -> list[Act]:
    """Do what `actions/acts` does, until nothing is left."""
    acts: list[Act] = []
    done: list[Done] = []
    while (act := eks.next_act(member, "train", case, done)) is not None:
        result = eks.perform(act)
        acts.append(act)
        done.append(Done(act.name, act.target, result.outcome.value))
        assert len(acts) < 20
    return acts


def node(api: FakeKubernetes, member: Member = NODE) -> dict[str, Any]:
    return api.world.nodes[member.node_name]


def test_a_node_is_cordoned_and_tainted_in_one_patch_and_only_the_jobs_pods_are_evicted(
    api: FakeKubernetes, eks: Eks
) -> None:
    """Pods of a DaemonSet, of the node itself, of other jobs and of other nodes stay; other taints stay too."""
    mine = [api.add_pod(f"rank-{i}", NODE.node_name, job="train") for i in (0, 1)]
    stay = [
        api.add_pod("agent", NODE.node_name, kind="DaemonSet", job="train"),
        api.add_pod("proxy", NODE.node_name, kind="Mirror", job="train"),
        api.add_pod("web", NODE.node_name, kind="ReplicaSet"),
        api.add_pod("eval", NODE.node_name, job="train2"),
        api.add_pod("elsewhere", MEMBERS[0].node_name, job="train"),
    ]
    acts = isolate(eks)
    assert [(act.name, act.target) for act in acts] == [("cordon", NODE.node_name), *(("evict", pod) for pod in mine)]
    assert sorted(api.world.pods) == sorted(stay)
    spec = node(api)["spec"]
    assert spec["unschedulable"] is True
    assert [taint["key"] for taint in spec["taints"]] == ["nvidia.com/gpu", TAINT]
    assert spec["taints"][1] == {"key": TAINT, "value": MINE, "effect": "NoSchedule"}
    assert node(api)["metadata"]["annotations"][CASE] == f"sdcwatch:{MINE}"
    assert acts[0].request["body"]["metadata"]["uid"] == "node-uid-1"
    view = eks.look(NODE, "train", MINE)
    assert view is not None
    assert (view.others_work, view.cordoned_by) == (("pod team/eval", "pod team/web"), "")
    foreign = eks.look(NODE, "train", OTHER)
    assert foreign is not None
    assert MINE in foreign.cordoned_by


WRONG: dict[str, Any] = {
    "the instance id of another": {"spec": {"providerID": "aws:///z/sagemaker/cluster/hyperpod-a-i-0ffffffffffffffff"}},
    "no instance id": {"spec": {"providerID": "aws:///z/somewhere"}},
    "an id that only ends alike": {"spec": {"providerID": "aws:///z/xi-00000000000000001"}},
    "another address": {"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.9"}]}},
    "another group": {"metadata": {"labels": {"sagemaker.amazonaws.com/instance-group-name": "theirs"}}},
    "the control plane": {"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}},
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_node_that_is_not_exactly_the_member_is_left_alone(api: FakeKubernetes, eks: Eks, what: str) -> None:
    """Name, instance id, address, group and kind must all fit; nothing is written otherwise."""
    for part, values in WRONG[what].items():
        node(api)[part].update(values)
    for ask in (lambda: eks.next_act(NODE, "train", MINE, ()), lambda: eks.look(NODE, "train", MINE)):
        with pytest.raises(NotOurs):
            ask()
    assert api.writes() == []


@pytest.mark.parametrize("name", ["all", "n1,n2", "../nodes", "n1/status", "n1\n", "", "-h", "x" * 300, "nоde-1"])
def test_names_that_are_not_one_nodes_reach_no_server(api: FakeKubernetes, eks: Eks, name: str) -> None:
    """No label text becomes a path."""
    for ask in (eks.describe, lambda member: eks.next_restore(member, MINE, ())):
        with pytest.raises(NotOurs):
            ask(dataclasses.replace(NODE, node_name=name))
    assert api.calls == []


def test_a_node_that_others_took_out_of_service_is_left_to_them(api: FakeKubernetes, eks: Eks) -> None:
    """Somebody's cordon, another case's mark, HyperPod's own repair: neither isolated nor given back."""
    cordoned, marked, repaired = (node(api, member) for member in MEMBERS)
    cordoned["spec"]["unschedulable"] = True
    marked["metadata"]["annotations"][CASE] = f"sdcwatch:{OTHER}"
    repaired["metadata"]["labels"]["sagemaker.amazonaws.com/node-health-status"] = "UnschedulablePendingReboot"
    for member in MEMBERS:
        with pytest.raises(NotOurs):
            eks.next_act(member, "train", MINE, ())
        view = eks.look(member, "train", MINE)
        assert view is not None
        assert view.cordoned_by
        assert eks.next_restore(member, MINE, ()) is None
    assert api.writes() == []


def test_a_person_who_uncordons_it_again_has_the_last_word(api: FakeKubernetes, eks: Eks) -> None:
    """After an accepted cordon the service does not fight over the node."""
    isolate(eks)
    del node(api)["spec"]["unschedulable"]
    with pytest.raises(NotOurs, match="back into service"):
        eks.next_act(NODE, "train", MINE, [Done("cordon", NODE.node_name, "accepted")])


def test_restore_takes_back_exactly_what_is_ours(api: FakeKubernetes, eks: Eks) -> None:
    """Taint, annotation and cordon of this case; a taint that came meanwhile, and another case's mark, stay."""
    isolate(eks)
    taints = node(api)["spec"]["taints"]
    taints.append({"key": "team/reserved", "effect": "NoSchedule"})
    assert eks.next_restore(NODE, OTHER, ()) is None
    act = eks.next_restore(NODE, MINE, ())
    assert act is not None
    assert eks.perform(act).outcome is Outcome.ACCEPTED
    assert [taint["key"] for taint in node(api)["spec"]["taints"]] == ["nvidia.com/gpu", "team/reserved"]
    assert "unschedulable" not in node(api)["spec"]
    assert CASE not in node(api)["metadata"]["annotations"]
    assert eks.next_restore(NODE, MINE, ()) is None
    del api.world.nodes[NODE.node_name]
    assert eks.next_restore(NODE, MINE, ()) is None


def test_a_node_that_changed_since_it_was_read_is_not_patched(api: FakeKubernetes, eks: Eks) -> None:
    """Another version gives 409, another uid (the name was given to a new machine) 422; both had no effect."""
    act = eks.next_act(NODE, "train", MINE, ())
    assert act is not None
    api.world.stamp(node(api))
    result = eks.perform(act)
    assert (result.outcome, result.code) == (Outcome.REFUSED, "Status409")
    node(api)["metadata"]["uid"] = "another"
    assert eks.perform(act).code == "Status422"
    assert "unschedulable" not in node(api)["spec"]


def test_an_eviction_names_the_pod_that_was_seen_and_waits_for_its_end(api: FakeKubernetes, eks: Eks) -> None:
    """A new pod of the same name is not evicted by the old request, and a pod that is ending is waited for."""
    key = api.add_pod("rank-0", NODE.node_name, job="train")
    cordon = eks.next_act(NODE, "train", MINE, ())
    assert cordon is not None
    assert eks.perform(cordon).outcome is Outcome.ACCEPTED
    act = eks.next_act(NODE, "train", MINE, ())
    assert act is not None
    api.world.pods[key]["metadata"]["uid"] = "reborn"
    assert eks.perform(act).code == "Status409"
    api.graceful = True
    again = eks.next_act(NODE, "train", MINE, ())
    assert again is not None
    assert eks.perform(again).outcome is Outcome.ACCEPTED
    with pytest.raises(SchedulerProblem, match="waiting for team/rank-0"):
        eks.next_act(NODE, "train", MINE, ())
    api.end_pods()
    assert eks.next_act(NODE, "train", MINE, ()) is None


@pytest.mark.parametrize(
    ("fault", "outcome", "code"),
    [
        (Fault("before", "patch", "nodes", 403), Outcome.REFUSED, "Status403"),
        (Fault("before", "patch", "nodes", 429), Outcome.REFUSED, "Status429"),
        (Fault("before", "patch", "nodes", 307), Outcome.REFUSED, "Status307"),
        (Fault("before", "patch", "nodes", 500), Outcome.UNKNOWN, "Status500"),
        (Fault("after", "patch", "nodes", 504), Outcome.UNKNOWN, "Status504"),
        (Fault("drop_before", "patch", "nodes"), Outcome.UNKNOWN, "ProtocolError"),
        (Fault("drop_after", "patch", "nodes"), Outcome.UNKNOWN, "ProtocolError"),
    ],
)
def test_each_write_is_one_attempt_and_its_outcome_is_settled_by_reading(
    api: FakeKubernetes, eks: Eks, fault: Fault, outcome: Outcome, code: str
) -> None:
    """The official client repeats nothing and follows nothing; what may have happened is unknown until it is read."""
    act = eks.next_act(NODE, "train", MINE, ())
    assert act is not None
    api.faults.append(fault)
    result = eks.perform(act)
    assert (result.outcome, result.code) == (outcome, code)
    assert len(api.writes()) == 1
    took = fault.kind.endswith("after")
    assert bool(node(api)["spec"].get("unschedulable")) is took
    assert (eks.next_act(NODE, "train", MINE, ()) is None) is took


def test_a_server_that_is_not_there_is_a_definite_refusal(api: FakeKubernetes, tmp_path: Path) -> None:
    """Nothing was reached, so nothing happened; a read is a problem that is tried again."""
    config = api.kubeconfig(tmp_path / "gone")
    config.write_text(config.read_text().replace(api.url, "http://127.0.0.1:9"))
    eks = Eks(EksClient.connect(str(config), timeout_seconds=2))
    result = eks.perform(Act("cordon", "n", {"method": "PATCH", "path": "/api/v1/nodes/n", "body": {"spec": {}}}))
    assert (result.outcome, result.code) == (Outcome.REFUSED, "NotReached")
    with pytest.raises(SchedulerProblem):
        eks.next_act(NODE, "train", MINE, ())


def test_a_listing_that_is_not_whole_is_no_listing(api: FakeKubernetes, eks: Eks) -> None:
    """403 on pods, or a page with more behind it, is a problem and not an empty node."""
    isolate(eks)
    api.faults.append(Fault("before", "list", "pods", 403))
    with pytest.raises(SchedulerProblem, match="403"):
        eks.next_act(NODE, "train", MINE, ())


def test_the_dry_run_shows_the_requests_that_are_sent(api: FakeKubernetes, eks: Eks) -> None:
    """Method, path and body are those of the acts, but for what only the server knows; nothing is asked."""
    planned = eks.plan(NODE, "train", MINE)
    assert api.calls == []
    api.add_pod("rank-0", NODE.node_name, job="train")
    sent = [act.request for act in isolate(eks)]
    assert [request["method"] for request in planned] == [request["method"] for request in sent]
    assert planned[0]["path"] == sent[0]["path"]
    assert planned[0]["body"]["spec"]["taints"][-1] == sent[0]["body"]["spec"]["taints"][-1]
    assert planned[0]["body"]["metadata"]["annotations"] == sent[0]["body"]["metadata"]["annotations"]
    assert planned[1]["body"]["kind"] == sent[1]["body"]["kind"] == "Eviction"


def test_logs_of_the_job_alone_are_kept_and_bounded(api: FakeKubernetes, eks: Eks) -> None:
    """Other people's logs are not read; a long one is cut; one that cannot be read says why."""
    key = api.add_pod("rank-0", NODE.node_name, job="train")
    api.add_pod("web", NODE.node_name, kind="ReplicaSet")
    api.world.logs[key] = "x" * (2 * LOG_BYTES)
    assert eks.logs(NODE, "train") == {"team.rank-0.training.log": "x" * LOG_BYTES}
    api.faults.append(Fault("before", "get", "pods/log", 403))
    assert "403" in eks.logs(NODE, "train")["team.rank-0.training.log"]
    assert "node-uid-1" in eks.describe(NODE)


def test_a_kubeconfig_that_cannot_be_used_says_which(tmp_path: Path) -> None:
    """Neither a missing file nor a missing pod's token is a traceback."""
    with pytest.raises(ConfigError, match="nowhere"):
        EksClient.connect(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="no kubeconfig"):
        EksClient.connect()
