"""Hand a node over to whoever owns its replacement: a condition and an Event on the node, through the Kubernetes API.

What it does: sets the node condition `SDCSuspected` (one strategic-merge patch of its status, with uid and version as
read) and writes one Event, under a name made of node and case, so that a second one of the same case cannot be. As a
`Scheduler`, so that `acts` commits each request before it is sent; `next_restore` sets the condition to False.
What it never does: cordon, evict, taint or replace; touch a condition that another case or somebody else has set, or a
node that somebody else took out of service.
Its place: `actions/handing_over` uses it for the groups of `policy.handover_groups`, `actions/give_back` takes it back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from sdcwatch_remediation.actions.eks import describe_node, find_node, out_of_service, read_node, same_member
from sdcwatch_remediation.actions.eks_client import JSON, STRATEGIC_PATCH, EksClient
from sdcwatch_remediation.actions.scheduler import (
    Act,
    ActResult,
    Done,
    NotOurs,
    checked_name,
    mark,
    times,
)
from sdcwatch_remediation.cases import Case
from sdcwatch_remediation.records import Member, Outcome

NAME = "handover"
CONDITION = "SDCSuspected"
"""Type of the node condition, and reason of the Event."""
REASON, WITHDRAWN = "SilentDataCorruption", "Withdrawn"
COMPONENT = "sdcwatch-remediation"
NAMESPACE = "default"
"""Events about what has no namespace stand there."""
EVENT_TRIES = 3
"""Requests after which an Event that is refused is done without: the condition is what counts."""
EVENT_NODE_LENGTH = 200
"""Letters of the node's name in the Event's, which may have 253 in all."""
MESSAGE_LENGTH = 1000
"""An Event's message may have 1,024 bytes."""


@dataclass(frozen=True, slots=True)
class Handover:
    """The Kubernetes API, as far as a handover needs it."""

    client: EksClient
    clock: Callable[[], float]

    def of(self, case: Case) -> HandoverOf:
        """Return the handover of one case."""
        return HandoverOf(self, case)

    def describe(self, member: Member) -> str:
        """Return the node as the server has it; raises `SchedulerProblem`."""
        return describe_node(self.client, member)


class HandoverOf:
    """The handover of one case, as a `Scheduler`."""

    name = NAME

    def __init__(self, handover: Handover, case: Case) -> None:
        """Tell of this case, as it is known now."""
        self._case = case
        self._client, self._clock = handover.client, handover.clock

    def next_act(self, member: Member, job: str, case_id: str, done: Sequence[Done]) -> Act | None:
        """Set the condition, then write the Event: the first that is missing."""
        name, ours, node = checked_name(member), mark(case_id), read_node(self._client, member)
        found = _condition(node)
        if not _ours(found, ours):
            if times(done, "suspect", name, "accepted"):
                raise NotOurs(f"somebody has taken {CONDITION} of {name} back: left to them; hold or reject the case")
            if found.get("status") == "True":
                raise NotOurs(f"{name} is {CONDITION} already ({str(found.get('message', ''))[:120]}): left to that")
            if other := out_of_service(node, ours):
                raise NotOurs(f"{name} is out of service ({other}): left to whoever did it")
            return Act("suspect", name, self._suspect(name, ours, node["metadata"], _time(self._clock())))
        tried = times(done, "announce", name)
        if times(done, "announce", name, "accepted") or tried >= EVENT_TRIES:
            return None
        return Act("announce", name, self._event(name, ours, node["metadata"]["uid"], _time(self._clock())))

    def next_restore(self, member: Member, case_id: str, done: Sequence[Done]) -> Act | None:
        """Set the condition to False where it is set and is still this case's."""
        name, ours = checked_name(member), mark(case_id)
        node = find_node(self._client, name)
        if node is None or not _ours(_condition(node), ours):
            return None
        same_member(node, member)
        message = f"{ours}: taken back; nobody replaces {name} on account of this case any more"
        return Act("withdraw", name, _status(name, node["metadata"], "False", WITHDRAWN, message, _time(self._clock())))

    def by_hand(self, member: Member) -> str:
        """Return the command with which a person takes the condition back."""
        patch = {"status": {"conditions": [{"type": CONDITION, "status": "False", "reason": WITHDRAWN}]}}
        return (
            f"kubectl patch node {checked_name(member)} --subresource=status --type=strategic -p '{json.dumps(patch)}'"
        )

    def perform(self, act: Act) -> ActResult:
        """Send the request of an act once; an Event that is there already was written by this very case."""
        result = self._client.act(act.request)
        if act.name == "announce" and result.code == "Status409":
            return ActResult(Outcome.ACCEPTED, "AlreadyExists", result.message)
        return result

    def plan(self, member: Member, job: str, case_id: str) -> list[dict[str, Any]]:
        """Return both requests; uid, version and the time of sending are only known then."""
        name, ours, then = checked_name(member), mark(case_id), "<when it is sent>"
        unseen = {"uid": f"<uid of {name}>", "resourceVersion": "<version just read>"}
        return [self._suspect(name, ours, unseen, then), self._event(name, ours, unseen["uid"], then)]

    def describe(self, member: Member) -> str:
        """Return the node as the server has it."""
        return describe_node(self._client, member)

    def logs(self, member: Member, job: str) -> dict[str, str]:
        """Return nothing: a handover has no road to logs."""
        return {}

    def _message(self, ours: str) -> str:
        case = self._case
        what = f"{case.event_key}, event {case.event_id}, {_time(case.event_time)}"
        told = f"other nodes attest that {case.gpu_uuid or 'a GPU'} corrupts data of training job {case.job} ({what})"
        return f"{ours}: {told}; case opened {_time(case.opened_at)}; this node is yours to replace"[:MESSAGE_LENGTH]

    def _suspect(self, name: str, ours: str, meta: dict[str, Any], now: str) -> dict[str, Any]:
        return _status(name, meta, "True", REASON, self._message(ours), now)

    def _event(self, name: str, ours: str, uid: str, now: str) -> dict[str, Any]:
        head = name.lower()[:EVENT_NODE_LENGTH].rstrip(".-")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{head}.{self._case.id}", "namespace": NAMESPACE},
            "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid},
            "type": "Warning",
            "reason": CONDITION,
            "message": self._message(ours),
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        return {"method": "POST", "path": f"/api/v1/namespaces/{NAMESPACE}/events", "content_type": JSON, "body": body}


def _status(name: str, meta: dict[str, Any], value: str, reason: str, message: str, now: str) -> dict[str, Any]:
    condition = {
        "type": CONDITION,
        "status": value,
        "reason": reason,
        "message": message,
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }
    # Strategic merge: conditions are merged by their type, so the node's own (Ready, ...) stay as they are.
    body = {
        "metadata": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]},
        "status": {"conditions": [condition]},
    }
    return {"method": "PATCH", "path": f"/api/v1/nodes/{name}/status", "content_type": STRATEGIC_PATCH, "body": body}


def _condition(node: dict[str, Any]) -> dict[str, Any]:
    found = node.get("status", {}).get("conditions") or []
    return next((condition for condition in found if condition.get("type") == CONDITION), {})


def _ours(condition: dict[str, Any], ours: str) -> bool:
    return condition.get("status") == "True" and str(condition.get("message", "")).startswith(f"{ours}:")


def _time(seconds: float) -> str:
    """Return unix seconds as Kubernetes writes a time: UTC, to the second."""
    return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
