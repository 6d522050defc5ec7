"""Isolate a node under Kubernetes (EKS): cordon and taint it, then evict the training job's pods from it.

What it does: one patch cordons the node, adds a taint with the case id and says in an annotation whose it is; the
training job's pods are then asked to go through the Eviction API, one at a time, and waited for. `next_restore` takes
back, in one patch, exactly that.
What it never does: touch a node whose name, instance id, address, group or kind does not fit the inventory's member,
or one that somebody else cordoned; evict a pod of a DaemonSet, of the node itself (mirror pod) or of another job; go
round a PodDisruptionBudget; delete anything.
Its place: `actions/acts` calls it as a `Scheduler`, the policy as an `Orchestrator`. Each patch carries the uid and
the version of the node that was read, and each eviction the pod's uid: if the world moved, the server refuses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sdcwatch_remediation.actions.eks_client import MERGE_PATCH, EksClient, answered
from sdcwatch_remediation.actions.scheduler import (
    Act,
    ActResult,
    Done,
    NotOurs,
    SchedulerProblem,
    checked_name,
    mark,
    times,
)
from sdcwatch_remediation.records import Member, NodeView

CASE = "sdcwatch/case"
"""Annotation of a node that a case took out of service; its value is the case's mark."""
TAINT = "sdcwatch/quarantine"
"""Key of our taint; its value is the case id."""
JOB_VARIABLE = "SDCWATCH_JOB"
"""A container with this variable belongs to the training job of that name."""
HEALTH = "sagemaker.amazonaws.com/node-health-status"
GROUP = "sagemaker.amazonaws.com/instance-group-name"
CONTROL_PLANE = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
PODS_A_NODE = 1000
LOG_LINES, LOG_BYTES, LOGS = 500, 131_072, 8
"""Most lines, bytes and containers of which logs are kept."""

_POD = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Pod:
    namespace: str
    name: str
    uid: str
    phase: str
    going: bool
    """Its deletion has begun."""
    of_node: bool
    """Of a DaemonSet, or of the node itself: it belongs to every node."""
    jobs: frozenset[str]
    """Names of training jobs that it says to be of."""
    containers: tuple[str, ...]

    @property
    def target(self) -> str:
        return f"{self.namespace}/{self.name}"


class Eks:
    """Kubernetes as a `Scheduler` and as the policy's `Orchestrator`."""

    name = "eks"

    def __init__(self, client: EksClient, *, job_label: str = "") -> None:
        """Use one cluster's API; `job_label`: a pod label whose value is the training job's name, or empty."""
        self._client, self._label = client, job_label

    def look(self, member: Member, job: str, case_id: str) -> NodeView | None:
        """Say what else runs on the node, and who but this case took it out of service."""
        node = read_node(self._client, member)
        pods = [pod for pod in self._pods(member) if not pod.of_node and job not in pod.jobs]
        others = tuple(sorted(f"pod {pod.target}" for pod in pods))
        return NodeView(others_work=others, cordoned_by=out_of_service(node, mark(case_id)))

    def next_act(self, member: Member, job: str, case_id: str, done: Sequence[Done]) -> Act | None:
        """Cordon with our taint, evict the job's pods, wait until they are gone: the first that the world lacks."""
        name, ours, node = checked_name(member), mark(case_id), read_node(self._client, member)
        if other := out_of_service(node, ours):
            raise NotOurs(f"{name} is out of service ({other}): left to whoever did it")
        if not _isolated(node, ours):
            if times(done, "cordon", name, "accepted"):
                raise NotOurs(f"somebody has put {name} back into service: left to them; hold or reject the case")
            return Act("cordon", name, _cordon(name, ours, node))
        mine = [pod for pod in self._pods(member) if job in pod.jobs and not pod.of_node]
        for pod in mine:
            if not pod.going:
                return Act("evict", pod.target, _eviction(pod.namespace, pod.name, pod.uid))
        if mine:
            raise SchedulerProblem(f"waiting for {', '.join(pod.target for pod in mine)} to end on {name}"[:500])
        return None

    def next_restore(self, member: Member, case_id: str, done: Sequence[Done]) -> Act | None:
        """Take our taint, our annotation and our cordon back where the node still says that they are ours."""
        name, ours = checked_name(member), mark(case_id)
        node = find_node(self._client, name)
        if node is None or _annotations(node).get(CASE) != ours:
            return None
        same_member(node, member)
        taints = node.get("spec", {}).get("taints", [])
        left = [taint for taint in taints if not _our_taint(taint, ours)]
        spec: dict[str, Any] = {"taints": left or None}
        if _isolated(node, ours) and _healthy(node):
            spec["unschedulable"] = None  # else the cordon is by now somebody else's as well: it stays
        return Act("uncordon", name, _node_request(name, _patch(node, {CASE: None}, spec)))

    def by_hand(self, member: Member) -> str:
        """Return the commands with which a person gives the node back."""
        name = checked_name(member)
        return f"kubectl uncordon {name}; kubectl taint node {name} {TAINT}-; kubectl annotate node {name} {CASE}-"

    def perform(self, act: Act) -> ActResult:
        """Send the request of an act once."""
        return self._client.act(act.request)

    def plan(self, member: Member, job: str, case_id: str) -> list[dict[str, Any]]:
        """Return the requests; uids, versions, other taints and pods are only known when it is done."""
        name, ours = checked_name(member), mark(case_id)
        unseen = {
            "metadata": {"uid": f"<uid of {name}>", "resourceVersion": "<version just read>"},
            "spec": {"taints": ["<every taint that it has>"]},
        }
        each = f"<each pod of job {job!r} on {name}>"
        return [_cordon(name, ours, unseen), _eviction("<its namespace>", each, "<its uid>")]

    def describe(self, member: Member) -> str:
        """Return the node and its pods as the server has them."""
        pods = [
            f"{pod.target} {pod.phase} uid={pod.uid} jobs={','.join(sorted(pod.jobs))}" for pod in self._pods(member)
        ]
        return describe_node(self._client, member) + "\npods:\n" + "\n".join(pods or ["(none)"]) + "\n"

    def logs(self, member: Member, job: str) -> dict[str, str]:
        """Return the last lines of the logs of the job's containers on the node, bounded in number and size."""
        read_node(self._client, member)
        found: dict[str, str] = {}
        for pod in self._pods(member, finished=True):
            for container in pod.containers if job in pod.jobs else ():
                if len(found) >= LOGS:
                    return found
                path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/log"
                query = {"container": container, "tailLines": str(LOG_LINES), "limitBytes": str(LOG_BYTES)}
                reply = self._client.get(path, query)
                said = reply.text if reply.status == 200 else f"(not kept: {reply.words})"
                found[f"{pod.namespace}.{pod.name}.{container}.log"] = said[:LOG_BYTES]
        return found

    def _pods(self, member: Member, *, finished: bool = False) -> list[_Pod]:
        name = checked_name(member)
        query = {"fieldSelector": f"spec.nodeName={name}", "limit": str(PODS_A_NODE)}
        tree = answered(self._client.get("/api/v1/pods", query), f"pods of {name}").body()
        items = tree.get("items")
        if not isinstance(items, list) or tree.get("metadata", {}).get("continue"):
            raise SchedulerProblem(f"the pods of {name} cannot be read whole")
        # A server that ignored the selector would show other nodes' pods.
        pods = [_pod(item, self._label) for item in items if item.get("spec", {}).get("nodeName") == name]
        return [pod for pod in pods if finished or pod.phase not in ("Succeeded", "Failed")]


def read_node(client: EksClient, member: Member) -> dict[str, Any]:
    """Return the one node that is this member.

    Raises:
        NotOurs: there is none of that name, or it is not this instance.
        SchedulerProblem: it cannot be read.
    """
    name = checked_name(member)
    node = find_node(client, name)
    if node is None:
        raise NotOurs(f"Kubernetes knows no node of the name {name}; nothing was sent")
    same_member(node, member)
    return node


def find_node(client: EksClient, name: str) -> dict[str, Any] | None:
    """Return the node of a checked name, whichever instance it is; None where there is none.

    Raises:
        SchedulerProblem: it cannot be read.
    """
    reply = client.get(f"/api/v1/nodes/{name}")
    return None if reply.status == 404 else answered(reply, f"node {name}").body()


def describe_node(client: EksClient, member: Member) -> str:
    """Return the node as the server has it, as JSON; raises as `read_node` does."""
    node = read_node(client, member)
    node.get("metadata", {}).pop("managedFields", None)
    return json.dumps(node, indent=2, sort_keys=True) + "\n"


def same_member(node: dict[str, Any], member: Member) -> None:
    """Look whether a node is this member by name, instance id, address, group and kind.

    Raises:
        NotOurs: it is not.
    """
    meta, labels = node.get("metadata", {}), node.get("metadata", {}).get("labels") or {}
    provider = str(node.get("spec", {}).get("providerID", ""))
    addresses = {a.get("address") for a in node.get("status", {}).get("addresses", []) if a.get("type") == "InternalIP"}
    # aws:///<zone>/sagemaker/cluster/hyperpod-<cluster>-<instance>, and aws:///<zone>/<instance> on plain EKS.
    ends = re.search(r"(?:^|[/-])(i-[0-9a-f]{8,40})$", provider, re.ASCII)
    wrong = {
        f"is called {meta.get('name')!r}": meta.get("name") != member.node_name,
        f"is {provider or 'without a providerID'}, not {member.instance_id}": ends is None
        or ends[1] != member.instance_id,
        f"has the address {sorted(map(str, addresses))}, not {member.address}": member.address not in addresses,
        f"is of group {labels.get(GROUP)!r}, not {member.group!r}": labels.get(GROUP, member.group) != member.group,
        "is of the control plane": any(label in labels for label in CONTROL_PLANE),
        "has no uid or version": not (meta.get("uid") and meta.get("resourceVersion")),
    }
    if problems := [words for words, so in wrong.items() if so]:
        raise NotOurs(f"the node {member.node_name} of Kubernetes {problems[0]}; nothing was sent"[:500])


def _annotations(node: dict[str, Any]) -> dict[str, str]:
    return node.get("metadata", {}).get("annotations") or {}


def _our_taint(taint: dict[str, Any], ours: str) -> bool:
    return taint.get("key") == TAINT and f"sdcwatch:{taint.get('value')}" == ours


def _isolated(node: dict[str, Any], ours: str) -> bool:
    spec = node.get("spec", {})
    tainted = any(_our_taint(taint, ours) for taint in spec.get("taints", []))
    return _annotations(node).get(CASE) == ours and bool(spec.get("unschedulable")) and tainted


def _healthy(node: dict[str, Any]) -> bool:
    return bool((node.get("metadata", {}).get("labels") or {}).get(HEALTH, "Schedulable") == "Schedulable")


def out_of_service(node: dict[str, Any], ours: str) -> str:
    """Return who but this case (its mark: `ours`) took the node out of service; empty: nobody."""
    if not _healthy(node):
        return f"HyperPod: {node['metadata']['labels'][HEALTH]}"[:200]
    marked = _annotations(node).get(CASE, "")
    if marked and marked != ours:
        return marked[:200]
    return "somebody cordoned it" if node.get("spec", {}).get("unschedulable") and marked != ours else ""


def _patch(node: dict[str, Any], annotations: dict[str, str | None], spec: dict[str, Any]) -> dict[str, Any]:
    meta = node["metadata"]
    # With uid and version the server refuses (409, 422) where the node is another, or was changed since it was read.
    return {
        "metadata": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"], "annotations": annotations},
        "spec": spec,
    }


def _cordon(name: str, ours: str, node: dict[str, Any]) -> dict[str, Any]:
    own = {"key": TAINT, "value": ours.partition(":")[2], "effect": "NoSchedule"}
    others = [t for t in node.get("spec", {}).get("taints", []) if isinstance(t, str) or t.get("key") != TAINT]
    return _node_request(name, _patch(node, {CASE: ours}, {"unschedulable": True, "taints": [*others, own]}))


def _node_request(name: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"method": "PATCH", "path": f"/api/v1/nodes/{name}", "content_type": MERGE_PATCH, "body": body}


def _eviction(namespace: str, name: str, uid: str) -> dict[str, Any]:
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": {"preconditions": {"uid": uid}},
    }
    path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
    return {"method": "POST", "path": path, "content_type": "application/json", "body": body}


def _pod(item: dict[str, Any], label: str) -> _Pod:
    meta, spec = item.get("metadata", {}), item.get("spec", {})
    namespace, name, uid = (str(meta.get(key, "")) for key in ("namespace", "name", "uid"))
    if not (_POD.fullmatch(namespace) and _POD.fullmatch(name) and uid):
        raise SchedulerProblem(f"{namespace[:80]!r}/{name[:80]!r} is not the name of a pod; nothing was sent")
    containers = spec.get("containers", [])
    jobs = {
        str(variable.get("value", ""))
        for container in containers
        for variable in container.get("env") or []
        if variable.get("name") == JOB_VARIABLE
    }
    jobs.add(str((meta.get("labels") or {}).get(label, "")) if label else "")
    owners = [owner for owner in meta.get("ownerReferences") or [] if owner.get("controller")]
    return _Pod(
        namespace,
        name,
        uid,
        phase=str(item.get("status", {}).get("phase", "")),
        going=bool(meta.get("deletionTimestamp")),
        of_node=any(owner.get("kind") == "DaemonSet" for owner in owners)
        or "kubernetes.io/config.mirror" in (meta.get("annotations") or {}),
        jobs=frozenset(jobs - {""}),
        containers=tuple(str(container.get("name", "")) for container in containers),
    )
