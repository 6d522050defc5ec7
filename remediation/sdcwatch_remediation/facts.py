"""What a decision is made of and what it looks like: facts, gates, answers; pure records.

What it does: declares them, in the order in which they are needed.
What it never does: decide (`policy` does) or gather (`context` does).
Its place: between the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sdcwatch_remediation.known_answer import KnownAnswerTest
from sdcwatch_remediation.proof import ProvenEvent
from sdcwatch_remediation.records import Member, NodeView


class Answer(str, Enum):
    """What a decision says."""

    GO = "go"
    WAIT = "wait"
    """No proof yet: go on asking."""
    HOLD = "hold"
    """Proven, but not now: ask again."""
    ASK = "ask"
    """Not unasked: a person must approve exactly this request, whatever the mode."""
    SUSPECT = "suspect"
    REFUSE = "refuse"
    FREEZE = "freeze"
    EXPIRE = "expire"


@dataclass(frozen=True, slots=True)
class Gate:
    """One rule, how it went and why."""

    name: str
    passed: bool
    reason: str
    otherwise: Answer
    """What the decision says when this is the first gate that fails."""


@dataclass(frozen=True, slots=True)
class Usage:
    """How much of the budgets is used; in-flight and recent replacements count, also across restarts."""

    in_flight: int
    in_flight_in_group: int
    last_day: int
    last_proven_at: float = 0.0
    """When the newest replacement in the cluster was proven, in unix seconds; 0: never."""


@dataclass(frozen=True, slots=True)
class OtherCase:
    """Another open case, as far as this decision needs it."""

    id: str
    job: str
    proven: bool
    opened_at: float


@dataclass(frozen=True, slots=True)
class PastEvent:
    """A first transient fault remembered for `suspected_days`."""

    event_id: str
    epoch: str
    step: int
    gpu_uuid: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything a decision may depend on; times are unix seconds."""

    now: float
    cluster: str
    instance_id: str
    node_name: str
    """As the doorbell and the event gave it."""
    opened_at: float
    events: tuple[ProvenEvent, ...]
    proof_reason: str
    past: tuple[PastEvent, ...]
    members: tuple[Member, ...] | None
    """The live inventory, or None when it could not be read."""
    retired: bool
    """Whether a tombstone says that this instance id was replaced."""
    others: tuple[OtherCase, ...]
    failed_again: bool
    """Whether an earlier, replaced case of this job failed at the same step and check."""
    usage: Usage
    stop: str
    """Why nothing may be done now (pause, kill switch); empty when nothing stops it."""
    held: str
    """Who holds this case and why; empty: nobody."""
    decided: bool
    """Whether the case has been decided already; from then on its states' deadlines, not the event's age, expire it."""
    approved: bool = False
    """Whether a person approved exactly the present request."""
    here: frozenset[str] = frozenset()
    """Names and addresses of the machine that the service itself runs on."""
    short_groups: tuple[str, ...] = ()
    """Instance groups in which instances that should be there are missing."""
    node: NodeView | None = None
    """What the orchestrator says about the node; None: there is none to ask, or it does not answer."""
    lately: tuple[str, ...] = ()
    """Instances of the cluster about which something was proven within `breaker_seconds`, this one excepted."""
    test: KnownAnswerTest | None = None
    """What the known-answer test of the suspect's own halted node showed; None: nothing is known of it."""
    no_test: str = ""
    """Why nothing is known of it; empty: nobody asked."""
    test_later: bool = False
    """Whether there may be a result later."""
    returned_gpus: tuple[str, ...] = ()
    """GPUs that the event blames and that left the cluster before, with a replaced instance."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer with all its reasons."""

    action: str
    answer: Answer
    mode: str
    """`observe`, `recommend`, `approve` or `auto`, of this action in the member's group."""
    gates: tuple[Gate, ...]

    @property
    def reason(self) -> str:
        """The reason of the first gate that failed, or that all passed."""
        return next((f"{gate.name}: {gate.reason}" for gate in self.gates if not gate.passed), "all gates passed")
