"""The frozen records that the service and its providers pass to each other.

What it does: says what an instance, an inventory and the answer of one replace request are, and what a provider
must offer (`Provider`).
What it never does: talk to anything; it imports the standard library only.
Its place: `actions/*` and the simulator produce these records, `proof`, `policy` and `worker` read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Member:
    """One instance of the live inventory."""

    instance_id: str
    group: str
    node_name: str
    status: str
    """As the provider spells it: `Running`, `Pending`, `ShuttingDown`, ..."""
    launch_time: float
    """Unix seconds."""
    address: str
    """Private IP address, the only address at which this instance's agent is asked."""
    instance_type: str


@dataclass(frozen=True, slots=True)
class Inventory:
    """All instances of one cluster as the provider listed them at one time."""

    cluster: str
    members: tuple[Member, ...]
    fetched_at: float
    """Unix seconds."""
    node_recovery: str | None
    """The cluster's own repair setting (`Automatic`, `None`), or None where it has none."""
    short_groups: tuple[str, ...] = ()
    """Instance groups with fewer instances than they should have."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """What the orchestrator (Slurm, Kubernetes) says about one node."""

    others_work: tuple[str, ...]
    """What else runs there, besides the training job of the case and what runs on every node."""
    cordoned_by: str
    """Who took the node out of service, when that was not this service; empty: nobody."""


class Orchestrator(Protocol):
    """Who schedules work onto the nodes, as far as the policy must know it."""

    def look(self, member: Member, job: str, case_id: str) -> NodeView | None:
        """Look at one node; None when it cannot be seen now. What carries this case's id is this service's own."""


class Outcome(str, Enum):
    """What is known about an outside action after its one attempt."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    """A definite refusal: nothing happened."""
    UNKNOWN = "unknown"
    """It may have happened; only reading the world can tell."""


@dataclass(frozen=True, slots=True)
class ReplaceResult:
    """The answer to one replace attempt."""

    outcome: Outcome
    code: str
    """The provider's own code (`InstanceIdInUse`, `ThrottlingException`, ...); empty when accepted."""
    message: str
    retryable: bool
    """Whether a refused request may be asked again later, as a new attempt."""


class Provider(Protocol):
    """What the service needs of whoever owns the instances."""

    def inventory(self) -> Inventory:
        """Read the live inventory; raises a `RemediationError` when it cannot be read whole."""

    def replace_request(self, instance_id: str) -> dict[str, Any]:
        """Return the exact request that `replace` would send, for the intent and for dry runs; sends nothing."""

    def replace(self, instance_id: str) -> ReplaceResult:
        """Ask once for the replacement of one instance, without any client-side retry."""

    def replacement_of(self, before: Inventory, now: Inventory, instance_id: str) -> Member | None:
        """Return the proof of a replacement, or None as long as there is none.

        The proof: the old id is gone or not `Running`, and an instance of the same group that was not there before
        is `Running` in its place.
        """
