"""What may be healed, and by which road: a table over simulated groups."""

from __future__ import annotations

from typing import Any

import pytest
from sdcwatch.heal.plan import Healed, Plan, asks, make_plan, only_new, recheck
from sdcwatch.observation import RowError
from sdcwatch.testing.simulated_group import SimulatedGroup
from sdcwatch.verdict import Group
from sdcwatch.verdict.records import Judgement


def group_of(*nodes: str) -> Group:
    size = len(nodes)
    return Group(nodes=nodes, instances=tuple(range(1, size + 1)), environments=(7,) * size, epoch=9)


THREE = group_of("a", "b", "c")
COMMON: dict[str, Any] = {"past": (), "count": 10, "window": 100}


def planned(group: Group, faults: dict[str, Any] | None = None, steps: int = 4, **changes: Any) -> Plan:
    """The plan for one faulty exchange after `steps` clean ones."""
    simulated = SimulatedGroup(group)
    simulated.steps(steps)
    before, rows = simulated.history, simulated.rows(faults)
    judgement = simulated.step(rows=rows)
    assert asks(judgement), judgement
    arguments = {**COMMON, **changes}
    return make_plan(judgement, before, group, arguments.pop("rows", rows), **arguments)


STEP_WRONG = {"weights_end": {1: 5}, "weights_now": {1: 5}}
STATE_WRONG = {"state_end": {2: 5}}


def test_a_reduced_gradient_that_differs_is_computed_again_by_all() -> None:
    """Nobody is overwritten, and every node may have caused it."""
    assert planned(THREE, {"reduced": {1: 5}}) == Plan("gradient_checksum", nodes=frozenset("abc"))


def test_two_ranks_heal_a_gradient_and_never_a_weight() -> None:
    """A recompute needs no majority; overwriting does."""
    two = group_of("a", "b")
    assert not planned(two, {"reduced": {1: 5}}).refusal
    assert "no strict majority" in planned(two, STEP_WRONG).refusal


@pytest.mark.parametrize(("faults", "wrong"), [(STEP_WRONG, 1), (STATE_WRONG, 2), ({"weights_now": {0: 5}}, 0)])
def test_a_minority_is_overwritten_from_the_lowest_rank_of_the_majority(faults: dict[str, Any], wrong: int) -> None:
    """A wrong optimizer step, wrong optimizer state, weights that changed at rest: rank 0 is no reference."""
    plan = planned(THREE, faults)
    assert (plan.check, plan.refusal, plan.targets) == ("weight_checksum", "", (wrong,))
    assert plan.source == (1 if wrong == 0 else 0)
    assert plan.nodes == {"abc"[wrong]}


def test_weights_and_state_need_one_majority_together() -> None:
    """Of five ranks two hold wrong weights and one other wrong state: nobody may be copied who is in neither minority
    only by halves."""
    five = group_of(*"abcde")
    faults = {"weights_end": {0: 5, 1: 5}, "weights_now": {0: 5, 1: 5}, "state_end": {4: 9}}
    plan = planned(five, faults)
    assert (plan.source, plan.targets) == (2, (0, 1, 4)) or plan.refusal
    split = {"weights_end": {0: 5, 1: 5}, "weights_now": {0: 5, 1: 5}, "state_end": {3: 9, 4: 9}}
    assert "no strict majority" in planned(five, split).refusal


def test_a_majority_of_ranks_on_one_node_is_none_of_nodes() -> None:
    """Three healthy ranks of one node against two nodes of one wrong rank each."""
    lopsided = group_of("a", "a", "a", "b", "c")
    faults = {"weights_end": {3: 5, 4: 5}, "weights_now": {3: 5, 4: 5}}
    assert "no strict majority" in planned(lopsided, faults).refusal


def test_optimizer_state_that_changed_at_rest_halts() -> None:
    """A step has used it already."""
    faults = {"state_begin": {1: 5}, "state_end": {1: 6}, "weights_end": {1: 7}, "weights_now": {1: 7}}
    assert "at rest" in planned(THREE, faults).refusal


def test_a_majority_that_a_reduce_may_have_fed_is_not_trusted() -> None:
    """The gradient was not seen clean at the step before: a wrong chunk may have reached most of the ranks."""
    simulated = SimulatedGroup(THREE)
    simulated.steps(3)
    simulated.step({"reduced": {2: 1}})
    before, rows = simulated.history, simulated.rows({"weights_now": {1: 5}})
    plan = make_plan(simulated.step(rows=rows), before, THREE, rows, **COMMON)
    assert "not seen clean" in plan.refusal


def test_a_replay_verdict_halts_whatever_else_there_is() -> None:
    """Steps before the audit may have used such gradients, too."""
    from sdcwatch.testing.simulated_group import backward_fault

    simulated = SimulatedGroup(THREE)
    simulated.audit()
    before = simulated.history
    rows = simulated.rows()
    judgement = simulated.audit(backward_fault(THREE, 1))
    assert asks(judgement)
    plan = make_plan(judgement, before, THREE, rows, **COMMON)
    assert plan.check == "replay"
    assert "replay" in plan.refusal


def test_a_gradient_over_unequal_weights_halts() -> None:
    """Two differences at once are one too many."""
    assert planned(THREE, {"reduced": {1: 5}, "weights_now": {2: 5}}).refusal == "more than one difference stands"


def test_a_row_that_cannot_be_read_halts() -> None:
    """What one rank holds is then unknown."""
    simulated = SimulatedGroup(THREE)
    simulated.steps(4)
    rows: list[Any] = simulated.rows({"reduced": {1: 5}})
    rows[2] = RowError("torn")
    assert "read" in planned(THREE, {"reduced": {1: 5}}, rows=rows).refusal


@pytest.mark.parametrize(("ago", "node", "halts"), [(100, "b", True), (101, "b", False), (1, "a", False)])
def test_a_second_event_of_a_node_within_the_window_halts(ago: int, node: str, halts: bool) -> None:
    """At the boundary, and for another node not at all."""
    past = (Healed(200 - ago, frozenset(node)),)
    plan = planned(THREE, STEP_WRONG, past=past, count=200)
    assert bool(plan.refusal) is halts
    assert ("heal_window" in plan.refusal) is halts


def test_the_digest_tells_plans_apart() -> None:
    """Ranks that plan differently must not agree."""
    plans = [planned(THREE, {"weights_now": {r: 5}}) for r in range(3)] + [planned(THREE, {"reduced": {1: 5}})]
    assert len({p.digest for p in plans}) == 4
    assert planned(THREE, {"reduced": {1: 5}}).digest == plans[3].digest


def test_a_recheck_accepts_only_what_was_seen_equal() -> None:
    """A difference that came back, and a step that could not be checked again, are both failures."""
    simulated = SimulatedGroup(THREE)
    clean = simulated.steps(3)
    assert recheck(clean) == ""
    assert "came back" in recheck(simulated.step({"reduced": {1: 5}}))
    assert "could not be checked" in recheck(Judgement.void(3, 3))


def test_what_the_first_judgement_said_is_not_said_again() -> None:
    """One event is one line, however often the step is judged."""
    simulated = SimulatedGroup(THREE)
    simulated.steps(3)
    found = simulated.step({"reduced": {1: 5}})
    assert only_new(found, found).verdicts == ()
    assert only_new(found, Judgement.void(3, 3)).verdicts == found.verdicts
