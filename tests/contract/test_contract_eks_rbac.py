"""deploy/remediation/kubernetes-eks.yaml against what the EKS action calls: a verb too few and one too many are red."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from sdcwatch_remediation.actions.eks import Eks
from sdcwatch_remediation.actions.eks_client import EksClient
from sdcwatch_remediation.actions.handover import Handover
from sdcwatch_remediation.actions.scheduler import Done, Scheduler, SchedulerProblem
from sdcwatch_remediation.cases import Case
from sdcwatch_remediation.testing.kubernetes import FakeKubernetes
from sdcwatch_remediation.testing.provider import fleet

FILE = Path(__file__).parents[2] / "deploy" / "remediation" / "kubernetes-eks.yaml"
DOCUMENTS = list(yaml.safe_load_all(FILE.read_text()))
CASE = "case-0123456789ab"
MEMBERS = tuple(dataclasses.replace(m, node_name=f"hyperpod-{m.instance_id}") for m in fleet(2))
Grant = tuple[str, str]


def rules(*, handover: bool) -> list[dict[str, Any]]:
    """The rules of all roles of one part of the file, as the service account is given them."""
    return [
        rule
        for document in DOCUMENTS
        if document["kind"] in ("Role", "ClusterRole")
        and document["metadata"]["name"].endswith("-handover") is handover
        for rule in document["rules"]
    ]


def grants(of: list[dict[str, Any]]) -> list[Grant]:
    """Each verb and resource once for each time that it is granted."""
    return [(verb, resource) for rule in of for resource in rule["resources"] for verb in rule["verbs"]]


def walk(scheduler: Scheduler) -> None:
    """A case of the first member: the evidence, every act, and all of it taken back."""
    done: list[Done] = []
    scheduler.describe(MEMBERS[0])
    scheduler.logs(MEMBERS[0], "train")
    while (act := scheduler.next_act(MEMBERS[0], "train", CASE, done)) is not None and len(done) < 5:
        done.append(Done(act.name, act.target, scheduler.perform(act).outcome.value))
    if (act := scheduler.next_restore(MEMBERS[0], CASE, done)) is not None:
        scheduler.perform(act)


def play(granted: list[dict[str, Any]], folder: Path) -> FakeKubernetes:
    """A whole case of the action: look, keep the evidence, cordon, evict, give back."""
    with FakeKubernetes(MEMBERS, rules=granted).serving() as fake:
        fake.add_pod("rank-0", MEMBERS[0].node_name, job="train")
        eks = Eks(EksClient.connect(str(fake.kubeconfig(folder / "kubeconfig")), timeout_seconds=5))
        with suppress(SchedulerProblem):  # a refused read ends it; the calls say which
            eks.look(MEMBERS[0], "train", CASE)
            walk(eks)
        return fake


def test_the_action_needs_every_verb_that_is_granted_and_no_other(tmp_path: Path) -> None:
    """A server that enforces the file's rules lets a whole case through, and each rule was used."""
    granted = rules(handover=False)
    fake = play(granted, tmp_path)
    assert [call for call in fake.calls if call.status == 403] == []
    assert fake.world.pods == {}
    assert sorted({(call.verb, call.resource) for call in fake.calls}) == sorted(grants(granted))


@pytest.mark.parametrize("missing", sorted(grants(rules(handover=False))), ids=lambda grant: "-".join(grant))
def test_without_one_of_them_the_server_refuses_the_action(missing: Grant, tmp_path: Path) -> None:
    """The fake server does enforce: each verb that is taken away is asked for, and refused."""
    less = [
        {**rule, "resources": [resource], "verbs": [verb]}
        for rule in rules(handover=False)
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if (verb, resource) != missing
    ]
    fake = play(less, tmp_path)
    assert missing in {(call.verb, call.resource) for call in fake.calls if call.status == 403}


def play_handover(granted: list[dict[str, Any]], folder: Path) -> FakeKubernetes:
    """A whole handover: keep the evidence, set the condition, write the Event, take the condition back."""
    empty: dict[str, Any] = {item.name: "" for item in dataclasses.fields(Case)}
    case = Case(**{**empty, "id": CASE, "event_time": 1.0, "opened_at": 2.0})
    with FakeKubernetes(MEMBERS, rules=granted).serving() as fake:
        client = EksClient.connect(str(fake.kubeconfig(folder / "kubeconfig")), timeout_seconds=5)
        with suppress(SchedulerProblem):  # a refused read ends it; the calls say which
            walk(Handover(client, lambda: 3.0).of(case))
        return fake


def test_the_handover_has_a_part_of_its_own_and_needs_all_of_it(tmp_path: Path) -> None:
    """Read the node, patch its status, create Events, and nothing that evicts or cordons."""
    granted = rules(handover=True)
    fake = play_handover(granted, tmp_path)
    assert [call for call in fake.calls if call.status == 403] == []
    assert len(fake.world.events) == 1
    assert sorted({(call.verb, call.resource) for call in fake.calls}) == sorted(grants(granted))
    assert sorted(grants(granted)) == [("create", "events"), ("get", "nodes"), ("patch", "nodes/status")]
    (path,) = {call.path for call in fake.calls if call.resource == "events"}
    (role,) = (d for d in DOCUMENTS if d["kind"] == "Role")
    assert path.split("/")[4] == role["metadata"]["namespace"]


@pytest.mark.parametrize("missing", sorted(grants(rules(handover=True))), ids=lambda grant: "-".join(grant))
def test_without_one_of_them_the_server_refuses_the_handover(missing: Grant, tmp_path: Path) -> None:
    """Each verb that is taken away is asked for, and refused."""
    less = [
        {**rule, "resources": [resource], "verbs": [verb]}
        for rule in rules(handover=True)
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if (verb, resource) != missing
    ]
    fake = play_handover(less, tmp_path)
    assert missing in {(call.verb, call.resource) for call in fake.calls if call.status == 403}


def bindings() -> Iterator[dict[str, Any]]:
    return (document for document in DOCUMENTS if document["kind"] in ("RoleBinding", "ClusterRoleBinding"))


def test_pods_are_evicted_and_logs_read_only_where_jobs_train() -> None:
    """Both are bound in namespaces, never in the whole cluster; each role is bound, to the one service account."""
    assert {binding["roleRef"]["name"] for binding in bindings() if binding["kind"] == "ClusterRoleBinding"} == {
        "sdcwatch-remediation-nodes",
        "sdcwatch-remediation-handover",
    }
    roles = {(d["kind"], d["metadata"]["name"]) for d in DOCUMENTS if d["kind"] in ("Role", "ClusterRole")}
    assert {(b["roleRef"]["kind"], b["roleRef"]["name"]) for b in bindings()} == roles
    account = {"kind": "ServiceAccount", "name": "sdcwatch-remediation", "namespace": "sdcwatch"}
    assert all(binding["subjects"] == [account] for binding in bindings())
    assert all("*" not in str(rule) for rule in rules(handover=False) + rules(handover=True))
