"""Move one case from doorbell to decision: fetch the proof, wait, decide, and end what is not acted on.

What it does: one function per state; each reads what it needs afresh, and returns the moved case, or None when there is
nothing to do before the next round.
What it never does: touch a node. States after the decision are in `actions/*`.
Its place: `worker` calls `STEPS[case.state]`.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from sdcwatch_remediation.cases import Case, inventory_json
from sdcwatch_remediation.context import TESTED, Context, event_key, find, gates_json
from sdcwatch_remediation.facts import Answer, Decision, Facts, PastEvent
from sdcwatch_remediation.policy import gpus
from sdcwatch_remediation.records import Inventory


def receive(ctx: Context, case: Case) -> Case | None:
    """Begin: the doorbell is durable, now look."""
    return ctx.store.move(case, "proving")


def prove(ctx: Context, case: Case) -> Case | None:
    """Ask the other agents of the group once more, and go where the decision says (`proving`, `unproven`)."""
    inventory = ctx.glance()
    if inventory is not None:
        case = _ask(ctx, case, inventory)
    decision, facts = ctx.decide("quarantine", case, inventory)
    if moved := _stopped(ctx, case, decision, facts, inventory):
        return moved
    if decision.answer is Answer.WAIT and case.state == "proving":
        case = ctx.store.move(case, "unproven", reason=decision.reason, gates=gates_json(decision))
    if facts.events and inventory is not None:
        return _proven(ctx, case, decision, facts, inventory)
    _later(ctx, case, decision)
    return None


def settle(ctx: Context, case: Case) -> Case | None:
    """Go on asking while the settle time runs, then decide (`settling`)."""
    inventory = ctx.glance()
    if inventory is not None:
        case = _ask(ctx, case, inventory)
        _ask_suspect(ctx, case, inventory)
    decision, facts = ctx.decide("quarantine", case, inventory)
    if moved := _stopped(ctx, case, decision, facts, inventory):
        return moved
    if decision.answer is Answer.SUSPECT:
        return ctx.store.move(
            case, "suspected", reason=decision.reason, outcome="suspected", gates=gates_json(decision)
        )
    if decision.answer is Answer.GO:
        return _by_mode(ctx, case, decision, facts, inventory)
    _later(ctx, case, decision)
    return None


def observe(ctx: Context, case: Case) -> Case | None:
    """Watch an instance that is not ours to touch (`observed`, `recommended`, `awaiting_approval`)."""
    inventory = ctx.glance()
    heir = ctx.replaced_elsewhere(case, inventory)
    if heir is None:
        ctx.store.set(case, next_at=ctx.clock() + ctx.config.worker.poll_seconds)
        return None
    return replaced_by_others(ctx, case, heir.instance_id)


def replaced_by_others(
    ctx: Context, case: Case, replacement: str, *, reason: str = "somebody else replaced it"
) -> Case:
    """Close (or resume) a case whose instance somebody else replaced."""
    ctx.ledger.entomb(case, replacement)
    changes: dict[str, Any] = {"outcome": "replaced_by_others", "replacement": replacement}
    case = ctx.store.set(case, step="replacement_proven", detail={"replacement": replacement}, **changes)
    resumes = case.state != "observed" and ctx.may_release(case)
    return ctx.store.move(case, "resuming" if resumes else "closed", reason=reason)


def _ask(ctx: Context, case: Case, inventory: Inventory) -> Case:
    suspect = find(inventory, case.instance_id)
    if suspect is None:
        return case
    since = ctx.clock() - ctx.config.policy.evidence_max_age_seconds
    peers = [
        member
        for member in inventory.members
        if member.group == suspect.group and member.status == "Running" and member.instance_id != case.instance_id
    ]
    answers = ctx.agents.events(peers, case.instance_id, since)
    fresh = ctx.store.keep_copies(case, (copy for answer in answers for copy in answer.copies))
    for answer in answers:
        result = "problem" if answer.problem else "events" if answer.copies else "nothing"
        ctx.telemetry.count("sdc_remediation_agent_answers_total", result)
    if fresh or case.state == "proving":
        told = [
            {"agent": a.member.instance_id, "events": [c.event.id for c in a.copies][-8:], "problem": a.problem}
            for a in answers
        ]
        detail = {"asked": len(answers), "new_copies": fresh, "answers": told[:64]}
        return ctx.store.set(case, step="agents_asked", detail=detail)
    return case


def _ask_suspect(ctx: Context, case: Case, inventory: Inventory) -> None:
    """Ask the suspect's own agent for its known-answer test, where a halt made it take one; the first result stays."""
    events, _ = ctx.proof(case)
    suspect = find(inventory, case.instance_id)
    if suspect is None or not events or events[0].event.action not in ("halt", "heal"):
        return
    latch_id = events[0].event.id
    before = ctx.known_answer(case, latch_id)
    if before.get("test"):
        return
    answer = ctx.agents.known_answer(suspect, latch_id)
    test = asdict(answer.test) if answer.test is not None else None
    told = {"latch_id": latch_id, "test": test, "problem": answer.problem, "later": answer.later}
    if told != before:
        ctx.store.note(case.id, TESTED, told)


def _stopped(ctx: Context, case: Case, decision: Decision, facts: Facts, inventory: Inventory | None) -> Case | None:
    ends = {Answer.REFUSE: "refused", Answer.FREEZE: "frozen", Answer.EXPIRE: "expired"}
    if decision.answer not in ends:
        return None
    if decision.answer is Answer.REFUSE and (heir := ctx.replaced_elsewhere(case, inventory)):
        ctx.ledger.entomb(case, heir.instance_id)
    changes: dict[str, Any] = {"gates": gates_json(decision)}
    if facts.events:
        changes |= _event_columns(case, facts)
    return ctx.store.move(case, ends[decision.answer], reason=decision.reason, **changes)


def _event_columns(case: Case, facts: Facts) -> dict[str, Any]:
    event = facts.events[0].event
    named = sorted(gpus(event, case.instance_id))
    return {
        "event_id": event.id,
        "event_time": event.time,
        "event_key": event_key(event.check, event.step),
        "job": event.job[:128],
        "gpu_uuid": (named[0] if named else case.gpu_uuid)[:300],
    }


def _proven(ctx: Context, case: Case, decision: Decision, facts: Facts, inventory: Inventory) -> Case:
    event, member = facts.events[0].event, find(inventory, case.instance_id)
    assert member is not None  # a proof without a member is refused
    detail = {
        "event": event.id,
        "sha256": event.sha256,
        "event_time": event.time,
        "check": event.check,
        "step": event.step,
        "persistence": event.persistence,
        "sentence": event.sentence[:1000],
        "witnesses": list(facts.events[0].witnesses),
    }
    changes = {
        **_event_columns(case, facts),
        "group_name": member.group,
        "before": inventory_json(inventory),
        "gates": gates_json(decision),
    }
    case = ctx.store.set(case, step="proven", detail=detail, **changes)
    seen = {rank.gpu_uuid: rank.instance for rank in event.ranks}
    for gpu in ctx.ledger.returned_gpus(case.cluster, seen):
        ctx.telemetry.count("sdc_remediation_returned_gpus_total")
        ctx.store.note(case.id, "returned_hardware", {"gpu": gpu, "instance": seen[gpu]})
    return ctx.store.move(case, "settling", reason=facts.proof_reason)


def _by_mode(ctx: Context, case: Case, decision: Decision, facts: Facts, inventory: Inventory | None) -> Case | None:
    replacing, _ = ctx.decide("replace", case, inventory)
    wanted = ["quarantine"]
    # Below `approve` the request only shows what would be done, so it shows all of it.
    if decision.mode in ("observe", "recommend") or replacing.mode in ("approve", "auto"):
        wanted.append("replace")
    columns = _event_columns(case, facts)
    request = ctx.request_of(replace(case, **columns), columns["event_id"], *wanted)
    to = {
        "observe": "observed",
        "recommend": "recommended",
        "approve": "awaiting_approval",
        "auto": "containing",
    }[decision.mode]
    return ctx.store.move(
        case,
        to,
        reason=f"mode {decision.mode}: {decision.reason}",
        detail={"request": request, "replace_mode": replacing.mode, "replace_now": replacing.reason},
        request=request,
        gates=gates_json(decision, replacing),
        **columns,
    )


def _later(ctx: Context, case: Case, decision: Decision) -> None:
    changes: dict[str, Any] = {"next_at": ctx.clock() + ctx.config.worker.poll_seconds, "gates": gates_json(decision)}
    if decision.reason.partition(":")[0] != case.reason.partition(":")[0]:
        ctx.store.set(case, step="held", detail={"reason": decision.reason}, reason=decision.reason, **changes)
    else:
        ctx.store.set(case, **changes)


def remember_suspicion(ctx: Context, case: Case) -> None:
    """Remember the transient faults of a case that ends as `suspected`."""
    events, _ = ctx.proof(case)
    ctx.ledger.suspect(
        case,
        [
            PastEvent(item.event.id, item.event.epoch, item.event.step, gpu)
            for item in events
            for gpu in gpus(item.event, case.instance_id)
        ],
    )
