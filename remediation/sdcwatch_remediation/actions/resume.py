"""Let the job go on: release the latch on the other nodes, then close the case.

What it does: posts `release` with the id of the decided event, and of each other proven one that blames the instance
alone, to the agents of the running members that the events know or that share the suspect's group; releasing twice is
harmless. Ends cases that are replaced, suspected or rejected.
What it never does: release where the service may only observe or recommend, or tell a quarantined node to go on.
Its place: `worker` calls this for the states `resuming`, `suspected` and `rejected`.
"""

from __future__ import annotations

from sdcwatch_remediation.agents import LatchAnswer
from sdcwatch_remediation.cases import Case
from sdcwatch_remediation.casework import remember_suspicion
from sdcwatch_remediation.context import BY, Context
from sdcwatch_remediation.evidence import Event
from sdcwatch_remediation.proof import judge
from sdcwatch_remediation.records import Inventory

PATIENCE_SECONDS = 60.0
"""Once one agent released the latch, silent ones are waited for this long."""

_DONE = ("released", "already_released")


def release(ctx: Context, case: Case) -> Case | None:
    """Release the latch where allowed, and close (`resuming`, `suspected`, `rejected`)."""
    if case.state == "suspected":
        remember_suspicion(ctx, case)
    if not case.event_id:
        return ctx.store.move(case, "closed", reason="no event, so no latch of ours")
    if not ctx.may_release(case):
        return ctx.store.move(case, "closed", reason="the mode does not allow a release; a person releases the latch")
    if stop := ctx.stop():
        _again(ctx, case, stop)
        return None
    inventory = ctx.inventory()
    if inventory is None:
        _again(ctx, case, "inventory_read: the inventory cannot be read")
        return None
    if case.state == "resuming":
        _ask_again(ctx, case, inventory)
    events = _events(ctx, case)
    known = {rank.instance for event in events for rank in event.ranks}
    keeps_out = case.state == "resuming" or case.quarantined_at is not None
    members = [
        member
        for member in inventory.members
        if member.status == "Running"
        and (member.instance_id in known or member.group == case.group_name)
        and not (keeps_out and member.instance_id == case.instance_id)
    ]
    answers = {
        latch_id: ctx.agents.latch(
            members,
            latch_id=latch_id,
            decision="release",
            instance_id=case.instance_id,
            case_id=case.id,
            by=BY,
        )
        for latch_id in sorted({case.event_id, *(event.id for event in events)})
    }
    return _judge(ctx, case, answers, known, stands=any(event.action == "halt" for event in events))


def _ask_again(ctx: Context, case: Case, inventory: Inventory) -> None:
    # A check may have blamed the instance once more after the decision; that event's latch stands then.
    peers = [
        member
        for member in inventory.members
        if member.status == "Running" and member.group == case.group_name and member.instance_id != case.instance_id
    ]
    since = min(case.opened_at, case.event_time) - ctx.config.policy.evidence_max_age_seconds
    answers = ctx.agents.events(peers, case.instance_id, since)
    ctx.store.keep_copies(case, (copy for answer in answers for copy in answer.copies))


def _events(ctx: Context, case: Case) -> list[Event]:
    """Return the event that was decided on, and every proven halt that blames this instance alone."""
    copies = ctx.store.copies(case.id)
    decided = next((copy.event for copy in copies if copy.event.id == case.event_id), None)
    proven = (item.event for item in judge(copies, instance_id=case.instance_id, cluster=case.cluster).events)
    also = [
        event
        for event in proven
        if event.action == "halt"
        and event.id != case.event_id
        and {rank.instance for rank in event.suspect_ranks()} == {case.instance_id}
        # While the instance stays, what it did after the decision is a matter for the next case.
        and (case.state == "resuming" or event.time <= case.event_time)
    ]
    return [decided, *also] if decided else also


def _judge(
    ctx: Context, case: Case, by_latch: dict[str, list[LatchAnswer]], known: set[str], *, stands: bool
) -> Case | None:
    answers = [answer for group in by_latch.values() for answer in group]
    results: dict[str, str] = {}
    for answer in sorted(answers, key=lambda answer: (answer.result == "failed", answer.result in _DONE)):
        results[answer.member.instance_id] = answer.result  # a failure outweighs a release, a release "no latch"
    released = sorted({answer.member.instance_id for answer in answers if answer.result in _DONE})
    silent = [instance for instance, result in results.items() if result == "failed" and instance in known]
    if released and case.released_at is None:
        case = ctx.store.set(case, step="latch_released", detail={"results": results}, released_at=ctx.clock())
    waited = ctx.clock() - case.state_since
    if (released or not stands) and (not silent or waited > PATIENCE_SECONDS):
        what = f"latch released on {len(released)} nodes" if released else "no latch stood"
        missing = f"; no answer from {', '.join(silent)}" if silent else ""
        left = case.mark_left if case.state == "rejected" else ""
        return ctx.store.move(case, "closed", reason=what + missing + left)
    problems = sorted({answer.problem or answer.result for answer in answers if answer.result not in _DONE})
    _again(ctx, case, f"release: {'; '.join(problems)[:500] or 'no agent to ask'}")
    return None


def _again(ctx: Context, case: Case, reason: str) -> None:
    later = ctx.clock() + ctx.config.worker.poll_seconds
    if reason == case.reason:
        ctx.store.set(case, next_at=later)
    else:
        ctx.store.set(case, step="held", detail={"reason": reason}, reason=reason, next_at=later)
