"""Let the job go on: release the latch on the other nodes, then close the case.

What it does: posts `release` with the event's id to the agents of the running members that the event knows or that
share the suspect's group; releasing twice is harmless. Ends cases that are replaced, suspected or rejected.
What it never does: release where the service may only observe or recommend, or tell a quarantined node to go on.
Its place: `worker` calls this for the states `resuming`, `suspected` and `rejected`.
"""

from __future__ import annotations

from sdcwatch_remediation.agents import LatchAnswer
from sdcwatch_remediation.cases import Case
from sdcwatch_remediation.casework import remember_suspicion
from sdcwatch_remediation.context import BY, Context
from sdcwatch_remediation.evidence import Event

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
    event = next((copy.event for copy in ctx.store.copies(case.id) if copy.event.id == case.event_id), None)
    known = {rank.instance for rank in event.ranks} if event else set()
    keeps_out = case.state == "resuming" or case.quarantined_at is not None
    members = [
        member
        for member in inventory.members
        if member.status == "Running"
        and (member.instance_id in known or member.group == case.group_name)
        and not (keeps_out and member.instance_id == case.instance_id)
    ]
    answers = ctx.agents.latch(
        members,
        latch_id=case.event_id,
        decision="release",
        instance_id=case.instance_id,
        case_id=case.id,
        by=BY,
    )
    return _judge(ctx, case, event, answers, known)


def _judge(ctx: Context, case: Case, event: Event | None, answers: list[LatchAnswer], known: set[str]) -> Case | None:
    results = {answer.member.instance_id: answer.result for answer in answers}
    released = [instance for instance, result in results.items() if result in _DONE]
    silent = [instance for instance, result in results.items() if result == "failed" and instance in known]
    stands = event is not None and event.action == "halt"
    if released and case.released_at is None:
        case = ctx.store.set(case, step="latch_released", detail={"results": results}, released_at=ctx.clock())
    waited = ctx.clock() - case.state_since
    if (released or not stands) and (not silent or waited > PATIENCE_SECONDS):
        what = f"latch released on {len(released)} nodes" if released else "no latch stood"
        missing = f"; no answer from {', '.join(silent)}" if silent else ""
        return ctx.store.move(case, "closed", reason=what + missing)
    problems = sorted({answer.problem or answer.result for answer in answers if answer.result not in _DONE})
    _again(ctx, case, f"release: {'; '.join(problems)[:500] or 'no agent to ask'}")
    return None


def _again(ctx: Context, case: Case, reason: str) -> None:
    later = ctx.clock() + ctx.config.worker.poll_seconds
    if reason == case.reason:
        ctx.store.set(case, next_at=later)
    else:
        ctx.store.set(case, step="held", detail={"reason": reason}, reason=reason, next_at=later)
