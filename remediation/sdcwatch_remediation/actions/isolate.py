"""Contain and quarantine: keep the evidence, tell the suspect's own agent that it must not train, then the scheduler.

What it does: `contain` asks every gate once more with fresh facts; `quarantine` posts `leave` to the suspect's agent,
at most `TRIES` times, and goes on either way: the node may be dead, and replacing it is what stops it then.
What it never does: release anything, or replace.
Its place: `worker` calls these for the states `containing` and `quarantining`.
"""

from __future__ import annotations

import json

from sdcwatch_remediation.actions import acts, bundle
from sdcwatch_remediation.cases import Case
from sdcwatch_remediation.context import BY, Context, find, gates_json
from sdcwatch_remediation.facts import Answer, Decision

TRIES = 3


def contain(ctx: Context, case: Case) -> Case | None:
    """Ask every gate again and note which copies of the evidence are kept (`containing`)."""
    decision, _ = ctx.decide("quarantine", case, ctx.inventory())
    if (moved := blocked(ctx, case, decision)) is not None or not permitted(ctx, case, decision):
        return moved
    copies = ctx.store.copies(case.id)
    kept = sorted({f"{copy.event.id} from {copy.agent_instance}" for copy in copies})
    detail = {"copies": len(copies), "kept": kept[:64], "bundle": bundle.keep(ctx, case)}
    case = ctx.store.set(case, step="evidence_kept", detail=detail)
    return ctx.store.move(case, "quarantining", reason=decision.reason)


def quarantine(ctx: Context, case: Case) -> Case | None:
    """Tell the suspect's own agent to leave the job, best effort (`quarantining`)."""
    inventory = ctx.inventory()
    decision, _ = ctx.decide("quarantine", case, inventory)
    if (moved := blocked(ctx, case, decision)) is not None or not permitted(ctx, case, decision):
        return moved
    member = find(inventory, case.instance_id)
    assert member is not None  # the decision said so
    tries = sum(line["step"] == "quarantine_requested" for line in ctx.store.timeline(case.id))
    if tries < TRIES and case.quarantined_at is None:
        ctx.store.note(case.id, "quarantine_requested", {"agent": member.instance_id, "address": member.address})
        answer = ctx.agents.latch(
            [member],
            latch_id=case.event_id,
            decision="leave",
            instance_id=case.instance_id,
            case_id=case.id,
            by=BY,
        )[0]
        detail = {"result": answer.result, "problem": answer.problem}
        if answer.result != "quarantined":
            ctx.store.set(
                case, step="quarantine_unconfirmed", detail=detail, next_at=ctx.clock() + ctx.config.worker.poll_seconds
            )
            return None
        case = ctx.store.set(case, step="quarantined", detail=detail, quarantined_at=ctx.clock())
    for scheduler in ctx.schedulers:
        if problem := acts.isolate(ctx, case, member, scheduler):
            hold(ctx, case, problem)
            return None
    return _then(ctx, case)


def _then(ctx: Context, case: Case) -> Case:
    mode, road = ctx.mode("replace", case), ctx.road(case)
    how = "quarantined" if case.quarantined_at else "quarantine not confirmed; replacing stops the node all the same"
    if mode == "auto" or (mode == "approve" and case.approved and road in json.loads(case.request)):
        return ctx.store.move(case, "handing_over" if road == "handover" else "replacing", reason=how)
    request = ctx.request_of(case, case.event_id, "replace")
    to = "awaiting_approval" if mode == "approve" else "recommended"
    return ctx.store.move(case, to, reason=how, detail={"request": request}, request=request)


def blocked(ctx: Context, case: Case, decision: Decision) -> Case | None:
    """Move a decided case that must not go on, or return None."""
    if decision.answer is Answer.FREEZE:
        return ctx.store.move(case, "frozen", reason=decision.reason, gates=gates_json(decision))
    if decision.answer is Answer.REFUSE:
        return ctx.store.move(case, "refused", reason=decision.reason, gates=gates_json(decision))
    return None


def permitted(ctx: Context, case: Case, decision: Decision) -> bool:
    """Whether a decided case may act now; if not, say why once and look again in the next round."""
    # In `auto` an approval is needed only where a gate asked for one; that gate has looked.
    allowed = decision.mode == "auto" or (decision.mode == "approve" and case.approved)
    if decision.answer is Answer.GO and allowed:
        return True
    reason = decision.reason if decision.answer is not Answer.GO else f"mode: {decision.mode} does not allow it"
    hold(ctx, case, reason)
    return False


def hold(ctx: Context, case: Case, reason: str) -> None:
    """Look again in the next round; say why, once for each kind of reason."""
    later = ctx.clock() + ctx.config.worker.poll_seconds
    if reason.partition(":")[0] == case.reason.partition(":")[0]:
        ctx.store.set(case, next_at=later)
    else:
        ctx.store.set(case, step="held", detail={"reason": reason}, reason=reason, next_at=later)
