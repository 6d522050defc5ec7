"""Checks JSON bodies against botocore's own service model, and against what botocore itself does not check.

What it does: loads SageMaker's model from the installed botocore and walks one request or response through its shape:
types, required and unknown members, and also the maxima, patterns and enums that botocore sends unchecked.
What it never does: change a body, or know anything about clusters.
Its place: the simulator's door, in both directions. A request that fails is answered `ValidationException`, as AWS
does; a response that fails is a defect of the simulator and is said so, loudly.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from botocore.loaders import Loader
from botocore.model import ServiceModel

OPERATIONS = (
    "BatchDeleteClusterNodes",
    "BatchRebootClusterNodes",
    "BatchReplaceClusterNodes",
    "DescribeCluster",
    "DescribeClusterNode",
    "ListClusterNodes",
    "ListClusters",
)


@cache
def service_model() -> Any:
    """Return SageMaker's `botocore.model.ServiceModel`, as the installed botocore ships it."""
    return ServiceModel(Loader().load_service_model("sagemaker", "service-2"), "sagemaker")


def request_problems(operation: str, body: Any) -> list[str]:
    """Return what is wrong with a request body in AWS's own wording; empty when it is right."""
    return _problems(service_model().operation_model(operation).input_shape, body, "")


def response_problems(operation: str, body: Any) -> list[str]:
    """Return what is wrong with a response body; empty when it is right."""
    return _problems(service_model().operation_model(operation).output_shape, body, "")


def enum_values(shape_name: str) -> tuple[str, ...]:
    """Return the values that a string shape of the model allows."""
    return tuple(service_model().shape_for(shape_name).metadata.get("enum", ()))


def _problems(shape: Any, value: Any, where: str) -> list[str]:
    kind = shape.type_name
    if kind == "structure":
        return _structure_problems(shape, value, where)
    if kind == "list":
        if not isinstance(value, list):
            return [_wrong_type(where, "a list")]
        found = _size_problems(shape, len(value), where, "length")
        for number, item in enumerate(value, 1):
            found += _problems(shape.member, item, f"{where}.{number}.member")
        return found
    if kind == "map":
        if not isinstance(value, dict):
            return [_wrong_type(where, "a map")]
        found = _size_problems(shape, len(value), where, "length")
        for key, item in value.items():
            found += _problems(shape.key, key, f"{where}.key") + _problems(shape.value, item, f"{where}.{key}")
        return found
    return _scalar_problems(shape, kind, value, where)


def _structure_problems(shape: Any, value: Any, where: str) -> list[str]:
    if not isinstance(value, dict):
        return [_wrong_type(where, "a structure")]
    found = [
        f"Value null at '{_join(where, name)}' failed to satisfy constraint: Member must not be null"
        for name in shape.required_members
        if value.get(name) is None
    ]
    for name, item in value.items():
        if name not in shape.members:
            found.append(f"Unknown member '{_join(where, name)}' of {shape.name}")
        elif item is not None:
            found += _problems(shape.members[name], item, _join(where, name))
    return found


def _scalar_problems(shape: Any, kind: str, value: Any, where: str) -> list[str]:
    if kind == "boolean":
        return [] if isinstance(value, bool) else [_wrong_type(where, "a boolean")]
    if kind in ("integer", "long"):
        if isinstance(value, bool) or not isinstance(value, int):
            return [_wrong_type(where, "an integer")]
        return _size_problems(shape, value, where, "value")
    if kind in ("float", "double", "timestamp"):
        # JSON 1.1 sends a timestamp as unix seconds unless a shape says otherwise; none of those used here does.
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return [_wrong_type(where, "a number")]
        return []
    if not isinstance(value, str):
        return [_wrong_type(where, "a string")]
    found = _size_problems(shape, len(value), where, "length")
    pattern = shape.metadata.get("pattern")
    if pattern is not None and re.fullmatch(pattern, value) is None:
        found.append(_constraint(where, value, f"Member must satisfy regular expression pattern: {pattern}"))
    allowed = shape.metadata.get("enum")
    if allowed and value not in allowed:
        found.append(_constraint(where, value, f"Member must satisfy enum value set: [{', '.join(allowed)}]"))
    return found


def _size_problems(shape: Any, size: int, where: str, what: str) -> list[str]:
    found = []
    low, high = shape.metadata.get("min"), shape.metadata.get("max")
    # AWS words a list's or string's limit as a length and an integer's as a value.
    noun = "have length" if what == "length" else "have value"
    if low is not None and size < low:
        found.append(_constraint(where, size, f"Member must {noun} greater than or equal to {low}"))
    if high is not None and size > high:
        found.append(_constraint(where, size, f"Member must {noun} less than or equal to {high}"))
    return found


def _constraint(where: str, value: Any, rule: str) -> str:
    return f"Value '{str(value)[:120]}' at '{where}' failed to satisfy constraint: {rule}"


def _wrong_type(where: str, wanted: str) -> str:
    return f"Value at '{where or 'the body'}' must be {wanted}"


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
