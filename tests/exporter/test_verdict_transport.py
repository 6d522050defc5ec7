"""What arrives is checked before it is compared, and a judgement that ranks do not share names nobody."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sdcwatch.observation import Row, RowError
from sdcwatch.testing.simulated_group import SimulatedGroup, group_of
from sdcwatch.verdict import CONTAINS_FROM, Judgement, checked_through, combine


def run(*layout: int) -> SimulatedGroup:
    group = SimulatedGroup(group_of(*layout))
    group.steps(3)
    return group


def broken(how: str, rows: list[Row]) -> list[Row | RowError]:
    changed: list[Row | RowError] = list(rows)
    if how == "permuted":
        changed[0], changed[1] = changed[1], changed[0]
    elif how == "crc":
        changed[1] = RowError("row's CRC does not match")
    else:
        changed[1] = replace(rows[1], **{how: 1})
    return changed


@pytest.mark.parametrize("how", ["permuted", "crc", "rank", "instance", "epoch", "step"])
def test_a_row_that_is_not_its_ranks_own_blames_nobody(how: str) -> None:
    """Wrong slot, CRC, instance, epoch or an old step: one transport fault, contained by nothing."""
    group = run(1, 1, 1, 1)
    rows = group.rows({"weights_now": {3: 1}})
    if how == "rank":
        rows[1] = replace(rows[1], rank=2)
    judgement = group.step(rows=broken(how, rows) if how != "rank" else rows)
    (verdict,) = judgement.verdicts
    assert (verdict.kind, verdict.path, verdict.suspects, verdict.contains) == ("inconclusive", "transport", (), False)
    assert 1 in verdict.differing
    assert {result for _, result in judgement.checks} == {"skipped:error"}
    assert judgement.code < CONTAINS_FROM


def test_too_few_rows_are_a_transport_fault() -> None:
    """A gather of another length than the group is no exchange."""
    group = run(1, 1, 1)
    assert group.step(rows=group.rows()[:2]).verdicts[0].path == "transport"


def test_a_lasting_transport_fault_is_one_event() -> None:
    """It counts once, until rows arrive whole again, and nothing is checked meanwhile."""
    group = run(1, 1, 1)
    seen = [group.step(rows=broken("crc", group.rows())).verdicts[0].new for _ in range(3)]
    assert seen == [True, False, False]
    assert checked_through(group.history) == 1
    assert group.step().verdicts == ()
    assert group.step(rows=broken("crc", group.rows())).verdicts[0].new


def test_a_loop_that_numbers_its_steps_otherwise_is_software() -> None:
    """A step number from the future is no old row: the ranks do not run the same loop. It lasts as one event."""
    group = run(1, 1, 1, 1)
    kinds = []
    for _ in range(3):
        judgement = group.step({"step": {2: group.next_step + 1}})
        kinds += [(v.kind, v.path, v.new) for v in judgement.verdicts]
        assert judgement.step == group.next_step - 1
    assert kinds == [("software", "code", True), ("software", "code", False), ("software", "code", False)]


@pytest.mark.parametrize("missing", [None, "error"])
def test_a_void_or_missing_row_is_a_skip_for_the_group(missing: str | None) -> None:
    """Our own code failed on one rank, or its last row never came: nothing is compared and nothing is clean."""
    group = run(1, 1, 1)
    rows: list[Row | None] = list(group.rows({"weights_now": {2: 1}}))
    rows[0] = None if missing is None else replace(group.rows()[0], error=1)
    judgement = group.step(rows=rows)
    assert (judgement.verdicts, judgement.code) == ((), 0)
    assert {result for _, result in judgement.checks} == {"skipped:error"}
    assert (group.history.gradient_clean_since, checked_through(group.history)) == (None, 1)
    fault = {"weights_end": {1: 1}, "weights_now": {1: 1}}
    assert group.step(fault).verdicts[0].suspects == (), "the optimizer step in the gap was seen by nobody"


def test_an_optimizer_step_between_two_exchanges_that_nobody_saw_is_not_blamed() -> None:
    """Its gradient was in no row, so the reduce may have been wrong: seen, contained, and nobody is named."""
    group = run(1, 1, 1)
    group.next_step += 1
    (verdict,) = group.step({"weights_end": {1: 1}, "weights_now": {1: 1}}).verdicts
    assert (verdict.kind, verdict.suspects, verdict.contains) == ("inconclusive", (), True)


def judged(**faults: dict[int, int]) -> Judgement:
    return run(1, 1, 1, 1).step(faults)


def test_agreement_changes_nothing() -> None:
    """All ranks hold the same judgement: it stands."""
    judgement = judged(weights_end={2: 1}, weights_now={2: 1})
    assert combine(judgement, True, judgement.code) is judgement


@pytest.mark.parametrize(("highest", "contains"), [(0, False), (3, False), (4, False), (5, True), (6, True)])
def test_disagreement_names_nobody_and_the_highest_code_contains(highest: int, contains: bool) -> None:
    """Whatever a rank read, all end with the same inconclusive judgement."""
    combined = [combine(j, False, highest) for j in (judged(), judged(weights_end={2: 1}, weights_now={2: 1}))]
    assert combined[0].verdicts == combined[1].verdicts
    assert (combined[0].code, combined[0].digest) == (combined[1].code, combined[1].digest)
    (verdict,) = combined[0].verdicts
    assert (verdict.kind, verdict.suspects, verdict.contains) == ("inconclusive", (), contains)
    assert (combined[0].code >= CONTAINS_FROM) == contains


def test_codes_order_by_what_must_happen() -> None:
    """clean < undefined < software < inconclusive < whatever contains."""
    nan = dict.fromkeys(range(4), 1)
    codes = [
        judged().code,
        judged(reduced_nonfinite=nan).code,
        judged(loss_scale={1: 2}).code,
        run(1, 1, 1).step(rows=[]).code,
        judged(weights_now={2: 1}).code,
        judged(weights_end={2: 1}, weights_now={2: 1}).code,
    ]
    assert codes == [0, 1, 2, 3, 5, 6]


def test_the_digest_tells_suspects_kinds_and_steps_apart() -> None:
    """Two ranks with different verdicts never hold the same digest, which fits an int64."""
    faults = [{}, {"weights_now": {2: 1}}, {"weights_end": {2: 1}}, {"weights_end": {1: 1}}, {"reduced": {1: 1}}]
    digests = [judged(**fault).digest for fault in faults]
    digests.append(run(1, 1, 1, 1).steps(2).digest)
    assert len(set(digests)) == len(digests)
    assert all(0 <= digest < 1 << 63 for digest in digests)


def test_a_void_judgement_can_still_be_combined() -> None:
    """A rank whose own judging failed takes part in the second collective."""
    void = Judgement.void(4)
    assert (void.code, void.verdicts, combine(void, False, 6).verdicts[0].contains) == (0, (), True)
