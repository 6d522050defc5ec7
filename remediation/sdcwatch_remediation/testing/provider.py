"""A provider in memory: an inventory that tests change, and replace calls that are logged.

What it does: implements `records.Provider` with a script of answers; `come_up` finishes a replacement.
What it never does: keep a client of its own; for the wire there is the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sdcwatch_remediation.errors import RemediationError
from sdcwatch_remediation.records import Inventory, Member, Outcome, ReplaceResult

ACCEPTED = ReplaceResult(Outcome.ACCEPTED, "", "", retryable=False)


def fleet(count: int, *, launched: float = 0.0, group: str = "workers", subnet: int = 1) -> tuple[Member, ...]:
    """Return running members `node-0` to `node-<count-1>` at loopback addresses 127.0.<subnet>.<n + 1>."""
    return tuple(
        Member(
            instance_id=f"i-{index:017x}",
            group=group,
            node_name=f"node-{index}",
            status="Running",
            launch_time=launched,
            address=f"127.0.{subnet}.{index + 1}",
            instance_type="ml.p5.48xlarge",
        )
        for index in range(count)
    )


class FakeProvider:
    """A provider whose world the test moves."""

    def __init__(self, members: tuple[Member, ...], *, cluster: str = "demo") -> None:
        """Begin with these members; every replace is accepted until `answers` says otherwise."""
        self.cluster = cluster
        self.members = members
        self.calls: list[str] = []
        """Instance ids of every replace call, in order."""
        self.answers: list[ReplaceResult | Exception] = []
        """Answers of the next replace calls; when none is left, `ACCEPTED`."""
        self.readable = True
        self.reads = 0
        """How often the inventory was asked for."""
        self.on_replace: Callable[[str], None] = lambda instance_id: None

    def inventory(self) -> Inventory:
        """Return the present members; raises while `readable` is false."""
        self.reads += 1
        if not self.readable:
            raise RemediationError("the inventory cannot be read now")
        return Inventory(self.cluster, self.members, 0.0, None)

    def replace_request(self, instance_id: str) -> dict[str, Any]:
        """Return the request that would be sent."""
        return {"ClusterName": self.cluster, "NodeIds": [instance_id]}

    def replace(self, instance_id: str) -> ReplaceResult:
        """Log one call and give the next answer."""
        self.calls.append(instance_id)
        self.on_replace(instance_id)
        answer = self.answers.pop(0) if self.answers else ACCEPTED
        if isinstance(answer, Exception):
            raise answer
        return answer

    def replacement_of(self, before: Inventory, now: Inventory, instance_id: str) -> Member | None:
        """Return a running member under the same node name that was not there before."""
        old = next(member for member in before.members if member.instance_id == instance_id)
        if any(member.instance_id == instance_id and member.status == "Running" for member in now.members):
            return None
        known = {member.instance_id for member in before.members}
        heirs = [m for m in now.members if m.node_name == old.node_name and m.instance_id not in known]
        return next((member for member in heirs if member.status == "Running"), None)

    def come_up(self, instance_id: str, *, launched: float) -> Member:
        """Put a new running instance in the place of an old one, under the same node name and address."""
        old = next(member for member in self.members if member.instance_id == instance_id)
        new = replace(old, instance_id=f"i-f{instance_id[3:]}", launch_time=launched)
        self.members = tuple(new if member is old else member for member in self.members)
        return new

    def set_status(self, instance_id: str, status: str) -> None:
        """Change the status of one member."""
        self.members = tuple(
            replace(member, status=status) if member.instance_id == instance_id else member for member in self.members
        )
