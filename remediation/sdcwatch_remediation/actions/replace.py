"""Replace one instance: reserve the intent, act once, record, then read the world until it is proven.

What it does: one attempt per call of `replace`, each with an intent of its own, committed before anything is sent. An
attempt whose record is missing (a crash) or whose outcome is unknown is never repeated: only the inventory can
settle it.
What it never does: send two requests for one instance, or call it done because the provider accepted it.
Its place: `worker` calls these for the states `replacing` and `proving_replacement`.
"""

from __future__ import annotations

from sdcwatch_remediation.actions.isolate import permitted
from sdcwatch_remediation.cases import Case, inventory_json
from sdcwatch_remediation.casework import replaced_by_others
from sdcwatch_remediation.context import Context, gates_json
from sdcwatch_remediation.errors import Conflict
from sdcwatch_remediation.facts import Answer, Decision
from sdcwatch_remediation.records import Outcome, ReplaceResult

NOT_SENT = "NotSent"
"""Code of an attempt that was reserved and then kept back; it says nothing about the provider and is not counted."""

ANSWER_SECONDS = 60.0
"""An intent without a record is left to whoever reserved it for this long: one call ends sooner (5 s to connect, 30 s
to be answered, no retry), and longer means that its process died."""


def replace(ctx: Context, case: Case) -> Case | None:
    """Make the next attempt, if there may be one (`replacing`)."""
    intents = ctx.ledger.intents(case.id)
    if live := [intent for intent in intents if intent.outcome != "refused"]:
        if live[-1].outcome is None and ctx.clock() - live[-1].reserved_at < ANSWER_SECONDS:
            return None  # another process may be in the middle of this very call
        known = live[-1].outcome or "not recorded: the service stopped between intent and record"
        return ctx.store.move(case, "proving_replacement", reason=f"intent {live[-1].id}: {known}")
    inventory = ctx.inventory()
    if heir := ctx.replaced_elsewhere(case, inventory):
        return replaced_by_others(ctx, case, heir.instance_id)
    asked = [intent for intent in intents if intent.code != NOT_SENT]
    if len(asked) >= ctx.config.policy.attempts:
        return ctx.ledger.leave(case, "failed", reason=f"refused {len(asked)} times, last: {asked[-1].code}")
    decision, _ = ctx.decide("replace", case, inventory)
    if decision.answer is Answer.FREEZE:
        return ctx.ledger.leave(case, "frozen", reason=decision.reason, gates=gates_json(decision))
    if decision.answer is Answer.REFUSE:
        return ctx.ledger.leave(case, "failed", reason=decision.reason, gates=gates_json(decision))
    if decision.answer is Answer.ASK:
        return ask(ctx, case, decision)
    if not permitted(ctx, case, decision):
        return None
    assert inventory is not None  # the decision said so
    try:
        request = ctx.provider.replace_request(case.instance_id)
        intent = ctx.ledger.reserve(case, request, before=inventory_json(inventory))
    except Conflict as error:
        ctx.store.set(
            case,
            step="held",
            detail={"reason": str(error)},
            next_at=ctx.clock() + ctx.config.worker.poll_seconds,
        )
        return None
    result = _act_once(ctx, case)
    ctx.ledger.record(intent, result)
    ctx.telemetry.count("sdc_remediation_provider_calls_total", "replace", result.code or result.outcome.value)
    if result.outcome is Outcome.UNKNOWN:
        ctx.telemetry.count("sdc_remediation_unknown_outcomes_total")
    if result.outcome is not Outcome.REFUSED:
        return ctx.store.move(case, "proving_replacement", reason=f"intent {intent.id}: {result.outcome.value}")
    if not result.retryable:
        return ctx.store.move(case, "failed", reason=f"refused: {result.code} {result.message}"[:1000])
    if result.code == NOT_SENT:
        return None
    wait = ctx.config.policy.backoff_seconds * 2 ** len(asked)
    ctx.store.set(case, step="attempt_refused", detail={"code": result.code, "wait": wait}, next_at=ctx.clock() + wait)
    return None


def ask(ctx: Context, case: Case, decision: Decision) -> Case:
    """Ask a person first, although the mode would not: the node stays quarantined until somebody answers."""
    request = ctx.request_of(case, case.event_id, "replace")
    detail = {"request": request}
    # A reserved handover is no reason to stay: what it asked for shows on the node, and can be taken back.
    move = ctx.ledger.leave if case.state == "replacing" else ctx.store.move
    return move(
        case, "awaiting_approval", reason=decision.reason, detail=detail, request=request, gates=gates_json(decision)
    )


def prove_replacement(ctx: Context, case: Case) -> Case | None:
    """Read the inventory until another instance runs in the old one's place (`proving_replacement`)."""
    inventory, before = ctx.inventory(), case.before_inventory()
    heir = ctx.provider.replacement_of(before, inventory, case.instance_id) if before and inventory else None
    if heir is None:
        if not asked_already(ctx, case):
            return _refused_late(ctx, case)
        ctx.store.set(case, next_at=ctx.clock() + ctx.config.worker.poll_seconds)
        return None
    ctx.ledger.entomb(case, heir.instance_id)
    detail = {"replacement": heir.instance_id, "node": heir.node_name, "address": heir.address}
    case = ctx.store.set(
        case, step="replacement_proven", detail=detail, replacement=heir.instance_id, outcome="replaced"
    )
    return ctx.store.move(case, "resuming", reason=f"{heir.instance_id} runs in its place")


def asked_already(ctx: Context, case: Case) -> bool:
    """Whether a request that was not refused may have had, or may still have, its effect."""
    return any(intent.outcome != "refused" for intent in ctx.ledger.intents(case.id))


def _refused_late(ctx: Context, case: Case) -> Case:
    # A refusal that was recorded after another process had begun to read: nothing happened, so nothing will show.
    answers = [line["detail"] for line in ctx.store.timeline(case.id) if line["step"] == "replace_answered"]
    last = answers[-1] if answers else {"code": "", "retryable": False}
    if not last["retryable"]:
        return ctx.store.move(case, "failed", reason=f"refused: {last['code']}")
    wait = ctx.config.policy.backoff_seconds * 2 ** (len(answers) - 1)
    return ctx.store.move(case, "replacing", reason=f"refused: {last['code']}", next_at=ctx.clock() + wait)


def _act_once(ctx: Context, case: Case) -> ReplaceResult:
    # Looked at once more after the intent was committed: a stop or another worker may have come meanwhile.
    stop = ctx.stop() or ("" if ctx.lease.hold() else "another process has taken over the worker's lease")
    if stop:
        return ReplaceResult(Outcome.REFUSED, NOT_SENT, stop, retryable=True)
    try:
        # A provider that acts in a role of its own for each case says so; the others act as they are.
        acting_for = getattr(ctx.provider, "acting_for", None)
        actor = acting_for(case.id) if acting_for is not None else ctx.provider
        result: ReplaceResult = actor.replace(case.instance_id)
        return result
    except Exception as error:  # whatever a provider raises after the intent, the call may have had its effect
        return ReplaceResult(Outcome.UNKNOWN, type(error).__name__, str(error)[:500], retryable=False)
