"""SageMaker's cluster operations, from a checked request to a checked response.

What it does: answers List/DescribeCluster(s), List/DescribeClusterNode(s) and the three Batch*ClusterNodes calls out
of a `Cluster`, with AWS's error codes, paging and per-node failures.
What it never does: touch a socket, keep time, or hold a lock; the caller does.
Its place: between `server`, which speaks HTTP, and `cluster`, which is the world.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sdcwatch_remediation.simulator.cluster import Cluster, Node, NodeRefused
from sdcwatch_remediation.simulator.faults import REFUSALS, Fault
from sdcwatch_remediation.simulator.shapes import request_problems, response_problems

ACCOUNT = "123456789012"
"""The example account number of AWS's own documentation."""
_DELETE_CODES = {"InstanceIdNotFound": "NodeIdNotFound", "InstanceIdInUse": "NodeIdInUse"}
_REPLACED_AS_WE_CAME = "replaced_by_others"


class ServiceError(Exception):
    """An error answer for the whole call."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class SimulatorDefect(RuntimeError):
    """The simulator's own answer does not fit botocore's model: the simulator must be corrected."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of a 200, and what the call did to the world."""

    body: dict[str, Any]
    affected: tuple[str, ...] = ()
    """Instance ids that a mutating call took effect on."""


def perform(cluster: Cluster, now: float, operation: str, request: Any, fault: Fault | None) -> Answer:
    """Carry out one operation.

    Args:
        cluster: The world, settled to `now`.
        now: Virtual unix seconds.
        operation: One of `shapes.OPERATIONS`.
        request: The parsed JSON body.
        fault: The fault that this call meets; those that concern the connection are the server's.

    Raises:
        ServiceError: The call as a whole is refused and had no effect.
        SimulatorDefect: The answer does not fit botocore's model.
    """
    if fault is not None and fault.kind in REFUSALS:
        raise ServiceError(*REFUSALS[fault.kind])
    problems = request_problems(operation, request)
    if problems:
        count = f"{len(problems)} validation error{'s' if len(problems) > 1 else ''} detected: "
        raise ServiceError("ValidationException", count + "; ".join(problems))
    answer = _HANDLERS[operation](cluster, now, request, fault)
    wrong = response_problems(operation, answer.body)
    if wrong:
        raise SimulatorDefect(f"the simulator's answer to {operation} is not as botocore describes it: {wrong}")
    return answer


def cluster_arn(cluster: Cluster) -> str:
    """Return the ARN under which the cluster may be named instead of its name."""
    identity = hashlib.sha256(cluster.config.cluster.encode()).hexdigest()[:12]
    return f"arn:aws:sagemaker:{cluster.config.region}:{ACCOUNT}:cluster/{identity}"


def _list_clusters(cluster: Cluster, now: float, request: Any, fault: Fault | None) -> Answer:
    summary = {
        "ClusterArn": cluster_arn(cluster),
        "ClusterName": cluster.config.cluster,
        "CreationTime": cluster.created,
        "ClusterStatus": "InService",
    }
    fits = request.get("NameContains", "") in cluster.config.cluster
    fits = fits and _within(cluster.created, request)
    return Answer({"ClusterSummaries": [summary] if fits else []})


def _describe_cluster(cluster: Cluster, now: float, request: Any, fault: Fault | None) -> Answer:
    _want_cluster(cluster, request)
    config = cluster.config
    groups = []
    for group in config.groups:
        present = [n for n in cluster.present() if n.group == group.name and n.status != "ShuttingDown"]
        groups.append(
            {
                "InstanceGroupName": group.name,
                "InstanceType": group.instance_type,
                "CurrentCount": len(present),
                "TargetCount": len(group.nodes),
                "Status": "InService",
            }
        )
    body: dict[str, Any] = {
        "ClusterArn": cluster_arn(cluster),
        "ClusterName": config.cluster,
        "ClusterStatus": "InService",
        "CreationTime": cluster.created,
        "InstanceGroups": groups,
        "NodeRecovery": config.node_recovery,
    }
    if any(order.waited and order.new_id is None for order in cluster.orders):
        body["FailureMessage"] = "We currently do not have sufficient capacity to provision a replacement instance."
    if config.orchestrator == "eks":
        arn = f"arn:aws:eks:{config.region}:{ACCOUNT}:cluster/{config.cluster}"
        body["Orchestrator"] = {"Eks": {"ClusterArn": arn}}
    else:
        body["Orchestrator"] = {"Slurm": {}}
    return Answer(body)


def _list_nodes(cluster: Cluster, now: float, request: Any, fault: Fault | None) -> Answer:
    _want_cluster(cluster, request)
    part = request.get("InstanceGroupNameContains", "")
    nodes = [n for n in cluster.present() if part in n.group and _within(n.launch_time, request)]
    if request.get("SortBy") == "NAME":
        nodes.sort(key=lambda n: (n.host, n.instance_id))
    if request.get("SortOrder") == "Descending":
        nodes.reverse()
    if fault is not None and fault.kind == "paging_changes" and nodes:
        nodes = nodes[1:] + nodes[:1]
    query = {k: v for k, v in request.items() if k not in ("NextToken", "MaxResults")}
    start = _offset(request.get("NextToken"), query)
    end = start + request.get("MaxResults", 10)
    body: dict[str, Any] = {"ClusterNodeSummaries": [_summary(cluster, n) for n in nodes[start:end]]}
    if end < len(nodes):
        body["NextToken"] = _token(end, query)
    return Answer(body)


def _describe_node(cluster: Cluster, now: float, request: Any, fault: Fault | None) -> Answer:
    _want_cluster(cluster, request)
    _want_no_logical_ids(request, "NodeLogicalId")
    if "NodeId" not in request:
        raise ServiceError("ValidationException", "Either NodeId or NodeLogicalId must be specified")
    node = cluster.find(request["NodeId"])
    if node is None:
        raise ServiceError("ResourceNotFound", f"Instance with instance id {request['NodeId']} does not exist.")
    return Answer({"NodeDetails": _summary(cluster, node) | {"PrivatePrimaryIp": node.address}})


def _replace(cluster: Cluster, now: float, request: Any, fault: Fault | None) -> Answer:
    def act(instance_id: str) -> None:
        if fault is not None and fault.kind == _REPLACED_AS_WE_CAME and fault.instance_id in (None, instance_id):
            _let_others_replace(cluster, instance_id, now)
        cluster.replace(instance_id, now)

    return _batch(cluster, request, fault, act, code_member="ErrorCode")


def _reboot(cluster: Cluster, now: float, request: Any, fault: Fault | None) -> Answer:
    return _batch(cluster, request, fault, lambda i: cluster.reboot(i, now), code_member="ErrorCode")


def _delete(cluster: Cluster, now: float, request: Any, fault: Fault | None) -> Answer:
    return _batch(cluster, request, fault, lambda i: cluster.delete(i, now), code_member="Code")


def _batch(
    cluster: Cluster, request: Any, fault: Fault | None, act: Callable[[str], None], *, code_member: str
) -> Answer:
    _want_cluster(cluster, request)
    _want_no_logical_ids(request, "NodeLogicalIds")
    if not request.get("NodeIds"):
        raise ServiceError("ValidationException", "At least one of NodeIds or NodeLogicalIds must be provided")
    done: list[str] = []
    failed: list[dict[str, str]] = []
    for instance_id in request["NodeIds"]:
        try:
            _fail_by_order(fault, instance_id)
            act(instance_id)
            done.append(instance_id)
        except NodeRefused as refused:
            code = refused.code
            if code_member == "Code":
                code = _DELETE_CODES.get(code, "InvalidNodeStatus")
            failed.append({"NodeId": instance_id, code_member: code, "Message": str(refused)})
    # The model wants at least one id in a list of successes, so a list without any is left out.
    body: dict[str, Any] = {"Successful": done} if done else {}
    if failed:
        body["Failed"] = failed
    return Answer(body, tuple(done))


def _fail_by_order(fault: Fault | None, instance_id: str) -> None:
    if fault is None or fault.instance_id not in (None, instance_id):
        return
    if fault.kind == "node_failed":
        raise NodeRefused(fault.code, f"Ordered failure of {instance_id}")
    if fault.kind == "instance_in_use":
        raise NodeRefused("InstanceIdInUse", f"Another operation is already in progress for {instance_id}")


def _let_others_replace(cluster: Cluster, instance_id: str, now: float) -> None:
    try:
        cluster.replace(instance_id, now, by="others")
    except NodeRefused:
        # Nobody can replace it any more; the caller's own request is about to learn why.
        return


def _summary(cluster: Cluster, node: Node) -> dict[str, Any]:
    return {
        "InstanceGroupName": node.group,
        "InstanceId": node.instance_id,
        "InstanceType": node.instance_type,
        "LaunchTime": node.launch_time,
        "InstanceStatus": {"Status": node.status},
        "PrivateDnsHostname": f"{node.host}.{cluster.config.region}.compute.internal",
    }


def _want_cluster(cluster: Cluster, request: Any) -> None:
    if request["ClusterName"] not in (cluster.config.cluster, cluster_arn(cluster)):
        raise ServiceError("ResourceNotFound", f"Cluster with name {request['ClusterName']} does not exist.")


def _want_no_logical_ids(request: Any, member: str) -> None:
    if member in request:
        message = f"{member} is only supported for clusters using Continuous as the NodeProvisioningMode"
        raise ServiceError("ValidationException", message)


def _within(moment: float, request: Any) -> bool:
    after, before = request.get("CreationTimeAfter"), request.get("CreationTimeBefore")
    return bool((after is None or moment > after) and (before is None or moment < before))


def _token(offset: int, query: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps([offset, query], sort_keys=True).encode()).decode()


def _offset(token: str | None, query: dict[str, Any]) -> int:
    if token is None:
        return 0
    try:
        offset, asked = json.loads(base64.urlsafe_b64decode(token.encode()))
    except (binascii.Error, ValueError, TypeError) as error:
        raise ServiceError("ValidationException", "Invalid NextToken") from error
    if type(offset) is not int or offset < 0 or asked != json.loads(json.dumps(query)):
        raise ServiceError("ValidationException", "NextToken does not belong to this request")
    return offset


_HANDLERS: dict[str, Callable[[Cluster, float, Any, Fault | None], Answer]] = {
    "BatchDeleteClusterNodes": _delete,
    "BatchRebootClusterNodes": _reboot,
    "BatchReplaceClusterNodes": _replace,
    "DescribeCluster": _describe_cluster,
    "DescribeClusterNode": _describe_node,
    "ListClusterNodes": _list_nodes,
    "ListClusters": _list_clusters,
}
