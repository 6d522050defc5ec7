"""Conservation: is the reduced gradient the average of what the ranks computed?

It sees a wrong result of the reduce even when it is the same on every rank, where comparing replicas is blind, and it
says which ranks hold one. It never names a suspect: any rank may have passed on a wrong chunk. Where the replicas
differ too, `gradient_checksum` speaks, and this check only adds to its evidence. Flow: columns -> **conservation** ->
engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sdcwatch.observation import CONSERVATION_GROUPS, SkipReason
from sdcwatch.verdict.columns import Columns
from sdcwatch.verdict.gradient import all_nonfinite
from sdcwatch.verdict.group import Group
from sdcwatch.verdict.history import History
from sdcwatch.verdict.outcome import Outcome, lasting
from sdcwatch.verdict.partition import labels
from sdcwatch.verdict.records import (
    ALLREDUCE_CONSERVATION,
    CLEAN,
    CODE,
    DIFFERS,
    INCONCLUSIVE,
    REDUCE,
    SOFTWARE,
    UNDEFINED,
    Verdict,
)
from sdcwatch.verdict.sentences import listing

#: The bound, in units of what rounding may bring (docs/decisions.md says how often a healthy reduce may pass it).
BOUND = 8.0

_WORDS = {
    "first_check": "was so from the first check of this epoch on",
    "gradient_edits": "came with code that wrote to gradients after they were computed",
}


@dataclass(frozen=True, slots=True)
class Balance:
    """What the sums of one exchange show.

    Attributes:
        wrong: ranks whose reduced gradient is not the average.
        group: the group of parameters that is furthest off.
        excess: its error over its bound; infinite where a sum is not finite.
        bound: the bound there, in the unit of the gradients.
    """

    wrong: tuple[int, ...]
    group: int = 0
    excess: float = 0.0
    bound: float = 0.0


def judge_conservation(
    gradient: Outcome, group: Group, step: int, columns: Columns, clean_before: int | None
) -> tuple[Outcome | None, Outcome]:
    """Judges the sums of one exchange.

    Args:
        gradient: what `gradient_checksum` made of the same exchange.
        clean_before: newest step whose state is clean if this gradient is not.

    Returns:
        The outcome (None where the check was not due or is not defined in this run, which is no skip), and the
        gradient's outcome with the ranks that hold a wrong result in the evidence of its new verdicts.
    """
    history = gradient.history
    reason = _reason(columns)
    if columns.absent("conservation") or reason == "comm_hook":
        return None, gradient
    if reason is not None:
        return Outcome(UNDEFINED if reason == UNDEFINED else f"skipped:{reason}", (), history), gradient
    found = balance(columns)
    if found is None:
        return Outcome(UNDEFINED, (), history), gradient
    events = history.opened(ALLREDUCE_CONSERVATION)
    if not found.wrong:
        edits = columns.integers("gradient_edits")
        after = replace(history, conserved=True, conserved_step=step, gradient_edits=edits)
        after = after.with_open(ALLREDUCE_CONSERVATION, ())
        return Outcome(CLEAN, (), after), gradient
    if gradient.partition:
        told = tuple([_told(v, found) if v.new else v for v in gradient.verdicts])
        after = replace(history, conserved=False)
        return Outcome(DIFFERS, lasting(events, step), after), replace(gradient, verdicts=told)
    verdicts = lasting(events, step)
    if not events:
        verdicts = (_verdict(gradient, group, step, columns, found, clean_before),)
    spoiled = history.spoiled or any(v.contains for v in verdicts)
    after = replace(history, conserved=False, spoiled=spoiled).with_open(ALLREDUCE_CONSERVATION, verdicts)
    return Outcome(DIFFERS, verdicts, after), gradient


def _reason(columns: Columns) -> str | None:
    states = columns.distinct("conservation")
    if states == {1}:
        if columns.labels("schema"):
            return "disabled"
        unequal = 1 in columns.distinct("local_nonfinite") or all_nonfinite(columns)
        return UNDEFINED if unequal else None
    codes = [code for code in states if code is not None and -len(SkipReason.NAMES) <= code < 0]
    # The reason that stands first in the list of reasons, so that all ranks say the same one.
    return SkipReason.name(max(codes)) if codes else "disabled"


def balance(columns: Columns) -> Balance | None:
    """Compares the sums of all ranks, group by group; None where a local sum is not a finite number."""
    wrong: set[int] = set()
    worst = Balance(())
    for group in range(CONSERVATION_GROUPS):
        average, unit = (_average(columns.column(f"{name}_{group}")) for name in ("local_sum", "reduce_noise"))
        if average is None or unit is None:
            return None
        # Replicas that agree hold one value: one comparison, whatever their number.
        reduced = f"reduced_sum_{group}"
        for value in columns.distinct(reduced):
            error = math.nan if value is None else abs(value - average)
            if error <= BOUND * unit:
                continue
            # NaN equals nothing, itself neither: its holders are all that hold a NaN.
            column, unequal = columns.column(reduced), value != value
            wrong.update(r for r, held in enumerate(column) if held == value or (unequal and held != held))
            excess = error / (BOUND * unit) if unit and math.isfinite(error) else math.inf
            if excess > worst.excess:
                worst = Balance((), group, excess, BOUND * unit)
    return replace(worst, wrong=tuple(sorted(wrong)))


def _average(values: Sequence[float | None]) -> float | None:
    """The mean of all ranks, the same bits on every rank; None where one is absent or not finite."""
    if None in values:
        return None
    mean = sum(values) / len(values)  # type: ignore[arg-type]
    return mean if math.isfinite(mean) else None


def _evidence(found: Balance) -> dict[str, object]:
    times = f"{found.excess:.3g}"
    return {"ranks": list(found.wrong), "group": found.group, "times_bound": times, "bound": f"{found.bound:.3g}"}


def _told(verdict: Verdict, found: Balance) -> Verdict:
    return replace(verdict, evidence={**verdict.evidence, "not_conserved": _evidence(found)})


def _verdict(
    gradient: Outcome, group: Group, step: int, columns: Columns, found: Balance, clean_before: int | None
) -> Verdict:
    history = gradient.history
    edits = columns.integers("gradient_edits")
    signs = ("first_check",) if history.conserved is None else _edited(history.gradient_edits, edits)
    everyone = tuple(range(group.size))
    what = (
        f"The reduced gradient of step {step} is the same on all ranks and is not the average of their local ones "
        f"({found.excess:.3g} times the bound)"
    )
    if signs:
        sentence = f"{what}; this {listing([_WORDS[sign] for sign in signs])}: software, no node is blamed."
    else:
        sentence = (
            f"{what}: the reduce itself went wrong, and any rank may have passed on a wrong chunk, so nobody can be "
            "named."
        )
    return Verdict(
        step=step,
        check=ALLREDUCE_CONSERVATION,
        kind=SOFTWARE if signs else INCONCLUSIVE,
        differing=everyone,
        candidates=() if signs else everyone,
        path=CODE if signs else REDUCE,
        contains=not signs,
        last_clean_step=_clean_through(history, clean_before),
        sentence=sentence,
        evidence={"signs": list(signs), **_evidence(found)},
    )


def _clean_through(history: History, clean_before: int | None) -> int | None:
    """Steps since the last run of this check may have been reduced wrong in the same way."""
    if clean_before is None or history.conserved_step is None:
        return None
    return min(clean_before, history.conserved_step)


def _edited(before: Sequence[int | None], now: Sequence[int | None]) -> tuple[str, ...]:
    """DDP moves the counters of every rank alike and at every step alike; whatever else does is the user's code."""
    return ("gradient_edits",) if labels(now) or (before and tuple(before) != tuple(now)) else ()
