"""What holds for every group and every fault: a healthy rank is never named, and equal rows are always clean.

Each verdict rule and the test that turns red when the rule is broken:

    strict majority of ranks                     test_names_nobody_without_a_strict_majority_of_ranks_and_nodes
    strict majority of nodes                     test_names_nobody_without_a_strict_majority_of_ranks_and_nodes
    accuse only on a transition                  test_first_check_with_different_weights_is_software
    a lasting difference is one event            test_a_lasting_difference_counts_once_and_keeps_its_kind
    a leaver is a new event                      test_a_rank_that_leaves_its_group_is_a_new_event
    clean gradients since the last clean run     test_accuses_only_after_clean_gradients
    gradient agreed as optimizer.step began      test_a_gradient_edited_on_one_rank_names_nobody
    positive signs are software                  test_a_positive_sign_makes_a_difference_software
    version counters                             test_code_that_wrote_on_one_rank_is_software
    not finite everywhere is undefined           test_not_finite_everywhere_is_undefined
    not finite on some ranks is a mismatch       test_not_finite_on_some_ranks_is_a_mismatch
    gradient_checksum names nobody               test_a_corrupt_ring_forwarder_is_never_named_nor_are_its_victims
    rows in wrong slots are transport faults     test_a_row_that_is_not_its_ranks_own_blames_nobody
    void rows are skips                          test_a_void_or_missing_row_is_a_skip_for_the_group
    replay accuses only where calibrated         test_a_first_audit_only_calibrates
    O compared only where shown                  test_originals_are_compared_only_where_calibration_showed_them
    edge table, row by row                       test_verdict_edges.py
    fewer than three nodes name nobody           test_fewer_than_three_nodes_name_nobody
    void audits                                  test_a_void_audit_accuses_nobody
    software and calibration never contain       test_a_positive_sign_makes_a_difference_software
    nothing advances while an event is open      test_checked_step_follows_one_step_behind_and_stops_while_open
    disagreement names nobody                    test_disagreement_names_nobody_and_the_highest_code_contains
"""

from __future__ import annotations

import json
import time
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from sdcwatch.observation import Row, pack
from sdcwatch.packed_rows import unpack_rows
from sdcwatch.testing.simulated_group import SimulatedGroup, backward_fault, group_of
from sdcwatch.verdict import Group, Verdict, judge

LAYOUTS = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple)
QUICK = settings(max_examples=60, deadline=None)

WEIGHT_FIELDS = ("weights_begin", "weights_end", "weights_now", "state_begin", "state_end")
ROW_FIELDS = (*WEIGHT_FIELDS, "reduced", "gradient_begin")
SCALARS = ("loss_scale", "hyperparameters", "environment", "compile_count", "versions_now", "reduced_nonfinite")


@st.composite
def injected(draw: st.DrawFn, fields: tuple[str, ...]) -> tuple[tuple[int, ...], list[dict[str, dict[int, int]]]]:
    """A layout and the faults of a few steps, all on ranks of one bad set."""
    layout = draw(LAYOUTS)
    size = sum(layout)
    bad = draw(st.sets(st.integers(0, size - 1), max_size=size))
    step = st.dictionaries(
        st.sampled_from(fields),
        st.dictionaries(st.sampled_from(sorted(bad)), st.integers(1, 3)) if bad else st.just({}),
    )
    return layout, draw(st.lists(step, min_size=1, max_size=5))


def most_hold(group: Group, ranks: set[int]) -> bool:
    """Whether the healthy ranks are a strict majority of ranks."""
    return 2 * len(ranks) > group.size


@QUICK
@given(injected((*ROW_FIELDS, *SCALARS)))
def test_no_healthy_majority_rank_is_ever_named(
    case: tuple[tuple[int, ...], list[dict[str, dict[int, int]]]],
) -> None:
    """Whatever is measured on bad ranks: while the healthy hold a strict majority none of them is named."""
    layout, steps = case
    group = SimulatedGroup(group_of(*layout))
    group.steps(2)
    for faults in steps:
        bad = {rank for by_rank in faults.values() for rank in by_rank}
        for verdict in group.step(faults).verdicts:
            if most_hold(group.group, set(range(group.group.size)) - bad) and verdict.new:
                assert set(verdict.suspects) <= bad
            assert bool(verdict.suspects) == (verdict.kind == "attributed")
            assert not (verdict.kind == "software" and verdict.contains)
            assert len(verdict.suspects) * 2 < group.group.size
            json.dumps(dict(verdict.evidence))
            assert verdict.sentence.endswith(".")


@QUICK
@given(LAYOUTS, st.data())
def test_who_is_named_does_not_depend_on_rank_numbers(layout: tuple[int, ...], data: st.DataObject) -> None:
    """Renumbering ranks renumbers the suspects and changes nothing else: no rank is a reference."""
    names = group_of(*layout)
    bad = data.draw(st.integers(0, names.size - 1))
    order = data.draw(st.permutations(range(names.size)))
    field = data.draw(st.sampled_from(ROW_FIELDS))
    moved = Group(
        tuple(names.nodes[order[rank]] for rank in range(names.size)), names.instances, names.environments, names.epoch
    )
    found = []
    for group, rank in ((names, bad), (moved, order.index(bad))):
        simulated = SimulatedGroup(group)
        simulated.steps(2)
        found.append(
            [_renamed(v, order if group is moved else None) for v in simulated.step({field: {rank: 1}}).verdicts]
        )
    assert found[0] == found[1]


def _renamed(verdict: Verdict, order: list[int] | None) -> tuple[Any, ...]:
    ranks = [
        tuple(sorted(r if order is None else order[r] for r in some))
        for some in (verdict.suspects, verdict.differing, verdict.candidates)
    ]
    return verdict.kind, verdict.check, verdict.path, verdict.contains, *ranks


@QUICK
@given(st.sampled_from(["software", "loaded"]), st.integers(3, 8), st.data())
def test_lasting_software_divergence_is_never_named(cause: str, size: int, data: st.DataObject) -> None:
    """One rank loaded something else, or runs with other settings, for ever: never a name, whatever the vote."""
    rank = data.draw(st.integers(0, size - 1))
    group = SimulatedGroup(group_of(*(1,) * size))
    group.step()
    for step in range(6):
        faults: dict[str, dict[int, int]] = {"state_begin": {rank: 1}, "state_end": {rank: 1}}
        if cause == "software":
            faults = {"hyperparameters": {rank: 5}}
        faults |= {"weights_end": {rank: step + 1}, "weights_now": {rank: step + 1}}
        if step:
            faults["weights_begin"] = {rank: step}
        judgement = group.step(faults)
        assert [(v.kind, v.suspects, v.new) for v in judgement.verdicts] == [("software", (), step == 0)]


@QUICK
@given(st.sampled_from(ROW_FIELDS), st.integers(0, 1), st.booleans())
def test_two_replicas_are_never_named(field: str, rank: int, one_node: bool) -> None:
    """Neither of two can outvote the other, in rows or in replays."""
    group = SimulatedGroup(group_of(2) if one_node else group_of(1, 1))
    group.steps(2)
    assert all(not v.suspects for v in group.step({field: {rank: 1}}).verdicts)
    group = SimulatedGroup(group_of(1, 1))
    group.step()
    group.audit()
    assert all(not v.suspects for v in group.audit(backward_fault(group.group, rank)).verdicts)


@QUICK
@given(LAYOUTS.filter(lambda layout: len(layout) > 1), st.data())
def test_replay_never_names_a_healthy_rank(layout: tuple[int, ...], data: st.DataObject) -> None:
    """One bad rank, wrong in any subset of what it computes, with any fault: it is named, or nobody is."""
    names = group_of(*layout)
    bad = data.draw(st.integers(0, names.size - 1))
    wrong = st.integers(0, 2)
    faults: dict[str, dict[int, int]] = {
        "original": {bad: data.draw(wrong)},
        "self_digest": {bad: data.draw(wrong)},
        "served_digest": {owner: data.draw(wrong) for owner in names.served_by(bad)},
        "tie_digest": {owner: data.draw(wrong) for owner in range(names.size) if names.third(owner) == bad},
    }
    group = SimulatedGroup(names)
    group.step()
    group.audit()
    for verdict in group.audit(faults).verdicts:
        assert set(verdict.suspects) <= {bad}


@QUICK
@given(LAYOUTS, st.integers(1, 6))
def test_equal_rows_are_clean(layout: tuple[int, ...], count: int) -> None:
    """Nothing injected, nothing said, and all ranks hold the same digest."""
    group = SimulatedGroup(group_of(*layout))
    for _ in range(count):
        judgement = group.audit()
        assert (judgement.verdicts, judgement.code) == ((), 0)
    assert dict(judgement.checks)["weight_checksum"] == "clean"


def test_sixteen_thousand_ranks_are_judged_quickly() -> None:
    """Bytes in, judgement out: 16,384 healthy ranks are read by column (bound: generous for a busy machine)."""
    group = SimulatedGroup(group_of(*(8,) * 2048))
    group.step()
    data = b"".join(map(pack, group.rows()))
    spent = []
    for _ in range(5):
        begin = time.process_time()
        rows = unpack_rows(Row, data, group.group.size)
        judgement, _ = judge(group.history, group.group, group.next_step, rows)
        spent.append(time.process_time() - begin)
    assert judgement.code == 0
    assert min(spent) < 0.1


def test_one_bad_rank_in_sixteen_thousand_is_named() -> None:
    """Size changes nothing about the verdict, and its evidence stays small."""
    group = SimulatedGroup(group_of(*(8,) * 2048))
    group.steps(2)
    (verdict,) = group.step({"weights_end": {9001: 1}, "weights_now": {9001: 1}}).verdicts
    assert (verdict.kind, verdict.suspects) == ("attributed", (9001,))
    assert len(json.dumps(dict(verdict.evidence))) < 8000
