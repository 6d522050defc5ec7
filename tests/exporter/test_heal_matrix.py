"""What `make campaign-heal` lives through, and how it judges: complete, and not to be satisfied by nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from sdcwatch.testing import LOCATIONS  # noqa: E402

from benchmarks.heal import document  # noqa: E402
from benchmarks.heal.cases import BEGINS, FAULT, KILL, Case, all_cases  # noqa: E402
from benchmarks.heal.lived import Result, wrong  # noqa: E402

CASES = all_cases([3, 4])


def fault(**fields: Any) -> Case:
    bad = {"location": "optimizer_weight", "rank": 1, "step": 5}
    return Case(
        **{"section": FAULT, "name": "f", "when": "once", "on_fault": "halt", "size": 3, "faults": (bad,)} | fields
    )


def ended(case: Case, **fields: Any) -> Result:
    good = {"equal": True, "lives": 2, "struck": 1, "resumed": [3], "events": ["weight_checksum"], "suspects": [1]}
    return Result(case, **(good | fields))


def test_every_place_is_struck_once_and_for_good_with_heal_and_with_halt() -> None:
    """All locations of the injector x transient, persistent x heal, halt x 3, 4 ranks; no key twice."""
    found = {
        (f["location"], f.get("mode", "persistent") == "persistent", case.on_fault, case.size)
        for case in CASES
        if case.section == FAULT
        for f in case.faults
    }
    wanted = {
        (place, lasting, on_fault, size)
        for place in LOCATIONS
        for lasting in (True, False)
        for on_fault in ("heal", "halt")
        for size in (3, 4)
    }
    assert found == wanted
    assert len({case.key for case in CASES}) == len(CASES)


@pytest.mark.parametrize("during", ["check", "heal", "heal that overwrites", "checkpoint write", "halt, before"])
def test_one_rank_all_ranks_and_a_node_are_killed_during_each(during: str) -> None:
    """At 3 and 4 ranks; with 4 ranks a node has two."""
    for size in (3, 4):
        cases = [c for c in CASES if c.section == KILL and c.size == size and f"during a {during}" in c.when]
        victims = [tuple(c.kill["ranks"]) for c in cases if c.kill is not None]
        assert tuple(range(size)) in victims
        assert {len(v) for v in victims} >= {1, size}
        if during != "heal that overwrites" and size == 4:
            assert 2 in {len(v) for v in victims}


def test_only_a_compute_fault_that_no_audit_met_may_go_unproven() -> None:
    """It happened once between audits, or the job was killed before the next one: all others must end equal."""
    blind = [c for c in CASES if c.blind]
    assert {c.name for c in blind} == {"forward", "backward", "local_gradient", "input_batch"}
    assert {c.when for c in blind if c.kill is None} == {"once, between audits"}
    assert {c.section for c in blind if c.kill is not None} == {BEGINS}


def test_a_run_that_ended_as_it_must_is_fine() -> None:
    """Seen, named rightly, resumed from before the fault, equal."""
    assert not wrong(ended(fault()))
    assert not wrong(ended(fault(blind=True), equal=False, events=[], suspects=[], resumed=[]))


@pytest.mark.parametrize(
    ("case", "end", "said"),
    [
        (fault(), {"equal": False}, "not a clean run's"),
        (fault(), {"suspects": [1, 2]}, "were named"),
        (fault(), {"struck": 0}, "never struck"),
        (fault(), {"events": []}, "nothing was seen"),
        (fault(), {"resumed": [5]}, "resumed after step 5"),
        (fault(blind=True), {"suspects": []}, "nothing is there to see it"),
        (fault(blind=True, bad_lives=9), {"equal": False, "events": [], "verified": 3}, "went by in silence"),
        (fault(blind=True, bad_lives=9), {"equal": False, "outliers": [1], "verified": 7}, "went by in silence"),
        (fault(), {"outliers": [2]}, "outliers"),
        (fault(kill={"during": "check", "ranks": [1], "step": 5}), {"resumed": [7]}, "resumed after step 7"),
    ],
)
def test_each_way_to_be_wrong_is_told(case: Case, end: dict[str, Any], said: str) -> None:
    """A run that proves nothing does not pass for one that holds."""
    assert said in wrong(ended(case, **end))


def test_the_table_says_where_sizes_differ() -> None:
    """One row for both sizes; a value that both share stands once."""
    text = document.tables([ended(fault()), ended(fault(size=4), resumed=[None])], 60.0)
    assert "| f | once | halt | 3 / 4 | yes | 0 | 2 | 0 | 3 / start | weight_checksum |" in text
