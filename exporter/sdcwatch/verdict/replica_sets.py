"""A job whose state is sharded and replicated: each set of ranks that hold the same shard is judged by itself.

The rules are those of one replica group, so a majority is one of the set's ranks and nodes, and no verdict spans two
sets. Ranks in what comes out are the job's. All ranks judge all sets from the same rows, so that they still act as
one. Flow: exchange -> **judge_sets** -> second collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sdcwatch.observation import Row, RowError
from sdcwatch.packed_rows import columnar
from sdcwatch.verdict.engine import judge
from sdcwatch.verdict.group import Group
from sdcwatch.verdict.history import History, checked_through, verified_through
from sdcwatch.verdict.records import CLEAN, DIFFERS, UNDEFINED, Judgement, Verdict, digest_of

#: Evidence whose value lists ranks.
_LISTS_RANKS = ("ranks", "slots")


def judge_sets(
    histories: Sequence[History], groups: Sequence[Group], step: int, rows: Sequence[Row | RowError | None]
) -> tuple[Judgement, tuple[History, ...]]:
    """Judges one exchange of a job, set by set, without an audit (a sharded model's ranks cannot replay alone).

    Args:
        histories: what the previous exchange returned, one for each set.
        groups: the sets, as parts of the job's group; each rank of the job is in exactly one.
        step: this rank's own step number.
        rows: one row a rank of the job.
    """
    found = [
        judge(history, group, step, _of_set(rows, group.ranks))
        for history, group in zip(histories, groups, strict=True)
    ]
    judgements = [judgement for judgement, _ in found]
    verdicts = tuple(
        _of_job(verdict, group.ranks)
        for judgement, group in zip(judgements, groups, strict=True)
        for verdict in judgement.verdicts
    )
    merged = Judgement(
        verdicts=verdicts,
        checks=_checks(judgements),
        group_sizes=_sizes(judgements, groups),
        code=max(judgement.code for judgement in judgements),
        digest=digest_of(step, verdicts),
        step=step,
        size=sum(group.size for group in groups),
        num_sets=len(groups),
    )
    return merged, tuple(history for _, history in found)


def _of_set(rows: Sequence[Row | RowError | None], members: tuple[int, ...]) -> Sequence[Row | RowError | None]:
    packed = columnar(rows)
    return packed.take(members) if packed else [rows[rank] for rank in members]


def checked_everywhere(histories: Sequence[History]) -> int | None:
    """Newest step that is checked in every set."""
    return _least([checked_through(history) for history in histories])


def verified_everywhere(histories: Sequence[History]) -> int | None:
    """Newest step that is verified in every set."""
    return _least([verified_through(history) for history in histories])


def _least(steps: Sequence[int | None]) -> int | None:
    known = [step for step in steps if step is not None]
    return min(known) if len(known) == len(steps) else None


def _of_job(verdict: Verdict, members: tuple[int, ...]) -> Verdict:
    def ranks(inside: Sequence[int]) -> tuple[int, ...]:
        return tuple(members[index] for index in inside)

    return replace(
        verdict,
        suspects=ranks(verdict.suspects),
        differing=ranks(verdict.differing),
        candidates=ranks(verdict.candidates),
        evidence={**_translated(verdict.evidence, members), "replica_set": list(members[:64])},
    )


def _translated(value: Any, members: tuple[int, ...]) -> Any:
    if isinstance(value, list):
        return [_translated(item, members) for item in value]
    if not hasattr(value, "items"):
        return value
    return {
        key: [members[index] for index in item] if key in _LISTS_RANKS else _translated(item, members)
        for key, item in value.items()
    }


def _checks(judgements: Sequence[Judgement]) -> tuple[tuple[str, str], ...]:
    """One result a check: a difference in any set, else what kept any set from being compared, else clean."""

    def weight(result: str) -> int:
        return {DIFFERS: 3, UNDEFINED: 1, CLEAN: 0}.get(result, 2)

    results: dict[str, str] = {}
    for judgement in judgements:
        for check, result in judgement.checks:
            if check not in results or weight(result) > weight(results[check]):
                results[check] = result
    return tuple(results.items())


def _sizes(judgements: Sequence[Judgement], groups: Sequence[Group]) -> dict[str, tuple[int, ...]]:
    checks = dict.fromkeys(check for judgement in judgements for check in judgement.group_sizes)
    merged: dict[str, tuple[int, ...]] = {}
    for check in checks:
        column: dict[int, int] = {}
        for judgement, group in zip(judgements, groups, strict=True):
            column |= zip(group.ranks, judgement.group_sizes.get(check, (group.size,) * group.size), strict=True)
        merged[check] = tuple(column[rank] for rank in sorted(column))
    return merged
