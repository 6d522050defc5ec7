"""The simulated cluster's life cycle, capacity, clock and configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sdcwatch_remediation.simulator import Simulator, SimulatorConfig, SimulatorConfigError

START = 1_790_000_000.0


def simulated(orchestrator: str = "slurm", **settings: Any) -> Simulator:
    settings = {"nodes": 3, "spares": 1, "clock_factor": 0.0, "clock_start": START} | settings
    return Simulator(SimulatorConfig.of_size("demo", orchestrator=orchestrator, **settings))


def replace_first(simulator: Simulator) -> dict[str, Any]:
    node = dict(simulator.state()["nodes"][0])
    reply = simulator.call("BatchReplaceClusterNodes", {"ClusterName": "demo", "NodeIds": [node["instance_id"]]})
    assert reply.body == {"Successful": [node["instance_id"]]}
    return node


def statuses(simulator: Simulator) -> dict[str, str]:
    return {node["instance_id"]: node["status"] for node in simulator.state()["nodes"]}


def test_replacement_goes_through_its_states() -> None:
    """ShuttingDown at once, gone and Pending after a minute, Running after the boot, at the exact virtual times."""
    simulator = simulated(shutdown_seconds=60, provision_seconds=60, boot_seconds=240)
    old = replace_first(simulator)["instance_id"]
    assert statuses(simulator)[old] == "ShuttingDown"
    simulator.advance(59)
    assert statuses(simulator)[old] == "ShuttingDown"
    assert len(statuses(simulator)) == 3
    simulator.advance(1)
    assert old not in statuses(simulator)
    new = simulator.state()["replacements"][0]["new_id"]
    assert statuses(simulator)[new] == "Pending"
    simulator.advance(239)
    assert statuses(simulator)[new] == "Pending"
    simulator.advance(1)
    assert statuses(simulator)[new] == "Running"
    order = simulator.state()["replacements"][0]
    assert (order["requested_at"], order["running_at"]) == (START, START + 300)


def test_a_long_jump_keeps_the_times_in_between() -> None:
    """One big jump gives the same launch and running times as many small ones."""
    simulator = simulated(deep_check_seconds=100)
    replace_first(simulator)
    simulator.advance(1_000_000)
    order = simulator.state()["replacements"][0]
    new = next(n for n in simulator.state()["nodes"] if n["instance_id"] == order["new_id"])
    assert (new["launch_time"], order["running_at"]) == (START + 60, START + 60 + 240 + 100)


def test_deep_health_checks_come_before_running() -> None:
    """With deep checks on, the new instance is in DeepHealthCheckInProgress before it is Running."""
    simulator = simulated(deep_check_seconds=7200)
    replace_first(simulator)
    simulator.advance(60 + 240)
    new = simulator.state()["replacements"][0]["new_id"]
    assert statuses(simulator)[new] == "DeepHealthCheckInProgress"
    simulator.advance(7200)
    assert statuses(simulator)[new] == "Running"


@pytest.mark.parametrize("orchestrator", ["slurm", "eks"])
def test_host_name_stays_on_slurm_and_changes_on_eks(orchestrator: str) -> None:
    """A Slurm replacement takes over the host name; an EKS node is named after its own instance id."""
    simulator = simulated(orchestrator)
    old = replace_first(simulator)
    simulator.advance(1000)
    new = next(n for n in simulator.state()["nodes"] if n["replaces"] == old["instance_id"])
    assert new["address"] == "127.0.200.1"
    assert new["instance_id"] != old["instance_id"]
    assert (new["host"] == old["host"]) is (orchestrator == "slurm")
    expected = old["node_name"] if orchestrator == "slurm" else f"hyperpod-{new['instance_id']}"
    assert new["node_name"] == expected


def test_capacity_is_finite_and_a_late_spare_is_used() -> None:
    """Without a spare the old node goes and none comes, and the cluster says why, until capacity is added."""
    simulator = simulated(spares=0)
    replace_first(simulator)
    simulator.advance(5000)
    assert len(statuses(simulator)) == 2
    about = simulator.call("DescribeCluster", {"ClusterName": "demo"}).body
    assert "sufficient capacity" in about["FailureMessage"]
    assert (about["InstanceGroups"][0]["CurrentCount"], about["InstanceGroups"][0]["TargetCount"]) == (2, 3)
    simulator.add_spares(["127.0.200.1"])
    new = simulator.state()["replacements"][0]["new_id"]
    launched = next(n["launch_time"] for n in simulator.state()["nodes"] if n["instance_id"] == new)
    assert launched == START + 5000
    assert "FailureMessage" not in simulator.call("DescribeCluster", {"ClusterName": "demo"}).body


def test_no_capacity_fault_holds_back_a_spare_until_cleared() -> None:
    """The standing fault keeps a spare unused however much time passes."""
    simulator = simulated()
    simulator.order("no_capacity")
    replace_first(simulator)
    simulator.advance(100_000)
    assert simulator.state()["spares"] == ["127.0.200.1"]
    simulator.clear_faults("no_capacity")
    simulator.advance(240)
    assert statuses(simulator)[simulator.state()["replacements"][0]["new_id"]] == "Running"


def test_bad_replacement_ends_as_failure_and_can_be_replaced_again() -> None:
    """A replacement can itself come up broken, once per ordered fault."""
    simulator = simulated(spares=2)
    simulator.order("bad_replacement")
    replace_first(simulator)
    simulator.advance(1000)
    broken = simulator.state()["replacements"][0]["new_id"]
    assert statuses(simulator)[broken] == "Failure"
    simulator.others_replace(broken)
    simulator.advance(1000)
    assert statuses(simulator)[simulator.state()["replacements"][1]["new_id"]] == "Running"


def test_virtual_clock_runs_at_its_factor_and_never_backwards() -> None:
    """A frozen clock moves only when advanced; a fast one moves by itself; no jump leads back."""
    frozen = simulated()
    assert frozen.clock.now() == frozen.clock.now() == START
    fast = simulated(clock_factor=1e6)
    assert fast.clock.now() < fast.clock.now()
    with pytest.raises(ValueError, match="0 seconds or more"):
        frozen.advance(-1)


def test_ids_are_the_same_in_every_run_and_never_reused() -> None:
    """Two simulators of the same cluster have the same ids, and a reset gives the first ones again."""
    simulator, other = simulated(), simulated()
    assert list(statuses(simulator)) == list(statuses(other))
    old = replace_first(simulator)["instance_id"]
    simulator.advance(1000)
    assert old not in statuses(simulator)
    simulator.reset()
    assert list(statuses(simulator)) == list(statuses(other))


def test_configuration_file_describes_a_cluster(tmp_path: Path) -> None:
    """A JSON and a TOML file give the groups, addresses, ids and durations that they say."""
    body = {
        "cluster": "train",
        "orchestrator": "eks",
        "node_recovery": "Automatic",
        "boot_seconds": 2,
        "spares": ["127.0.1.9"],
        "groups": [
            {"name": "head", "instance_type": "ml.m5.2xlarge", "controller": True, "count": 1},
            {"name": "gpu", "nodes": [{"address": "127.0.1.1", "instance_id": "i-0123456789abcdef0"}]},
        ],
    }
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(body))
    config = SimulatorConfig.from_file(path)
    state = Simulator(config).state()
    assert {(n["group"], n["address"]) for n in state["nodes"]} == {("head", "127.0.10.1"), ("gpu", "127.0.1.1")}
    assert config.boot_seconds == 2
    toml = tmp_path / "cluster.toml"
    toml.write_text('cluster = "train"\nspares = 2\n[[groups]]\nname = "gpu"\ncount = 2\n')
    assert SimulatorConfig.from_file(toml).spares == ("127.0.200.1", "127.0.200.2")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"clutser": "x"}, "unknown keys in the configuration: clutser"),
        ({"cluster": "a b"}, "cluster 'a b'"),
        ({"cluster": None}, "cluster None"),
        ({"orchestrator": "mesos"}, "slurm or eks"),
        ({"boot_seconds": -1}, "boot_seconds"),
        ({"boot_seconds": "soon"}, "boot_seconds"),
        ({"groups": []}, "at least one"),
        ({"groups": [{"name": "g", "count": 1, "colour": "red"}]}, "unknown keys in a group: colour"),
        ({"groups": [{"name": "g"}]}, "either nodes or count"),
        ({"groups": [{"name": "g", "count": 1, "instance_type": "ml.huge"}]}, "not one of SageMaker's"),
        ({"groups": [{"name": "g", "nodes": [{"address": "127.0.1"}]}]}, "IPv4"),
        ({"groups": [{"name": "g", "nodes": [{"address": "127.0.1.1", "host": "node-1"}]}]}, "ip-10-0-0-7"),
        ({"groups": [{"name": "g", "nodes": [{"address": "127.0.1.1", "instance_id": "i-1"}]}]}, "17 hex"),
        ({"groups": [{"name": "g", "count": 1}], "spares": ["127.0.10.1"]}, "only once"),
        ({"groups": [{"count": 1}]}, "name"),
    ],
)
def test_wrong_configuration_says_what_to_change(change: dict[str, Any], part: str) -> None:
    """Each wrong key or value is named in the error."""
    body = {"cluster": "demo", "groups": [{"name": "g", "count": 1}]} | change
    with pytest.raises(SimulatorConfigError, match=part):
        SimulatorConfig.from_dict(body)
