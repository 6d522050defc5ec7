"""What came of one case: sdcwatch's answer and its peers', each held against what was really done.

Pure: it reads the answers of all ranks and gives plain data. A peer that names a healthy rank is scored as one, too.
Flow: training -> **score** -> guarantees, document.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.campaign.cases import COMPUTE, REDUCE, Case

#: Outcomes. `masked`: the fault changed no bit of what a check could see, nor of what was trained on.
NAMED, INCONCLUSIVE, SOFTWARE, HINT, MISSED, MASKED, WRONG = (
    "named", "inconclusive", "software", "hint", "missed", "masked", "wrong blame",
)  # fmt: skip
#: The run itself failed on some rank: no outcome, and the campaign fails.
BROKEN = "broken"
#: A rank's local norm that is so many times above or below the median of all ranks is an alarm of the threshold.
NORM_TIMES = 3.0
#: As in docs/decisions.md: the bound of allreduce_conservation, and the unit it is counted in.
_BOUND, _HALF_EPS = 8.0, 2.0**-24
_GROUPS = 4
#: One element that is off by so many bounds cannot hide: a weight of the checksum is at least one half.
CLEAR = 2.1


@dataclass(frozen=True, slots=True)
class Truth:
    """What was really done: steps that were struck with effect, elements and size of the largest change.

    Attributes:
        times_bound: the largest change over the bound of `allreduce_conservation`.
        loud_step: the first step that changed one element by more than `CLEAR` bounds; None where none did.
    """

    steps: tuple[int, ...]
    elements: int
    error: float
    times_bound: float
    loud_step: int | None


def truth_of(case: Case, answers: Sequence[dict[str, Any]]) -> Truth:
    """Reads the truth from all ranks' answers."""
    strikes = [s for answer in answers for s in answer["strikes"] if s[1]]
    steps = {s[0] for s in strikes}
    if case.location in (*COMPUTE, "input_batch"):
        steps = {step for answer in answers for step in answer["changed"]}
    errors = [(s[2] if math.isfinite(s[2]) else math.inf, s[1], s[0]) for s in strikes]
    error, elements, step = max(errors, default=(0.0, 0, case.step))
    loud = [at for size, count, at in errors if count == 1 and _times_bound(case, answers, size, at) > CLEAR]
    times = _times_bound(case, answers, error, step)
    return Truth(tuple(sorted(steps)), elements, error, times, min(loud, default=None))


def _times_bound(case: Case, answers: Sequence[dict[str, Any]], error: float, step: int) -> float:
    """The change of the reduced gradient over the bound of allreduce_conservation in its group of parameters."""
    if case.location not in REDUCE or step >= len(answers[0]["norms"]):
        return 0.0
    count = len(answers[0]["norms"][step])
    index = case.parameter % count
    group = [i for i in range(count) if i * _GROUPS // count == index * _GROUPS // count]
    norms = [math.sqrt(sum(a["norms"][step][i] ** 2 for i in group)) for a in answers]
    bound = _BOUND * math.sqrt(case.world + 1) * _HALF_EPS * statistics.fmean(norms)
    return error / bound if bound else math.inf


def score(case: Case, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of the result: outcome, when it was seen, by what, and the peers' outcomes."""
    truth = truth_of(case, answers)
    verdicts = answers[0]["verdicts"]
    bad = set(range(case.world)) if case.location == "reduced_gradient_all" else {case.rank}
    named = {rank for v in verdicts for rank in v["suspects"]}
    first = next((v for v in verdicts if v["kind"] != "undefined"), None)
    outcome = _outcome(case, truth, verdicts, named - bad, answers)
    return {
        "outcome": outcome,
        "seen_step": None if first is None else first["step"],
        "first": first and {k: first[k] for k in ("check", "kind", "path", "suspects", "contains", "sentence")},
        "struck": list(truth.steps),
        "elements": truth.elements,
        "error": _plain(truth.error),
        "times_bound": _plain(truth.times_bound),
        "loud_step": truth.loud_step,
        "contained": any(v["contains"] for v in verdicts),
        "agreed": all(a["verdicts"] == verdicts for a in answers),
        "failures": sum(a["failures"] for a in answers),
        "software": [v["sentence"] for v in verdicts if v["kind"] == "software"],
        "peers": _peers(case, truth, answers),
    }


def _plain(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None


def _outcome(
    case: Case, truth: Truth, verdicts: Sequence[dict[str, Any]], healthy: set[int], answers: Sequence[dict[str, Any]]
) -> str:
    kinds = {v["kind"] for v in verdicts}
    if healthy or (case.location == "reduced_gradient_all" and any(v["suspects"] for v in verdicts)):
        return WRONG
    if "attributed" in kinds:
        return NAMED
    if "inconclusive" in kinds:
        return INCONCLUSIVE
    if "software" in kinds:
        return SOFTWARE
    if not truth.steps:
        return MASKED
    if any(a["outlier"] or a["anomalies"] for a in answers) or any(
        "nondeterministic" in k for k in answers[0]["skipped"]
    ):
        return HINT
    return MISSED


def _peers(case: Case, truth: Truth, answers: Sequence[dict[str, Any]]) -> dict[str, str]:
    return {"parity": _answer(case, truth, _parity(answers)), "norm": _answer(case, truth, _norm(answers))}


def score_sdcguard(case: Case, struck: Sequence[int], answers: Sequence[Sequence[dict[str, Any]]]) -> str:
    """What sdcguard made of the same case; an alarm that lists every rank names nobody.

    Args:
        struck: steps that were struck with effect.
        answers: its alerts on each rank.
    """
    named = {r for alerts in answers for alert in alerts if len(alert["named"]) < case.world for r in alert["named"]}
    spoke = any(answers)
    return _answer(case, Truth(tuple(struck), 0, 0.0, 0.0, None), named or (set() if spoke else None))


def _answer(case: Case, truth: Truth, named: set[int] | None) -> str:
    """A peer's outcome: None is silence, an empty set an alarm that names nobody."""
    if named is None:
        return MISSED if truth.steps else MASKED
    if named - {case.rank} or (named and case.location == "reduced_gradient_all"):
        return WRONG
    return NAMED if named else INCONCLUSIVE


def _parity(answers: Sequence[dict[str, Any]]) -> set[int] | None:
    """Weights compared with rank 0's after each step: whoever differs at the first mismatch is named."""
    for step in range(len(answers[0]["weights"])):
        differ = {r for r, a in enumerate(answers) if a["weights"][step] != answers[0]["weights"][step]}
        if differ:
            return differ
    return None


def _norm(answers: Sequence[dict[str, Any]]) -> set[int] | None:
    """Local gradient norms against their median, at each step."""
    for step in range(len(answers[0]["norms"])):
        norms = [math.sqrt(sum(n * n for n in a["norms"][step])) for a in answers]
        middle = statistics.median(n if math.isfinite(n) else math.inf for n in norms)
        odd = {r for r, n in enumerate(norms) if not middle / NORM_TIMES <= n <= middle * NORM_TIMES}
        if odd:
            return odd
    return None
