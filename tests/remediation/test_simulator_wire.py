"""The simulator as unmodified boto3 and plain HTTP clients meet it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import httpx
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from sdcwatch_remediation.simulator import GroupConfig, NodeConfig, Simulator, SimulatorConfig
from sdcwatch_remediation.simulator import operations as simulator_operations

START = 1_790_000_000.0
SETTINGS: dict[str, Any] = {"clock_factor": 0.0, "clock_start": START}


@pytest.fixture(scope="module")
def simulator() -> Iterator[Simulator]:
    """One started simulator of seven workers and one spare, its clock frozen."""
    with Simulator(SimulatorConfig.of_size("demo", nodes=7, spares=1, **SETTINGS)) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(simulator: Simulator) -> None:
    simulator.reset()


@pytest.fixture(scope="module")
def client(simulator: Simulator) -> Iterator[Any]:
    """An unmodified boto3 client, with any credentials and no retries."""
    made = boto3.session.Session("any", "thing", region_name="us-west-2").client(
        "sagemaker",
        endpoint_url=simulator.url,
        config=Config(retries={"total_max_attempts": 1}, read_timeout=10, parameter_validation=False),
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def http(simulator: Simulator) -> Iterator[httpx.Client]:
    """A plain HTTP client of the simulator."""
    with httpx.Client(base_url=simulator.url) as made:
        yield made


def first_id(simulator: Simulator) -> str:
    return str(simulator.state()["nodes"][0]["instance_id"])


def refused(call: Any, **arguments: Any) -> tuple[str, str]:
    with pytest.raises(ClientError) as raised:
        call(**arguments)
    return raised.value.response["Error"]["Code"], raised.value.response["Error"]["Message"]


def test_lists_every_node_once_through_boto3s_own_paginator(simulator: Simulator, client: Any) -> None:
    """A paginator with small pages meets each of the seven nodes exactly once."""
    pages = client.get_paginator("list_cluster_nodes").paginate(ClusterName="demo", PaginationConfig={"PageSize": 3})
    sizes, ids = [], []
    for page in pages:
        sizes.append(len(page["ClusterNodeSummaries"]))
        ids += [node["InstanceId"] for node in page["ClusterNodeSummaries"]]
    assert sizes == [3, 3, 1]
    assert sorted(ids) == sorted(node["instance_id"] for node in simulator.state()["nodes"])


def test_page_token_belongs_to_its_request(client: Any) -> None:
    """A token from one listing is refused by a listing with other filters, and so is a made-up one."""
    token = client.list_cluster_nodes(ClusterName="demo", MaxResults=2)["NextToken"]
    assert refused(client.list_cluster_nodes, ClusterName="demo", SortOrder="Descending", NextToken=token)[0] == (
        "ValidationException"
    )
    assert refused(client.list_cluster_nodes, ClusterName="demo", NextToken="made up")[0] == "ValidationException"


def test_sorts_and_filters_like_the_service(simulator: Simulator, client: Any) -> None:
    """Descending order turns the listing round and filters leave out what does not fit."""
    up = [n["InstanceId"] for n in client.list_cluster_nodes(ClusterName="demo")["ClusterNodeSummaries"]]
    down = client.list_cluster_nodes(ClusterName="demo", SortOrder="Descending")["ClusterNodeSummaries"]
    assert [n["InstanceId"] for n in down] == up[::-1]
    assert not client.list_cluster_nodes(ClusterName="demo", InstanceGroupNameContains="login")["ClusterNodeSummaries"]
    assert not client.list_cluster_nodes(ClusterName="demo", CreationTimeAfter=START)["ClusterNodeSummaries"]


def test_describes_cluster_and_node_by_name_and_arn(simulator: Simulator, client: Any) -> None:
    """Name and ARN mean the same cluster, and a node is described with its address and host name."""
    summary = client.list_clusters()["ClusterSummaries"][0]
    assert summary["ClusterName"] == "demo"
    about = client.describe_cluster(ClusterName=summary["ClusterArn"])
    assert about["InstanceGroups"][0]["CurrentCount"] == about["InstanceGroups"][0]["TargetCount"] == 7
    assert about["NodeRecovery"] == "None"
    assert about["Orchestrator"] == {"Slurm": {}}
    node = client.describe_cluster_node(ClusterName=summary["ClusterArn"], NodeId=first_id(simulator))["NodeDetails"]
    assert node["PrivatePrimaryIp"].startswith("127.0.10.")
    assert node["PrivateDnsHostname"] == f"ip-{node['PrivatePrimaryIp'].replace('.', '-')}.us-west-2.compute.internal"
    assert node["InstanceStatus"]["Status"] == "Running"


def test_unknown_cluster_and_node_are_not_found(client: Any) -> None:
    """What is not there is ResourceNotFound, for a cluster as for a node."""
    assert refused(client.list_cluster_nodes, ClusterName="other")[0] == "ResourceNotFound"
    assert refused(client.describe_cluster_node, ClusterName="demo", NodeId="i-" + "0" * 17)[0] == "ResourceNotFound"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"NodeIds": [f"i-{n:017x}" for n in range(26)]}, "less than or equal to 25"),
        ({"NodeIds": ["i-0123456789abcdef0", "i-xyz"]}, "regular expression pattern"),
        ({"NodeIds": ["i-0123456789abcdef0\n"]}, "regular expression pattern"),
        ({"NodeIds": []}, "greater than or equal to 1"),
        ({}, "At least one of"),
        ({"NodeLogicalIds": ["node-1"]}, "Continuous"),
    ],
)
def test_replace_refuses_what_botocore_lets_through(
    simulator: Simulator, client: Any, arguments: dict[str, Any], part: str
) -> None:
    """Limits, patterns and combinations that botocore sends unchecked are a ValidationException without effect."""
    code, message = refused(client.batch_replace_cluster_nodes, ClusterName="demo", **arguments)
    assert code == "ValidationException"
    assert part in message
    assert simulator.replacements() == {}


def test_enum_and_range_of_a_listing_are_checked(client: Any) -> None:
    """An order that is none and a page size above the maximum are refused."""
    assert "enum value set" in refused(client.list_cluster_nodes, ClusterName="demo", SortOrder="Sideways")[1]
    assert "less than or equal to 100" in refused(client.list_cluster_nodes, ClusterName="demo", MaxResults=101)[1]


def test_replace_answers_for_each_node_by_itself(simulator: Simulator, client: Any) -> None:
    """One call with a good, an unknown and a busy id: the good one succeeds and the others fail with their codes."""
    good, busy, pending = (str(n["instance_id"]) for n in simulator.state()["nodes"][:3])
    simulator.others_replace(busy)
    simulator.set_status(pending, "SystemUpdating")
    unknown = "i-" + "f" * 17
    answer = client.batch_replace_cluster_nodes(ClusterName="demo", NodeIds=[good, unknown, busy, pending])
    assert answer["Successful"] == [good]
    assert {item["NodeId"]: item["ErrorCode"] for item in answer["Failed"]} == {
        unknown: "InstanceIdNotFound",
        busy: "InstanceIdInUse",
        pending: "InvalidInstanceStatus",
    }


def test_controller_of_a_slurm_cluster_is_never_replaced() -> None:
    """HyperPod cannot replace a Slurm controller, and neither can the simulator."""
    controller = GroupConfig("controller", (NodeConfig("127.0.10.1"),), "ml.m5.2xlarge", controller=True)
    with Simulator(SimulatorConfig("demo", (controller,), **SETTINGS)) as simulator:
        reply = simulator.call("BatchReplaceClusterNodes", {"ClusterName": "demo", "NodeIds": [first_id(simulator)]})
    assert reply.body["Failed"][0]["ErrorCode"] == "InvalidInstanceStatus"
    assert "Successful" not in reply.body


def test_delete_takes_a_node_away_without_a_replacement(simulator: Simulator, client: Any) -> None:
    """A deleted node shuts down and is gone, and nothing comes in its place."""
    victim = first_id(simulator)
    assert client.batch_delete_cluster_nodes(ClusterName="demo", NodeIds=[victim])["Successful"] == [victim]
    again = client.batch_delete_cluster_nodes(ClusterName="demo", NodeIds=[victim])
    assert again["Failed"][0]["Code"] == "NodeIdInUse"
    simulator.advance(10_000)
    assert len(client.list_cluster_nodes(ClusterName="demo")["ClusterNodeSummaries"]) == 6
    assert simulator.replacements() == {}


def test_reboot_keeps_the_instance(simulator: Simulator, client: Any) -> None:
    """A rebooted node is Pending for a while and then Running under the same id."""
    node = first_id(simulator)
    assert client.batch_reboot_cluster_nodes(ClusterName="demo", NodeIds=[node])["Successful"] == [node]
    status = client.describe_cluster_node(ClusterName="demo", NodeId=node)["NodeDetails"]["InstanceStatus"]["Status"]
    assert status == "Pending"
    simulator.advance(10_000)
    status = client.describe_cluster_node(ClusterName="demo", NodeId=node)["NodeDetails"]["InstanceStatus"]["Status"]
    assert status == "Running"


def aws_headers(**changes: str) -> dict[str, str]:
    signature = (
        "AWS4-HMAC-SHA256 Credential=A/20261201/us-west-2/sagemaker/aws4_request, SignedHeaders=host, Signature="
    )
    headers = {
        "X-Amz-Target": "SageMaker.ListClusters",
        "Content-Type": "application/x-amz-json-1.1",
        "X-Amz-Date": "20261201T000000Z",
        "Authorization": signature + "0" * 64,
    }
    return {key: value for key, value in (headers | changes).items() if value}


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({}, 200, ""),
        ({"Authorization": ""}, 403, "MissingAuthenticationTokenException"),
        ({"Authorization": "Bearer x"}, 403, "IncompleteSignatureException"),
        ({"X-Amz-Date": ""}, 403, "IncompleteSignatureException"),
        ({"X-Amz-Target": "SageMaker.CreateCluster"}, 400, "UnknownOperationException"),
        ({"X-Amz-Target": "Other.ListClusters"}, 400, "UnknownOperationException"),
        ({"Content-Type": "application/json"}, 400, "SerializationException"),
    ],
)
def test_wire_protocol_is_wanted_whole(http: httpx.Client, changes: dict[str, str], status: int, code: str) -> None:
    """A call needs target, JSON 1.1 and a SigV4 signature for SageMaker; each lack has AWS's own error."""
    answer = http.post("/", headers=aws_headers(**changes), content=b"{}")
    assert answer.status_code == status
    assert answer.json().get("__type", "") == code


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"{", "not JSON"),
        (b"[]", "must be a structure"),
        (b'{"A":1}', "Unknown"),
        (b'{"MaxResults":"1"}', "an integer"),
    ],
)
def test_bodies_that_are_no_request_are_refused(http: httpx.Client, body: bytes, part: str) -> None:
    """A broken body, one that is no structure, an unknown member and a wrong type are refused with the reason."""
    answer = http.post("/", headers=aws_headers(), content=body)
    assert answer.status_code == 400
    assert part in answer.json()["message"]


def test_an_answer_that_botocore_would_not_describe_is_a_loud_defect(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should the simulator itself answer outside the service model, the caller gets a 500 that says so."""
    monkeypatch.setattr(simulator_operations, "cluster_arn", lambda _: "not an ARN")
    answer = http.post("/", headers=aws_headers(), content=b"{}")
    assert answer.status_code == 500
    assert answer.json()["__type"] == "SimulatorDefect"
    assert "regular expression" in answer.json()["message"]


def test_admin_shows_calls_with_their_outcome(simulator: Simulator, http: httpx.Client, client: Any) -> None:
    """The call log has the request, what was answered and what it took effect on, also when no answer was sent."""
    node = first_id(simulator)
    posted = http.post("/_simulator/faults", json={"kind": "error_after"})
    assert posted.json()["faults"][0]["kind"] == "error_after"
    assert refused(client.batch_replace_cluster_nodes, ClusterName="demo", NodeIds=[node])[0] == "InternalFailure"
    calls = http.get("/_simulator/calls?operation=BatchReplaceClusterNodes").json()["calls"]
    assert len(calls) == 1
    assert calls[0]["request"] == {"ClusterName": "demo", "NodeIds": [node]}
    assert (calls[0]["status"], calls[0]["code"], calls[0]["fault"]) == (500, "InternalFailure", "error_after")
    assert calls[0]["affected"] == [node]
    assert calls[0]["time"] == START
    number = calls[0]["number"]
    assert http.get(f"/_simulator/calls?since={number}").json() == {"calls": []}


def test_admin_moves_the_world(simulator: Simulator) -> None:
    """Over HTTP alone: replace a node, let time pass, add capacity, cancel faults and go back to the start."""
    node = first_id(simulator)
    with httpx.Client(base_url=simulator.url + "/_simulator/") as admin:
        assert admin.post("faults", json={"kind": "no_capacity"}).status_code == 200
        assert admin.post("nodes", json={"replace": node}).status_code == 200
        assert admin.post("advance", json={"seconds": 1000}).json() == {"now": START + 1000}
        state = admin.get("state").json()
        assert [gone["instance_id"] for gone in state["gone"]] == [node]
        assert state["replacements"][0]["new_id"] is None
        assert admin.delete("faults").json() == {"faults": []}
        assert admin.post("nodes", json={"spares": ["127.0.201.9"]}).json()["spares"] == ["127.0.201.9"]
        assert admin.get("state").json()["replacements"][0]["new_id"] is not None
        assert "no_capacity" in admin.get("faults").json()["menu"]
        assert len(admin.post("reset").json()["nodes"]) == 7


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "part"),
    [
        ("GET", "nothing", None, 404, "endpoints"),
        ("POST", "faults", {"kind": "fire"}, 400, "unknown fault"),
        ("POST", "faults", {"kind": ["fire"]}, 400, "unknown fault"),
        ("POST", "faults", {"kind": "throttle", "often": 1}, 400, "often"),
        ("POST", "faults", {"kind": "throttle", "count": 0}, 400, "count"),
        ("POST", "faults", {"kind": "slow_answer", "seconds": -1}, 400, "seconds"),
        ("POST", "advance", {"seconds": -1}, 400, "0 seconds or more"),
        ("POST", "advance", {}, 400, "seconds"),
        ("POST", "nodes", {"status": "Running"}, 400, "one of"),
        ("POST", "nodes", {"instance_id": "i-0", "status": "Asleep"}, 400, "unknown status"),
        ("POST", "nodes", {"spares": ["127.0.10.1"]}, 400, "only once"),
        ("POST", "nodes", {"spares": ["somewhere"]}, 400, "IPv4"),
        ("GET", "calls?since=x", None, 400, "since"),
    ],
)
def test_admin_says_what_it_takes(
    http: httpx.Client, method: str, path: str, body: Any, status: int, part: str
) -> None:
    """A wrong admin request is an error that names what would be right."""
    answer = http.request(method, f"/_simulator/{path}", json=body)
    assert answer.status_code == status
    assert part in answer.json()["error"]
