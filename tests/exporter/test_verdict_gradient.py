"""The gradient checks: the reduce path is seen and never blamed on a rank; norms only hint."""

from __future__ import annotations

import math

import pytest
from sdcwatch.testing.simulated_group import SimulatedGroup, group_of
from sdcwatch.verdict import Judgement, Verdict, checked_through


def run(*layout: int, healthy: int = 2) -> SimulatedGroup:
    group = SimulatedGroup(group_of(*layout))
    group.steps(healthy)
    return group


def only(judgement: Judgement) -> Verdict:
    assert len(judgement.verdicts) == 1, judgement.verdicts
    return judgement.verdicts[0]


def test_a_mismatch_contains_and_names_nobody() -> None:
    """One rank got other bits back: contained before the step, all ranks are candidates."""
    group = run(1, 1, 1, 1)
    verdict = only(group.step({"reduced": {3: 1}}))
    assert (verdict.check, verdict.kind, verdict.path) == ("gradient_checksum", "inconclusive", "reduce")
    assert (verdict.suspects, verdict.differing, verdict.candidates) == ((), (3,), (0, 1, 2, 3))
    assert (verdict.contains, verdict.last_clean_step, verdict.trust_needed) == (True, 1, "checked")
    assert checked_through(group.history) == 1, "the row that shows it also proves the state before it"


def test_without_a_majority_all_ranks_differ() -> None:
    """Two replicas: neither is the other's reference."""
    assert only(run(1, 1).step({"reduced": {1: 1}})).differing == (0, 1)


@pytest.mark.parametrize("size", [3, 5, 8])
def test_a_corrupt_ring_forwarder_is_never_named_nor_are_its_victims(size: int) -> None:
    """Simulated ring: a chunk corrupted at any hop reaches the ranks behind it, and nobody is named."""
    for source in range(size):
        for hops in range(1, size):
            behind = {(source + hop) % size: 6 for hop in range(1, hops + 1)}
            verdict = only(run(*(1,) * size).step({"reduced": behind}))
            assert (verdict.suspects, verdict.candidates) == ((), tuple(range(size)))


def test_not_finite_everywhere_is_undefined() -> None:
    """Every rank's reduced gradient holds Inf or NaN: counted, never judged, and never a clean step."""
    group = run(1, 1, 1)
    judgement = group.step({"reduced_nonfinite": dict.fromkeys(range(3), 1), "reduced": {1: 1}})
    assert (judgement.verdicts, dict(judgement.checks)["gradient_checksum"]) == ((), "undefined")
    assert (judgement.code, group.history.gradient_clean_since) == (1, None)


def test_not_finite_on_some_ranks_is_a_mismatch() -> None:
    """A NaN that only some ranks got back is a difference."""
    assert only(run(1, 1, 1).step({"reduced_nonfinite": {1: 1}})).kind == "inconclusive"


@pytest.mark.parametrize("sign", [{"environment": {0: 5}}, {"loss_scale": {0: 2.0}}, {"compile_count": {0: 3}}])
def test_a_sign_of_software_stops_no_run(sign: dict[str, dict[int, float]]) -> None:
    """Where the ranks demonstrably run different things, a differing gradient is software."""
    judgement = run(1, 1, 1).step({"reduced": {0: 1}, **sign})
    found = [v for v in judgement.verdicts if v.check == "gradient_checksum"]
    assert [(v.kind, v.contains) for v in found] == [("software", False)]


def test_an_old_difference_of_the_compile_counter_stops_hiding_gradients() -> None:
    """Rank 0 compiled one graph more before the epoch: only what the counter moves says anything about now."""
    group = SimulatedGroup(group_of(1, 1, 1))
    more = {"compile_count": {0: 3}}
    group.step(more)
    group.step(more)
    verdict = only(group.step({"reduced": {0: 1}, **more}))
    assert (verdict.kind, verdict.contains) == ("inconclusive", True)


def test_the_first_check_of_an_epoch_is_software() -> None:
    """No transition was seen, so nothing is contained."""
    assert only(SimulatedGroup(group_of(1, 1, 1)).step({"reduced": {0: 1}})).kind == "software"


def test_a_lasting_difference_is_one_event_and_a_leaver_another() -> None:
    """The same partition counts once; a rank that leaves the group it shared counts again."""
    group = run(1, 1, 1, 1)
    assert only(group.step({"reduced": {3: 1}})).new
    assert not only(group.step({"reduced": {3: 2}})).new
    judgement = group.step({"reduced": {3: 1, 0: 2}})
    assert [(v.new, v.differing) for v in judgement.verdicts] == [(False, (3,)), (True, (0, 1, 2, 3))]
    assert group.step().verdicts == ()
    assert only(group.step({"reduced": {3: 1}})).new


def test_different_schemas_are_one_software_event() -> None:
    """Schemas differ from the start: one clear verdict, and nothing else is compared."""
    group = SimulatedGroup(group_of(1, 1, 1))
    judgement = group.step({"schema": {2: 4}, "reduced": {2: 4}}, apart={2: 4})
    assert (only(judgement).kind, only(judgement).check) == ("software", "weight_checksum")
    assert dict(judgement.checks)["gradient_checksum"] == "skipped:disabled"


def test_the_rank_whose_gradient_became_nan_is_the_origin_and_only_a_hint() -> None:
    """NaN in rank 3's local gradient; after the all-reduce all are NaN."""
    judgement = run(1, 1, 1, 1).step(
        {
            "local_norm": {3: math.nan},
            "local_nonfinite": {3: 1},
            "reduced_nonfinite": dict.fromkeys(range(4), 1),
        }
    )
    assert (judgement.nonfinite_origin, judgement.verdicts) == ((3,), ())
    assert judgement.deviations[3] == math.inf
    assert dict(judgement.checks)["gradient_norm"] == "undefined"


def test_not_finite_on_half_of_the_ranks_has_no_origin() -> None:
    """A hint points at a strict minority or at nobody."""
    assert run(1, 1, 1, 1).step({"local_nonfinite": {0: 1, 1: 1}}).nonfinite_origin == ()


def test_an_outlying_norm_is_a_hint() -> None:
    """A thousandfold norm deviates, ordinary spread does not, and neither is a verdict."""
    judgement = run(*(1,) * 8).step({"local_norm": {5: 1000.0}})
    assert judgement.verdicts == ()
    assert judgement.deviations[5] > 100
    assert max(d for rank, d in enumerate(judgement.deviations) if rank != 5) < 3


def test_mixed_environments_refuse_to_compare_norms() -> None:
    """Other GPU models give other roundings by design."""
    judgement = run(1, 1, 1).step({"environment": {0: 9}, "local_norm": {0: 50.0}})
    assert (judgement.deviations, dict(judgement.checks)["gradient_norm"]) == ((), "skipped:disabled")
