"""Carry out what a scheduler asks for, one committed request at a time.

What it does: `isolate` and `restore` ask a `Scheduler` for its next act, commit the exact request to the audit log,
perform it once, and commit what came of it, until the scheduler's own reading says that nothing is left. An act that
was never recorded (a crash) or whose outcome is unknown is not repeated blindly: the next reading shows whether it
took.
What it never does: more than `ACTS_A_ROUND` acts in one round, or one act on one target more than `TRIES` times in
one case.
Its place: `actions/isolate` calls `isolate` once the suspect's own agent was told; every gate has been asked just
before; `actions/give_back` calls `restore` once a case ends without a replacement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sdcwatch_remediation.actions.scheduler import Act, Done, Scheduler, SchedulerProblem, times
from sdcwatch_remediation.cases import Case
from sdcwatch_remediation.context import Context
from sdcwatch_remediation.records import Member

TRIES = 5
GIVEN_UP = "given up: "
"""How the reason begins where an act will not be tried again."""
ACTS_A_ROUND = 64
REFUSED_SECONDS = 10.0
"""Wait before an act that was refused (a PodDisruptionBudget, say) is asked for again; doubled each time."""

_Next = Callable[[tuple[Done, ...]], Act | None]


def isolate(ctx: Context, case: Case, member: Member, scheduler: Scheduler) -> str:
    """Do what isolating a node takes; return why it is not isolated yet, or an empty text when the reading shows it."""
    return _carry_out(ctx, case, scheduler, lambda done: scheduler.next_act(member, case.job, case.id, done))


def restore(ctx: Context, case: Case, member: Member, scheduler: Scheduler) -> str:
    """Give back what this case took; return why that is not done yet, or an empty text when nothing of ours is left."""
    return _carry_out(ctx, case, scheduler, lambda done: scheduler.next_restore(member, case.id, done))


def history(ctx: Context, case: Case, scheduler: str) -> tuple[Done, ...]:
    """Return the acts of one scheduler that this case requested before, from the audit log, oldest first."""
    found: list[Done] = []
    for line in ctx.store.timeline(case.id):
        detail = line["detail"]
        if detail.get("scheduler") != scheduler:
            continue
        if line["step"] == "act_requested":
            found.append(Done(detail["act"], detail["target"], "", at=line["time"]))
        elif line["step"] == "act_answered" and found:
            found[-1] = replace(found[-1], outcome=detail["outcome"], message=detail.get("message", ""))
    return tuple(found)


def _carry_out(ctx: Context, case: Case, scheduler: Scheduler, next_act: _Next) -> str:
    for _ in range(ACTS_A_ROUND):
        if stop := ctx.stop():
            return stop
        done = history(ctx, case, scheduler.name)
        try:
            act = next_act(done)
        except SchedulerProblem as error:
            return f"{scheduler.name}: {error}"
        if act is None:
            return ""
        if wait := _not_now(ctx, scheduler, act, done):
            return wait
        about = {"scheduler": scheduler.name, "act": act.name, "target": act.target}
        ctx.store.note(case.id, "act_requested", {**about, "request": act.request})
        result = scheduler.perform(act)
        answer = {"outcome": result.outcome.value, "code": result.code, "message": result.message}
        ctx.store.note(case.id, "act_answered", {**about, **answer})
        ctx.telemetry.count("sdc_remediation_provider_calls_total", act.name, result.code or result.outcome.value)
        if result.outcome.value != "accepted":
            return f"{scheduler.name}: {act.name} of {act.target} was {result.outcome.value}: {result.message}"[:500]
    return f"{scheduler.name}: goes on in the next round"


def _not_now(ctx: Context, scheduler: Scheduler, act: Act, done: tuple[Done, ...]) -> str:
    """Why an act that was tried before is not tried again, or not yet."""
    before = [earlier for earlier in done if (earlier.name, earlier.target) == (act.name, act.target)]
    what = f"{scheduler.name}: {act.name} of {act.target}"
    if len(before) >= TRIES:
        said, what = before[-1].message, f"{GIVEN_UP}{what} was tried {TRIES} times and"
        return f"{what} is refused: {said}"[:600] if said else f"{what} does not show"
    refused = times(done, act.name, act.target, "refused")
    if refused and before[-1].outcome == "refused":
        due = before[-1].at + REFUSED_SECONDS * 2 ** (refused - 1)
        if ctx.clock() < due:
            return f"{what} was refused: {before[-1].message}"[:500]
    return ""
