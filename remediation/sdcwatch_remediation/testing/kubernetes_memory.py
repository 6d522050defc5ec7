"""A Kubernetes in memory, for schedules on a virtual clock: the fake API over the nodes of a simulated cluster.

What it does: gives each simulated instance a node and the training job's pod; keeps a list of what took effect on which
instance; lets other people cordon, and the owner of a node act on the condition of a handover; meets faults on order.
What it never does: tell the service more than the API does, or repeat anything.
Its place: under `schedule_world`; `client` is the way to it for one process of the service.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from sdcwatch_remediation.actions.eks import CASE
from sdcwatch_remediation.actions.eks_client import JSON, EksClient, Reply
from sdcwatch_remediation.actions.handover import CONDITION
from sdcwatch_remediation.records import Member
from sdcwatch_remediation.simulator import Simulator
from sdcwatch_remediation.testing.kubernetes_api import TOKEN, Answer, Fault, KubernetesApi, node_object, route

_ISOLATES = (("patch", "nodes"), ("create", "pods/eviction"))
WRITES = {"eks": _ISOLATES, "handover": (("patch", "nodes/status"), ("create", "events"), *_ISOLATES)}
"""What a fault can be ordered for, by road."""
KINDS = ("before", "after", "drop_before", "drop_after")
STATUSES = (403, 409, 429, 500, 503)
THEIRS = "seen by our own probe"
"""What somebody else writes into the condition."""
OTHERS_POD = 0.1
"""Share of the nodes on which something runs besides the job."""


@dataclass(frozen=True, slots=True)
class Effect:
    """One thing that a request changed."""

    what: str
    """`cordon`, `uncordon`, `evict`, `suspect`, `withdraw`, `event`."""
    instance_id: str
    case_id: str
    """Whose mark the request carried; empty: none."""
    target: str


class KubernetesMemory(KubernetesApi):
    """One cluster's API; `effects` is its log."""

    def __init__(self, simulator: Simulator, job: str, chance: random.Random) -> None:
        """Give every instance a node; `chance` decides on which of them others run something."""
        super().__init__(())
        self.effects: list[Effect] = []
        self.met: list[str] = []
        """Faults that a request met, oldest first."""
        self._simulator, self._job, self._chance = simulator, job, chance
        self._instances: dict[str, str] = {}
        self._others: set[str] = set()
        """Nodes that somebody else cordoned."""
        self.wrongs: list[str] = []
        """What of others' was written over, one sentence each."""
        self._look()

    def client(self, point: Callable[[str], None]) -> EksClient:
        """Return the way of one process to it, with a point before and after each request."""
        return _Client(self, point)

    def answer(self, method: str, target: str, body: Any, token: str, content_type: str = JSON) -> Answer | None:
        """Answer one request about the nodes that there are now."""
        self._look()
        reply = super().answer(method, target, body, token, content_type)
        spent = [fault for fault in self.faults if not fault.count]
        self.met += [f"{fault.kind} {fault.status}" for fault in spent]
        self.faults = [fault for fault in self.faults if fault.count]
        return reply

    def order(self, road: str) -> None:
        """Order one fault of those that a road can meet."""
        verb, resource = self._chance.choice(WRITES[road])
        self.faults.append(Fault(self._chance.choice(KINDS), verb, resource, self._chance.choice(STATUSES)))

    def cordon_by_others(self, instance_id: str) -> None:
        """Let somebody else take a node out of service."""
        self._look()
        node = self.world.nodes.get(f"hyperpod-{instance_id}")
        if node is not None and not node["spec"].get("unschedulable"):
            node["spec"]["unschedulable"] = True
            self._others.add(node["metadata"]["name"])
            self.world.stamp(node)

    def suspect_by_others(self, instance_id: str) -> None:
        """Let somebody else set the condition on a node."""
        self._look()
        node = self.world.nodes.get(f"hyperpod-{instance_id}")
        if node is not None and not _suspected(node):
            kept = [c for c in node["status"]["conditions"] if c["type"] != CONDITION]
            node["status"]["conditions"] = [*kept, {"type": CONDITION, "status": "True", "message": THEIRS}]
            self.world.stamp(node)

    def others_undo(self) -> None:
        """Let whoever cordoned a node give it back, and whoever set its condition take that back."""
        for name, node in self.world.nodes.items():
            condition = _condition(node)
            if name in self._others:
                node["spec"].pop("unschedulable", None)
                self.world.stamp(node)
            if _suspected(node) and condition["message"] == THEIRS:
                condition["status"] = "False"
                self.world.stamp(node)
        self._others.clear()

    def owner_acts(self) -> bool:
        """Let the owner of the nodes replace one that it was told of; return whether there was one."""
        self._look()
        for name, node in self.world.nodes.items():
            if _suspected(node) and _condition(node)["message"] != THEIRS:
                try:
                    self._simulator.others_replace(self._instances[name])
                except ValueError:
                    continue  # it is being replaced already
                return True
        return False

    def carries(self, instance_id: str, case_id: str) -> bool:
        """Whether an instance's node still carries a case's mark, or its condition."""
        self._look()
        node = self.world.nodes.get(f"hyperpod-{instance_id}")
        if node is None:
            return False
        marked = node["metadata"]["annotations"].get(CASE, "").endswith(case_id)
        return marked or (_suspected(node) and case_id in _condition(node)["message"])

    def _look(self) -> None:
        """Take in what became of the instances."""
        nodes = self._simulator.state()["nodes"]
        for found in nodes:
            name = found["node_name"]
            if name not in self.world.nodes:
                number = len(self._instances)
                self._instances[name] = found["instance_id"]
                member = Member(found["instance_id"], found["group"], name, "", 0.0, found["address"], "")
                self.world.nodes[name] = node_object(member, number)
                self.add_pod(f"rank-{number}", name, job=self._job)
                self.add_pod(f"agent-{number}", name, kind="DaemonSet", job=self._job)
                if self._chance.random() < OTHERS_POD:
                    self.add_pod(f"web-{number}", name, kind="ReplicaSet")
        there = {found["node_name"] for found in nodes}
        for name in [name for name in self.world.nodes if name not in there]:
            del self.world.nodes[name]
            self._others.discard(name)
            for key in [key for key, pod in self.world.pods.items() if pod["spec"]["nodeName"] == name]:
                del self.world.pods[key]

    def _patch(self, node: dict[str, Any], body: Any, *, of_status: bool, by_key: bool) -> Answer:
        name = node["metadata"]["name"]
        theirs = (_suspected(node) and _condition(node)["message"] == THEIRS) if of_status else name in self._others
        reply = super()._patch(node, body, of_status=of_status, by_key=by_key)
        if reply[0] == 200:
            if of_status:
                condition = body["status"]["conditions"][0]
                what = "suspect" if condition["status"] == "True" else "withdraw"
                mark = condition["message"].split(":")[1]
            else:
                mark = (body["metadata"]["annotations"].get(CASE) or "").rpartition(":")[2]
                what = "cordon" if mark else "uncordon"
            self._log(what, name, mark)
            if theirs:
                self.wrongs.append(f"{what} of {name}, which somebody else had marked or cordoned")
        return reply

    def _evict(self, pod: dict[str, Any], body: Any) -> Answer:
        name, target = pod["spec"]["nodeName"], pod["metadata"]["name"]
        reply = super()._evict(pod, body)
        if reply[0] == 201:
            self._log("evict", name, "", target)
        return reply

    def _event(self, namespace: str, body: Any) -> Answer:
        reply = super()._event(namespace, body)
        if reply[0] == 201:
            self._log("event", body["involvedObject"]["name"], body["message"].split(":")[1])
        return reply

    def _log(self, what: str, node: str, case_id: str, target: str = "") -> None:
        self.effects.append(Effect(what, self._instances[node], case_id, target or node))


class _Client(EksClient):
    def __init__(self, memory: KubernetesMemory, point: Callable[[str], None]) -> None:
        self._memory, self._point = memory, point

    def send(self, request: Mapping[str, Any]) -> Reply:
        """Send one request, exactly once."""
        verb, resource, _ = route(request["method"], request["path"].strip("/").split("/"))
        self._point(f"call {verb} {resource}")
        target = request["path"] + (f"?{urlencode(query)}" if (query := request.get("query")) else "")
        kind = request.get("content_type", JSON)
        reply = self._memory.answer(request["method"], target, deepcopy(request.get("body")), TOKEN, kind)
        self._point(f"answer {verb} {resource}")
        if reply is None:
            return Reply(0, "", "ProtocolError: the connection was closed")
        return Reply(reply[0], reply[1] if isinstance(reply[1], str) else json.dumps(reply[1]), "")


def _condition(node: dict[str, Any]) -> dict[str, Any]:
    return next((c for c in node["status"]["conditions"] if c["type"] == CONDITION), {})


def _suspected(node: dict[str, Any]) -> bool:
    return bool(_condition(node).get("status") == "True")
