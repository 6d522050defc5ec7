"""The live inventory as `HyperPod` reads it, and the proof that another instance runs in a place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sdcwatch_remediation.actions.hyperpod import DESCRIBE_WORKERS, LIST_READS, HyperPod, InventoryUnreadable
from sdcwatch_remediation.records import Inventory, Member
from sdcwatch_remediation.simulator import GroupConfig, NodeConfig, Simulator, SimulatorConfig
from sdcwatch_remediation.simulator.config import loopback

START = 1_790_000_000.0


def simulated(nodes: int, orchestrator: str = "slurm", **settings: Any) -> Simulator:
    settings = {"clock_factor": 0.0, "clock_start": START} | settings
    return Simulator(SimulatorConfig.of_size("demo", nodes=nodes, orchestrator=orchestrator, **settings))


def hyperpod(simulator: Simulator) -> HyperPod:
    return HyperPod("demo", region="us-west-2", endpoint_url=simulator.url, access_key_id="a", secret_access_key="b")


@pytest.fixture(scope="module")
def large() -> Iterator[tuple[Simulator, HyperPod]]:
    """Two pages of instances, and a provider for them, which remembers their addresses from test to test."""
    with simulated(130, spares=2) as simulator:
        provider = hyperpod(simulator)
        yield simulator, provider
        provider.close()


@pytest.fixture(autouse=True)
def _fresh(large: tuple[Simulator, HyperPod]) -> None:
    large[0].reset()


@pytest.mark.parametrize(("orchestrator", "recovery"), [("slurm", "None"), ("eks", "Automatic")])
def test_members_have_what_the_service_needs(orchestrator: str, recovery: str) -> None:
    """Group, node name, address, launch time, type and the cluster's repair setting come out as they are."""
    groups = (
        GroupConfig("head", (NodeConfig("127.0.10.9"),), "ml.m5.2xlarge", controller=True),
        GroupConfig("gpu", (NodeConfig("127.0.10.1", "i-0123456789abcdef0", launched_seconds_ago=100.0),)),
    )
    config = SimulatorConfig(
        "demo", groups, (), orchestrator, node_recovery=recovery, clock_factor=0.0, clock_start=START
    )
    with Simulator(config) as simulator:
        provider = hyperpod(simulator)
        inventory = provider.inventory()
        provider.close()
    assert (inventory.cluster, inventory.node_recovery) == ("demo", recovery)
    name = "ip-127-0-10-1" if orchestrator == "slurm" else "hyperpod-i-0123456789abcdef0"
    assert inventory.members[0] == Member(
        instance_id="i-0123456789abcdef0",
        group="gpu",
        node_name=name,
        status="Running",
        launch_time=START - 100,
        address="127.0.10.1",
        instance_type="ml.p5.48xlarge",
    )
    assert [member.group for member in inventory.members] == ["gpu", "head"]


def test_many_pages_are_read_whole_and_each_node_described_once(large: tuple[Simulator, HyperPod]) -> None:
    """130 instances on two pages are all there; a second read describes none of them again."""
    simulator, provider = large
    provider._details = {}
    first = provider.inventory()
    assert {m.address for m in first.members} == {loopback(10, n) for n in range(130)}
    assert len(simulator.calls("DescribeClusterNode")) == 130
    assert provider.inventory().members == first.members
    assert len(simulator.calls("DescribeClusterNode")) == 130
    assert DESCRIBE_WORKERS <= 16


def test_order_that_changes_between_pages_is_noticed(large: tuple[Simulator, HyperPod]) -> None:
    """Where one node shows twice and another not at all, the listing is read again until two reads agree."""
    simulator, provider = large
    simulator.order("paging_changes", count=1)
    assert len(provider.inventory().members) == 130
    assert len(simulator.calls("ListClusterNodes")) == 3 * 2


def test_listing_that_never_settles_is_an_error(large: tuple[Simulator, HyperPod], monkeypatch: Any) -> None:
    """An inventory that keeps changing is never handed out in part, and the reads are bounded."""
    _, provider = large
    real = provider._list_once

    def flickering() -> Any:
        listed, pages = real()
        flickering.reads += 1
        return listed[flickering.reads :], pages

    flickering.reads = 0
    monkeypatch.setattr(provider, "_list_once", flickering)
    with pytest.raises(InventoryUnreadable, match="changed between reads"):
        provider.inventory()
    assert flickering.reads == LIST_READS


def test_node_that_leaves_between_list_and_describe_starts_the_read_again() -> None:
    """An instance gone by the time it is described is not in the inventory, and the rest is whole."""
    with simulated(3) as simulator:
        provider = hyperpod(simulator)
        real = provider._describe
        left = simulator.state()["nodes"][0]["instance_id"]

        def describe(instance_id: str) -> Any:
            if instance_id == left and simulator.replacements() == {}:
                simulator.others_replace(left)
                simulator.advance(70)
            return real(instance_id)

        provider._describe = describe  # type: ignore[method-assign]
        members = provider.inventory().members
        provider.close()
    assert len(members) == 3
    assert left not in {member.instance_id for member in members}
    assert [member.status for member in members].count("Pending") == 1


@pytest.mark.parametrize("kind", ["error_before", "drop_before", "throttle", "access_denied", "empty_answer"])
@pytest.mark.parametrize("operation", ["DescribeCluster", "ListClusterNodes", "DescribeClusterNode"])
def test_a_read_that_fails_is_no_inventory(large: tuple[Simulator, HyperPod], kind: str, operation: str) -> None:
    """Any failed call, wherever in the read, raises instead of leaving nodes out."""
    simulator, provider = large
    provider._details = {} if operation == "DescribeClusterNode" else provider._details
    simulator.order(kind, operation=operation)
    with pytest.raises(InventoryUnreadable, match="on demo"):
        provider.inventory()


def test_unknown_cluster_is_said() -> None:
    """A cluster that does not exist is an error that carries AWS's words."""
    with simulated(1) as simulator:
        provider = HyperPod(
            "other", region="us-west-2", endpoint_url=simulator.url, access_key_id="a", secret_access_key="b"
        )
        with pytest.raises(InventoryUnreadable, match="other does not exist"):
            provider.inventory()
        provider.close()


def member(number: int, *, host: str | None = None, **changes: Any) -> Member:
    instance_id = f"i-{number:017x}"
    values = {
        "instance_id": instance_id,
        "group": "workers",
        "node_name": host or f"hyperpod-{instance_id}",
        "status": "Running",
        "launch_time": START + number,
        "address": loopback(10, number),
        "instance_type": "ml.p5.48xlarge",
    }
    return Member(**(values | changes))


def inventory(*members: Member) -> Inventory:
    return Inventory("demo", members, START, None)


@pytest.mark.parametrize(
    ("now", "proof"),
    [
        ([member(1), member(2)], None),
        ([member(2)], None),
        ([member(1, status="ShuttingDown"), member(2)], None),
        ([member(2), member(9, status="Pending")], None),
        ([member(2), member(9, status="DeepHealthCheckInProgress")], None),
        ([member(2), member(9, status="Failure")], None),
        ([member(2), member(9, group="others")], None),
        ([member(2), member(9, launch_time=START)], None),
        ([member(1), member(2), member(9)], None),
        ([member(9)], None),
        ([member(2), member(9)], 9),
        ([member(1, status="ShuttingDown"), member(2), member(9)], 9),
        ([member(1, status="Failure"), member(2), member(9)], 9),
        ([member(8), member(9)], 8),
    ],
)
def test_proof_on_eks(now: list[Member], proof: int | None) -> None:
    """Proven only by a new, later, Running instance of the same group, with the old one out of service."""
    before = inventory(member(1), member(2))
    found = HyperPod("demo", region="us-west-2").replacement_of(before, inventory(*now), member(1).instance_id)
    assert found == (None if proof is None else next(m for m in now if m.instance_id == member(proof).instance_id))


def test_two_replaced_at_once_each_have_their_own_proof() -> None:
    """Two old instances never share one new one."""
    before, now = inventory(member(1), member(2)), inventory(member(8), member(9))
    provider = HyperPod("demo", region="us-west-2")
    found = [provider.replacement_of(before, now, member(n).instance_id) for n in (1, 2)]
    assert found == [member(8), member(9)]


def test_replacement_of_a_node_that_left_earlier_is_not_ours() -> None:
    """A node that was shutting down before we began gets the first new instance; ours is the second."""
    before = inventory(member(1), member(2, status="ShuttingDown"))
    provider = HyperPod("demo", region="us-west-2")
    assert provider.replacement_of(before, inventory(member(8)), member(1).instance_id) is None
    assert provider.replacement_of(before, inventory(member(8), member(9)), member(1).instance_id) == member(9)
    coming = inventory(member(1), member(2, status="ShuttingDown"), member(3, status="Pending"))
    now = inventory(member(3), member(9))
    assert provider.replacement_of(coming, now, member(1).instance_id) == member(9)


def test_proof_on_slurm_is_the_same_host_name() -> None:
    """On Slurm only the instance that took over the host name counts, whatever else is new."""
    before = inventory(member(1, host="ip-a"), member(2, host="ip-b"))
    provider = HyperPod("demo", region="us-west-2")
    other, same = member(8, host="ip-b"), member(9, host="ip-a")
    assert provider.replacement_of(before, inventory(other), member(1).instance_id) is None
    assert provider.replacement_of(before, inventory(other, same), member(1).instance_id) == same
    assert provider.replacement_of(before, inventory(same), "i-" + "f" * 17) is None


@pytest.mark.parametrize("orchestrator", ["slurm", "eks"])
def test_simulated_replacement_is_proven_only_when_it_runs(orchestrator: str) -> None:
    """From the call to Running, every inventory in between proves nothing."""
    with simulated(3, orchestrator, boot_seconds=240) as simulator:
        provider = hyperpod(simulator)
        before = provider.inventory()
        old = before.members[1]
        provider.replace(old.instance_id)
        proofs = [provider.replacement_of(before, provider.inventory(), old.instance_id)]
        for seconds in (59, 1, 239):
            simulator.advance(seconds)
            proofs.append(provider.replacement_of(before, provider.inventory(), old.instance_id))
        assert proofs == [None, None, None, None]
        simulator.advance(1)
        proof = provider.replacement_of(before, provider.inventory(), old.instance_id)
        provider.close()
    assert proof is not None
    assert (proof.status, proof.group, proof.address) == ("Running", "workers", "127.0.200.1")
    assert (proof.node_name == old.node_name) is (orchestrator == "slurm")
