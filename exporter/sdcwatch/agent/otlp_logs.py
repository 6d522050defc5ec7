"""An event as an OTLP log record: its sentence is the body, its fields are the attributes.

Attributes that metrics carry as labels keep the labels' names, so that one query finds both; the others begin with
`sdcwatch.`. The ranks of the whole job stay in the journal (16,384 of them would be megabytes). A line that lacks a
field gives a record without it, never none. Flow: otlp_outbox -> **otlp_logs** -> otlp.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from sdcwatch.agent.node import Node
from sdcwatch.agent.otlp_outbox import Waiting
from sdcwatch.agent.otlp_wire import Value, Wire, any_value, attributes, nanoseconds, resource_of, scope

EVENT_NAME = "sdcwatch.event"
#: Most rank numbers in one attribute.
MAX_RANKS = 64

#: Severities of the OpenTelemetry log data model.
_INFO, _WARN, _ERROR, _FATAL = (9, "INFO"), (13, "WARN"), (17, "ERROR"), (21, "FATAL")
_SHARED = ("training_job", "training_cluster", "check")
_OWN = ("epoch", "step", "kind", "persistence", "path", "action", "drill", "world_size", "last_clean_step")
_RANKS = ("suspects", "differing", "candidates")


def request_of(wire: Wire, node: Node, events: Sequence[Waiting], now: float) -> Any:
    """One request with one record an event; `now` is unix seconds."""
    records = [_record(wire, waiting, now) for waiting in events]
    scoped = wire.logs.ScopeLogs(scope=scope(wire), log_records=records)
    resource = wire.logs.ResourceLogs(resource=resource_of(wire, node), scope_logs=[scoped])
    return wire.logs_service.ExportLogsServiceRequest(resource_logs=[resource])


def severity(event: dict[str, Any]) -> tuple[int, str]:
    """A proven suspect is an error, other differences a warning; a job that halts for it is one worse; a drill none."""
    if event.get("drill") is True:
        return _INFO
    halts = event.get("action") == "halt"
    if event.get("kind") == "attributed":
        return _FATAL if halts else _ERROR
    return _ERROR if halts else _WARN


def _record(wire: Wire, waiting: Waiting, now: float) -> Any:
    event = waiting.event
    sentence = event.get("sentence")
    number, text = severity(event)
    return wire.logs.LogRecord(
        time_unix_nano=nanoseconds(waiting.time),
        observed_time_unix_nano=nanoseconds(now),
        severity_number=number,
        severity_text=text,
        event_name=EVENT_NAME,
        body=any_value(wire, sentence if isinstance(sentence, str) and sentence else f"event {waiting.id}"),
        attributes=attributes(wire, _attributes(waiting)),
    )


def _attributes(waiting: Waiting) -> dict[str, Value]:
    event = waiting.event
    found: dict[str, Value] = {"sdcwatch.event_id": waiting.id}
    for name in _SHARED:
        if isinstance(value := event.get(name), str):
            found[name] = value
    for name in _OWN:
        if isinstance(value := event.get(name), (str, bool, int, float)):
            found[f"sdcwatch.{name}"] = value
    for name in _RANKS:
        if isinstance(value := event.get(name), list):
            numbers = [rank for rank in value if isinstance(rank, int)]
            found[f"sdcwatch.{name}"] = numbers[:MAX_RANKS]
            if len(numbers) > MAX_RANKS:
                found[f"sdcwatch.{name}_count"] = len(numbers)
    found.update(_suspect(event))
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        found["sdcwatch.reporter_rank"] = int(json.loads(waiting.line)["reporter"]["rank"])
    return found


def _suspect(event: dict[str, Any]) -> dict[str, Value]:
    """Where the one suspect runs, under the names that its metrics carry; nothing where none or several are named."""
    suspects, ranks = event.get("suspects"), event.get("ranks")
    if not (isinstance(suspects, list) and len(suspects) == 1 and isinstance(ranks, list)):
        return {}
    for identity in ranks:
        if isinstance(identity, dict) and identity.get("rank") == suspects[0]:
            told: dict[str, Value] = {"rank": str(suspects[0])}
            for label, name in (("training_node", "node"), ("training_instance", "instance"), ("gpu_uuid", "gpu_uuid")):
                if isinstance(value := identity.get(name), str):
                    told[label] = value
            return told
    return {}
