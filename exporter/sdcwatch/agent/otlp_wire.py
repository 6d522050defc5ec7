"""The OTLP message types, loaded only where `--otlp-endpoint` asks for them, and values as they travel in them.

Only `opentelemetry-proto` is used, the messages themselves: an SDK would keep a second state beside the spool's, and
its exporters decide for themselves how long an exit may take. Flow: **otlp_wire** -> otlp_metrics, otlp_logs, senders.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdcwatch._version import __version__
from sdcwatch.agent.node import Node
from sdcwatch.errors import ConfigurationError

_LARGEST_INT = 2**63 - 1
_LONGEST_TEXT = 4096

Value = str | bool | int | float | Sequence[str] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Wire:
    """Modules of `opentelemetry.proto` (generated code; none of it is typed here)."""

    common: Any
    resource: Any
    metrics: Any
    logs: Any
    metrics_service: Any
    logs_service: Any


def load() -> Wire:
    """Imports the message types.

    Raises:
        ConfigurationError: the extra is not installed.
    """
    base = "opentelemetry.proto"
    names = {
        "common": f"{base}.common.v1.common_pb2",
        "resource": f"{base}.resource.v1.resource_pb2",
        "metrics": f"{base}.metrics.v1.metrics_pb2",
        "logs": f"{base}.logs.v1.logs_pb2",
        "metrics_service": f"{base}.collector.metrics.v1.metrics_service_pb2",
        "logs_service": f"{base}.collector.logs.v1.logs_service_pb2",
    }
    try:
        return Wire(**{field: importlib.import_module(name) for field, name in names.items()})
    except ImportError as error:
        raise ConfigurationError(f"--otlp-endpoint needs the extra: pip install 'sdcwatch[otlp]' ({error})") from error


def resource_of(wire: Wire, node: Node) -> Any:
    """Who sends: this agent on this node. The identity that rules read stands on each data point besides."""
    told: dict[str, Value] = {
        "service.name": "sdcwatch-agent",
        "service.version": __version__,
        "service.instance.id": node.instance or node.node,
        "host.name": node.host,
        **node.labels(),
    }
    return wire.resource.Resource(attributes=attributes(wire, told))


def scope(wire: Wire) -> Any:
    """The instrumentation scope of everything that is sent."""
    return wire.common.InstrumentationScope(name="sdcwatch", version=__version__)


def attributes(wire: Wire, values: Mapping[str, Value]) -> list[Any]:
    """Attributes in the order given."""
    return [wire.common.KeyValue(key=clean(key), value=any_value(wire, value)) for key, value in values.items()]


def any_value(wire: Wire, value: Value) -> Any:
    """One value. Nothing that a journal may hold raises here: one bad value must not cost a batch."""
    make = wire.common.AnyValue
    if isinstance(value, bool):
        return make(bool_value=value)
    if isinstance(value, int):
        return make(int_value=value) if -_LARGEST_INT <= value <= _LARGEST_INT else make(string_value=str(value))
    if isinstance(value, float):
        return make(double_value=value)
    if isinstance(value, str):
        return make(string_value=clean(value)[:_LONGEST_TEXT])
    return make(array_value=wire.common.ArrayValue(values=[any_value(wire, item) for item in value]))


def clean(text: str) -> str:
    """Text without lone surrogates, which protobuf refuses; `/metrics` writes the same question marks."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def nanoseconds(seconds: float) -> int:
    """Unix seconds as OTLP's unsigned nanoseconds; a time that is none becomes 0, which means unknown."""
    return int(seconds * 1e9) if 0 <= seconds < 1.8e10 else 0
