"""Give a node back to its scheduler once a case ends without a replacement.

What it does: `give_back` undoes, through `acts.restore`, what this case asked of the schedulers and what still carries
its id, then ends the case as it was decided. What cannot be undone within `PATIENCE_SECONDS` waits for a person, with
the commands to type; `look_again` reads on, and ends the case once nothing of ours is left.
What it never does: touch what somebody else has taken over since, or lift the mark of the node's own agent, for which
agents have no road: the last reason says where a person removes it.
Its place: `worker` calls these for the states `giving_back` and `not_given_back`; `store.move` sends a case there.
"""

from __future__ import annotations

from sdcwatch_remediation.actions import acts
from sdcwatch_remediation.actions.handover import NAME
from sdcwatch_remediation.actions.isolate import hold
from sdcwatch_remediation.actions.scheduler import Scheduler, SchedulerProblem
from sdcwatch_remediation.cases import Case
from sdcwatch_remediation.context import Context, find

PATIENCE_SECONDS = 900.0
"""After so long a person is asked; half of the state's deadline."""

UNDOES = ("undrain", "uncordon", "release_job", "withdraw")
"""Names of the acts that give something back."""


def give_back(ctx: Context, case: Case) -> Case | None:
    """Undo what this case took, and end it (`giving_back`)."""
    if case.held_by:
        return _wait(ctx, case, f"held by {case.held_by}")
    inventory = ctx.inventory()
    if inventory is None:
        return _wait(ctx, case, "inventory_read: the inventory cannot be read")
    member = find(inventory, case.instance_id)
    if member is None:
        return _end(ctx, case, f"{case.instance_id} is gone: there is no node to give back")
    takers, unknown = _takers(ctx, case)
    if unknown:
        reason = f"{', '.join(unknown)} acted on the node, and is not configured any more: give it back there"
        return ctx.store.move(case, "not_given_back", reason=reason)
    for scheduler in takers:
        if problem := acts.restore(ctx, case, member, scheduler):
            if problem.startswith(acts.GIVEN_UP):
                return _ask(ctx, case, problem)
            return _wait(ctx, case, problem)
    ctx.ledger.withdraw(case)
    return _end(ctx, case, _told(ctx, case, takers))


def look_again(ctx: Context, case: Case) -> Case | None:
    """End the case once a person has given the node back, or the instance is gone (`not_given_back`)."""
    inventory = ctx.inventory()
    ctx.store.set(case, next_at=ctx.clock() + ctx.config.worker.poll_seconds)
    if inventory is None:
        return None
    member = find(inventory, case.instance_id)
    if member is None:
        return _end(ctx, case, f"{case.instance_id} is gone: there is no node to give back")
    takers, unknown = _takers(ctx, case)
    try:
        left = [t for t in takers if t.next_restore(member, case.id, acts.history(ctx, case, t.name)) is not None]
    except SchedulerProblem:
        return None
    if left or unknown:
        return None
    ctx.ledger.withdraw(case)
    return _end(ctx, case, "a person gave the node back")


def _takers(ctx: Context, case: Case) -> tuple[list[Scheduler], list[str]]:
    """Return the schedulers that this case asked for something, and the names of those that are not configured."""
    lines = ctx.store.timeline(case.id)
    asked = sorted({str(line["detail"]["scheduler"]) for line in lines if line["step"] == "act_requested"})
    known = {scheduler.name: scheduler for scheduler in ctx.schedulers}
    if ctx.handover is not None:
        known[NAME] = ctx.handover.of(case)
    # First of all nobody is asked any more to replace the node.
    asked.sort(key=lambda name: name != NAME)
    return [known[name] for name in asked if name in known], [name for name in asked if name not in known]


def _told(ctx: Context, case: Case, takers: list[Scheduler]) -> str:
    undone = [
        f"{done.name} {done.target}"
        for taker in takers
        for done in acts.history(ctx, case, taker.name)
        if done.name in UNDOES and done.outcome != "refused" and done.at >= case.state_since
    ]
    if not any(word.startswith(("undrain", "uncordon", "withdraw")) for word in undone):
        return "nothing of ours is left on the node; whoever has taken it over keeps it"
    return f"given back: {', '.join(undone)}"[:500]


def _wait(ctx: Context, case: Case, problem: str) -> Case | None:
    if ctx.clock() - case.state_since > PATIENCE_SECONDS:
        return _ask(ctx, case, problem)
    hold(ctx, case, problem)
    return None


def _ask(ctx: Context, case: Case, problem: str) -> Case:
    takers, _ = _takers(ctx, case)
    member = find(case.before_inventory(), case.instance_id)
    by_hand = "; ".join(taker.by_hand(member) for taker in takers) if member else ""
    typed = f"; a person types: {by_hand}" if by_hand else ""
    return ctx.store.move(case, "not_given_back", reason=f"{problem[:400]}{typed}{case.mark_left}"[:1000])


def _end(ctx: Context, case: Case, reason: str) -> Case:
    to = case.outcome if case.outcome in ("cancelled", "expired") else "closed"
    return ctx.store.move(case, to, reason=f"{reason}{case.mark_left}"[:1000])
