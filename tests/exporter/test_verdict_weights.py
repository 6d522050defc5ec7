"""The weight check: who is named, who is not, and when a difference is one event."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sdcwatch.testing.simulated_group import SimulatedGroup, group_of
from sdcwatch.verdict import Judgement, Verdict, checked_through, verified_through

OPTIMIZER_FAULT = ("weights_end", "weights_now")


def optimizer_fault(*ranks: int, state: bool = False) -> dict[str, dict[int, int]]:
    """Ranks whose optimizer step computed something else."""
    fields = (*OPTIMIZER_FAULT, "state_end") if state else OPTIMIZER_FAULT
    return {name: {rank: rank + 1 for rank in ranks} for name in fields}


def same_fault(*ranks: int) -> dict[str, dict[int, int]]:
    """The same wrong value on several ranks."""
    return {name: dict.fromkeys(ranks, 5) for name in OPTIMIZER_FAULT}


def only(judgement: Judgement) -> Verdict:
    assert len(judgement.verdicts) == 1, judgement.verdicts
    return judgement.verdicts[0]


def run(*layout: int, healthy: int = 3) -> SimulatedGroup:
    group = SimulatedGroup(group_of(*layout))
    group.steps(healthy)
    return group


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 1, 1, 1), (4,), (2, 2, 2), (1,) * 5, (8, 8, 8)])
@pytest.mark.parametrize("bad", ["first", "last"])
def test_names_the_minority_after_an_equal_begin(layout: tuple[int, ...], bad: str) -> None:
    """Begin equal and end different names the strict minority, rank 0 like any other."""
    group = run(*layout)
    rank = 0 if bad == "first" else group.group.size - 1
    verdict = only(group.step(optimizer_fault(rank)))
    assert (verdict.kind, verdict.suspects, verdict.differing) == ("attributed", (rank,), (rank,))
    assert (verdict.path, verdict.contains, verdict.new) == ("optimizer compute", True, True)
    assert (verdict.last_clean_step, verdict.trust_needed) == (1, "checked")


def test_sentence_names_rank_node_and_how_many_agree() -> None:
    """The sentence is one that a tired person understands."""
    verdict = only(run(1, 1, 1, 1).step(optimizer_fault(2)))
    assert verdict.sentence == (
        "Rank 2 on node-2 computed a different optimizer step from the same gradient and the same weights as the 3 "
        "other ranks."
    )


def test_names_in_the_first_step_of_an_epoch() -> None:
    """Within one row, begin equal and end different is a transition, also in the first step."""
    group = run(1, 1, 1, healthy=1)
    assert only(group.step(optimizer_fault(1, state=True))).suspects == (1,)


def test_state_alone_may_be_what_the_optimizer_got_wrong() -> None:
    """A wrong optimizer state after an equal begin is optimizer compute as well."""
    verdict = only(run(1, 1, 1).step({"state_end": {1: 9}}))
    assert (verdict.kind, verdict.suspects, verdict.path) == ("attributed", (1,), "optimizer compute")


@pytest.mark.parametrize(
    ("layout", "bad"),
    [
        ((1, 1), (0,)),
        ((2,), (1,)),
        ((2, 2), (0, 1)),
        ((2, 2), (3,)),
        ((1, 1, 1, 1), (0, 1)),
        ((1, 1, 2), (2, 3)),
        ((8, 2, 2), tuple(range(8))),
        ((8, 2, 2), (8, 9, 10, 11)),
    ],
)
def test_names_nobody_without_a_strict_majority_of_ranks_and_nodes(
    layout: tuple[int, ...], bad: tuple[int, ...]
) -> None:
    """Two replicas, ties and majorities of ranks that are no majority of nodes name nobody, but contain."""
    group = run(*layout)
    verdict = only(group.step(same_fault(*bad)))
    assert (verdict.kind, verdict.suspects, verdict.contains) == ("inconclusive", (), True)
    assert verdict.differing == verdict.candidates == tuple(range(group.group.size))


def test_uneven_nodes_name_a_small_node() -> None:
    """8+2+2: ten ranks on two of three nodes are a majority of both."""
    assert only(run(8, 2, 2).step(same_fault(10, 11))).suspects == (10, 11)


def test_many_different_values_name_nobody() -> None:
    """When every rank holds its own value there is no majority."""
    assert only(run(1, 1, 1).step(optimizer_fault(0, 1, 2))).suspects == ()


SIGNS = [
    ("schema", 99),
    ("loss_scale", 2.0),
    ("optimizer_steps", 1),
    ("optimizer_step_of", 1),
    ("hyperparameters", 99),
    ("compile_count", 3),
    ("environment", 99),
    ("versions_end", 1),
]


@pytest.mark.parametrize(("field", "value"), SIGNS)
def test_a_positive_sign_makes_a_difference_software(field: str, value: float) -> None:
    """What shows that the ranks ran different things blames no node and stops no run."""
    group = run(1, 1, 1, 1)
    verdict = only(group.step({**optimizer_fault(3), field: {3: value}}))
    assert (verdict.kind, verdict.suspects, verdict.contains, verdict.path) == ("software", (), False, "code")


def test_a_sign_that_only_the_previous_row_showed_counts_as_well() -> None:
    """One rank's learning rate differed as its optimizer stepped and was set back before the next row."""
    group = run(1, 1, 1, 1)
    assert group.step({"hyperparameters": {2: 5}}).verdicts == ()
    assert only(group.step(optimizer_fault(2))).kind == "software"


@pytest.mark.parametrize(("field", "word"), [("loss_scale", "loss scale"), ("schema", "parameter names")])
def test_configuration_is_said_before_the_state_differs(field: str, word: str) -> None:
    """Loss scale and schema are compared values of their own, and the sentence says which differs."""
    group = run(1, 1, 1, 1)
    verdict = only(group.step({field: {1: 3.0}}))
    assert verdict.kind == "software"
    assert word in verdict.sentence.lower()
    later = group.step({field: {1: 3.0}, **optimizer_fault(1)})
    assert [v.new for v in later.verdicts] == [False], "the state that follows is the same event"


@pytest.mark.parametrize("field", ["hyperparameters", "compile_count", "environment", "versions_now"])
def test_a_sign_without_a_difference_is_clean(field: str) -> None:
    """Counters and environments may differ for ever while all state is equal."""
    assert run(1, 1, 1).step({field: {1: 4}}).verdicts == ()


def test_loaded_on_one_rank_only_is_software_and_blames_nobody() -> None:
    """Only rank 0 has optimizer state after a resume: flagged at the first check, 3 to 1, rank 0 not blamed."""
    group = SimulatedGroup(group_of(1, 1, 1, 1), first=500)
    assert group.step().verdicts == ()
    lasting = {"state_begin": {0: 8}, "state_end": {0: 8}, "weights_end": {0: 8}, "weights_now": {0: 8}}
    verdict = only(group.step(lasting))
    assert (verdict.kind, verdict.suspects, verdict.contains) == ("software", (), False)
    for _ in range(4):
        judgement = group.step({**lasting, "weights_begin": {0: 8}})
        assert [(v.kind, v.new) for v in judgement.verdicts] == [("software", False)]


def test_first_check_with_different_weights_is_software() -> None:
    """Nobody ever saw these replicas equal, so no hardware is blamed."""
    group = SimulatedGroup(group_of(1, 1, 1))
    verdict = only(group.step(apart={0: 3}))
    assert (verdict.kind, verdict.evidence["signs"]) == ("software", ["first_check"])
    assert [v.new for v in group.step(apart={0: 3}).verdicts] == [False]


@pytest.mark.parametrize(
    ("faults", "path"),
    [
        ({"weights_now": {2: 1}}, "weights at rest"),
        ({"weights_begin": {2: 1}, "weights_end": {2: 1}, "weights_now": {2: 1}}, "weights at rest"),
        ({"state_begin": {2: 1}, "state_end": {2: 1}}, "optimizer state at rest"),
        ({"state_begin": {2: 1}, "state_end": {2: 1}, **optimizer_fault(2)}, "optimizer state at rest"),
    ],
)
def test_at_rest_gives_candidates_only(faults: dict[str, dict[int, int]], path: str) -> None:
    """State that changed while no optimizer step ran is contained and names nobody."""
    verdict = only(run(1, 1, 1, 1).step(faults))
    assert (verdict.kind, verdict.suspects, verdict.candidates) == ("inconclusive", (), (2,))
    assert (verdict.path, verdict.contains, verdict.last_clean_step) == (path, True, 1)


def test_code_that_wrote_on_one_rank_is_software() -> None:
    """Version counters that rose on one rank only tell an EMA swap from memory."""
    group = run(1, 1, 1, 1)
    assert only(group.step({"weights_now": {0: 1}, "versions_now": {0: 9999}})).kind == "software"


def moved_by(group: SimulatedGroup, name: str, more: int = 1) -> dict[str, dict[int, int]]:
    """A version counter that moved further than the optimizer moved it, equally on all ranks."""
    return {name: {rank: getattr(row, name) + more for rank, row in enumerate(group.rows())}}


def test_code_that_wrote_on_every_rank_is_software_where_weights_should_rest() -> None:
    """Each rank perturbed its weights by its own gradient before the backward (m-SAM): no rank's memory did that."""
    group = run(1, 1, 1, 1)
    verdict = only(group.step({"weights_now": {2: 1}, **moved_by(group, "versions_now")}))
    assert (verdict.kind, verdict.path, verdict.contains) == ("software", "code", False)
    assert verdict.evidence["signs"] == ["written"]


def test_code_that_wrote_before_the_optimizer_step_began_is_software() -> None:
    """Between a row and the optimizer step after it nothing but code moves the parameters' version counters."""
    group = run(1, 1, 1, 1)
    moved = {k: v for n in ("begin", "end", "now") for k, v in moved_by(group, f"versions_{n}").items()}
    verdict = only(group.step(moved, apart={2: 1}))
    assert (verdict.kind, verdict.evidence["signs"]) == ("software", ["written"])


def test_optimizer_steps_that_no_row_showed_are_no_sign_of_code() -> None:
    """A void row hid one optimizer step, which moved the version counters as it should; the fault still contains."""
    group = run(1, 1, 1, 1)
    group.step(rows=[None, *group.rows()[1:]])
    verdict = only(group.step(apart={2: 1}))
    assert (verdict.kind, verdict.path, verdict.contains) == ("inconclusive", "weights at rest", True)


def test_an_optimizer_state_at_rest_is_not_explained_by_writes_to_parameters() -> None:
    """Code that clips weights in every step does not reach the optimizer's state."""
    group = run(1, 1, 1, 1)
    moved = {k: v for n in ("begin", "end", "now") for k, v in moved_by(group, f"versions_{n}").items()}
    verdict = only(group.step({"state_begin": {2: 1}, "state_end": {2: 1}, **moved}))
    assert (verdict.kind, verdict.path, verdict.contains) == ("inconclusive", "optimizer state at rest", True)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("field", ["compile_count", "optimizer_steps", "unfinished"])
def test_an_old_difference_of_a_counter_hides_no_later_fault(field: str, first: int) -> None:
    """One rank compiled one graph more, or skipped a step, long ago and all state stayed equal: no sign any more."""
    group = SimulatedGroup(group_of(1, 1, 1, 1))
    group.steps(first + 1)

    def counted() -> dict[str, dict[int, int]]:
        return {field: {rank: (getattr(row, field) or 0) + (rank == 0) for rank, row in enumerate(group.rows())}}

    for _ in range(2):
        assert group.step(counted()).verdicts == ()
    verdict = only(group.step({**counted(), **optimizer_fault(3)}))
    assert (verdict.kind, verdict.suspects) == ("attributed", (3,))


def test_a_reduce_left_unfinished_explains_the_optimizer_step_that_used_it() -> None:
    """All ranks left one unfinished; the optimizer stepped with its gradients several rows later."""
    group = run(1, 1, 1, 1)
    last = group.rows()
    group.step(rows=last)
    names = ("optimizer_step_of", "optimizer_steps", "versions_begin", "versions_end", "versions_now", "weights_now")
    held = {name: {rank: getattr(row, name) for rank, row in enumerate(last)} for name in names}
    for _ in range(3):
        rows = [
            replace(row, unfinished=1, **{name: held[name][rank] for name in names})
            for rank, row in enumerate(group.rows())
        ]
        assert group.step(rows=rows).verdicts == ()
    unfinished = dict.fromkeys(range(4), 1)
    verdict = only(group.step({"unfinished": unfinished, "gradient_begin": {3: 1}, **optimizer_fault(3)}))
    assert (verdict.kind, verdict.evidence["signs"]) == ("software", ["unfinished"])


def test_version_counters_with_a_constant_offset_are_no_sign() -> None:
    """Rank 0 loaded more often before the epoch; only how far the counters move counts."""
    assert only(run(1, 1, 1).step({"weights_now": {0: 1}})).kind == "inconclusive"


def test_a_gradient_edited_on_one_rank_names_nobody() -> None:
    """The gradient as the optimizer step began differed, so the optimizer step may be sound."""
    verdict = only(run(1, 1, 1, 1).step({"gradient_begin": {1: 1}, **optimizer_fault(1)}))
    assert (verdict.kind, verdict.suspects, verdict.contains) == ("inconclusive", (), True)


@pytest.mark.parametrize("missing", ["gradient_begin", "state_begin", "weights_begin"])
def test_what_was_not_measured_cannot_accuse(missing: str) -> None:
    """Without all inputs of the optimizer step nobody is named."""
    group = run(1, 1, 1)
    assert only(group.step({missing: dict.fromkeys(range(3)), **optimizer_fault(1)})).suspects == ()


@pytest.mark.parametrize("gradient", [{"reduced": {0: 1}}, {"reduced": dict.fromkeys(range(4))}])
def test_accuses_only_after_clean_gradients(gradient: dict[str, dict[int, int]]) -> None:
    """A gradient check that differed or did not run since the weights last agreed takes the name away."""
    group = run(1, 1, 1, 1)
    group.step(gradient)
    judgement = group.step(optimizer_fault(3))
    assert [(v.kind, v.suspects) for v in judgement.verdicts if v.check == "weight_checksum"] == [("inconclusive", ())]
    assert group.steps(2).verdicts == (), "once all is equal again the events are over"
    assert only(group.step(optimizer_fault(3))).suspects == (3,), "and the next fault is named again"


def test_accuses_nobody_when_the_gradient_differs_at_the_same_step() -> None:
    """Two things wrong at once: both are said, nobody is named."""
    judgement = run(1, 1, 1, 1).step({**optimizer_fault(3), "reduced": {3: 1}})
    assert [v.suspects for v in judgement.verdicts] == [(), ()]


def test_accuses_although_its_own_corruption_made_the_gradient_not_finite() -> None:
    """Weights that became NaN on one rank make every reduced gradient NaN: that rank is still the one."""
    nan = {"reduced_nonfinite": dict.fromkeys(range(4), 1)}
    assert only(run(1, 1, 1, 1).step({**optimizer_fault(3), **nan})).suspects == (3,)


def test_a_lasting_difference_counts_once_and_keeps_its_kind() -> None:
    """In observe mode the same difference is one event, whatever signs appear later."""
    group = run(1, 1, 1, 1)
    first = only(group.step(optimizer_fault(2)))
    for extra in ({}, {"environment": {2: 1}}, {"reduced_nonfinite": dict.fromkeys(range(4), 1)}):
        lasts = only(group.step(extra, apart={2: 3}))
        assert (lasts.new, lasts.kind, lasts.suspects) == (False, first.kind, first.suspects)
        assert group.next_step - 1 == lasts.step


def test_equal_again_and_apart_again_are_two_events() -> None:
    """A fault after a clean check of the same state is a new event."""
    group = run(1, 1, 1, 1)
    assert only(group.step(optimizer_fault(2))).new
    assert group.step().verdicts == ()
    assert only(group.step(optimizer_fault(2))).new


def test_a_rank_that_leaves_its_group_is_a_new_event() -> None:
    """While rank 3 lasts apart, rank 7 leaves the majority: a new event that names rank 7 alone."""
    group = run(*(1,) * 9)
    group.step(optimizer_fault(3))
    group.step(apart={3: 4})
    judgement = group.step({"weights_end": {7: 8}, "weights_now": {7: 8}}, apart={3: 4})
    new = [v for v in judgement.verdicts if v.new]
    assert [(v.kind, v.suspects, v.differing) for v in new] == [("attributed", (7,), (3, 7))]
    assert {v.new for v in group.step(apart={3: 4, 7: 8}).verdicts} == {False}
    assert [v.new for v in group.step(apart={7: 8}).verdicts] == [False], "one rank came back"
    assert group.step().verdicts == ()


def test_leaving_a_minority_group_names_nobody() -> None:
    """Two ranks that were apart together and now part from each other are a new event without a name."""
    group = run(*(1,) * 7)
    group.step(same_fault(5, 6))
    judgement = group.step({"weights_end": {6: 9}, "weights_now": {6: 9}}, apart={5: 5, 6: 5})
    new = [v for v in judgement.verdicts if v.new]
    assert [(v.kind, v.suspects) for v in new] == [("inconclusive", ())]


def test_a_skipped_optimizer_step_is_not_judged_twice() -> None:
    """The loss scaler skipped: the row repeats the last optimizer step, and nothing new is seen in it."""
    group = run(1, 1, 1)
    rows = group.rows()
    group.step(rows=rows)
    again = {
        name: {rank: getattr(rows[rank], name) for rank in range(3)}
        for name in ("optimizer_step_of", "optimizer_steps", "versions_begin", "versions_end", "versions_now")
    }
    repeated = [
        type(row)(**{f: getattr(row, f) for f in row.__dataclass_fields__} | {f: again[f][i] for f in again})
        for i, row in enumerate(group.rows({"weights_now": {2: 1}}))
    ]
    assert only(group.step(rows=repeated)).path == "weights at rest"


def test_identical_nan_bits_are_agreement() -> None:
    """What every rank holds is equal, whatever it means; another payload on one rank is not."""
    group = run(1, 1, 1)
    nan = dict.fromkeys(range(3), 0x7FC00000)
    assert group.step({"weights_end": nan, "weights_now": nan}).verdicts == ()
    assert only(group.step({"weights_now": {1: 1}})).kind == "inconclusive"


def test_checked_step_follows_one_step_behind_and_stops_while_open() -> None:
    """The state after a step is proven equal by the next row, and nothing advances under an open event."""
    group = SimulatedGroup(group_of(1, 1, 1), first=10)
    group.step()
    assert checked_through(group.history) is None
    group.steps(3)
    assert (checked_through(group.history), verified_through(group.history)) == (12, None)
    group.step(optimizer_fault(1))
    group.step(apart={1: 2})
    assert checked_through(group.history) == 12
    group.step()
    assert checked_through(group.history) == 15


def test_group_sizes_say_how_many_share_a_fingerprint() -> None:
    """Three agree and one stands alone."""
    judgement = run(1, 1, 1, 1).step(optimizer_fault(1))
    assert judgement.group_sizes["weight_checksum"] == (3, 1, 3, 3)
    assert judgement.group_sizes["gradient_checksum"] == (4, 4, 4, 4)


def test_unmeasured_weights_are_a_skip_and_verify_nothing() -> None:
    """A step on which the weight check does not run moves neither its clean step nor the checked step."""
    group = run(1, 1, 1)
    nothing = {
        name: dict.fromkeys(range(3))
        for name in ("weights_begin", "weights_end", "weights_now", "state_begin", "state_end", "gradient_begin")
    }
    judgement = group.step(nothing)
    assert dict(judgement.checks)["weight_checksum"] == "skipped:disabled"
    assert (checked_through(group.history), group.history.weights_clean_step) == (1, 2)
