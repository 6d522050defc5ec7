"""moto's HyperPod against the service's own reading of the API, as far as moto has the calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from sdcwatch_remediation.actions.hyperpod import HyperPod, InventoryUnreadable

pytestmark = pytest.mark.integration
REGION = "us-west-2"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A SageMaker of moto's with a cluster of three workers and a controller."""
    from moto import mock_aws  # here, because it puts a hook of its own into botocore as it is imported

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    with mock_aws():
        made = boto3.client("sagemaker", region_name=REGION)
        made.create_cluster(ClusterName="demo", InstanceGroups=[group("workers", 3), group("controller", 1)])
        yield made


def group(name: str, count: int) -> dict[str, Any]:
    return {
        "InstanceCount": count,
        "InstanceGroupName": name,
        "InstanceType": "ml.p5.48xlarge",
        "LifeCycleConfig": {"SourceS3Uri": "s3://sagemaker-any/scripts", "OnCreate": "on_create.sh"},
        "ExecutionRole": "arn:aws:iam::123456789012:role/any",
        "ThreadsPerCore": 1,
    }


def test_the_inventory_is_what_moto_lists(client: Any) -> None:
    """DescribeCluster, ListClusterNodes and DescribeClusterNode of somebody else's making are read as ours are."""
    inventory = HyperPod("demo", region=REGION).inventory()
    listed = client.list_cluster_nodes(ClusterName="demo")["ClusterNodeSummaries"]
    assert len(inventory.members) == len(listed) == 4
    for item in listed:
        (member,) = (m for m in inventory.members if m.instance_id == item["InstanceId"])
        assert member.group == item["InstanceGroupName"]
        assert member.status == item["InstanceStatus"]["Status"] == "Running"
        assert member.instance_type == item["InstanceType"]
        assert member.launch_time == pytest.approx(item["LaunchTime"].timestamp(), abs=0.001)
    assert inventory.short_groups == ()


def test_a_cluster_that_is_not_there_is_no_empty_one(client: Any) -> None:
    """Of a deleted cluster nothing is read, which is told from a cluster without instances."""
    client.delete_cluster(ClusterName="demo")
    with pytest.raises(InventoryUnreadable):
        HyperPod("demo", region=REGION).inventory()


def test_moto_has_no_replacement_to_check_against(client: Any) -> None:
    """Ours is checked against botocore's shapes and Stubber instead; once moto has the call, this says so."""
    with pytest.raises(NotImplementedError, match="batch_replace_cluster_nodes"):
        client.batch_replace_cluster_nodes(ClusterName="demo", NodeIds=["i-0123456789abcdef0"])
