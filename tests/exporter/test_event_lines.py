"""Events: the bytes that copies are compared by, the checks on reading, and the words for people."""

from __future__ import annotations

import dataclasses
import json
from types import MappingProxyType
from typing import Any

import pytest
from sdcwatch.event import (
    Event,
    EventError,
    RankIdentity,
    Reporter,
    canonical,
    event_id,
    journal_line,
    parse_line,
    training_log_block,
    verdict_line,
)


def make(**changes: Any) -> Event:
    """An attributed replay event of a job of four ranks."""
    values: dict[str, Any] = {
        "training_job": "gpt/1",
        "training_cluster": "blue",
        "epoch": "e1764600000000-00c0ffee",
        "step": 130,
        "check": "replay",
        "kind": "attributed",
        "persistence": "persistent",
        "time": 1764600130.25,
        "suspects": (2,),
        "differing": (2,),
        "candidates": (2,),
        "path": "backward compute",
        "sentence": "rank 2 disagrees with both neighbours, ünïcode too",
        "evidence": MappingProxyType({"edges": [[2, 3], [1, 2]], "digest": "00ff"}),
        "action": "halt",
        "drill": False,
        "world_size": 4,
        "last_clean_step": 110,
        "trust_needed": "verified",
        "ranks": tuple(
            RankIdentity(r, 0, f"n{r}", f"i-{r}", f"h{r}", f"GPU-{r}", "blue", "ab12") for r in (3, 1, 0, 2)
        ),
        **changes,
    }
    names = ("training_job", "epoch", "step", "check", "kind", "suspects", "differing")
    return Event(**{"id": event_id(*(values[name] for name in names)), **values})


REPORTER = Reporter(0, "n0", "i-0", "GPU-0")


def test_the_canonical_bytes_are_sorted_compact_utf8_json() -> None:
    """Exactly what docs/contracts.md says, so that another language can make the same bytes."""
    data = canonical(make())
    again = json.dumps(json.loads(data), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert data == again
    assert "ünïcode".encode() in data


def test_reporters_that_list_ranks_in_another_order_write_the_same_bytes() -> None:
    """A set has no order; two reporters must not disagree because of it."""
    one = make(differing=(0, 2), candidates=(0, 1))
    two = make(differing=(2, 0), candidates=(1, 0), ranks=tuple(reversed(one.ranks)))
    assert canonical(one) == canonical(two)


def test_whole_seconds_are_the_same_time_as_whole_floats() -> None:
    """A clock that returns an int must not make another event of it."""
    assert canonical(make(time=5)) == canonical(make(time=5.0))


def test_the_id_depends_on_what_makes_it_another_event_and_on_nothing_else() -> None:
    """Any of the seven fields changes it; words and evidence do not."""
    base = make()
    for change in (
        {"training_job": "x"}, {"epoch": "e1-00000000"}, {"step": 131}, {"check": "weight_checksum"},
        {"kind": "software", "suspects": ()}, {"suspects": (1,)}, {"differing": (1, 2)},
    ):  # fmt: skip
        assert make(**change).id != base.id
    assert make(sentence="other", evidence={}).id == base.id
    assert base.id.startswith("sdc-")
    assert len(base.id) == 20


def test_a_line_read_back_is_the_same_event() -> None:
    """Writing and reading loses nothing; the line for stderr parses too."""
    line = journal_line(make(), REPORTER, {"seconds": 0.5})
    event, reporter, detail = parse_line(json.dumps(line))
    assert canonical(event) == canonical(make())
    assert (reporter, detail) == (REPORTER, {"seconds": 0.5})
    prefix, _, rest = verdict_line(line).partition(" ")
    assert prefix == "SDCWATCH_VERDICT"
    assert "\n" not in rest
    assert canonical(parse_line(rest)[0]) == canonical(event)


def test_fields_of_a_newer_writer_are_passed_over() -> None:
    """A mixed fleet during an upgrade goes on working."""
    line = journal_line(make(), REPORTER, {})
    line["event"]["ranks"][0]["rack"] = "r1"
    line["event"]["mood"] = "grim"
    line["new"] = 1
    assert canonical(parse_line(line)[0]) == canonical(make())


def break_event(**changes: Any) -> dict[str, Any]:
    line = journal_line(make(), REPORTER, {})
    line["event"].update(changes)
    return line


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("nonsense", "JSON"),
        ("[]", "object"),
        ({}, "schema"),
        ({**break_event(), "schema": 2}, "schema"),
        ({**break_event(), "event": []}, "event"),
        ({**break_event(), "reporter": None}, "reporter"),
        ({**break_event(), "detail": 5}, "detail"),
        (break_event(step="130"), "step"),
        (break_event(step=True), "step"),
        (break_event(drill=0), "drill"),
        (break_event(check="vibes"), "check"),
        (break_event(kind="clean"), "kind"),
        (break_event(persistence="often"), "persistence"),
        (break_event(path="somewhere"), "path"),
        (break_event(action="explode"), "action"),
        (break_event(trust_needed="none"), "trust_needed"),
        (break_event(time=float("inf")), "time"),
        (break_event(suspects=[-1]), "suspects"),
        (break_event(suspects="2"), "suspects"),
        (break_event(suspects=[1]), "id"),
        (break_event(kind="inconclusive"), "suspects"),
        (break_event(id="sdc-0000000000000000"), "id"),
        (break_event(ranks={}), "ranks"),
        (break_event(ranks=[{"rank": 1}]), "ranks"),
        (break_event(evidence=[]), "evidence"),
    ],
)
def test_a_broken_line_is_refused_and_the_field_named(line: Any, field: str) -> None:
    """Nothing acts on half an event."""
    with pytest.raises(EventError, match=field):
        parse_line(line)


def test_evidence_that_is_not_json_is_an_error() -> None:
    """NaN in evidence would make JSON that other languages refuse."""
    with pytest.raises(EventError, match="JSON"):
        canonical(make(evidence={"norm": float("nan")}))


def test_the_block_says_step_rank_node_proof_what_now_and_where_to_look() -> None:
    """An engineer who sees only the training log knows what to do."""
    block = training_log_block(make(), what_now="the job stops", look_further="sdcwatch latch show")
    for part in ("step 130", "rank 2 on node n2", "i-2", "GPU-2", "disagrees", "job stops", "sdcwatch latch show"):
        assert part in block
    assert max(map(len, block.splitlines())) <= 110


def test_the_block_of_an_unattributed_event_lists_differing_ranks_and_candidates_apart() -> None:
    """Who differed and who could be at fault are two questions."""
    event = make(
        kind="inconclusive", suspects=(), differing=(1,), candidates=(0, 1), path="reduce", check="gradient_checksum"
    )
    block = training_log_block(event, what_now="w", look_further="l")
    assert "nobody can be named" in block
    differing = next(line for line in block.splitlines() if line.strip().startswith("differing"))
    assert "rank 1 " in differing
    assert "rank 0 " not in differing
    assert "candidates" in block


def test_a_block_over_a_thousand_ranks_stays_readable() -> None:
    """The list is cut and says so; the journal has it whole."""
    many = tuple(range(1000))
    block = training_log_block(
        make(kind="inconclusive", suspects=(), differing=many, candidates=many), what_now="w", look_further="l"
    )
    assert "992 more" in block
    assert len(block.splitlines()) < 40


def test_a_drill_is_called_a_drill() -> None:
    """Nobody may take a synthetic event for a real one."""
    assert "drill" in training_log_block(dataclasses.replace(make(), drill=True), what_now="w", look_further="l")
