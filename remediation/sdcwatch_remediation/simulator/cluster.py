"""The simulated cluster itself: instances, their life cycle, and the capacity that is left.

What it does: keeps every instance that ever was, lets time pass (`settle`), and carries out replace, delete and reboot.
    replace: Running -> ShuttingDown -> gone; meanwhile a new id: Pending -> (DeepHealthCheckInProgress) -> Running
On Slurm the new instance takes the old one's host name, on EKS it gets its own; its address comes from the spares.
What it never does: speak HTTP or JSON, check a request's shape, or decide that a fault happens.
Its place: behind `operations`. Not safe for threads by itself: `Simulator` holds one lock around it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from sdcwatch_remediation.simulator.config import SimulatorConfig

REPLACEABLE = frozenset({"Running", "Failure"})
"""States in which HyperPod accepts a replacement (its documentation: not while a change is under way)."""


class NodeRefused(Exception):
    """HyperPod would refuse this one node; `code` is the per-node error code of a replace or reboot."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Node:
    """One instance, from its first showing until after it is gone."""

    instance_id: str
    group: str
    instance_type: str
    address: str
    host: str
    """First label of the private DNS host name."""
    launch_time: float
    """Unix seconds, virtual."""
    status: str = "Running"
    """A value of ClusterInstanceStatus, or `gone`, which no listing shows."""
    next_status: str | None = None
    due: float = 0.0
    """Virtual unix seconds at which `next_status` comes."""
    replaces: str | None = None
    controller: bool = False


@dataclass(slots=True)
class Order:
    """One accepted replacement; `new_id` is None until there is capacity and the new instance shows."""

    instance_id: str
    by: str
    """`api` for a BatchReplaceClusterNodes call, `others` for HyperPod's own repair or another person."""
    requested_at: float
    due: float
    new_id: str | None = None
    running_at: float | None = None
    waited: bool = False
    """Whether capacity was missing when the new instance was due."""


class Cluster:
    """The instances of one cluster. Every method takes the virtual time `now` in unix seconds."""

    def __init__(
        self,
        config: SimulatorConfig,
        now: float,
        *,
        has_capacity: Callable[[], bool] = lambda: True,
        comes_up_bad: Callable[[], bool] = lambda: False,
    ) -> None:
        """Set up all configured nodes as Running.

        Args:
            config: What the cluster looks like.
            now: The virtual time in unix seconds.
            has_capacity: Asked when a new instance is due; False leaves the order waiting.
            comes_up_bad: Asked when a new instance would become Running; True makes it a Failure.
        """
        self.config = config
        self.created = now
        self.orders: list[Order] = []
        self.spares: list[str] = list(config.spares)
        self._numbers = 0
        self._has_capacity = has_capacity
        self._comes_up_bad = comes_up_bad
        self.nodes: dict[str, Node] = {}
        for group in config.groups:
            for wanted in group.nodes:
                node = Node(
                    instance_id=wanted.instance_id or self._new_id(),
                    group=group.name,
                    instance_type=group.instance_type,
                    address=wanted.address,
                    host=wanted.host or host_of(wanted.address),
                    launch_time=now - wanted.launched_seconds_ago,
                    controller=group.controller,
                )
                self.nodes[node.instance_id] = node

    def present(self) -> list[Node]:
        """Return the instances that a listing shows, oldest launch first."""
        return sorted(
            (n for n in self.nodes.values() if n.status != "gone"), key=lambda n: (n.launch_time, n.instance_id)
        )

    def find(self, instance_id: str) -> Node | None:
        """Return a present instance, or None."""
        node = self.nodes.get(instance_id)
        return None if node is None or node.status == "gone" else node

    def settle(self, now: float) -> None:
        """Carry out everything that is due by `now`, in the order in which it falls due."""
        while True:
            due = [(n.due, 0, n.instance_id) for n in self.nodes.values() if n.next_status and n.due <= now]
            if self.spares and self._has_capacity():
                due += [(o.due, 1, o.instance_id) for o in self.orders if o.new_id is None and o.due <= now]
            if not due:
                break
            when, is_order, instance_id = min(due)
            if is_order:
                self._provision(next(o for o in self.orders if o.instance_id == instance_id), now)
            else:
                self._move_on(self.nodes[instance_id], when)
        for order in self.orders:
            order.waited = order.waited or (order.new_id is None and order.due <= now)

    def replace(self, instance_id: str, now: float, *, by: str = "api") -> None:
        """Accept the replacement of one instance.

        Raises:
            NodeRefused: As HyperPod refuses it.
        """
        node = self._actable(instance_id, "replaced")
        config = self.config
        node.status, node.next_status, node.due = "ShuttingDown", "gone", now + config.shutdown_seconds
        self.orders.append(Order(instance_id, by, now, now + config.provision_seconds))

    def delete(self, instance_id: str, now: float) -> None:
        """Accept the removal of one instance, without a replacement.

        Raises:
            NodeRefused: As HyperPod refuses it.
        """
        node = self._actable(instance_id, "deleted")
        node.status, node.next_status, node.due = "ShuttingDown", "gone", now + self.config.shutdown_seconds

    def reboot(self, instance_id: str, now: float) -> None:
        """Accept a reboot: `Pending` for the boot time, then `Running` again under the same id.

        Raises:
            NodeRefused: As HyperPod refuses it.
        """
        node = self._actable(instance_id, "rebooted")
        node.status, node.next_status, node.due = "Pending", "Running", now + self.config.boot_seconds

    def set_status(self, instance_id: str, status: str) -> None:
        """Put one instance into a state by hand, where it stays.

        Raises:
            ValueError: There is no such instance, or it is already being shut down.
        """
        node = self.find(instance_id)
        if node is None or node.status == "ShuttingDown":
            raise ValueError(f"instance {instance_id} is not there, or is already being shut down")
        node.status, node.next_status = status, None

    def _actable(self, instance_id: str, verb: str) -> Node:
        node = self.find(instance_id)
        if node is None:
            raise NodeRefused("InstanceIdNotFound", f"Instance {instance_id} does not exist in the cluster")
        if node.status == "ShuttingDown":
            raise NodeRefused("InstanceIdInUse", f"Another operation is already in progress for {instance_id}")
        if node.controller and self.config.orchestrator == "slurm":
            raise NodeRefused("InvalidInstanceStatus", f"{instance_id} is a Slurm controller and cannot be {verb}")
        if node.status not in REPLACEABLE:
            raise NodeRefused("InvalidInstanceStatus", f"{instance_id} is {node.status} and cannot be {verb} now")
        return node

    def _move_on(self, node: Node, when: float) -> None:
        assert node.next_status is not None
        node.status, node.next_status = node.next_status, None
        if node.status == "DeepHealthCheckInProgress":
            node.next_status, node.due = "Running", when + self.config.deep_check_seconds
        elif node.status == "Running" and node.replaces is not None:
            order = next(o for o in self.orders if o.new_id == node.instance_id)
            if order.running_at is None and self._comes_up_bad():
                node.status = "Failure"
            elif order.running_at is None:
                order.running_at = when

    def _provision(self, order: Order, now: float) -> None:
        old = self.nodes[order.instance_id]
        address = self.spares.pop(0)
        # An order that waited for capacity comes up when the capacity came, not back when it was due: `now` is the
        # closest time known. One that did not wait comes exactly when due, however late we look.
        launched = now if order.waited else order.due
        on_slurm = self.config.orchestrator == "slurm"
        new = Node(
            instance_id=self._new_id(),
            group=old.group,
            instance_type=old.instance_type,
            address=address,
            host=old.host if on_slurm else host_of(address),
            launch_time=launched,
            status="Pending",
            next_status="DeepHealthCheckInProgress" if self.config.deep_check_seconds > 0 else "Running",
            due=launched + self.config.boot_seconds,
            replaces=old.instance_id,
            controller=old.controller,
        )
        self.nodes[new.instance_id] = new
        order.new_id = new.instance_id

    def _new_id(self) -> str:
        self._numbers += 1
        digest = hashlib.sha256(f"{self.config.cluster}:{self._numbers}".encode()).hexdigest()
        return f"i-{digest[:17]}"


def host_of(address: str) -> str:
    """Return the first label of the private DNS host name that AWS gives to an address."""
    return "ip-" + address.replace(".", "-")
