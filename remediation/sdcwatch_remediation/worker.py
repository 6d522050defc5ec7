"""Move every open case as far as it goes, round after round.

What it does: in each round, for each open case: apply the deadline, take steps until there is nothing to do, and look
whether watched instances report something new. One broken case never stops the others.
What it never does: decide or act itself; `casework` and `actions/*` do.
Its place: one thread of the service; `wake()` starts a round at once, for a delivery that has just been committed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sdcwatch_remediation.actions.give_back import give_back, look_again
from sdcwatch_remediation.actions.handing_over import hand_over, watch
from sdcwatch_remediation.actions.isolate import contain, quarantine
from sdcwatch_remediation.actions.replace import asked_already, prove_replacement, replace
from sdcwatch_remediation.actions.resume import release
from sdcwatch_remediation.cases import Case
from sdcwatch_remediation.casework import observe, prove, receive, settle
from sdcwatch_remediation.context import Context, find
from sdcwatch_remediation.errors import Conflict, StoreUnavailable
from sdcwatch_remediation.states import READ_BEFORE_DEADLINE, STATES

log = logging.getLogger(__name__)

Step = Callable[[Context, Case], Case | None]

STEPS: dict[str, Step] = {
    "received": receive,
    "proving": prove,
    "unproven": prove,
    "settling": settle,
    "observed": observe,
    "recommended": observe,
    "awaiting_approval": observe,
    "containing": contain,
    "quarantining": quarantine,
    "replacing": replace,
    "proving_replacement": prove_replacement,
    "handing_over": hand_over,
    "handed_over": watch,
    "resuming": release,
    "suspected": release,
    "rejected": release,
    "giving_back": give_back,
    "not_given_back": look_again,
}
"""What is done in each state; `frozen` waits for a person, terminal states for nobody."""

# A case passes a dozen states at most, so more steps in one round mean a loop in the table.
STEPS_A_ROUND = 20


class Worker:
    """The thread that moves cases."""

    def __init__(self, context: Context) -> None:
        """Use one context; `start` begins the rounds, or call `round` yourself."""
        self.context = context
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def round(self) -> None:
        """Move every open case as far as it goes now.

        Raises:
            StoreUnavailable: the database could not be used; the next round goes on where this one ended.
        """
        if not self.context.lease.hold():
            # Another process moves the cases; this one stands by and takes over when that one's lease runs out.
            self.context.telemetry.round_ended(self.context.clock())
            return
        self.context.seen.at = 0.0
        for case in self.context.store.cases(open_only=True):
            try:
                self._advance(case)
            except Conflict as error:
                log.info("%s: %s", case.id, error)
            except StoreUnavailable:
                raise
            except Exception:  # one broken case must not stop the others; it is counted and seen, and tried again
                log.exception("%s: unexpected error in state %s", case.id, case.state)
                self.context.telemetry.count("sdc_remediation_errors_total", "case")
        try:
            self._look_back()
            self._watch()
        except Conflict as error:
            log.info("%s", error)
        self.context.store.remember()
        self.context.telemetry.round_ended(self.context.clock())

    def _advance(self, case: Case) -> None:
        ctx = self.context
        for _ in range(STEPS_A_ROUND):
            now = ctx.clock()
            state = STATES[case.state]
            overdue = case.deadline is not None and now > case.deadline
            step = STEPS.get(case.state)
            # A request that was not refused may have its effect yet: that is read, whatever the time.
            reads = case.state in READ_BEFORE_DEADLINE or (case.state == "replacing" and asked_already(ctx, case))
            if overdue and not reads:
                self._expire(case, state.overdue)
                return
            if step is None or (case.next_at > now and not overdue) or not ctx.lease.hold():
                return
            moved = step(ctx, case)
            if moved is None:
                if overdue and case.state in READ_BEFORE_DEADLINE:
                    self._expire(case, state.overdue)
                return
            case = moved
        raise RuntimeError(f"{case.id} took {STEPS_A_ROUND} steps in one round")

    def _expire(self, case: Case, to: str) -> None:
        reason = f"{case.state} for longer than it may be; last: {case.reason[:600]}{case.mark_left}"
        if case.state == "replacing":
            self.context.ledger.leave(case, to, reason=reason[:1000])
        else:
            self.context.store.move(case, to, reason=reason[:1000])

    def _look_back(self) -> None:
        ctx = self.context
        unsettled = ctx.ledger.unsettled()
        inventory = ctx.glance() if unsettled else None
        for case in unsettled:
            if heir := ctx.replaced_elsewhere(case, inventory):
                ctx.ledger.entomb(case, heir.instance_id)
                ctx.store.note(case.id, "replacement_proven", {"replacement": heir.instance_id, "after": case.state})

    def _watch(self) -> None:
        ctx = self.context
        watched = ctx.store.watched()
        inventory = ctx.glance() if watched else None
        for case in watched:
            suspect = find(inventory, case.instance_id)
            if inventory is None or suspect is None:
                continue
            peers = [
                member
                for member in inventory.members
                if member.group == suspect.group and member.status == "Running" and member != suspect
            ]
            for answer in ctx.agents.events(peers, case.instance_id, case.event_time):
                newer = [
                    copy.event
                    for copy in answer.copies
                    if copy.event.time > case.event_time and copy.event.blames(case.instance_id)
                ]
                if newer and ctx.store.reopen(case, newer[-1].id, check=newer[-1].check):
                    self.wake()
                    break

    def wake(self) -> None:
        """Start the next round now."""
        self._wake.set()

    def start(self) -> None:
        """Begin the rounds in a thread of their own."""
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    def stop(self, timeout_seconds: float = 10.0) -> bool:
        """End after the step that is under way; what it did is recorded before. Returns whether it has ended."""
        self._ending.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while not self._ending.is_set():
            self._wake.clear()
            try:
                self.round()
            except Exception as error:  # the loop outlives any error: a service without a worker would look alive
                level = logging.WARNING if isinstance(error, StoreUnavailable) else logging.ERROR
                log.log(level, "a round ended early: %s", error, exc_info=level == logging.ERROR)
                self.context.telemetry.count("sdc_remediation_errors_total", "round")
            self._wake.wait(self.context.config.worker.poll_seconds)
