"""What a simulated cluster looks like: groups, addresses, spare capacity and how long things take.

What it does: turns a file, a dict or a few numbers into one checked, frozen `SimulatorConfig`, with every default in
one place; an unknown key is an error.
What it never does: start anything, or read the environment.
Its place: between whoever wants a simulator (a test, `sdcwatch-remediation simulate`, the demo) and `cluster`.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import tomllib

from sdcwatch_remediation.simulator.shapes import enum_values

INSTANCE_ID = re.compile(r"i-[0-9a-f]{17}\Z")
_Built = TypeVar("_Built")
NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}\Z")
REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d\Z")
HOST = re.compile(r"ip(-\d{1,3}){4}\Z")
ORCHESTRATORS = ("slurm", "eks")


class SimulatorConfigError(ValueError):
    """The configuration of a simulator is wrong; the message says what to change."""


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One instance that runs from the start."""

    address: str
    """Private IP address; a loopback address lets an agent really listen there."""
    instance_id: str | None = None
    """None: derived from the cluster's name and a counter, the same in every run."""
    host: str | None = None
    """First label of the private DNS host name; None: `ip-a-b-c-d` of its address."""
    launched_seconds_ago: float = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """One instance group."""

    name: str
    nodes: tuple[NodeConfig, ...]
    instance_type: str = "ml.p5.48xlarge"
    controller: bool = False
    """A Slurm controller or login group: HyperPod refuses to replace its nodes."""


@dataclass(frozen=True, slots=True)
class SimulatorConfig:
    """One simulated HyperPod cluster."""

    cluster: str
    groups: tuple[GroupConfig, ...]
    spares: tuple[str, ...] = ()
    """Addresses of the capacity that is left: each replacement uses up one, and none comes back."""
    orchestrator: str = "slurm"
    region: str = "us-west-2"
    node_recovery: str = "None"
    """`Automatic` or `None`, as DescribeCluster reports it."""
    clock_factor: float = 1.0
    """Virtual seconds per real second; 0 stands still until it is advanced."""
    clock_start: float | None = None
    """Virtual time at the start in unix seconds; None: the real time."""
    shutdown_seconds: float = 60.0
    """From the call until the old instance is gone (`ShuttingDown` meanwhile)."""
    provision_seconds: float = 60.0
    """From the call until the new instance shows, as `Pending`."""
    boot_seconds: float = 240.0
    """From `Pending` to `Running`, or to the deep health checks."""
    deep_check_seconds: float = 0.0
    """How long a new instance stays in `DeepHealthCheckInProgress`; 0 leaves the state out."""

    def __post_init__(self) -> None:
        """Check everything that a shape of the service model cannot say.

        Raises:
            SimulatorConfigError: With the field and what it may be.
        """
        _want(_fits(NAME, self.cluster), f"cluster {self.cluster!r}: letters, digits and single dashes")
        _want(self.orchestrator in ORCHESTRATORS, f"orchestrator {self.orchestrator!r}: choose slurm or eks")
        _want(_fits(REGION, self.region), f"region {self.region!r}: as us-west-2")
        _want(self.node_recovery in ("Automatic", "None"), "node_recovery: choose Automatic or None")
        for name in ("clock_factor", "shutdown_seconds", "provision_seconds", "boot_seconds", "deep_check_seconds"):
            value = getattr(self, name)
            _want(_is_number(value) and value >= 0, f"{name} must be a number, 0 or more, got {value!r}")
        _want(bool(self.groups), "groups: at least one instance group is needed")
        _want(len({g.name for g in self.groups}) == len(self.groups), "groups: every name only once")
        types = enum_values("ClusterInstanceType")
        for group in self.groups:
            _want(_fits(NAME, group.name), f"group {group.name!r}: letters, digits and single dashes")
            _want(group.instance_type in types, f"instance_type {group.instance_type!r} is not one of SageMaker's")
            for node in group.nodes:
                _check_node(node)
        addresses = [node.address for group in self.groups for node in group.nodes] + list(self.spares)
        for address in self.spares:
            check_address(address)
        _want(len(set(addresses)) == len(addresses), "addresses: every address only once, spares included")
        ids = [node.instance_id for group in self.groups for node in group.nodes if node.instance_id]
        _want(len(set(ids)) == len(ids), "instance_id: every id only once")

    @classmethod
    def of_size(cls, cluster: str, *, nodes: int, spares: int = 1, **settings: Any) -> SimulatorConfig:
        """Build a cluster with one group `workers` of `nodes` instances, at addresses 127.0.10.1 and up.

        Spares are at 127.0.200.1 and up. `settings` are any other fields of this class.
        """
        group = GroupConfig(name="workers", nodes=tuple(NodeConfig(loopback(10, n)) for n in range(nodes)))
        settings.setdefault("groups", (group,))
        return cls(cluster=cluster, spares=tuple(loopback(200, n) for n in range(spares)), **settings)

    @classmethod
    def from_file(cls, path: Path, **overrides: Any) -> SimulatorConfig:
        """Read a JSON file, or TOML if it ends in `.toml`; `overrides` win over what it says.

        Raises:
            SimulatorConfigError: The file cannot be read, is no such file, or holds a wrong value.
        """
        try:
            text = path.read_text(encoding="utf-8")
            body = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        except (OSError, ValueError) as error:
            raise SimulatorConfigError(f"cannot read the simulator's configuration {path}: {error}") from error
        return cls.from_dict(body | overrides if isinstance(body, dict) else body)

    @classmethod
    def from_dict(cls, body: Any) -> SimulatorConfig:
        """Build a configuration from parsed JSON or TOML; see docs/simulator.md for the keys.

        Raises:
            SimulatorConfigError: A key is unknown or missing, or a value is wrong.
        """
        values = _keys(body, cls, "the configuration")
        counter = _Counter()
        values["groups"] = tuple(_group(item, counter) for item in _items(values.get("groups"), "groups"))
        spares = values.get("spares", 0)
        values["spares"] = (
            tuple(loopback(200, n) for n in range(spares)) if type(spares) is int else tuple(_items(spares, "spares"))
        )
        return _build(cls, values, "the configuration")


def loopback(third: int, number: int) -> str:
    """Return the `number`-th (from 0) loopback address from 127.0.`third`.1 on, 250 to a third octet."""
    return f"127.0.{third + number // 250}.{1 + number % 250}"


class _Counter:
    """Numbers the nodes across groups, so that generated addresses do not collide."""

    def __init__(self) -> None:
        self.value = 0

    def take(self) -> int:
        self.value += 1
        return self.value - 1


def _group(item: Any, counter: _Counter) -> GroupConfig:
    values = _keys(item, GroupConfig, "a group", extra=("count",))
    if ("nodes" in values) == ("count" in values):
        raise SimulatorConfigError(f"group {values.get('name')!r}: give either nodes or count")
    if "count" in values:
        count = values.pop("count")
        _want(type(count) is int and count >= 0, "count must be a whole number, 0 or more")
        values["nodes"] = tuple(NodeConfig(loopback(10, counter.take())) for _ in range(count))
    else:
        values["nodes"] = tuple(
            _build(NodeConfig, _keys(node, NodeConfig, "a node"), "a node") for node in _items(values["nodes"], "nodes")
        )
    return _build(GroupConfig, values, "a group")


def _keys(body: Any, cls: type, what: str, extra: tuple[str, ...] = ()) -> dict[str, Any]:
    _want(isinstance(body, dict), f"{what} must be a table of keys and values")
    known = {f.name for f in fields(cls)} | set(extra)
    unknown = sorted(set(body) - known)
    _want(not unknown, f"unknown keys in {what}: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return dict(body)


def _items(value: Any, what: str) -> list[Any]:
    _want(isinstance(value, list), f"{what} must be a list")
    return list(value)


def _build(cls: type[_Built], values: dict[str, Any], what: str) -> _Built:
    try:
        return cls(**values)
    except TypeError as error:
        raise SimulatorConfigError(f"{what}: {error}") from error


def _check_node(node: NodeConfig) -> None:
    check_address(node.address)
    wrong_id = f"instance_id {node.instance_id!r}: i- and 17 hex digits"
    _want(node.instance_id is None or _fits(INSTANCE_ID, node.instance_id), wrong_id)
    # The service model allows no other private DNS host names than these.
    wrong_host = f"host {node.host!r}: SageMaker knows only host names such as ip-10-0-0-7"
    _want(node.host is None or _fits(HOST, node.host), wrong_host)
    _want(_is_number(node.launched_seconds_ago), "launched_seconds_ago must be a number of seconds")


def check_address(address: Any) -> None:
    """Raise SimulatorConfigError unless this is an IPv4 address."""
    try:
        ipaddress.IPv4Address(address)
    except ValueError as error:
        raise SimulatorConfigError(f"address {address!r}: an IPv4 address such as 127.0.10.1 is needed") from error


def _fits(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.match(value) is not None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _want(condition: bool, otherwise: str) -> None:
    if not condition:
        raise SimulatorConfigError(otherwise)
