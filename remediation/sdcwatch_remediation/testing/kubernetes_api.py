"""The part of the Kubernetes API that the service uses, without a server: for tests and schedules.

What it does: holds nodes, pods, PodDisruptionBudgets and events; answers reads, patches of a node and of its status,
evictions, logs and new events as an API server does, with its versions, uids, conflicts and `Status` objects; admits
only what the given RBAC rules grant; carries out ordered faults; logs every call.
What it never does: schedule, or play the controllers: a test moves the world (`end_pods`).
Its place: `kubernetes` serves it on loopback, `kubernetes_memory` puts it under the random schedules. Its objects are
checked against the official client's models in `tests/remediation/test_eks_case.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from sdcwatch_remediation.actions.eks_client import JSON, MERGE_PATCH, STRATEGIC_PATCH
from sdcwatch_remediation.records import Member

TOKEN = "kubernetes-token"
Answer = tuple[int, Any]


@dataclass
class Fault:
    """What goes wrong with the next calls of one verb and resource."""

    kind: str
    """`before`: answers `status`, no effect. `after`: the effect, then `status`. `drop_before`, `drop_after`: no
    answer."""
    verb: str
    resource: str
    status: int = 500
    count: int = 1


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it arrived."""

    verb: str
    """RBAC's word: get, list, patch, create."""
    resource: str
    """RBAC's word, with its subresource: `nodes`, `nodes/status`, `pods/eviction`, ..."""
    path: str
    body: Any
    status: int | None
    """As answered; None: the connection was closed."""


@dataclass
class World:
    """The objects; a test may change them at any time."""

    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By `namespace/name`."""
    budgets: dict[str, int] = field(default_factory=dict)
    """Evictions that a PodDisruptionBudget still allows, by the value of a pod's label `app`."""
    events: dict[str, dict[str, Any]] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    """By `namespace/name`."""
    version: int = 100

    def stamp(self, thing: dict[str, Any]) -> None:
        """Give an object a new version, as every write does."""
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)


class KubernetesApi:
    """Some nodes and pods, and the answers to requests about them; safe to use from several threads."""

    def __init__(self, members: Sequence[Member], *, rules: Sequence[dict[str, Any]] | None = None) -> None:
        """Begin with one ready node a member; `rules`: RBAC rules, or None to admit everything."""
        self.world, self.calls, self.faults = World(), [], []  # type: tuple[World, list[Call], list[Fault]]
        self.rules = rules
        self.graceful = False
        """True: an evicted pod stays, being deleted, until `end_pods`."""
        self.lock = threading.Lock()
        for number, member in enumerate(members):
            self.world.nodes[member.node_name] = node_object(member, number)

    def add_pod(self, name: str, node: str, *, job: str = "", kind: str = "Job", app: str = "") -> str:
        """Put a running pod onto a node; `kind`: of its controller, `Mirror` for a static pod. Returns its key."""
        mirror = {"kubernetes.io/config.mirror": "0123"} if kind == "Mirror" else {}
        owner = {"apiVersion": "apps/v1", "kind": kind, "name": "owner", "uid": "owner-uid", "controller": True}
        env = [{"name": "SDCWATCH_JOB", "value": job}] if job else []
        meta = {
            "name": name,
            "namespace": "team",
            "uid": f"pod-uid-{name}",
            "labels": {"app": app or name},
            "annotations": mirror,
            "ownerReferences": [] if mirror else [owner],
        }
        container = {"name": "training", "image": "example.com/training", "env": env}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": meta,
            "spec": {"nodeName": node, "containers": [container]},
            "status": {"phase": "Running"},
        }
        self.world.stamp(pod)
        self.world.pods[f"team/{name}"] = pod
        self.world.logs[f"team/{name}"] = f"log of {name}\n"
        return f"team/{name}"

    def end_pods(self) -> None:
        """Let every pod that is being deleted end."""
        with self.lock:
            going = [key for key, pod in self.world.pods.items() if "deletionTimestamp" in pod["metadata"]]
            for key in going:
                del self.world.pods[key]

    def writes(self) -> list[tuple[str, str, int | None]]:
        """Return verb, resource and status of every call that was no read."""
        return [(c.verb, c.resource, c.status) for c in self.calls if c.verb not in ("get", "list")]

    def answer(
        self, method: str, target: str, body: Any, token: str, content_type: str = JSON
    ) -> tuple[int, Any] | None:
        """Answer one request; None: close the connection without an answer."""
        url = urlsplit(target)
        words = url.path.strip("/").split("/")
        verb, resource, keys = route(method, words)
        with self.lock:
            fault = next((f for f in self.faults if f.count and (f.verb, f.resource) == (verb, resource)), None)
            if fault is not None:
                fault.count -= 1
            reply: Answer | None
            if token != TOKEN:
                reply = status(401, "Unauthorized", "Unauthorized")
            elif not self._granted(verb, resource):
                reply = status(403, "Forbidden", f'cannot {verb} resource "{resource}"')
            elif fault is not None and fault.kind.endswith("before"):
                reply = status(fault.status, "Fault", "ordered before the effect")
            else:
                reply = self._do(verb, resource, keys, parse_qs(url.query), (body, content_type))
                if fault is not None:
                    reply = status(fault.status, "Fault", "ordered after the effect")
            if fault is not None and fault.kind.startswith("drop"):
                reply = None
            self.calls.append(Call(verb, resource, target, body, reply[0] if reply else None))
            return deepcopy(reply)

    def _granted(self, verb: str, resource: str) -> bool:
        return self.rules is None or any(
            verb in rule["verbs"] and resource in rule["resources"] and rule["apiGroups"] == [""] for rule in self.rules
        )

    def _do(
        self, verb: str, resource: str, keys: list[str], query: dict[str, list[str]], sent: tuple[Any, str]
    ) -> Answer:
        body, content_type = sent
        if (verb, resource) == ("list", "pods"):
            wanted = query.get("fieldSelector", [""])[0].partition("spec.nodeName=")[2]
            items = [p for p in self.world.pods.values() if not wanted or p["spec"]["nodeName"] == wanted]
            meta = {"resourceVersion": str(self.world.version)}
            return 200, {"apiVersion": "v1", "kind": "PodList", "metadata": meta, "items": items}
        if (verb, resource) == ("create", "events"):
            return self._event(keys[0], body)
        things = self.world.nodes if resource.startswith("nodes") else self.world.pods
        thing = things.get("/".join(keys))
        if thing is None:
            return status(404, "NotFound", f'{resource} "{keys[-1]}" not found')
        if verb == "get":
            return 200, self.world.logs["/".join(keys)] if resource == "pods/log" else thing
        if resource == "pods/eviction":
            return self._evict(thing, body)
        if content_type not in (MERGE_PATCH, STRATEGIC_PATCH):
            return status(
                415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {content_type}"
            )
        return self._patch(thing, body, of_status=resource == "nodes/status", by_key=content_type == STRATEGIC_PATCH)

    def _patch(self, node: dict[str, Any], body: Any, *, of_status: bool, by_key: bool) -> Answer:
        meta = body.get("metadata", {})
        if meta.get("uid", node["metadata"]["uid"]) != node["metadata"]["uid"]:
            return status(422, "Invalid", "metadata.uid: field is immutable")
        if meta.get("resourceVersion", node["metadata"]["resourceVersion"]) != node["metadata"]["resourceVersion"]:
            return status(409, "Conflict", "the object has been modified; apply your changes to the latest version")
        if of_status:
            # A strategic merge knows that conditions are told apart by their type; a plain one replaces the whole list.
            old = {c["type"]: c for c in node["status"]["conditions"]} if by_key else {}
            fresh = {c["type"]: {**old.get(c["type"], {}), **c} for c in body["status"]["conditions"]}
            node["status"]["conditions"] = list({**old, **fresh}.values())
        else:
            _merge(node, {"metadata": {"annotations": meta.get("annotations", {})}, "spec": body.get("spec", {})})
        self.world.stamp(node)
        return 200, node

    def _evict(self, pod: dict[str, Any], body: Any) -> Answer:
        wanted = body.get("deleteOptions", {}).get("preconditions", {}).get("uid", pod["metadata"]["uid"])
        if wanted != pod["metadata"]["uid"]:
            return status(409, "Conflict", "the UID in the precondition does not match the UID in record")
        app = pod["metadata"]["labels"]["app"]
        if self.world.budgets.get(app, 1) <= 0:
            words = "Cannot evict pod as it would violate the pod's disruption budget."
            return status(429, "TooManyRequests", words)
        if app in self.world.budgets:
            self.world.budgets[app] -= 1
        if self.graceful:
            pod["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
            self.world.stamp(pod)
        else:
            del self.world.pods[f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"]
        return 201, {"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Success", "code": 201}

    def _event(self, namespace: str, body: Any) -> Answer:
        name = body["metadata"]["name"]
        if name in self.world.events:
            return status(409, "AlreadyExists", f'events "{name}" already exists')
        self.world.events[name] = body
        body["metadata"] = {**body["metadata"], "namespace": namespace, "uid": f"event-{len(self.world.events)}"}
        self.world.stamp(body)
        return 201, body


def node_object(member: Member, number: int = 0) -> dict[str, Any]:
    """Return a ready HyperPod node as the API server has it."""
    labels = {
        "kubernetes.io/hostname": member.node_name,
        "node.kubernetes.io/instance-type": member.instance_type,
        "sagemaker.amazonaws.com/compute-type": "hyperpod",
        "sagemaker.amazonaws.com/instance-group-name": member.group,
        "sagemaker.amazonaws.com/node-health-status": "Schedulable",
    }
    meta = {
        "name": member.node_name,
        "uid": f"node-uid-{number}",
        "resourceVersion": str(10 + number),
        "labels": labels,
        "annotations": {"node.alpha.kubernetes.io/ttl": "0"},
    }
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": "2027-01-15T07:00:00Z"}
    provider = f"aws:///usw2-az2/sagemaker/cluster/hyperpod-abcdefghijkl-{member.instance_id}"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": meta,
        "spec": {
            "providerID": provider,
            "taints": [{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}],
        },
        "status": {"addresses": [{"type": "InternalIP", "address": member.address}], "conditions": [ready]},
    }


def status(code: int, reason: str, message: str) -> Answer:
    """Return a failure as the API server words it."""
    body = {"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure", "code": code}
    return code, {**body, "reason": reason, "message": message}


def route(method: str, words: list[str]) -> tuple[str, str, list[str]]:
    """Return RBAC's verb and resource of a request, and the keys of the object."""
    verb = {"GET": "get", "PATCH": "patch", "POST": "create"}.get(method, method.lower())
    if words[:2] != ["api", "v1"]:
        return verb, "/".join(words), words
    rest = words[2:]
    if rest[0] == "namespaces":
        namespace, kind, *more = rest[1:]
        sub = f"/{more[1]}" if len(more) > 1 else ""
        return verb, kind + sub, [namespace, *more[:1]]
    if len(rest) == 1:
        return "list" if verb == "get" else verb, rest[0], []
    return verb, "/".join([rest[0], *rest[2:]]), [rest[1]]


def _merge(target: dict[str, Any], patch: dict[str, Any]) -> None:
    # RFC 7386: null removes, objects merge, everything else replaces.
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            _merge(target.setdefault(key, {}), value)
        else:
            target[key] = value
