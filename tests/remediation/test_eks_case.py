"""Whole cases on the fake Kubernetes API: order, budgets of pods, crashes, evidence, and what RBAC must grant."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import ApiClient, CoreV1Api
from kubernetes.client.configuration import Configuration
from kubernetes.client.models.v1_eviction import V1Eviction
from sdcwatch_remediation.actions.acts import TRIES
from sdcwatch_remediation.actions.eks import CASE, Eks
from sdcwatch_remediation.actions.eks_client import EksClient
from sdcwatch_remediation.testing.kubernetes import TOKEN, FakeKubernetes, Fault
from sdcwatch_remediation.testing.provider import fleet
from sdcwatch_remediation.testing.rig import Rig, make_rig

JOB = "bytegpt"  # the training job of testing/events.py


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with make_rig(tmp_path, fleet(4)) as made:
        made.config = dataclasses.replace(
            made.config, actions=dataclasses.replace(made.config.actions, evidence_dir=str(tmp_path / "evidence"))
        )
        made.restart()
        yield made


@pytest.fixture
def api(rig: Rig) -> Iterator[FakeKubernetes]:
    with FakeKubernetes(rig.provider.members).serving() as fake:
        yield fake


def use(rig: Rig, api: FakeKubernetes, folder: Path) -> Eks:
    eks = Eks(EksClient.connect(str(api.kubeconfig(folder / "kubeconfig")), timeout_seconds=5))
    context = dataclasses.replace(rig.service.worker.context, schedulers=(eks,), orchestrator=eks)
    rig.service.worker.context = context
    return eks


def test_a_case_keeps_the_logs_isolates_the_node_and_only_then_replaces(
    rig: Rig, api: FakeKubernetes, tmp_path: Path
) -> None:
    """Bundle first, with the pod's log; cordon and evictions committed before they are sent; the replacement last."""
    use(rig, api, tmp_path)
    api.add_pod("rank-2", "node-2", job=JOB)
    rig.fault(2)
    rig.provider.on_replace = lambda _: api.calls.append("replaced")  # type: ignore[arg-type]
    rig.rounds(6, seconds=1)
    case = rig.case()
    assert case["job"] == JOB
    assert [c if isinstance(c, str) else (c.verb, c.resource) for c in api.calls if isinstance(c, str) or c.body] == [
        ("patch", "nodes"),
        ("create", "pods/eviction"),
        "replaced",
    ]
    folder = tmp_path / "evidence" / case["id"]
    assert (folder / "logs" / "team.rank-2.training.log").read_text() == "log of rank-2\n"
    assert "node-uid-2" in (folder / "eks.txt").read_text()
    steps = [line["step"] for line in case["timeline"]]
    assert steps.index("evidence_kept") < steps.index("act_requested") < steps.index("replace_requested")
    requests = [line["detail"]["request"] for line in case["timeline"] if line["step"] == "act_requested"]
    assert [(r["path"], r["body"]) for r in requests] == [(c.path, c.body) for c in _writes(api)]


def test_a_disruption_budget_is_asked_a_few_times_and_then_named(rig: Rig, api: FakeKubernetes, tmp_path: Path) -> None:
    """429 is a refusal: growing pauses, at most TRIES in all, then the case waits with the server's own words."""
    use(rig, api, tmp_path)
    api.add_pod("rank-1", "node-1", job=JOB, app="trainer")
    api.world.budgets["trainer"] = 0
    rig.fault(1)
    rig.rounds(25, seconds=10)
    evictions = [c for c in _writes(api) if c.resource == "pods/eviction"]
    assert [c.status for c in evictions] == [429] * TRIES
    assert f"tried {TRIES} times and is refused" in rig.case()["reason"]
    assert "disruption budget" in rig.case()["reason"]
    assert rig.provider.calls == []
    assert "team/rank-1" in api.world.pods


def test_a_budget_that_opens_in_time_lets_the_case_go_on(rig: Rig, api: FakeKubernetes, tmp_path: Path) -> None:
    """The second eviction is accepted, and the instance replaced once."""
    use(rig, api, tmp_path)
    api.add_pod("rank-1", "node-1", job=JOB, app="trainer")
    api.world.budgets["trainer"] = 0
    rig.fault(1)
    rig.rounds(3, seconds=1)
    api.world.budgets["trainer"] = 1
    rig.rounds(12, seconds=2)
    assert [c.status for c in _writes(api) if c.resource == "pods/eviction"] == [429, 201]
    assert rig.provider.calls == [rig.provider.members[1].instance_id]


@pytest.mark.parametrize("kind", ["before", "after", "drop_before", "drop_after"])
@pytest.mark.parametrize("resource", ["nodes", "pods/eviction"])
def test_whatever_becomes_of_an_answer_each_act_takes_effect_once(
    rig: Rig, api: FakeKubernetes, tmp_path: Path, kind: str, resource: str
) -> None:
    """An unknown outcome is settled by reading: repeated only where the reading shows that it had no effect."""
    use(rig, api, tmp_path)
    api.add_pod("rank-3", "node-3", job=JOB)
    api.faults.append(Fault(kind, "patch" if resource == "nodes" else "create", resource, 503))
    rig.fault(3)
    rig.rounds(8, seconds=2)
    sent = [c for c in _writes(api) if c.resource == resource]
    assert len(sent) == (1 if kind.endswith("after") else 2)
    assert rig.provider.calls == [rig.provider.members[3].instance_id]
    assert api.world.pods == {}
    assert api.world.nodes["node-3"]["spec"]["unschedulable"] is True


def test_a_crash_between_an_act_and_its_record_does_not_repeat_it(
    rig: Rig, api: FakeKubernetes, tmp_path: Path
) -> None:
    """The process dies after the patch was accepted: after the restart the node is read, and cordoned once in all."""
    eks = use(rig, api, tmp_path)
    perform = eks.perform

    def dies(act: Any) -> Any:
        perform(act)
        raise KeyboardInterrupt

    eks.perform = dies  # type: ignore[method-assign]
    rig.fault(0)
    with pytest.raises(KeyboardInterrupt):
        rig.rounds(4)
    rig.restart()
    use(rig, api, tmp_path)
    rig.rounds(6, seconds=1)
    assert [(c.verb, c.resource) for c in _writes(api)] == [("patch", "nodes")]
    assert len(rig.provider.calls) == 1


def test_other_peoples_pods_are_asked_about_before_the_replacement(
    rig: Rig, api: FakeKubernetes, tmp_path: Path
) -> None:
    """They are not evicted, and the case waits for a person although the mode is auto."""
    use(rig, api, tmp_path)
    api.add_pod("web", "node-1", kind="ReplicaSet")
    rig.fault(1)
    rig.rounds(6, seconds=1)
    assert rig.case()["state"] == "awaiting_approval"
    assert "team/web" in rig.case()["reason"]
    assert "team/web" in api.world.pods
    assert api.world.nodes["node-1"]["metadata"]["annotations"][CASE] == f"sdcwatch:{rig.case()['id']}"


def test_the_fakes_objects_and_our_requests_are_those_of_the_official_client(api: FakeKubernetes) -> None:
    """Its own models read what the fake answers, and the eviction that we send; a field of another name would raise."""
    settings = Configuration(host=api.url, api_key={"BearerToken": f"Bearer {TOKEN}"})
    core = CoreV1Api(ApiClient(settings))
    api.add_pod("rank-0", "node-0", job=JOB)
    node = core.read_node("node-0")
    assert node.metadata.uid == "node-uid-0"
    assert [address.type for address in node.status.addresses] == ["InternalIP"]
    (pod,) = core.list_pod_for_all_namespaces(field_selector="spec.nodeName=node-0").items
    assert pod.spec.containers[0].env[0].name == "SDCWATCH_JOB"
    assert core.read_namespaced_pod_log("rank-0", "team", container="training") == "log of rank-0\n"
    eks = Eks(EksClient(core.api_client))
    request = eks.plan(fleet(1)[0], "gpt", "case-0123456789ab")[1]
    eviction = V1Eviction.from_dict(request["body"])
    assert eviction.delete_options.preconditions.uid == "<its uid>"
    body = V1Eviction(metadata={"name": "rank-0", "namespace": "team"})
    core.create_namespaced_pod_eviction("rank-0", "team", body)
    path = api.calls[-1].path.partition("?")[0]
    assert path == "/api/v1/namespaces/team/pods/rank-0/eviction"
    assert json.dumps(request["path"]).endswith('/eviction"')


def _writes(api: FakeKubernetes) -> list[Any]:
    return [c for c in api.calls if not isinstance(c, str) and c.verb not in ("get", "list")]
