"""When an audit runs, when it is void, and how calibration decides what may accuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sdcwatch.observation import RowError, SkipReason
from sdcwatch.testing.simulated_group import Faults, SimulatedGroup, backward_fault, group_of
from sdcwatch.verdict import checked_through, judge, plan_audit, verified_through


def run(*layout: int, calibrated: bool = True) -> SimulatedGroup:
    group = SimulatedGroup(group_of(*layout))
    group.step()
    if calibrated:
        group.audit()
    return group


def replay_result(group: SimulatedGroup, faults: Faults | None = None, row_faults: Faults | None = None) -> str:
    judgement = group.audit(faults, row_faults)
    assert judgement.verdicts == ()
    return dict(judgement.checks)["replay"]


@pytest.mark.parametrize(
    ("row_faults", "reason"),
    [
        ({"replay_ready": {1: SkipReason.code("oom")}}, "oom"),
        ({"replay_ready": {1: SkipReason.code("collective"), 2: SkipReason.code("oom")}}, "collective"),
        ({"replay_ready": {0: None}}, "disabled"),
        ({"batch_bytes": {2: None}}, "batch"),
        ({"free_memory": {2: 63}}, "oom"),
        ({"error": {0: 1}}, "error"),
        ({"environment": {0: 3}}, "disabled"),
        ({"reduced_nonfinite": dict.fromkeys(range(3), 1)}, "undefined"),
    ],
)
def test_one_rank_that_cannot_stops_the_audit_of_all(row_faults: Faults, reason: str) -> None:
    """All ranks read the same reason from the same rows, before anything is replayed."""
    group = run(1, 1, 1)
    plan = plan_audit(group.history, group.group, group.rows(row_faults))
    assert (plan.run, plan.reason) == (False, reason)
    judgement = group.audit(row_faults=row_faults)
    assert dict(judgement.checks)["replay"] == f"skipped:{reason}"


def test_weights_that_differ_cannot_be_replayed() -> None:
    """Replays on different weights prove nothing."""
    group = run(1, 1, 1)
    assert plan_audit(group.history, group.group, group.rows({"weights_now": {0: 1}})).reason == "undefined"


@pytest.mark.parametrize("layout", [(4,), (1,)])
def test_one_node_has_no_replay(layout: tuple[int, ...]) -> None:
    """O and S on one node are one witness."""
    group = SimulatedGroup(group_of(*layout))
    assert plan_audit(group.history, group.group, group.rows()).reason == "disabled"


def test_a_lost_row_stops_the_audit() -> None:
    """A row that is no row makes no plan."""
    group = run(1, 1, 1)
    rows = [*group.rows()[:2], RowError("CRC")]
    assert plan_audit(group.history, group.group, rows).reason == "error"


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"batch_received": {1: 1}}, "batch"),
        ({"batch_unchanged": {1: 0}}, "batch"),
        ({"batch_sent": {1: None}, "batch_received": {2: None}}, "batch"),
        ({"weights_now": {1: 4}}, "undefined"),
        ({"error": {1: 1}}, "error"),
    ],
)
def test_a_void_audit_accuses_nobody(faults: Faults, reason: str) -> None:
    """Batch before and after transit, weights and our own code must be sound, else nothing is compared."""
    group = run(1, 1, 1, 1)
    assert replay_result(group, {**backward_fault(group.group, 2), **faults}) == f"skipped:{reason}"
    assert group.history.audited == 1, "and it verifies nothing"


@pytest.mark.parametrize("fault", [{"step": {1: 0}}, {"instance": {1: 0}}, {"rank": {1: 2}}, {"served_rank": {1: 3}}])
def test_audit_rows_in_the_wrong_slot_are_a_transport_fault(fault: Faults) -> None:
    """They blame nobody, once."""
    group = run(1, 1, 1, 1)
    (verdict,) = group.audit(fault).verdicts
    assert (verdict.check, verdict.path, verdict.suspects, verdict.contains) == ("replay", "transport", (), False)


def test_a_first_audit_only_calibrates() -> None:
    """Anything new calibrates first and cannot accuse in that audit; the one that stands out is an outlier."""
    group = run(1, 1, 1, 1, calibrated=False)
    plan = plan_audit(group.history, group.group, group.rows())
    assert (plan.run, plan.calibrating) == (True, ((0, 1), (1, 2), (2, 3), (3, 0)))
    judgement = group.audit(backward_fault(group.group, 2))
    assert (judgement.verdicts, judgement.calibration_outliers) == ((), (2,))
    assert dict(judgement.checks)["replay"] == "skipped:nondeterministic"
    assert verified_through(group.history) is None
    assert plan_audit(group.history, group.group, group.rows()).calibrating == ((1, 2), (2, 3))


def test_a_node_bad_from_the_start_stays_an_outlier_and_is_never_silent() -> None:
    """Its edges never calibrate, so it is never accused; it is an outlier at every audit."""
    group = run(1, 1, 1, calibrated=False)
    for _ in range(3):
        judgement = group.audit(backward_fault(group.group, 0))
        assert (judgement.verdicts, judgement.calibration_outliers) == ((), (0,))


@pytest.mark.parametrize("change", [{"batch_signature": {1: 22}}, {"compile_count": {1: 1}}])
def test_a_new_shape_or_compile_count_calibrates_its_edges_again(change: dict[str, dict[int, int]]) -> None:
    """A new input shape, or a recompiled module, cannot accuse in its first audit."""
    group = run(1, 1, 1, 1)
    plan = plan_audit(group.history, group.group, group.rows(change))
    assert (1, 2) in plan.calibrating
    assert group.audit({"served_digest": {1: 1}}, change).verdicts == ()
    assert group.audit(None, change).verdicts == ()
    assert group.audit({"served_digest": {1: 1}}, change).verdicts[0].suspects == (2,)


def test_calibration_that_fails_on_most_edges_turns_replay_off() -> None:
    """A non-deterministic replay is a skip, never a verdict, and stays off while nothing changes."""
    group = run(1, 1, 1, 1, calibrated=False)
    noise = {"served_digest": dict.fromkeys(range(4), 1)}
    assert replay_result(group, noise) == "skipped:nondeterministic"
    assert plan_audit(group.history, group.group, group.rows()).reason == "nondeterministic"
    assert replay_result(group, noise) == "skipped:nondeterministic"
    assert plan_audit(group.history, group.group, group.rows({"compile_count": dict.fromkeys(range(4), 1)})).run


def test_originals_are_compared_only_where_calibration_showed_them() -> None:
    """A loop whose originals never equal the replay still has S and N compared, and is never judged by O."""
    group = run(1, 1, 1, 1, calibrated=False)
    other = dict.fromkeys(range(4), 5)
    assert replay_result(group, {"original": other}) == "clean"
    assert replay_result(group, {"original": other}) == "clean"
    verdict = group.audit({**backward_fault(group.group, 1), "original": other}).verdicts[0]
    assert (verdict.suspects, verdict.contains) == ((1,), False)


def test_a_failing_calibration_beside_a_failing_edge_names_nobody() -> None:
    """Rows that need every other edge to be sound do not fit while one of them is unsure."""
    group = run(*(1,) * 6)
    new_shape = {"batch_signature": {4: 22}}
    faults = dict(backward_fault(group.group, 1))
    faults["served_digest"] = {**faults["served_digest"], 4: 1}  # the edge that rank 4 owns only calibrates
    (verdict,) = group.audit(faults, new_shape).verdicts
    assert (verdict.kind, verdict.suspects) == ("inconclusive", ())


def test_no_step_is_checked_while_a_replay_event_is_open() -> None:
    """The weights still agree, but they may all hold the wrong sum."""
    group = run(1, 1, 1, 1)
    before = checked_through(group.history)
    assert group.audit(backward_fault(group.group, 1)).verdicts
    during = checked_through(group.history)
    group.step()
    group.step()
    assert before is not None
    assert checked_through(group.history) == during


@pytest.mark.parametrize("spoil", ["batch_received", "weights_now", "step", "error", "served_rank", "round"])
def test_a_third_nodes_row_counts_only_when_it_is_sound(spoil: str) -> None:
    """Another batch, other weights, an old row or an error settle nothing."""
    group = run(1, 1, 1)
    rows, audit = group.rows(), group.audit_rows({"served_digest": {0: 1}})
    third = replace(audit[2], round=1, served_rank=0, served_digest=audit[0].self_digest)
    third = replace(third, batch_received=audit[0].batch_sent)
    sound, _ = judge(group.history, group.group, group.next_step, rows, audit, [third])
    assert sound.verdicts[0].suspects == (1,)
    bad = replace(third, **{spoil: 1 if spoil != "round" else 0})
    spoiled, _ = judge(group.history, group.group, group.next_step, rows, audit, [bad, None, RowError("CRC")])
    assert (spoiled.verdicts[0].kind, spoiled.verdicts[0].suspects) == ("inconclusive", ())


def test_an_audit_that_left_an_edge_unmeasured_verifies_nothing() -> None:
    """Clean on every rank means that every rank was replayed elsewhere."""
    group = run(8, 2, 2)
    before = group.history.audited
    rows, audit = group.rows(), group.audit_rows()[: group.group.size]
    judgement, after = judge(group.history, group.group, group.next_step, rows, audit)
    assert dict(judgement.checks)["replay"] == "clean"
    assert after.audited == before


def test_an_audit_in_which_some_originals_stand_apart_verifies_nothing() -> None:
    """A new shape may not accuse rank 2's original yet, but nobody has shown either that it was right."""
    group = run(1, 1, 1, 1)
    before = group.history.audited
    shape = {"batch_signature": dict.fromkeys(range(4), 22)}
    assert replay_result(group, {"original": {2: 1}}, shape) == "clean"
    assert group.history.audited == before
    assert replay_result(group, {}, shape) == "clean"
    assert group.history.audited == group.next_step - 1


def test_originals_that_no_replay_equals_leave_verifying_to_the_replays() -> None:
    """A compiled step rounds otherwise on every rank; two nodes that agree still verify it."""
    group = run(1, 1, 1, 1, calibrated=False)
    assert replay_result(group, {"original": dict.fromkeys(range(4), 5)}) == "clean"
    assert group.history.audited == group.next_step - 1


def test_calibration_stays_bounded() -> None:
    """Ever new shapes do not grow the history."""
    group = run(1, 1, 1)
    for signature in range(100, 160):
        group.audit(None, {"batch_signature": dict.fromkeys(range(3), signature)})
    known = group.history.calibration
    assert max(len(known.edges), len(known.originals)) <= 48
    assert len(known.complete) <= 4


def test_ranks_that_number_their_steps_apart_are_audited_all_the_same() -> None:
    """An audit row belongs to the step that its own rank's row named, whatever the others call it."""
    group = run(1, 1, 1, 1)
    ahead = {1: group.next_step + 1000}
    judgement = group.audit({"step": ahead}, {"step": ahead})
    assert dict(judgement.checks)["replay"] == "clean"
    assert [(v.check, v.kind) for v in judgement.verdicts] == [("weight_checksum", "software")], "the numbering's own"


def test_a_third_node_that_numbers_its_steps_apart_settles_a_tie() -> None:
    """Its tie-break row carries its own number, like its other rows."""
    group = run(1, 1, 1)
    ahead = group.next_step + 1000
    rows, audit = group.rows({"step": {2: ahead}}), group.audit_rows({"served_digest": {0: 1}, "step": {2: ahead}})
    third = replace(audit[2], round=1, served_rank=0, served_digest=audit[0].self_digest)
    third = replace(third, batch_received=audit[0].batch_sent)
    judgement, _ = judge(group.history, group.group, group.next_step, rows, audit, [third])
    assert [v.suspects for v in judgement.verdicts if v.check == "replay"] == [(1,)]
