"""Hand a node over, and watch its owner: for groups whose nodes somebody else's own machinery replaces.

What it does: `hand_over` asks every gate of a replacement, reserves it (budgets count it as one), and lets `acts` set
the node's condition and write the Event; `watch` reads the inventory until another instance runs in its place.
What it never does: replace. A handover that came to nothing waits for a person (`recommended`).
Its place: `worker` calls these for the states `handing_over` and `handed_over`; `handover` makes the requests.
"""

from __future__ import annotations

from sdcwatch_remediation.actions import acts
from sdcwatch_remediation.actions.handover import EVENT_TRIES, NAME, HandoverOf
from sdcwatch_remediation.actions.isolate import hold, permitted
from sdcwatch_remediation.actions.replace import ask
from sdcwatch_remediation.actions.scheduler import SchedulerProblem
from sdcwatch_remediation.cases import Case, inventory_json
from sdcwatch_remediation.casework import replaced_by_others
from sdcwatch_remediation.context import Context, find, gates_json
from sdcwatch_remediation.errors import Conflict
from sdcwatch_remediation.facts import Answer
from sdcwatch_remediation.ledger import Intent
from sdcwatch_remediation.records import Inventory, Member, Outcome, ReplaceResult

REQUESTED, ANSWERED = "handover_requested", "handover_answered"
"""Audit steps of the reservation, and of what came of it."""


def hand_over(ctx: Context, case: Case) -> Case | None:
    """Set the condition and write the Event (`handing_over`)."""
    inventory = ctx.inventory()
    if heir := ctx.replaced_elsewhere(case, inventory):
        return replaced_by_others(ctx, case, heir.instance_id)
    member = find(inventory, case.instance_id)
    if inventory is None or member is None:
        hold(ctx, case, "inventory_read: the inventory cannot be read, or lacks the instance for now")
        return None
    if ctx.handover is None:
        return _by_hand(ctx, case, "no handover is configured any more")
    scheduler = ctx.handover.of(case)
    try:
        # Looked at before anything is reserved, so that a node that is not ours to speak of takes up no budget.
        act = scheduler.next_act(member, case.job, case.id, acts.history(ctx, case, NAME))
    except SchedulerProblem as error:
        hold(ctx, case, f"{NAME} cannot go on: {error}")
        return None
    intent = _live(ctx, case)
    if (act is not None and act.name == "suspect") or intent is None:
        moved, intent = _ask_gates(ctx, case, scheduler, member, inventory)
        if intent is None:
            return moved
    elif case.held_by:
        hold(ctx, case, f"not_held: {case.held_by}")
        return None
    if problem := acts.isolate(ctx, case, member, scheduler):
        if problem.startswith(acts.GIVEN_UP):
            return _given_up(ctx, case, intent, problem)
        hold(ctx, case, problem)
        return None
    result = ReplaceResult(Outcome.ACCEPTED, "", _announced(ctx, case), retryable=False)
    ctx.ledger.record(intent, result, step=ANSWERED)
    reason = f"condition and Event stand on {member.node_name}{result.message}"
    return ctx.store.move(case, "handed_over", reason=reason)


def watch(ctx: Context, case: Case) -> Case | None:
    """Read the inventory until another instance runs in its place (`handed_over`)."""
    heir = ctx.replaced_elsewhere(case, ctx.inventory())
    if heir is not None:
        return replaced_by_others(ctx, case, heir.instance_id, reason="its owner replaced it")
    ctx.store.set(case, next_at=ctx.clock() + ctx.config.worker.poll_seconds)
    return None


def _ask_gates(
    ctx: Context, case: Case, scheduler: HandoverOf, member: Member, inventory: Inventory
) -> tuple[Case | None, Intent | None]:
    """Ask what is asked before a replacement, and reserve it; without a reservation, where the case goes instead."""
    decision, _ = ctx.decide("replace", case, inventory)
    ends = {Answer.FREEZE: "frozen", Answer.REFUSE: "failed"}
    if decision.answer in ends:
        gates = gates_json(decision)
        return ctx.store.move(case, ends[decision.answer], reason=decision.reason, gates=gates), None
    if decision.answer is Answer.ASK:
        return ask(ctx, case, decision), None
    if not permitted(ctx, case, decision):
        return None, None
    if (intent := _live(ctx, case)) is not None:
        return None, intent
    request = {"requests": scheduler.plan(member, case.job, case.id)}
    try:
        return None, ctx.ledger.reserve(case, request, before=inventory_json(inventory), step=REQUESTED)
    except Conflict as error:
        hold(ctx, case, str(error))
        return None, None


def _live(ctx: Context, case: Case) -> Intent | None:
    return next((intent for intent in ctx.ledger.intents(case.id) if intent.outcome != "refused"), None)


def _given_up(ctx: Context, case: Case, intent: Intent, problem: str) -> Case:
    # Where every request was definitely refused nothing can come of it; else the owner may act on it yet.
    refused = all(done.outcome == "refused" for done in acts.history(ctx, case, NAME))
    outcome = Outcome.REFUSED if refused else Outcome.UNKNOWN
    ctx.ledger.record(intent, ReplaceResult(outcome, "GivenUp", problem[:500], retryable=False), step=ANSWERED)
    return _by_hand(ctx, case, problem)


def _by_hand(ctx: Context, case: Case, problem: str) -> Case:
    return ctx.store.move(case, "recommended", reason=f"not handed over: {problem}; tell its owner"[:1000])


def _announced(ctx: Context, case: Case) -> str:
    """Say what is missing where the Event was done without; empty where it was written."""
    events = [done for done in acts.history(ctx, case, NAME) if done.name == "announce"]
    if any(done.outcome == "accepted" for done in events):
        return ""
    return f", without the Event, which was tried {EVENT_TRIES} times: {events[-1].message}"[:500]
