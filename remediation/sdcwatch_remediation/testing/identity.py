"""The identity table: every way in which alert, event, inventory and time can disagree, and the refusal each gets.

What it does: `ROWS` says each disagreement, how to bring it about in a `Rig`, and what must come of it; `play` drives
the real service through one row. `table()` is the table of docs/identity.md.
What it never does: judge; the test does.
Its place: a test plays every row, `docs/build_identity.py` writes the page from the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sdcwatch_remediation.records import Member
from sdcwatch_remediation.testing.events import alert, event_line
from sdcwatch_remediation.testing.provider import fleet
from sdcwatch_remediation.testing.rig import Rig, make_rig

MEMBERS = fleet(5)
SUSPECT = 2
STRANGER = "i-0000000000000beef"
FORBIDDEN = "controller-machine"

Arrange = Callable[[Rig], list[dict[str, Any]]]
"""Brings one disagreement about and rings; returns what the service answered to the alert."""


@dataclass(frozen=True, slots=True)
class Row:
    """One disagreement and its refusal."""

    between: str
    what: str
    arrange: Arrange
    ends: str
    """The state in which the case stays or ends; `no case`: none is opened."""
    gate: str
    """The first gate that fails; empty where none is asked (`no case`), or a person is answered."""
    says: str
    """Part of the sentence that is recorded."""
    policy: dict[str, Any] = field(default_factory=dict)
    rounds: tuple[int, float] = (3, 2.0)
    """Rounds of the worker afterwards, and seconds before each."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one row."""

    ends: str
    reason: str
    acts: tuple[str, ...]
    """Everything that was done outside: replace calls, posts to agents."""


def play(row: Row, folder: Path) -> Outcome:
    """Drive the real service through one row, in auto and with one verdict enough: nothing but the gates stops it."""
    with make_rig(folder, MEMBERS, **row.policy) as rig:
        answers = row.arrange(rig)
        rig.rounds(row.rounds[0], seconds=row.rounds[1])
        posts = [f"{body['decision']} at {agent.node}" for agent in rig.agents.agents.values() for body in agent.posts]
        acts = (*(f"replace {instance}" for instance in rig.provider.calls), *posts)
        if answers[0]["case"] is None:
            return Outcome("no case", str(answers[0]["reason"]), acts)
        newest = rig.case()
        failed = next((f"{g['name']}: {g['reason']}" for g in newest["gates"] if not g["passed"]), newest["reason"])
        return Outcome(newest["state"], failed, acts)


def table() -> str:
    """Return the Markdown table of all rows."""
    lines = ["| between | disagreement | ends | gate | says |", "|---|---|---|---|---|"]
    for row in ROWS:
        gate = f"`{row.gate}`" if row.gate else ""
        lines.append(f"| {row.between} | {row.what} | {row.ends} | {gate} | {row.says} |")
    return "\n".join(lines)


def _ring(**labels: str) -> Arrange:
    """The event is proven; the alert has other labels."""

    def arrange(rig: Rig) -> list[dict[str, Any]]:
        _say(rig)
        return rig.ring(alert(MEMBERS[SUSPECT], SUSPECT, **labels))

    return arrange


def _say(rig: Rig, *, by: list[str] | None = None, suspects: tuple[int, ...] = (SUSPECT,), **changes: Any) -> None:
    rig.agents.say(event_line(rig.provider.members, suspects, **{"time": rig.clock(), **changes}), by=by)


def _event(**changes: Any) -> Arrange:
    """The alert fits the inventory; the event has other fields."""

    def arrange(rig: Rig) -> list[dict[str, Any]]:
        ago = changes.get("ago", 0.0)
        _say(rig, time=rig.clock() - ago, **{name: value for name, value in changes.items() if name != "ago"})
        return rig.ring(alert(MEMBERS[SUSPECT], SUSPECT))

    return arrange


def _rank(number: int = SUSPECT, **changes: Any) -> Arrange:
    """One rank of the event has other fields."""

    def arrange(rig: Rig) -> list[dict[str, Any]]:
        line = event_line(MEMBERS, [SUSPECT], time=rig.clock())
        line["event"]["ranks"][number] |= changes
        rig.agents.say(line)
        return rig.ring(alert(MEMBERS[SUSPECT], SUSPECT))

    return arrange


def _inventory(change: Callable[[Member], tuple[Member, ...]]) -> Arrange:
    """Alert and event agree; the inventory has something else for the suspect."""

    def arrange(rig: Rig) -> list[dict[str, Any]]:
        _say(rig)
        found: list[Member] = []
        for member in rig.provider.members:
            found += change(member) if member == MEMBERS[SUSPECT] else (member,)
        rig.provider.members = tuple(found)
        return rig.ring(alert(MEMBERS[SUSPECT], SUSPECT))

    return arrange


def _with(**changes: Any) -> Arrange:
    return _inventory(lambda member: (replace(member, **changes),))


def _launched(rig: Rig, ago: float) -> list[dict[str, Any]]:
    return _with(launch_time=rig.clock() - ago)(rig)


def _provider(**changes: Any) -> Arrange:
    def arrange(rig: Rig) -> list[dict[str, Any]]:
        _say(rig)
        for name, value in changes.items():
            setattr(rig.provider, name, value)
        return rig.ring(alert(MEMBERS[SUSPECT], SUSPECT))

    return arrange


def _tombstone(rig: Rig) -> list[dict[str, Any]]:
    rig.ring(alert(MEMBERS[SUSPECT], SUSPECT))
    case = rig.service.store.cases()[0]
    rig.service.ledger.entomb(case, STRANGER)
    rig.service.ledger.reject(rig.service.store.move(case, "proving"), by="Ada", reason="replaced by hand")
    rig.rounds(2)
    return _ring()(rig)


def _tombstone_later(rig: Rig) -> list[dict[str, Any]]:
    answers = _ring()(rig)
    rig.service.ledger.entomb(rig.service.store.cases()[0], STRANGER)
    return answers


def _here(rig: Rig) -> list[dict[str, Any]]:
    rig.config = replace(rig.config, cluster=replace(rig.config.cluster, own_node=MEMBERS[SUSPECT].node_name))
    rig.restart()
    return _ring()(rig)


def _disputed(rig: Rig) -> list[dict[str, Any]]:
    for member, sentence in zip(MEMBERS, ("a", "b", "", "c", "d"), strict=True):
        line = event_line(MEMBERS, [SUSPECT], time=rig.clock())
        line["event"]["sentence"] = sentence
        rig.agents.say(line, by=[member.instance_id])
    return rig.ring(alert(MEMBERS[SUSPECT], SUSPECT))


def _twice(rig: Rig) -> list[dict[str, Any]]:
    line = event_line(MEMBERS, [SUSPECT], time=rig.clock())
    line["event"]["ranks"].append(dict(line["event"]["ranks"][0]))
    rig.agents.say(line)
    return rig.ring(alert(MEMBERS[SUSPECT], SUSPECT))


def _masked(rig: Rig) -> list[dict[str, Any]]:
    for member in MEMBERS:
        rig.agents[member.instance_id].instance = STRANGER
    return _ring()(rig)


def _outsiders(rig: Rig) -> list[dict[str, Any]]:
    others = tuple(replace(m, instance_id=f"i-{n + 40:017x}") for n, m in enumerate(MEMBERS) if n != SUSPECT)
    ranks = (*others[:SUSPECT], MEMBERS[SUSPECT], *others[SUSPECT:])
    rig.agents.say(event_line(ranks, [SUSPECT], time=rig.clock()))
    return rig.ring(alert(MEMBERS[SUSPECT], SUSPECT))


def _again(rig: Rig) -> list[dict[str, Any]]:
    rig.restart(mode="observe", evidence_max_age_seconds=600.0)
    rig.fault(SUSPECT)
    rig.rounds(2, seconds=2.0)
    rig.service.ledger.cancel(rig.service.store.cases()[0], by="Ada", reason="looked at it")
    rig.clock.now += 700.0  # the old case is no longer watched, so the same event rings a new one
    answers = rig.ring(alert(MEMBERS[SUSPECT], SUSPECT))
    rig.restart(mode="auto", evidence_max_age_seconds=9000.0)
    return answers


def _moved(change: Callable[[Member], Member]) -> Arrange:
    """The case waits for a person; the world moves on; then the person approves what was shown."""

    def arrange(rig: Rig) -> list[dict[str, Any]]:
        answers = _ring()(rig)
        rig.rounds(3, seconds=2.0)
        rig.provider.members = tuple(change(m) if m == MEMBERS[SUSPECT] else m for m in rig.provider.members)
        case = rig.service.store.cases()[0]
        rig.service.ledger.approve(case, by="Ada", request_sha256=case.request_sha256)
        return answers

    return arrange


ROWS: tuple[Row, ...] = (
    Row("alert, service", "another cluster", _ring(training_cluster="prod"), "no case", "", "another cluster"),
    Row(
        "alert, form", "an instance id that is none", _ring(training_instance="i-12"), "no case", "", "not of the form"
    ),
    Row("alert, form", "a node name that means every node", _ring(training_node="all"), "no case", "", "reserved word"),
    Row("alert, form", "no instance at all", _ring(training_instance=""), "no case", "", "training_instance is absent"),
    Row("alert, memory", "the id was replaced before", _tombstone, "no case", "", "was already replaced"),
    Row("case, memory", "the id is replaced meanwhile", _tombstone_later, "refused", "not_retired", "already replaced"),
    Row("alert, inventory", "no such instance", _inventory(lambda m: ()), "refused", "one_member", "has it 0 times"),
    Row("alert, inventory", "the id twice", _inventory(lambda m: (m, m)), "refused", "one_member", "has it 2 times"),
    Row(
        "alert, inventory",
        "the node's name belongs to a newer instance",
        _with(instance_id=STRANGER),
        "refused",
        "one_member",
        f"already replaced: node-2 is {STRANGER} now",
    ),
    Row(
        "alert, inventory",
        "the instance has another node's name",
        _ring(training_node="node-3"),
        "refused",
        "node_matches",
        "inventory: node-2",
    ),
    Row(
        "inventory, service",
        "it cannot be read",
        _provider(readable=False),
        "proving",
        "inventory_read",
        "0 instances",
    ),
    Row(
        "inventory, service",
        "it is another cluster's",
        _provider(cluster="prod"),
        "proving",
        "inventory_read",
        "0 inst",
    ),
    Row(
        "inventory, policy",
        "the group is not listed",
        _with(group="spare"),
        "unproven",
        "proven",
        "no agent of another",
    ),
    Row("inventory, policy", "no group is listed", _ring(), "refused", "group_allowed", "is not in", {"groups": ()}),
    Row("inventory, policy", "a controller", _with(group=FORBIDDEN), "refused", "not_forbidden", f"group {FORBIDDEN}"),
    Row("inventory, service", "the service's own node", _here, "refused", "not_my_node", "the service itself runs on"),
    Row(
        "inventory, provider",
        "its provider works on it",
        _with(status="Pending"),
        "settling",
        "provider_idle",
        "Pending",
    ),
    Row("alert, agents", "nobody knows of an event", _event(by=[]), "unproven", "proven", "no agent of another node"),
    Row(
        "alert, agents",
        "only the suspect's own agent tells it",
        _event(by=[MEMBERS[SUSPECT].instance_id]),
        "unproven",
        "proven",
        "no agent of another node",
    ),
    Row(
        "alert, agents",
        "one other agent alone tells it",
        _event(by=[MEMBERS[0].instance_id]),
        "unproven",
        "proven",
        "only one agent of another node",
    ),
    Row("agents", "they differ in one word", _disputed, "unproven", "proven", "different contents"),
    Row(
        "agents, inventory", "they say that they are others", _masked, "unproven", "proven", "no agent of another node"
    ),
    Row("agents, event", "none of them ran a rank of it", _outsiders, "unproven", "proven", "ran no rank"),
    Row("event, service", "another cluster", _event(training_cluster="prod"), "unproven", "proven", "another cluster"),
    Row("event, service", "the suspect's own cluster", _rank(cluster="prod"), "unproven", "proven", "another cluster"),
    Row("event, alert", "it names another node", _event(suspects=(3,)), "unproven", "proven", "does not name this"),
    Row(
        "event", "a suspect that is no rank of it", _event(suspects=(2, 9)), "unproven", "proven", "does not name this"
    ),
    Row("event", "one rank twice", _twice, "unproven", "proven", "lists a rank twice"),
    Row("event", "it attributes nothing", _event(kind="inconclusive"), "unproven", "proven", "not attributed"),
    Row("event", "a drill", _event(drill=True), "unproven", "proven", "is a drill"),
    Row(
        "event, inventory",
        "its node for the instance is another",
        _rank(node="node-7"),
        "refused",
        "event_node_matches",
        "event: ['node-7']",
    ),
    Row("event", "two instances at once", _event(suspects=(1, 2)), "frozen", "one_suspect", "names 2 instance(s)"),
    Row(
        "event", "the suspect's software differs", _rank(environment="x"), "frozen", "same_environment", "not hardware"
    ),
    Row(
        "event, memory", "an earlier case dealt with it", _again, "unproven", "proven", "dealt with by an earlier case"
    ),
    Row(
        "event, inventory",
        "launched after the fault",
        lambda rig: _launched(rig, -60.0),
        "refused",
        "launched_before",
        "launched -60 s before",
    ),
    Row(
        "event, inventory",
        "launched within the doubt of clocks",
        lambda rig: _launched(rig, 119.0),
        "refused",
        "launched_before",
        "more than 120 s needed",
    ),
    Row("event, clock", "it lies in the future", _event(ago=-600.0), "settling", "clock", "s old"),
    Row("event, clock", "it is too old to be fetched", _event(ago=3700.0), "unproven", "proven", "no agent of another"),
    Row(
        "event, clock",
        "it grows too old while it waits",
        _event(ago=3590.0),
        "expired",
        "fresh",
        "s old",
        {"settle_seconds": 60.0},
        (3, 10.0),
    ),
    Row(
        "approval, inventory",
        "the instance has another node's name by then",
        _moved(lambda m: replace(m, node_name="node-9")),
        "refused",
        "node_matches",
        "inventory: node-9",
        {"mode": "approve"},
    ),
    Row(
        "approval, inventory",
        "it was started anew by then",
        _moved(lambda m: replace(m, launch_time=1_800_000_000.0)),
        "refused",
        "launched_before",
        "more than 120 s needed",
        {"mode": "approve"},
    ),
)
"""All disagreements, in the order in which they are noticed."""
