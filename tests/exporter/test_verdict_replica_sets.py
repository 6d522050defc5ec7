"""Replica sets: the rules of one group, set by set; ranks that hold different shards are never compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sdcwatch.observation import Row, RowError
from sdcwatch.testing.simulated_group import group_of, healthy_row
from sdcwatch.verdict import Group, History, Judgement, checked_everywhere, judge_sets, verified_everywhere

JOB = group_of(*[2] * 4)  # four replicas, one a node, of two shards
PARTS = (JOB.part((0, 2, 4, 6)), JOB.part((1, 3, 5, 7)))


def rows(step: int, changes: dict[int, dict[str, Any]] | None = None) -> list[Row | RowError]:
    """Healthy rows in which the two shards differ from each other, with some ranks' fields changed."""
    made: list[Row | RowError] = []
    for rank in range(JOB.size):
        row = healthy_row(JOB, rank, step, 0)
        shard = {
            name: getattr(row, name) ^ (rank % 2)
            for name in ("reduced", "weights_now", "weights_begin", "weights_end", "state_begin", "state_end")
            if getattr(row, name) is not None
        }
        row = replace(row, **shard, local_norm=None, local_nonfinite=None, conservation=None)
        made.append(replace(row, **(changes or {}).get(rank, {})))
    return made


def run(*exchanges: list[Row | RowError], parts: tuple[Group, ...] = PARTS) -> tuple[list[Judgement], Any]:
    histories = tuple(History.initial() for _ in parts)
    judgements = []
    for step, exchange in enumerate(exchanges):
        judgement, histories = judge_sets(histories, parts, step, exchange)
        judgements.append(judgement)
    return judgements, histories


def test_different_shards_are_no_difference() -> None:
    """Healthy sets that hold different bits are clean, and the number of distinct values is one a set."""
    judgements, histories = run(rows(0), rows(1), rows(2))
    last = judgements[-1]
    assert not last.verdicts
    assert dict(last.checks)["weight_checksum"] == "clean"
    assert dict(last.checks)["gradient_norm"] == "skipped:disabled"
    assert last.distinct("weight_checksum") == 1
    assert last.group_sizes["weight_checksum"] == (4,) * 8
    assert (checked_everywhere(histories), verified_everywhere(histories)) == (1, None)


@pytest.mark.parametrize("bad", range(8))
def test_the_odd_rank_of_a_set_is_named_by_its_job_rank(bad: int) -> None:
    """Three of the four replicas of its shard agree; the other set is no witness and no suspect."""
    wrong = {"weights_end": 1, "weights_now": 1}
    judgements, histories = run(rows(0), rows(1), rows(2, {bad: wrong}))
    (verdict,) = judgements[-1].verdicts
    assert (verdict.kind, verdict.suspects, verdict.differing) == ("attributed", (bad,), (bad,))
    assert f"ank {bad} on {JOB.nodes[bad]}" in verdict.sentence
    assert verdict.evidence["replica_set"] == [r for r in range(8) if r % 2 == bad % 2]
    listed = [r for value in verdict.evidence["values"]["weights_end"] for r in value["ranks"]]
    assert sorted(listed) == verdict.evidence["replica_set"]
    assert judgements[-1].distinct("weight_checksum") == 2
    assert checked_everywhere(histories) == 0, "the job is clean only as far as its worst set"


def test_two_sets_split_at_once_are_two_verdicts_and_one_action() -> None:
    """Ranks 2 and 3 share a node: each is named in its own set, and the judgement contains once."""
    wrong = {"weights_end": 1, "weights_now": 1}
    judgements, _ = run(rows(0), rows(1), rows(2, {2: wrong, 3: wrong}))
    assert [v.suspects for v in judgements[-1].verdicts] == [(2,), (3,)]
    assert judgements[-1].code == 6


def test_a_row_that_is_not_its_ranks_own_faults_its_set_only() -> None:
    """A row with the number inside the set instead of the job's is no row of that rank."""
    judgements, _ = run(rows(0), rows(1), rows(2, {4: {"rank": 2}}))
    (verdict,) = judgements[-1].verdicts
    assert (verdict.path, verdict.differing, verdict.suspects) == ("transport", (4,), ())
    assert verdict.evidence["slots"] == [4]
    assert dict(judgements[-1].checks)["weight_checksum"] == "skipped:error"


def test_an_undefined_gradient_in_one_set_is_not_called_clean() -> None:
    """A loss scaler's overflow may show in one shard only."""
    overflow = {rank: {"reduced_nonfinite": 1} for rank in (0, 2, 4, 6)}
    judgements, _ = run(rows(0), rows(1, overflow))
    assert not judgements[-1].verdicts
    assert dict(judgements[-1].checks)["gradient_checksum"] == "undefined"


def test_two_replicas_of_a_shard_name_nobody() -> None:
    """Four ranks hold it somewhere in the job, but only two hold this shard."""
    parts = (JOB.part((0, 2)), JOB.part((1, 3)), JOB.part((4, 6)), JOB.part((5, 7)))
    wrong = {"weights_end": 1, "weights_now": 1}
    judgements, _ = run(rows(0), rows(1), rows(2, {6: wrong}), parts=parts)
    (verdict,) = judgements[-1].verdicts
    assert (verdict.kind, verdict.suspects, verdict.differing) == ("inconclusive", (), (4, 6))
