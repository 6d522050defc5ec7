"""What would be done about an instance if a fault of it were proven right now: the policy itself, on made-up evidence.

What it does: builds the facts of a case that does not exist, with a persistent fault that two others attest, and asks
`policy.decide`; everything but the evidence (inventory, budgets, stops, orchestrator) is read live.
What it never does: write anything, count a gate as asked, or act; the case has no row.
Its place: `diagnosis` shows what comes out.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from sdcwatch_remediation.cases import Case
from sdcwatch_remediation.context import Context
from sdcwatch_remediation.evidence import Event, RankIdentity
from sdcwatch_remediation.facts import Decision
from sdcwatch_remediation.policy import decide
from sdcwatch_remediation.proof import ProvenEvent
from sdcwatch_remediation.records import Inventory, Member
from sdcwatch_remediation.settings import ACTIONS

NO_CASE = "case-000000000000"
"""Of the form of a case's id, and of no case."""
RANKS = 8
"""Most ranks of the made-up event."""


def rehearse(ctx: Context, member: Member, inventory: Inventory) -> tuple[Decision, ...]:
    """Return the decisions about quarantine and replace for one running member, as if its fault were proven now."""
    event = _event(ctx, member, inventory)
    witnesses = tuple(rank.instance for rank in event.ranks if rank.instance != member.instance_id)[:2]
    case = _case(ctx, member, event)
    proof = (ProvenEvent(event, witnesses),)
    return tuple(
        decide(action, ctx.facts(action, case, inventory, proof, "a rehearsal"), ctx.config.policy)
        for action in ACTIONS
    )


def _event(ctx: Context, member: Member, inventory: Inventory) -> Event:
    others = [m for m in inventory.members if m.group == member.group and m.instance_id != member.instance_id]
    ranks = tuple(
        RankIdentity(number, each.node_name, each.instance_id, f"rehearsal-{number}", inventory.cluster, "same")
        for number, each in enumerate([member, *others[: RANKS - 1]])
    )
    return Event(
        id="sdc-" + "0" * 16,
        job="",
        cluster=inventory.cluster,
        epoch="rehearsal",
        step=0,
        check="rehearsal",
        kind="attributed",
        persistence="persistent",
        time=ctx.clock(),
        action="halt",
        drill=False,
        suspects=(0,),
        ranks=ranks,
        sentence="",
        canonical="{}",
    )


def _case(ctx: Context, member: Member, event: Event) -> Case:
    empty: dict[str, Any] = {item.name: "" for item in fields(Case)}
    empty |= dict.fromkeys(("deadline", "closed_at", "quarantined_at", "released_at"))
    times = {"opened_at": ctx.clock() - ctx.config.policy.max_settle_seconds, "state_since": event.time, "next_at": 0.0}
    known = {"id": NO_CASE, "cluster": event.cluster, "instance_id": member.instance_id, "state": "settling"}
    known |= {"node_name": member.node_name, "group_name": member.group, "event_id": event.id}
    return Case(**{**empty, **times, **known, "event_time": event.time})
