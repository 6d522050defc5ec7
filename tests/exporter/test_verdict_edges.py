"""The edge table of replay, row by row, on several layouts."""

from __future__ import annotations

import pytest
from sdcwatch.testing.simulated_group import Faults, SimulatedGroup, backward_fault, group_of
from sdcwatch.verdict import Group, Judgement, Verdict, verified_through


def run(*layout: int) -> SimulatedGroup:
    """A group whose replay is calibrated on every edge."""
    group = SimulatedGroup(group_of(*layout))
    group.step()
    assert dict(group.audit().checks)["replay"] == "clean"
    return group


def only(judgement: Judgement) -> Verdict:
    assert len(judgement.verdicts) == 1, judgement.verdicts
    return judgement.verdicts[0]


def edges(*owners: int, fault: int = 1) -> Faults:
    """Edges that fail because the helper's replay is wrong."""
    return {"served_digest": dict.fromkeys(owners, fault)}


LAYOUTS = [(1, 1, 1), (1, 1, 1, 1), (1,) * 5, (2, 2, 2), (8, 2, 2), (2, 1, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_edges_of_a_rank_name_it_persistent(layout: tuple[int, ...]) -> None:
    """A rank whose every backward is wrong is named wherever it stands, rank 0 included, if it serves somebody."""
    names = group_of(*layout)
    for bad in range(names.size):
        group = run(*layout)
        if not names.served_by(bad):
            continue
        verdict = only(group.audit(backward_fault(names, bad)))
        assert (verdict.kind, verdict.suspects, verdict.persistence) == ("attributed", (bad,), "persistent")
        assert (verdict.path, verdict.contains, verdict.trust_needed) == ("backward compute", True, "verified")
        assert verdict.last_clean_step == 1


def test_a_rank_that_serves_nobody_needs_a_third_node() -> None:
    """Uneven nodes leave ranks with one edge only: the third node settles it."""
    names = group_of(1, 2, 2)
    idle = next(rank for rank in range(names.size) if not names.served_by(rank))
    verdict = only(run(1, 2, 2).audit(backward_fault(names, idle)))
    assert (verdict.kind, verdict.suspects, verdict.persistence) == ("attributed", (idle,), "transient")


def test_all_edges_of_a_node_name_its_ranks() -> None:
    """Every edge of one node's ranks fails and no other: the node, all its ranks."""
    names = group_of(2, 2, 2, 2)
    owned = [0, 1, *names.served_by(0), *names.served_by(1)]
    faults = {
        "original": {0: 1, 1: 2},
        "self_digest": {0: 1, 1: 2},
        "served_digest": {owner: 3 for owner in owned if owner not in (0, 1)},
    }
    verdict = only(run(2, 2, 2, 2).audit(faults))
    assert (verdict.kind, verdict.suspects, verdict.persistence) == ("attributed", (0, 1), "persistent")


def test_a_persistent_fault_contains_although_this_original_was_right() -> None:
    """Serving and self-replay are wrong and this O was right: a rank that cannot repeat its O is contained as well."""
    verdict = only(run(1, 1, 1, 1).audit({"served_digest": {1: 7}, "self_digest": {2: 3}}))
    assert (verdict.suspects, verdict.persistence, verdict.contains) == ((2,), "persistent", True)


def test_not_reproducible_on_its_own_rank() -> None:
    """One edge fails, and the next node reproduced the original: inconclusive, and the state is not disputed."""
    verdict = only(run(1, 1, 1, 1).audit({"self_digest": {1: 4}}))
    assert (verdict.kind, verdict.candidates, verdict.contains) == ("inconclusive", (1,), False)
    assert "could not reproduce its own gradient" in verdict.sentence


def test_third_node_names_the_helper_that_stands_alone() -> None:
    """S and the third node agree, N does not: the helper, transient; its own gradients are not disputed."""
    group = run(1, 1, 1, 1)
    verdict = only(group.audit(edges(1)))
    assert (verdict.kind, verdict.suspects, verdict.persistence) == ("attributed", (2,), "transient")
    assert verdict.contains is False


def test_third_node_names_the_owner_that_stands_alone() -> None:
    """N and the third node agree, O and S do not: the owner, and its gradient is disputed."""
    verdict = only(run(1, 1, 1, 1).audit({"original": {1: 4}, "self_digest": {1: 4}}))
    assert (verdict.suspects, verdict.persistence, verdict.contains) == ((1,), "transient", True)


def test_third_node_that_agrees_with_nobody_names_nobody() -> None:
    """Three nodes, three values."""
    verdict = only(run(1, 1, 1).audit({**edges(1), "tie_digest": {1: 9}}))
    assert (verdict.kind, verdict.candidates) == ("inconclusive", (1, 2))


def test_an_owner_that_contradicts_itself_outvotes_nobody() -> None:
    """O and S are one witness only while they agree."""
    verdict = only(run(1, 1, 1).audit({**edges(1), "original": {1: 6}}))
    assert (verdict.kind, verdict.suspects, verdict.contains) == ("inconclusive", (), True)


def test_an_original_that_two_replays_contradict_is_inconclusive() -> None:
    """S = N, O differs on one of four ranks: contained, its rank a candidate."""
    verdict = only(run(1, 1, 1, 1).audit({"original": {3: 1}}))
    assert (verdict.kind, verdict.suspects, verdict.candidates) == ("inconclusive", (), (3,))
    assert verdict.contains


@pytest.mark.parametrize("apart", [(0, 1), (0, 1, 2, 3)])
def test_originals_that_differ_on_half_or_more_are_software(apart: tuple[int, ...]) -> None:
    """loss_fn is not what the loop runs; the first parameter that differs is named."""
    faults = {"original": dict.fromkeys(apart, 1), "first_difference": dict.fromkeys(apart, 17)}
    verdict = only(run(1, 1, 1, 1).audit(faults))
    assert (verdict.kind, verdict.contains, verdict.suspects) == ("software", False, ())
    assert "17" in verdict.sentence
    assert verdict.evidence["first_parameter"] == 17


@pytest.mark.parametrize("apart", [0, 1])
def test_one_original_of_two_is_no_software(apart: int) -> None:
    """A device that erred once looks like that as well; two of two are loss_fn's doing."""
    verdict = only(run(1, 1).audit({"original": {apart: 1}}))
    assert (verdict.kind, verdict.suspects, verdict.candidates, verdict.contains) == (
        "inconclusive",
        (),
        (apart,),
        True,
    )
    assert only(run(1, 1).audit({"original": {0: 1, 1: 2}})).kind == "software"


def test_with_two_nodes_every_rank_is_a_candidate() -> None:
    """Each edge has an end on both, so ranks whose edges agreed are no more trusted than the others."""
    verdict = only(run(2, 2).audit(edges(0, 2)))
    assert (verdict.candidates, verdict.evidence["row"]) == ((0, 1, 2, 3), "two nodes")


@pytest.mark.parametrize("owners", [(0, 1, 2), (1, 2, 3)])
def test_most_but_not_all_edges_of_one_rank_are_a_fault_that_depends_on_the_data(owners: tuple[int, ...]) -> None:
    """Three ranks served by one, which owns a fourth edge: it, or their node, could have made all of these fail."""
    verdict = only(run(3, 1, 1).audit(edges(*owners)))
    assert (verdict.kind, verdict.suspects, verdict.contains) == ("inconclusive", (), True)
    assert 3 in verdict.candidates


@pytest.mark.parametrize(
    ("layout", "owners", "kind"),
    [
        ((1,) * 6, (0, 3), "inconclusive"),
        ((1,) * 6, (0, 2, 4), "software"),
        ((1,) * 6, tuple(range(6)), "software"),
        ((2, 2, 2), (0, 3), "inconclusive"),
        ((2, 2), (0, 2), "inconclusive"),
        ((1, 1), (0, 1), "inconclusive"),
    ],
)
def test_any_other_pattern_names_nobody(layout: tuple[int, ...], owners: tuple[int, ...], kind: str) -> None:
    """Half or more of the edges is a replay that does not reproduce; fewer is unexplained."""
    verdict = only(run(*layout).audit(edges(*owners)))
    assert (verdict.kind, verdict.suspects) == (kind, ())
    assert verdict.contains == (kind == "inconclusive")


@pytest.mark.parametrize("layout", [(1, 1), (8, 8), (3, 1)])
def test_fewer_than_three_nodes_name_nobody(layout: tuple[int, ...]) -> None:
    """With two nodes either side of every edge could be wrong."""
    names = group_of(*layout)
    for bad in range(names.size):
        assert only(run(*layout).audit(backward_fault(names, bad))).suspects == ()
        assert only(run(*layout).audit(edges(bad))).suspects == ()


def test_two_bad_ranks_name_nobody_wrong() -> None:
    """Two persistent faults at once fit no row that names."""
    names = group_of(*(1,) * 8)
    both: dict[str, dict[int, int]] = {}
    for bad, fault in ((1, 1), (4, 2)):
        for field, by_rank in backward_fault(names, bad, fault).items():
            both.setdefault(field, {}).update(by_rank)
    assert only(run(*(1,) * 8).audit(both)).suspects == ()


def test_partners_lie_on_three_different_nodes() -> None:
    """Owner, helper and third node differ, whatever the layout; local index modulo the node's size."""
    for layout in ((1, 1, 1), (8, 2, 2), (1, 3, 2, 5)):
        group = group_of(*layout)
        for rank in range(group.size):
            helper, third = group.helper(rank), group.third(rank)
            assert helper is not None
            assert third is not None
            assert len({group.nodes[r] for r in (rank, helper, third)}) == 3
            assert rank in group.served_by(helper)
    group = Group(("b", "a", "b", "a", "a"), (1,) * 5, (1,) * 5, 1)
    assert (group.node_order, group.members("a")) == (("b", "a"), (1, 3, 4))
    assert [group.helper(rank) for rank in range(5)] == [1, 0, 3, 2, 0]
    assert group.third(0) is None
    assert group_of(4).helper(0) is None


def test_a_lasting_replay_fault_counts_once_until_a_clean_audit() -> None:
    """The same rank at every audit is one event; after a clean audit it is a new one."""
    names = group_of(1, 1, 1, 1)
    group, fault = run(1, 1, 1, 1), backward_fault(names, 2)
    assert [only(group.audit(fault)).new for _ in range(3)] == [True, False, False]
    assert group.audit().verdicts == ()
    assert only(group.audit(fault)).new


def test_a_stronger_proof_is_a_new_event() -> None:
    """A rank that was only a candidate, then transient, then persistent, is said each time."""
    names = group_of(1, 1, 1, 1)
    group = run(1, 1, 1, 1)
    assert only(group.audit({"original": {2: 1}})).kind == "inconclusive"
    shown = group.audit({"original": {2: 1}, "self_digest": {2: 1}}).verdicts
    assert [(v.kind, v.persistence, v.new) for v in shown] == [
        ("inconclusive", None, False),
        ("attributed", "transient", True),
    ]
    assert [v.persistence for v in group.audit(backward_fault(names, 2)).verdicts if v.new] == ["persistent"]


def test_verified_step_needs_a_clean_audit_and_stops_at_a_disputed_gradient() -> None:
    """An audit verifies what is checked up to it; after a disputed gradient no later audit verifies anything."""
    group = run(1, 1, 1, 1)
    assert verified_through(group.history) == 0
    group.step()
    assert verified_through(group.history) == 1
    group.steps(3)
    assert verified_through(group.history) == 1
    group.audit(backward_fault(group.group, 2))
    group.audit()
    group.steps(3)
    assert verified_through(group.history) == 1, "what the wrong gradient made of the weights is equal everywhere"
