"""The campaign's own judgement: right answers score as such, and each wrong one breaks a guarantee."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from sdcwatch.testing import LOCATIONS, PATTERNS  # noqa: E402

from benchmarks.campaign import guarantees, journal  # noqa: E402
from benchmarks.campaign.cases import CROSS, LAYOUTS, MODES, Case, fault_list, quick_list  # noqa: E402
from benchmarks.campaign.causes import BELOW, BETWEEN, ONE_NODE, UNKNOWN, cause  # noqa: E402
from benchmarks.campaign.score import score, score_sdcguard  # noqa: E402


def case(**fields: Any) -> Case:
    plain: dict[str, Any] = {
        "group": CROSS, "world": 3, "nodes": (1, 1, 1), "precision": "fp32", "optimizer": "sgd",
        "location": "optimizer_weight", "pattern": "bit_flip", "mode": "persistent", "rank": 0, "step": 2,
        "parameter": 0, "seed": 1,
    }  # fmt: skip
    return Case(**{**plain, **fields})


def answers(size: int = 3, *, struck: int = 0, verdicts: tuple[dict[str, Any], ...] = (), **more: Any) -> list[Any]:
    """What the ranks of a run answer where rank `struck` was hit at step 2."""
    found = []
    for rank in range(size):
        found.append(
            {
                "verdicts": list(verdicts), "norms": [[1.0, 2.0]] * 5, "skipped": {}, "outlier": 0, "anomalies": 0,
                "weights": [7, 7, 8 if rank == struck else 7, 7, 7], "changed": [], "failures": 0,
                "strikes": [(2, 1, 0.5)] if rank == struck else [], **more,
            }
        )  # fmt: skip
    return found


def verdict(kind: str, suspects: tuple[int, ...] = (), step: int = 3, check: str = "weight_checksum") -> dict[str, Any]:
    return {
        "step": step, "check": check, "kind": kind, "suspects": list(suspects), "path": "optimizer compute",
        "contains": kind != "software", "sentence": "Said.",
    }  # fmt: skip


def broken(one: Case, result: dict[str, Any]) -> set[str]:
    """The guarantees that this row breaks."""
    return {g.text.split(":")[0] for g in guarantees.of_faults([(one, result)]) if g.broken}


def test_the_list_is_the_cross_of_all_that_varies_and_rank_0_is_bad_as_often_as_others() -> None:
    """At least 2,000 faults; each place meets each pattern, mode and layout; the same seed gives the same list."""
    cases = fault_list()
    assert len(cases) >= guarantees.FAULTS
    assert len({c.key for c in cases}) == len(cases)
    assert [c.key for c in fault_list()] == [c.key for c in cases]
    assert [c.key for c in fault_list(1)] != [c.key for c in cases]
    cross = [c for c in cases if c.group == CROSS]
    for location in LOCATIONS:
        mine = [c for c in cross if c.location == location]
        assert {(c.pattern, c.mode, c.precision, c.world) for c in mine} >= {
            (pattern, mode, precision, world)
            for pattern in PATTERNS
            for mode in MODES
            for precision in ("fp32", "bf16 autocast")
            for world in LAYOUTS
        }
        assert {c.nodes for c in mine} == {nodes for layouts in LAYOUTS.values() for nodes in layouts}
        assert {(c.world, c.rank) for c in mine} == {(world, rank) for world in LAYOUTS for rank in range(world)}
    assert {c.location for c in quick_list()} == set(LOCATIONS)
    assert all(c.step > 0 for c in cross)


def test_a_named_rank_scores_and_a_healthy_one_is_wrong_blame() -> None:
    """Naming the bad rank and no other; a second name makes it wrong."""
    good = score(case(), answers(verdicts=(verdict("attributed", (0,)),)))
    assert good["outcome"] == "named"
    assert broken(case(), good) == set()
    for suspects in ((1,), (0, 1)):
        bad = score(case(), answers(verdicts=(verdict("attributed", suspects),)))
        assert bad["outcome"] == "wrong blame"
        assert "no healthy rank is named" in broken(case(), bad)


@pytest.mark.parametrize(
    ("said", "missed"),
    [
        ((), "weights and optimizer state struck in the step"),
        ((verdict("attributed", (0,), step=4),), "weights and optimizer state struck in the step"),
        ((verdict("inconclusive"),), "the same, at 3 nodes or more"),
        ((verdict("software"),), "the same, at 3 nodes or more"),
    ],
)
def test_too_late_too_weak_or_silent_breaks_a_guarantee(said: tuple[dict[str, Any], ...], missed: str) -> None:
    """A fault in the optimizer's step is named in the next exchange at three nodes."""
    assert missed in broken(case(), score(case(), answers(verdicts=said)))


def test_ranks_that_say_different_things_and_runs_that_failed_break_a_guarantee() -> None:
    """Whatever the rest looks like."""
    split = answers(verdicts=(verdict("attributed", (0,)),))
    split[1]["verdicts"] = []
    assert "all ranks give the same verdicts, and no check of ours failed" in broken(case(), score(case(), split))
    failed = {**score(case(), answers()), "outcome": "broken"}
    assert "every run came to its end" in broken(case(), failed)


def test_a_fault_without_effect_is_no_miss_and_a_miss_has_a_cause() -> None:
    """One node, between audits, below the bound; anything else is a bug."""
    forward = case(location="forward", replay_every=2)
    assert score(forward, answers())["outcome"] == "masked"
    between = answers()
    between[0]["changed"] = [3]
    assert cause(forward, score(forward, between)) == BETWEEN
    between[0]["changed"] = [2]
    assert cause(forward, score(forward, between)) == UNKNOWN
    assert cause(case(location="forward", world=2, nodes=(2,)), score(forward, between)) == ONE_NODE
    alike = case(location="reduced_gradient_all")
    quiet = answers(struck=0)
    quiet[0]["strikes"] = [(2, 1, 1e-9)]
    assert cause(alike, score(alike, quiet)) == BELOW
    assert cause(alike, score(alike, answers())) == UNKNOWN


def test_peers_are_held_against_the_same_truth() -> None:
    """Parity blames everybody but a bad rank 0; sdcguard that lists all ranks names nobody."""
    assert score(case(rank=2), answers(struck=2))["peers"]["parity"] == "named"
    assert score(case(rank=0), answers(struck=0))["peers"]["parity"] == "wrong blame"
    loud = answers()
    loud[0]["norms"] = [[1.0, 2.0]] * 2 + [[100.0, 2.0]] * 3
    assert score(case(), loud)["peers"]["norm"] == "named"
    alarm = {"step": 3, "detector": "replica"}
    for named, outcome in (([0], "named"), ([1], "wrong blame"), ([0, 1, 2], "inconclusive")):
        assert score_sdcguard(case(), [2], [[{**alarm, "named": named}]] * 3) == outcome
    assert score_sdcguard(case(), [2], [[], [], []]) == "missed"


def test_a_killed_campaign_goes_on_and_another_products_results_are_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that the kill cut in two is run again; results of other sources count for nothing."""
    monkeypatch.setattr(journal, "OUT", tmp_path)
    first = journal.Journal("c", {"product": "a"})
    first.add("one", {"outcome": "named"})
    with first.path.open("a") as file:
        file.write('{"key": "two", "res')
    again = journal.Journal("c", {"product": "a"})
    assert again.results == {"one": {"outcome": "named"}}
    again.add("two", 2)
    assert journal.Journal("c", {"product": "a"}).results == {"one": {"outcome": "named"}, "two": 2}
    assert journal.Journal("c", {"product": "b"}).results == {}
    assert len((tmp_path / "c.jsonl.old").read_text().splitlines()) == 4


def test_a_case_survives_json() -> None:
    """What the result holds can be made a case again."""
    one = fault_list()[0]
    fields = json.loads(json.dumps(dataclasses.asdict(one)))
    assert Case(**{**fields, "nodes": tuple(fields["nodes"])}) == one
