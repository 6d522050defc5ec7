"""Conservation's verdict: a wrong result that all ranks share is seen, nobody is named, and code is not hardware."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sdcwatch.observation import SkipReason
from sdcwatch.testing.simulated_group import SimulatedGroup, group_of
from sdcwatch.verdict import Judgement, Verdict, checked_through

CHECK = "allreduce_conservation"


def run(*layout: int, healthy: int = 3) -> SimulatedGroup:
    group = SimulatedGroup(group_of(*layout))
    group.steps(healthy)
    return group


def only(judgement: Judgement) -> Verdict:
    assert len(judgement.verdicts) == 1, judgement.verdicts
    return judgement.verdicts[0]


def everywhere(size: int, value: float, group: int = 2) -> dict[str, dict[int, float]]:
    return {f"reduced_sum_{group}": dict.fromkeys(range(size), value)}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_same_wrong_result_on_all_ranks_contains_and_names_nobody(size: int) -> None:
    """Replicas agree, so only the sums can tell; all ranks differ from what they should hold, all are candidates."""
    group = run(*(1,) * size)
    verdict = only(group.step(everywhere(size, 3.1)))
    assert (verdict.check, verdict.kind, verdict.path, verdict.contains) == (CHECK, "inconclusive", "reduce", True)
    assert (verdict.suspects, verdict.differing, verdict.candidates) == ((), tuple(range(size)), tuple(range(size)))
    assert verdict.last_clean_step == 2
    assert verdict.evidence["group"] == 2
    assert "is the same on all ranks and is not the average" in verdict.sentence


def test_rounding_within_the_bound_is_clean_and_beyond_it_is_not() -> None:
    """The bound is eight units of the rounding that the ranks announced, in the mean."""
    group = run(1, 1, 1)
    unit = 1e-8 * (1 + 2 + 3) / 3
    assert group.step(everywhere(3, 3.0 + 7.9 * unit)).verdicts == ()
    assert only(group.step(everywhere(3, 3.0 + 8.1 * unit))).check == CHECK


def test_where_replicas_differ_too_there_is_one_event_that_says_who_holds_the_wrong_result() -> None:
    """One fault, one event: gradient_checksum speaks and the sums add what only they know."""
    group = run(1, 1, 1, 1)
    judgement = group.step({"reduced": {0: 1, 1: 1, 2: 1}, "reduced_sum_0": dict.fromkeys((0, 1, 2), 9.0)})
    verdict = only(judgement)
    assert verdict.check == "gradient_checksum"
    assert verdict.differing == (3,), "the healthy rank is the minority here"
    assert verdict.evidence["not_conserved"]["ranks"] == [0, 1, 2]
    assert dict(judgement.checks)[CHECK] == "differs"


def test_a_difference_that_lasts_is_one_event_and_no_later_step_is_checked() -> None:
    """Wrong weights that are equal everywhere look clean to every other check, so the epoch stays unchecked."""
    group = run(1, 1, 1)
    assert checked_through(group.history) == 1
    assert only(group.step(everywhere(3, 4.0))).new
    assert not only(group.step(everywhere(3, 5.0))).new
    group.steps(4)
    assert checked_through(group.history) == 2
    assert only(group.step(everywhere(3, 4.0))).new


def test_from_the_first_check_on_it_is_software() -> None:
    """A reduce that never was an average (a subclass, a patched reducer) is no fault and stops no run."""
    group = SimulatedGroup(group_of(1, 1, 1))
    verdict = only(group.step(everywhere(3, 4.0)))
    assert (verdict.kind, verdict.contains, verdict.path) == ("software", False, "code")
    assert "first check" in verdict.sentence


@pytest.mark.parametrize("edits", [{1: 2}, {0: 2, 1: 2, 2: 2}], ids=["one rank", "all ranks"])
def test_gradients_that_code_wrote_to_before_the_reduce_are_software(edits: dict[int, int]) -> None:
    """Version counters tell: DDP moves them alike on all ranks and at all steps."""
    verdict = only(run(1, 1, 1).step({**everywhere(3, 4.0), "gradient_edits": edits}))
    assert (verdict.kind, verdict.contains) == ("software", False)
    assert "code that wrote to gradients" in verdict.sentence


@pytest.mark.parametrize(
    ("faults", "result"),
    [
        ({"local_nonfinite": {1: 1}, "local_sum_0": {1: math.nan}}, "undefined"),
        ({"local_sum_1": {1: math.inf}}, "undefined"),
        ({"reduced_nonfinite": dict.fromkeys(range(3), 1)}, "undefined"),
        ({"conservation": {2: SkipReason.code("undefined")}}, "undefined"),
        ({"conservation": {2: None}}, "skipped:disabled"),
        ({"conservation": {2: 77}}, "skipped:disabled"),
        ({"conservation": dict.fromkeys(range(3), SkipReason.code("error"))}, "skipped:error"),
    ],
)
def test_what_is_not_defined_is_counted_and_never_judged(faults: dict[str, Any], result: str) -> None:
    """Inf, NaN, a gradient nobody saw before the reduce, a rank that did not measure."""
    judgement = run(1, 1, 1).step({**everywhere(3, 4.0), **faults})
    assert [v for v in judgement.verdicts if v.check == CHECK] == []
    assert dict(judgement.checks)[CHECK] == result


def test_under_a_comm_hook_it_is_not_due() -> None:
    """Neither a run nor a skip: it is not defined for this run at all."""
    hooked = {"conservation": dict.fromkeys(range(3), SkipReason.code("comm_hook"))}
    assert CHECK not in dict(SimulatedGroup(group_of(1, 1, 1)).step(hooked).checks)


def test_a_sum_that_is_no_number_on_one_rank_is_wrong_there() -> None:
    """NaN came out of the reduce on one rank only: the gradient differs, and the sums say where."""
    judgement = run(1, 1, 1).step({"reduced": {1: 7}, "reduced_nonfinite": {1: 1}, "reduced_sum_3": {1: math.nan}})
    assert only(judgement).evidence["not_conserved"]["ranks"] == [1]
