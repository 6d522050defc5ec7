"""The gradient checks: equal bits after the all-reduce, and norms before it.

`gradient_checksum` sees the reduce path and can never name a rank: a rank that forwards a corrupted chunk makes the
healthy ranks behind it differ, even most of them. `gradient_norm` only hints. Flow: columns -> **gradient** -> engine.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from statistics import median

from sdcwatch.verdict.columns import Columns
from sdcwatch.verdict.group import Group
from sdcwatch.verdict.history import History
from sdcwatch.verdict.outcome import Outcome, lasting, still_apart
from sdcwatch.verdict.partition import Partition, outside, product, splits
from sdcwatch.verdict.records import (
    CLEAN,
    CODE,
    DIFFERS,
    GRADIENT_CHECKSUM,
    INCONCLUSIVE,
    REDUCE,
    SOFTWARE,
    UNDEFINED,
    Verdict,
)
from sdcwatch.verdict.sentences import capital, listing, spread, who
from sdcwatch.verdict.signs import WORDS, of_gradient

#: MAD -> standard deviation of a normal distribution.
_MAD_SCALE = 1.4826
#: A spread below this share of the median is measurement noise, not a scale to count outliers by.
_RELATIVE_FLOOR = 0.05
_ABSOLUTE_FLOOR = 1e-30


def judge_gradient(history: History, group: Group, step: int, columns: Columns, clean_before: int | None) -> Outcome:
    """Compares the reduced gradients of one step.

    Args:
        history: as the weight check of the same row left it.
        clean_before: newest step whose state is clean if this gradient is not.
    """
    if columns.absent("reduced") or columns.labels("schema"):
        return Outcome("skipped:disabled", (), replace(history, gradient_clean_since=None))
    if all_nonfinite(columns):
        return Outcome(UNDEFINED, (), replace(history, gradient_clean_since=None))
    part = _partition(columns)
    kept = lasting(still_apart(history.opened(GRADIENT_CHECKSUM), part, group), step)
    if not part:
        since = history.gradient_clean_since
        after = replace(history, gradient=part, gradient_clean_since=step if since is None else since)
        return Outcome(CLEAN, (), after.with_open(GRADIENT_CHECKSUM, ()), part)
    verdicts = kept
    if splits(history.gradient or (), part):
        signs = of_gradient(columns, history.signs)
        if history.gradient is None:
            signs = (*signs, "first_check")
        verdicts = (*kept, _mismatch(group, step, columns, outside(part, group), signs, clean_before))
    after = replace(history, gradient=part, gradient_clean_since=None).with_open(GRADIENT_CHECKSUM, verdicts)
    return Outcome(DIFFERS, verdicts, after, part)


def gradient_differs(columns: Columns) -> bool:
    """Whether the reduced gradients of these rows were measured, may be judged, and differ."""
    return not columns.absent("reduced") and not all_nonfinite(columns) and bool(_partition(columns))


def _partition(columns: Columns) -> Partition:
    return product(columns.labels("reduced"), columns.labels("reduced_nonfinite"))


def all_nonfinite(columns: Columns) -> bool:
    """Whether every rank's reduced gradient holds Inf or NaN: such a step is counted and never judged."""
    return columns.rows[0].reduced_nonfinite == 1 and not columns.labels("reduced_nonfinite")


def _mismatch(
    group: Group,
    step: int,
    columns: Columns,
    differing: tuple[int, ...],
    signs: tuple[str, ...],
    clean_before: int | None,
) -> Verdict:
    differ = "different values" if len(differing) == group.size else "another value than the majority"
    if signs:
        why = listing([WORDS[sign] for sign in signs])
        sentence = f"The reduced gradient differs between ranks, and with it {why}: software, no node is blamed."
    else:
        sentence = (
            f"{capital(who(group, differing))} got {differ} from the all-reduce of step {step}; any rank may have "
            "passed on a wrong chunk, so nobody can be named."
        )
    return Verdict(
        step=step,
        check=GRADIENT_CHECKSUM,
        kind=SOFTWARE if signs else INCONCLUSIVE,
        differing=differing,
        candidates=() if signs else tuple(range(group.size)),
        path=CODE if signs else REDUCE,
        contains=not signs,
        last_clean_step=clean_before,
        sentence=sentence,
        evidence={"signs": list(signs), "reduced": spread(columns.values("reduced"))},
    )


@dataclass(frozen=True, slots=True)
class NormHint:
    """What the local gradient norms hint at; never a verdict.

    Attributes:
        result: `clean`, `undefined` (some norm is not finite) or `skipped:<reason>`.
        deviations: robust deviation of each rank from the peers' median, in MADs; inf where it is not finite; empty
            where norms are not compared.
        origin: the strict minority of ranks whose local gradient holds Inf or NaN.
    """

    result: str
    deviations: tuple[float, ...]
    origin: tuple[int, ...]


def judge_norms(group: Group, columns: Columns) -> NormHint:
    """Compares local norms across ranks (median and MAD), and finds where an Inf or NaN started.

    Norms are not compared across different environments: other kernels give other rounding by design.
    """
    flags = columns.integers("local_nonfinite")
    origin = tuple([rank for rank, flag in enumerate(flags) if flag == 1]) if 1 in flags else ()
    hint = origin if 2 * len(origin) < group.size else ()
    norms = columns.column("local_norm")
    if None in norms or columns.labels("environment"):
        return NormHint("skipped:disabled", (), hint)
    known: tuple[float, ...] = norms
    finite = sorted(filter(math.isfinite, known))
    if not finite:
        return NormHint(UNDEFINED, (math.inf,) * group.size, hint)
    worked = finite if 0.0 not in finite else [n for n in finite if n] or [0.0]
    center = median(worked)
    middle = bisect_left(worked, center)
    # Two runs that rise, away from the center to both sides: sorting them again is one merge.
    mad = _MAD_SCALE * median([center - n for n in reversed(worked[:middle])] + [n - center for n in worked[middle:]])
    scale = max(mad, _RELATIVE_FLOOR * abs(center), _ABSOLUTE_FLOOR)
    # A norm of zero is a batch that the loop dropped on that rank: it neither counts nor stands out.
    deviations = tuple([abs(n - center) / scale if n else 0.0 for n in known])
    if len(finite) < group.size:
        deviations = tuple([d if math.isfinite(d) else math.inf for d in deviations])
    clean = len(finite) == group.size and not origin
    return NormHint(CLEAN if clean else UNDEFINED, deviations, hint)
