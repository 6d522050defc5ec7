"""The known-answer test of a suspect's own halted node: read strictly, and judged for one event; pure.

What it does: `read` turns the answer of the suspect's agent into a `KnownAnswerTest`; `judge` says whether it confirms
that the very GPU which an event names computes wrong.
What it never does: clear anybody. A failure comes from the suspect itself and accuses it alone, beside an event that
two others attest; a pass, or none, only leaves a first transient fault unconfirmed.
Its place: `agents` reads with it, `policy` judges with it, `context` keeps what was read in the audit log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdcwatch_remediation.evidence import Event

RESULTS = ("pass", "fail", "unknown")
FUTURE_SECONDS = 120.0
"""A result further ahead than this is not judged."""
_TEXT, _DEVICES = 300, 64


@dataclass(frozen=True, slots=True)
class Device:
    """One device as its node names it."""

    device: str
    """As torch names it: `cpu`, `cuda:0`."""
    uuid: str
    serial: str
    outcome: str


@dataclass(frozen=True, slots=True)
class KnownAnswerTest:
    """What one node found of itself under one latch."""

    latch_id: str
    node: str
    instance: str
    result: str
    """`pass`, `fail`, or `unknown`: it could not judge."""
    detail: str
    time: float
    """Unix seconds, of the node's own clock."""
    devices: tuple[Device, ...]


def read(tree: Any) -> KnownAnswerTest:
    """Read one element of `results` of `GET /preflight`, or what `context` kept of it.

    Raises:
        ValueError: it is not of schema 1; the message names the field.
    """
    if not isinstance(tree, Mapping):
        raise ValueError("a result is not an object")
    at = tree.get("time")
    if not isinstance(at, int | float) or isinstance(at, bool) or not math.isfinite(at):
        raise ValueError("time is not a finite number")
    devices = tree.get("devices")
    if not isinstance(devices, list | tuple):
        raise ValueError("devices is not a list")
    found = KnownAnswerTest(
        latch_id=_text(tree, "latch_id"),
        node=_text(tree, "node"),
        instance=_text(tree, "instance"),
        result=_text(tree, "result"),
        detail=_text(tree, "detail"),
        time=float(at),
        devices=tuple(_device(item) for item in devices[:_DEVICES]),
    )
    if found.result not in RESULTS:
        raise ValueError(f"result is none of {', '.join(RESULTS)}")
    return found


def judge(test: KnownAnswerTest, event: Event, instance_id: str, named: frozenset[str], now: float) -> tuple[bool, str]:
    """Return whether a test confirms an event about an instance, and why.

    Args:
        named: UUIDs of the instance's GPUs that the event names.
        now: unix seconds.
    """
    if test.instance != instance_id:
        return False, f"the known-answer test is of {test.instance}"
    if test.latch_id != event.id:
        return False, f"the known-answer test is of another halt, {test.latch_id}"
    if not event.time < test.time <= now + FUTURE_SECONDS:
        when = "older than the event" if test.time <= event.time else "from the future"
        return False, f"the known-answer test is {when}"
    if test.result == "unknown":
        return False, f"its known-answer test could not judge ({test.detail})"
    if test.result == "pass":
        return False, "its known-answer test passed, which neither confirms nor clears"
    failed = sorted({uuid for device in test.devices if device.outcome == "fail" for uuid in _uuids(device, named)})
    if hit := [uuid for uuid in failed if uuid in named]:
        return True, f"the known-answer test of {hit[0]} failed ({test.detail})"
    where = ", ".join(failed) or "a device that it does not name"
    return False, f"its known-answer test failed on {where}, and the event names {', '.join(sorted(named)) or 'none'}"


def _uuids(device: Device, named: frozenset[str]) -> set[str]:
    # A rank without a GPU computes on the CPU, which has no UUID: its name is made of the node and the local rank.
    of_cpu = {uuid for uuid in named if uuid.startswith("CPU-")} if device.device == "cpu" else set()
    return of_cpu or {device.uuid or device.device}


def _device(item: Any) -> Device:
    if not isinstance(item, Mapping):
        raise ValueError("devices holds something that is not an object")
    return Device(_text(item, "device"), _text(item, "uuid"), _text(item, "serial"), _text(item, "outcome"))


def _text(tree: Mapping[str, Any], key: str) -> str:
    value = tree.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} is not a string")
    value.encode()  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
    return value[:_TEXT]
