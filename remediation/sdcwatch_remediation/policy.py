"""Every rule about touching a node, on one page; pure.

What it does: `decide` asks every gate, records each one's reason, and lets the first gate that fails say what happens.
What it never does: read a clock, a file, the database or the network. All it knows stands in `Facts`.
Its place: `casework` and `actions/*` call it before every step that leads to an outside action, with facts read afresh.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sdcwatch_remediation.evidence import Event
from sdcwatch_remediation.proof import ProvenEvent
from sdcwatch_remediation.records import Member
from sdcwatch_remediation.settings import Policy

FUTURE_SECONDS = 120.0
"""An event further ahead than this is not judged until its time has come."""


class Answer(str, Enum):
    """What a decision says."""

    GO = "go"
    WAIT = "wait"
    """No proof yet: go on asking."""
    HOLD = "hold"
    """Proven, but not now: ask again."""
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
    decided: bool
    """Whether the case has been decided already; from then on its states' deadlines, not the event's age, expire it."""


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


def decide(action: str, facts: Facts, policy: Policy) -> Decision:
    """Decide about one action (`quarantine` or `replace`) on one instance."""
    member = _the_member(facts)
    gates = [*_identity(facts, policy, member)]
    if facts.events:
        gates += _breaker(facts)
        gates += _timing(facts, policy)
        gates.append(_confirmed(facts, policy))
    if member is not None:
        gates.append(
            Gate(
                "provider_idle",
                member.status == "Running",
                f"the instance is {member.status}" + ("" if member.status == "Running" else ": left to its provider"),
                Answer.HOLD,
            )
        )
        if action == "replace":
            gates += _budgets(facts, policy, member)
    gates.append(Gate("not_stopped", not facts.stop, facts.stop or "no pause, no kill switch", Answer.HOLD))
    answer = next((gate.otherwise for gate in gates if not gate.passed), Answer.GO)
    return Decision(action, answer, policy.mode_of(action, member.group if member else ""), tuple(gates))


def gpus(event: Event, instance_id: str) -> frozenset[str]:
    """Return the GPUs of one instance that an event names."""
    return frozenset(rank.gpu_uuid for rank in event.suspect_ranks() if rank.instance == instance_id)


def _the_member(facts: Facts) -> Member | None:
    found = [member for member in facts.members or () if member.instance_id == facts.instance_id]
    return found[0] if len(found) == 1 else None


def _identity(facts: Facts, policy: Policy, member: Member | None) -> list[Gate]:
    members = facts.members or ()
    count = sum(m.instance_id == facts.instance_id for m in members)
    heir = next((m.instance_id for m in members if m.node_name == facts.node_name and not count), "")
    absent = f"already replaced: {facts.node_name} is {heir} now" if heir else f"the inventory has it {count} times"
    gates = [
        Gate("not_retired", not facts.retired, "already replaced" if facts.retired else "no tombstone", Answer.REFUSE),
        Gate("inventory_read", facts.members is not None, f"{len(members)} instances", Answer.HOLD),
        Gate("one_member", count == 1, absent if count != 1 else "exactly one instance has this id", Answer.REFUSE),
    ]
    if member is None:
        return gates
    allowed = member.group in policy.groups
    gates += [
        Gate("node_matches", member.node_name == facts.node_name, f"inventory: {member.node_name}", Answer.REFUSE),
        Gate("not_forbidden", member.group not in policy.forbidden_groups, f"group {member.group}", Answer.REFUSE),
        Gate("proven", bool(facts.events), facts.proof_reason, Answer.WAIT),
    ]
    if facts.events:
        event = facts.events[0].event
        nodes = {rank.node for rank in event.suspect_ranks() if rank.instance == facts.instance_id}
        latest = event.time - policy.clock_doubt_seconds
        gates += [
            Gate("event_node_matches", nodes == {member.node_name}, f"event: {sorted(nodes)}", Answer.REFUSE),
            Gate(
                "launched_before",
                member.launch_time <= latest,
                f"launched {event.time - member.launch_time:.0f} s before its fault; "
                f"more than {policy.clock_doubt_seconds:.0f} s needed",
                Answer.REFUSE,
            ),
        ]
    listed = "is" if allowed else "is not"
    gates.append(Gate("group_allowed", allowed, f"group {member.group} {listed} in policy.groups", Answer.REFUSE))
    return gates


def _breaker(facts: Facts) -> list[Gate]:
    event = facts.events[0].event
    suspects = {rank.instance for rank in event.suspect_ranks()}
    same_job = [other.id for other in facts.others if other.proven and other.job == event.job]
    return [
        Gate("one_suspect", len(suspects) == 1, f"the event names {len(suspects)} instance(s)", Answer.FREEZE),
        Gate(
            "one_case_in_job", not same_job, f"open cases of this job: {', '.join(same_job) or 'none'}", Answer.FREEZE
        ),
        Gate(
            "new_failure",
            not facts.failed_again,
            "the same step failed on hardware replaced before" if facts.failed_again else "not failed before",
            Answer.FREEZE,
        ),
    ]


def _timing(facts: Facts, policy: Policy) -> list[Gate]:
    event = facts.events[0].event
    age = facts.now - event.time
    gates = [Gate("clock", age >= -FUTURE_SECONDS, f"the event is {age:.0f} s old", Answer.HOLD)]
    if not facts.decided:
        newest = max([facts.opened_at, *(other.opened_at for other in facts.others)])
        until = min(newest + policy.settle_seconds, facts.opened_at + policy.max_settle_seconds)
        gates += [
            Gate("fresh", age <= policy.evidence_max_age_seconds, f"the event is {age:.0f} s old", Answer.EXPIRE),
            Gate("settled", facts.now >= until, f"{max(0.0, until - facts.now):.0f} s to wait", Answer.HOLD),
        ]
    return gates


def _confirmed(facts: Facts, policy: Policy) -> Gate:
    if policy.confirm == "first":
        return Gate("confirmed", True, "confirm = first: one attributed verdict", Answer.SUSPECT)
    events = [item.event for item in facts.events]
    if any(event.persistence == "persistent" for event in events):
        return Gate("confirmed", True, "the fault is persistent", Answer.SUSPECT)
    seen: dict[str, set[tuple[str, int]]] = {}
    for event in events:
        for gpu in gpus(event, facts.instance_id):
            seen.setdefault(gpu, set()).add((event.epoch, event.step))
    for past in facts.past:
        seen.setdefault(past.gpu_uuid, set()).add((past.epoch, past.step))
    repeated = sorted(gpu for gpu in gpus(events[0], facts.instance_id) if len(seen[gpu]) > 1)
    if repeated:
        return Gate("confirmed", True, f"{repeated[0]} failed {len(seen[repeated[0]])} times", Answer.SUSPECT)
    return Gate("confirmed", False, "a first transient fault; confirm = persistent", Answer.SUSPECT)


def _budgets(facts: Facts, policy: Policy, member: Member) -> list[Gate]:
    size = sum(m.group == member.group for m in facts.members or ())
    share = max(1, int(policy.group_share * size))
    usage = facts.usage
    return [
        Gate(
            "concurrent",
            usage.in_flight < policy.concurrent,
            f"{usage.in_flight} of {policy.concurrent} replacements under way",
            Answer.HOLD,
        ),
        Gate("per_day", usage.last_day < policy.per_day, f"{usage.last_day} of {policy.per_day} in 24 h", Answer.HOLD),
        Gate(
            "group_share",
            usage.in_flight_in_group < share,
            f"{usage.in_flight_in_group} of {share} under way in group {member.group}",
            Answer.HOLD,
        ),
    ]
