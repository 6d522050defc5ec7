"""The menu of faults: what can go wrong on the way to HyperPod, each one observed or documented behaviour.

What it does: holds the faults that a test or demo has ordered, and hands each out to the calls that it fits, as often
as it was ordered.
What it never does: touch the cluster or a socket; `operations` and `server` carry a fault out.
Its place: between the admin endpoints, which order faults, and the calls, which meet them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

MENU: dict[str, str] = {
    "error_before": "answers 500 InternalFailure; the call had no effect",
    "error_after": "answers 500 InternalFailure; the call had its whole effect",
    "drop_before": "closes the connection without an answer; the call had no effect",
    "drop_after": "closes the connection without an answer; the call had its whole effect",
    "slow_answer": "the call has its effect, the answer comes `seconds` (real time) later",
    "empty_answer": "answers 200 with empty lists or an empty body; the call had its whole effect",
    "throttle": "answers 400 ThrottlingException; no effect",
    "expired_token": "answers 400 ExpiredTokenException; no effect",
    "access_denied": "answers 400 AccessDeniedException; no effect",
    "node_failed": "answers 200 with the node in Failed[] under `code` (default InternalServerError); no effect on it",
    "instance_in_use": "answers 200 with the node in Failed[] as InstanceIdInUse; no effect on it",
    "replaced_by_others": "somebody else has the same node replaced just before this call",
    "paging_changes": "the order of the nodes changes between two pages, so one shows twice and one not at all",
    "no_capacity": "stands until cleared: a replacement is accepted and the new instance does not come",
    "bad_replacement": "the next instance that comes up ends as Failure instead of Running",
}
"""Every kind of fault, with what it does."""

REFUSALS: dict[str, tuple[str, str]] = {
    "throttle": ("ThrottlingException", "Rate exceeded"),
    "expired_token": ("ExpiredTokenException", "The security token included in the request is expired"),
    "access_denied": ("AccessDeniedException", "User is not authorized to perform this operation"),
}
"""Kinds that refuse the whole call: AWS's error code and message."""

NODE_CODES = ("InstanceIdNotFound", "InvalidInstanceStatus", "InstanceIdInUse", "InternalServerError")
_PER_NODE = frozenset({"node_failed", "instance_in_use", "replaced_by_others"})
_NODE_OPERATIONS = frozenset({"BatchReplaceClusterNodes", "BatchRebootClusterNodes"})
_WORLD = frozenset({"no_capacity", "bad_replacement"})


@dataclass(frozen=True, slots=True)
class Fault:
    """One ordered fault."""

    kind: str
    """A key of `MENU`."""
    operation: str | None = None
    """The operation it waits for (`BatchReplaceClusterNodes`); None: the first call that it can fit."""
    instance_id: str | None = None
    """The instance it waits for; None: any."""
    count: int | None = 1
    """How many calls still meet it; None: all, until cleared."""
    seconds: float = 0.0
    """How late a `slow_answer` is, in real seconds."""
    code: str = "InternalServerError"
    """The per-node code of `node_failed`."""

    @classmethod
    def from_json(cls, body: Any) -> Fault:
        """Build a fault from an admin request.

        Raises:
            ValueError: It is not one of the menu, or a member is unknown or out of range; the message says which.
        """
        if not isinstance(body, dict):
            raise ValueError('a fault is a JSON object such as {"kind": "error_after"}')
        unknown = set(body) - {"kind", "operation", "instance_id", "count", "seconds", "code"}
        if unknown:
            raise ValueError(f"unknown members of a fault: {', '.join(sorted(unknown))}")
        if not isinstance(body.get("kind"), str) or body["kind"] not in MENU:
            raise ValueError(f"unknown fault {body.get('kind')!r}; choose one of {', '.join(MENU)}")
        fault = cls(**body)
        for name in ("operation", "instance_id"):
            if not isinstance(getattr(fault, name), (str, type(None))):
                raise ValueError(f"{name} must be a string or null")
        if fault.count is not None and (type(fault.count) is not int or fault.count < 1):
            raise ValueError("count must be 1 or more, or null for every call until cleared")
        if type(fault.seconds) not in (int, float) or not math.isfinite(fault.seconds) or not 0 <= fault.seconds <= 600:
            raise ValueError("seconds must lie between 0 and 600")
        if fault.code not in NODE_CODES:
            raise ValueError(f"unknown per-node code {fault.code!r}; choose one of {', '.join(NODE_CODES)}")
        return fault

    def fits(self, operation: str, instance_ids: tuple[str, ...]) -> bool:
        """Return whether a call of `operation` on these instances meets this fault."""
        if self.kind in _WORLD or (self.operation is not None and self.operation != operation):
            return False
        if self.kind in _PER_NODE and operation not in _NODE_OPERATIONS:
            return False
        if self.kind == "paging_changes" and operation != "ListClusterNodes":
            return False
        return self.instance_id is None or self.instance_id in instance_ids


class FaultMenu:
    """The faults on order, in the order in which they were ordered."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def order(self, fault: Fault) -> None:
        """Add one fault; a kind that stands in the world (`no_capacity`) is added once."""
        with self._lock:
            if fault.kind == "no_capacity":
                # Capacity is missing or not; counting calls would make no sense, so it stands until it is cleared.
                self._faults = [f for f in self._faults if f.kind != "no_capacity"]
                fault = replace(fault, count=None)
            self._faults.append(fault)

    def clear(self, kind: str | None = None) -> None:
        """Cancel all faults on order, or those of one kind."""
        with self._lock:
            self._faults = [] if kind is None else [f for f in self._faults if f.kind != kind]

    def meet(self, operation: str, instance_ids: tuple[str, ...]) -> Fault | None:
        """Return and use up the first fault that this call meets, or None."""
        return self._take(lambda fault: fault.fits(operation, instance_ids))

    def stands(self, kind: str) -> bool:
        """Return whether a fault of this kind is on order, without using it up."""
        with self._lock:
            return any(fault.kind == kind for fault in self._faults)

    def use(self, kind: str) -> bool:
        """Use up one fault of this kind and return whether there was one."""
        return self._take(lambda fault: fault.kind == kind) is not None

    def listing(self) -> list[dict[str, Any]]:
        """Return the faults on order, ready for JSON."""
        with self._lock:
            return [asdict(fault) for fault in self._faults]

    def _take(self, wanted: Callable[[Fault], bool]) -> Fault | None:
        with self._lock:
            for index, fault in enumerate(self._faults):
                if not wanted(fault):
                    continue
                if fault.count is not None:
                    left = fault.count - 1
                    self._faults[index : index + 1] = [replace(fault, count=left)] if left else []
                return fault
        return None
