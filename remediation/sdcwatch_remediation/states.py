"""The case machine: every state, its deadline, and the table of allowed transitions.

What it does: names the states, says how long a case may stay in each and where it goes when that time is over, and
draws the table for the documentation.
What it never does: move a case (`store.move` does, and asks this table first).
Its place: `worker` and `casework` follow it; `docs/remediation.md` shows `mermaid()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sdcwatch_remediation.settings import Policy


@dataclass(frozen=True, slots=True)
class State:
    """One state of a case."""

    name: str
    kind: Literal["working", "waiting", "terminal"]
    """`working`: the service moves it. `waiting`: a person decides. `terminal`: nothing happens any more."""
    meaning: str
    deadline: float | str | None
    """Seconds in this state, the `[policy]` setting that says so, or None (terminal)."""
    overdue: str
    """Where it goes when the deadline has passed; empty for a terminal state."""
    next: tuple[str, ...]
    """Every state it may move to, `overdue` among them."""

    def seconds(self, policy: Policy) -> float | None:
        """Return how long a case may stay here, in seconds."""
        return float(getattr(policy, self.deadline)) if isinstance(self.deadline, str) else self.deadline


_DECIDED = ("observed", "recommended", "awaiting_approval", "containing", "suspected")
_EVIDENCE = "evidence_max_age_seconds"

_TABLE = (
    State("received", "working", "a doorbell rang; nothing is known yet", 600.0, "expired", ("proving", "expired")),
    State(
        "proving",
        "working",
        "the inventory is read, the agents of the group are asked for the first time",
        _EVIDENCE,
        "expired",
        ("unproven", "settling", "refused", "frozen", "expired", "rejected", "cancelled"),
    ),
    State(
        "unproven",
        "working",
        "no two agents of other nodes agree; they are asked again until the window of evidence ends",
        _EVIDENCE,
        "expired",
        ("settling", "refused", "frozen", "expired", "rejected", "cancelled"),
    ),
    State(
        "settling",
        "working",
        "proven; waits for other cases to show themselves, and while something else holds it",
        _EVIDENCE,
        "expired",
        (*_DECIDED, "refused", "frozen", "expired", "rejected", "cancelled"),
    ),
    State(
        "observed",
        "working",
        "mode observe: what would be done is recorded, nothing is done",
        _EVIDENCE,
        "expired",
        ("closed", "expired", "rejected", "cancelled"),
    ),
    State(
        "recommended",
        "waiting",
        "a person is asked to do it by hand: mode recommend, or a handover that came to nothing",
        "approval_seconds",
        "expired",
        ("resuming", "closed", "expired", "rejected", "cancelled", "giving_back"),
    ),
    State(
        "awaiting_approval",
        "waiting",
        "mode approve: a named person must approve exactly this request",
        "approval_seconds",
        "expired",
        (
            "containing",
            "replacing",
            "handing_over",
            "resuming",
            "closed",
            "expired",
            "rejected",
            "cancelled",
            "giving_back",
        ),
    ),
    State(
        "containing",
        "working",
        "decided; the evidence is kept and every gate is asked again",
        900.0,
        "expired",
        ("quarantining", "refused", "frozen", "expired", "rejected", "cancelled"),
    ),
    State(
        "quarantining",
        "working",
        "the suspect's own agent is told that the instance must not train",
        900.0,
        "expired",
        (
            "replacing",
            "handing_over",
            "awaiting_approval",
            "recommended",
            "refused",
            "frozen",
            "expired",
            "rejected",
            "cancelled",
            "giving_back",
        ),
    ),
    State(
        "replacing",
        "working",
        "one replace request at a time: intent, act, record",
        1800.0,
        "expired",
        (
            "proving_replacement",
            "awaiting_approval",
            "resuming",
            "frozen",
            "failed",
            "expired",
            "rejected",
            "cancelled",
            "giving_back",
        ),
    ),
    State(
        "proving_replacement",
        "working",
        "the inventory is read until another instance runs in its place",
        "replacement_seconds",
        "failed",
        ("resuming", "replacing", "failed"),
    ),
    State(
        "handing_over",
        "working",
        "a group whose nodes somebody else replaces: the node's condition and an Event are written for them",
        900.0,
        "recommended",
        (
            "handed_over",
            "resuming",
            "closed",
            "awaiting_approval",
            "recommended",
            "frozen",
            "failed",
            "rejected",
            "cancelled",
            "giving_back",
        ),
    ),
    State(
        "handed_over",
        "working",
        "its owner was told; the inventory is read until another instance runs in its place",
        "handover_seconds",
        "recommended",
        ("resuming", "closed", "recommended", "rejected", "cancelled", "giving_back"),
    ),
    State(
        "resuming",
        "working",
        "the latch is released on the other nodes",
        1800.0,
        "failed",
        ("closed", "failed"),
    ),
    State(
        "suspected",
        "working",
        "a first transient fault: remembered, the latch released",
        1800.0,
        "closed",
        ("closed",),
    ),
    State(
        "rejected",
        "working",
        "a person said no: the latch is released",
        1800.0,
        "closed",
        ("closed", "giving_back"),
    ),
    State(
        "giving_back",
        "working",
        "the scheduler gets back what this case took from it, as far as it is still ours",
        1800.0,
        "failed",
        ("not_given_back", "closed", "cancelled", "expired", "failed"),
    ),
    State(
        "not_given_back",
        "waiting",
        "that could not be done: a person does it with the commands in the reason",
        86_400.0,
        "failed",
        ("closed", "cancelled", "expired", "failed"),
    ),
    State(
        "frozen",
        "waiting",
        "looks like a bad detector, build or checkpoint: a person looks",
        604_800.0,
        "expired",
        ("rejected", "expired", "cancelled", "giving_back"),
    ),
    State("refused", "terminal", "identity or permission does not fit: nothing is done", None, "", ()),
    State("cancelled", "terminal", "a person ended it: the latch and the mark of the node's agent stay", None, "", ()),
    State("expired", "terminal", "its time is over: nothing more is done", None, "", ()),
    State("failed", "terminal", "an action did not succeed or cannot be proven: a person takes over", None, "", ()),
    State("closed", "terminal", "done; the outcome says how", None, "", ()),
)

STATES: dict[str, State] = {state.name: state for state in _TABLE}
"""All states by name, in the order of the flow."""

INITIAL = "received"

# In these the world may have moved on while we were down: it is read before the deadline is applied.
READ_BEFORE_DEADLINE = frozenset({"proving_replacement", "handed_over", "resuming", "giving_back", "not_given_back"})


def allowed(old: str, new: str) -> bool:
    """Whether the table lets a case go from `old` to `new`."""
    return new in STATES[old].next


def mermaid() -> str:
    """Return the table as a mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {INITIAL}"]
    for state in _TABLE:
        for target in dict.fromkeys(state.next):
            label = " : deadline" if target == state.overdue else ""
            lines.append(f"    {state.name} --> {target}{label}")
        if state.kind == "terminal":
            lines.append(f"    {state.name} --> [*]")
    return "\n".join(lines)


def reference_table() -> str:
    """Return the Markdown table of the states, with meaning and deadline."""
    rows = ["| state | kind | meaning | deadline | then |", "|---|---|---|---|---|"]
    for state in _TABLE:
        deadline = "" if state.deadline is None else state.deadline
        shown = (
            f"`policy.{deadline}`" if isinstance(deadline, str) and deadline else f"{deadline:g} s" if deadline else ""
        )
        rows.append(f"| `{state.name}` | {state.kind} | {state.meaning} | {shown} | {state.overdue} |")
    return "\n".join(rows)
