"""The shapes of SageMaker's cluster calls that the action and the simulator rely on, in the installed botocore.

`botocore_shapes.json` beside this file is what they were when the code was written. New members and new enum values
do no harm and pass; one that is gone, has become required or changed its type, limits or pattern fails here, by name,
before it fails against a real cluster. After reading what changed, write the file anew:

    python tests/contract/test_contract_botocore_shapes.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import botocore
import pytest
from sdcwatch_remediation.simulator.shapes import OPERATIONS, service_model

SNAPSHOT = Path(__file__).with_name("botocore_shapes.json")

USED: dict[str, tuple[str, ...]] = {
    "ListClustersRequest": ("NameContains",),
    "ListClustersResponse": ("ClusterSummaries",),
    "ClusterSummary": ("ClusterArn", "ClusterName", "CreationTime", "ClusterStatus"),
    "DescribeClusterRequest": ("ClusterName",),
    "DescribeClusterResponse": (
        "ClusterArn",
        "ClusterName",
        "ClusterStatus",
        "CreationTime",
        "FailureMessage",
        "InstanceGroups",
        "NodeRecovery",
        "Orchestrator",
    ),
    "ClusterInstanceGroupDetails": ("CurrentCount", "InstanceGroupName", "InstanceType", "Status", "TargetCount"),
    "ClusterOrchestrator": ("Eks", "Slurm"),
    "ListClusterNodesRequest": ("ClusterName", "MaxResults", "NextToken", "SortBy", "SortOrder"),
    "ListClusterNodesResponse": ("ClusterNodeSummaries", "NextToken"),
    "ClusterNodeSummary": (
        "InstanceGroupName",
        "InstanceId",
        "InstanceStatus",
        "InstanceType",
        "LaunchTime",
        "PrivateDnsHostname",
    ),
    "ClusterInstanceStatusDetails": ("Status",),
    "DescribeClusterNodeRequest": ("ClusterName", "NodeId"),
    "DescribeClusterNodeResponse": ("NodeDetails",),
    "ClusterNodeDetails": ("InstanceId", "PrivateDnsHostname", "PrivatePrimaryIp"),
    "BatchReplaceClusterNodesRequest": ("ClusterName", "NodeIds", "NodeLogicalIds"),
    "BatchReplaceClusterNodesResponse": ("Failed", "Successful"),
    "BatchReplaceClusterNodesError": ("ErrorCode", "Message", "NodeId"),
    "BatchDeleteClusterNodesRequest": ("ClusterName", "NodeIds"),
    "BatchDeleteClusterNodesResponse": ("Failed", "Successful"),
    "BatchDeleteClusterNodesError": ("Code", "Message", "NodeId"),
    "BatchRebootClusterNodesRequest": ("ClusterName", "NodeIds"),
    "BatchRebootClusterNodesResponse": ("Failed", "Successful"),
    "BatchRebootClusterNodesError": ("ErrorCode", "Message", "NodeId"),
}
LIMITS = ("min", "max", "pattern")


def taken() -> dict[str, Any]:
    """What the installed botocore says of the operations and members used."""
    model = service_model()
    operations = {}
    for name in OPERATIONS:
        operation = model.operation_model(name)
        errors = sorted(shape.name for shape in operation.error_shapes)
        operations[name] = {
            "input": operation.input_shape.name,
            "output": operation.output_shape.name,
            "errors": errors,
        }
    shapes = {}
    for name, members in USED.items():
        shape = model.shape_for(name)
        shapes[name] = {
            "required": sorted(shape.required_members),
            "members": {m: described(shape.members[m]) for m in members if m in shape.members},
        }
    metadata = {key: model.metadata[key] for key in ("jsonVersion", "protocol", "signingName", "targetPrefix")}
    return {"botocore": botocore.__version__, "service": metadata, "operations": operations, "shapes": shapes}


def described(shape: Any) -> dict[str, Any]:
    """Type, limits and enum of one member; of a list's members as well."""
    found: dict[str, Any] = {"type": shape.type_name}
    found |= {key: shape.metadata[key] for key in LIMITS if key in shape.metadata}
    if shape.metadata.get("enum"):
        found["enum"] = sorted(shape.metadata["enum"])
    if shape.type_name == "list":
        found["of"] = described(shape.member)
    return found


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is no longer as it was; additions of members and enum values are none."""
    found = [
        f"service {key}: {then['service'][key]} became {value}"
        for key, value in now["service"].items()
        if then["service"][key] != value
    ]
    for name, operation in then["operations"].items():
        current = now["operations"][name]
        found += [f"{name}: {key} changed" for key in ("input", "output") if current[key] != operation[key]]
        found += [f"{name}: error {e} is gone" for e in operation["errors"] if e not in current["errors"]]
    for name, shape in then["shapes"].items():
        current = now["shapes"][name]
        if current["required"] != shape["required"]:
            found.append(f"{name}: required members were {shape['required']}, are {current['required']}")
        for member, was in shape["members"].items():
            if member not in current["members"]:
                found.append(f"{name}.{member} is gone")
            else:
                found += changed(f"{name}.{member}", was, current["members"][member])
    return found


def changed(where: str, was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is no longer as it was in one member."""
    keys = ("type", *LIMITS)
    found = [f"{where}: {k} was {was.get(k)}, is {now.get(k)}" for k in keys if was.get(k) != now.get(k)]
    found += [f"{where}: value {value} is gone" for value in was.get("enum", []) if value not in now.get("enum", [])]
    if "of" in was and "of" in now:
        found += changed(f"{where}[]", was["of"], now["of"])
    return found


def test_botocore_still_describes_what_we_rely_on() -> None:
    """Nothing that the action or the simulator uses has changed since the snapshot was taken."""
    then = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    assert differences(then, taken()) == [], f"botocore {then['botocore']} -> {botocore.__version__}"


def test_snapshot_covers_everything_used() -> None:
    """The snapshot has every operation and every member of the list above, so that none is left unwatched."""
    then = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    assert set(then["operations"]) == set(OPERATIONS)
    assert {name: set(shape["members"]) for name, shape in then["shapes"].items()} == {
        name: set(members) for name, members in USED.items()
    }


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        (("shapes", "BatchReplaceClusterNodesRequest", "members", "NodeIds", "max"), 10, "max was 25, is 10"),
        (
            ("shapes", "BatchReplaceClusterNodesRequest", "members", "NodeIds", "of", "pattern"),
            "x",
            "NodeIds[]: pattern",
        ),
        (("shapes", "BatchReplaceClusterNodesRequest", "required"), ["ClusterName", "ClientToken"], "ClientToken"),
        (
            ("shapes", "BatchReplaceClusterNodesError", "members", "ErrorCode", "enum"),
            ["Other"],
            "InstanceIdInUse is gone",
        ),
        (("shapes", "ClusterNodeSummary", "members"), {}, "ClusterNodeSummary.InstanceId is gone"),
        (("service", "jsonVersion"), "1.0", "1.1 became 1.0"),
    ],
)
def test_a_change_is_found_and_named(path: tuple[str, ...], value: Any, part: str) -> None:
    """Each kind of change is told by its place."""
    then, now = taken(), taken()
    place = now
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert any(part in line for line in differences(then, now))


def test_additions_are_tolerated() -> None:
    """A new member or a new enum value is no difference."""
    then, now = taken(), taken()
    now["shapes"]["ClusterNodeSummary"]["members"]["Novel"] = {"type": "string"}
    now["shapes"]["BatchReplaceClusterNodesError"]["members"]["ErrorCode"]["enum"].append("Novel")
    now["operations"]["ListClusters"]["errors"].append("Novel")
    assert differences(then, now) == []


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(taken(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
