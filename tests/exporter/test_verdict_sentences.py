"""Every verdict that can be given has one human sentence: the table of all of them, and what makes it complete.

The verdicts come from the judge itself. The table is complete when every check and kind is in it, every sign of
software has its words in one, and no code that makes a sentence was left unrun: a new verdict needs a row here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import sdcwatch.verdict
from sdcwatch.catalog import CHECKS, EVENT_KINDS
from sdcwatch.checkpoints.resume import ResumeResult, refusal
from sdcwatch.identity import Identity
from sdcwatch.latch.files import Latch, NamedRank
from sdcwatch.observation import RowError
from sdcwatch.testing.simulated_group import Faults, SimulatedGroup, backward_fault, group_of
from sdcwatch.verdict import Judgement, Verdict, combine
from sdcwatch.verdict import conservation as conservation_module
from sdcwatch.verdict.sentences import CHECK_WORDS
from sdcwatch.verdict.signs import WORDS
from sdcwatch.watch import same_step

SIZE = 4
NOBODY = {
    "inconclusive": ("nobody can be named", "blames nobody", "no node is blamed"),
    "software": ("no node is blamed",),
}
#: What a person should not have to read: identifiers, calls, literals of the language, markup, digests.
CODE = re.compile(
    r"\w_\w|\w\(|\b(None|True|False|nan|inf|dict|tuple)\b|[`{}\[\]<>=]|\b[0-9a-f]{12,}\b|[a-z][A-Z]|  |\n"
)


def group(healthy: int = 3, layout: tuple[int, ...] = (1,) * SIZE) -> SimulatedGroup:
    made = SimulatedGroup(group_of(*layout))
    if healthy:
        made.steps(healthy)
    return made


def audited(*layout: int) -> SimulatedGroup:
    """A group whose replay is calibrated."""
    made = group(1, layout or (1,) * SIZE)
    made.audit()
    return made


def optimizer_fault(*ranks: int) -> dict[str, dict[int, Any]]:
    return {name: {rank: rank + 1 for rank in ranks} for name in ("weights_end", "weights_now")}


def on_all(name: str, value: Any) -> dict[str, dict[int, Any]]:
    return {name: dict.fromkeys(range(SIZE), value)}


def edges(*owners: int) -> Faults:
    return {"served_digest": dict.fromkeys(owners, 1)}


def with_sign(name: str) -> Judgement:
    """A wrong optimizer step beside one positive sign of software."""
    made = group()
    if name == "first_check":
        made = group(0)
        return made.step({"weights_now": {2: 1}})
    if name == "measured":
        return made.step({**optimizer_fault(3), "weights_begin": {3: None}})
    if name == "versions":
        return made.step({"weights_now": {2: 1}, "versions_now": {2: 9999}})
    if name == "written":
        moved = {rank: (row.versions_now or 0) + 1 for rank, row in enumerate(made.rows())}
        return made.step({"weights_now": {2: 1}, "versions_now": moved})
    value = {"loss_scale": 2.0, "step": made.next_step + 5}.get(name, 1)
    return made.step({**optimizer_fault(3), name: {3: value}})


def lost_row() -> Judgement:
    made = group()
    rows: list[Any] = made.rows()
    return made.step(rows=[*rows[:3], RowError("the row's CRC does not match")])


def lost_audit_row() -> Judgement:
    return audited().audit({"epoch": {1: 9}})


def disagreement() -> Judgement:
    return combine(group().step(), agreed=False, highest_code=6)


def who_computes() -> Judgement:
    return audited().audit(backward_fault(group_of(*(1,) * SIZE), 2))


IDENTITY = Identity("job", "", "node-9", "i-9", "host-9", "GPU-9", 0, 0)
FORMER = Latch(
    latch_id="sdc-00112233445566aa", training_job="job", epoch="e", step=2, check="replay", kind="attributed", time=1.0,
    named=(NamedRank(1, "node-old", "i-old", "G"),), nodes=(), last_clean_step=1, trust_needed="verified",
    checkpoint_dir=None, sentence="Rank 1 on node-old computed wrong.",
)  # fmt: skip


def once_more(check: str, made: Judgement) -> Verdict:
    """The same verdict where the former hardware is gone and the same steps fail again."""
    (verdict,) = made.verdicts
    return same_step.judged(verdict, (IDENTITY,) * SIZE, (replace(FORMER, check=check, step=verdict.step),))


def refused(why: str, differ: bool) -> Verdict:
    return refusal(ResumeResult(why, (2,), "", True, differ, 4, 1.0))


#: Row -> check, kind and the verdict; rows are the reasons that a person must be able to tell apart.
TABLE: dict[str, tuple[str, str, Callable[[], Judgement | Verdict]]] = {
    "optimizer step": ("weight_checksum", "attributed", lambda: group().step(optimizer_fault(2))),
    "no majority": ("weight_checksum", "inconclusive", lambda: group().step(optimizer_fault(0, 1, 2, 3))),
    "apart before": (
        "weight_checksum",
        "inconclusive",
        lambda: _new(_left(group(layout=(1,) * 7), {5: 5, 6: 5})),
    ),
    "gradient edited": (
        "weight_checksum",
        "inconclusive",
        lambda: group().step({"gradient_begin": {1: 1}, **optimizer_fault(1)}),
    ),
    "no begin": (
        "weight_checksum",
        "inconclusive",
        lambda: group().step({**on_all("weights_begin", None), **optimizer_fault(1)}),
    ),
    "gradient not seen clean": ("weight_checksum", "inconclusive", lambda: _after_unseen(group())),
    "weights at rest": ("weight_checksum", "inconclusive", lambda: group().step({"weights_now": {2: 1}})),
    "weights at rest before the step": ("weight_checksum", "inconclusive", lambda: group().step(apart={2: 1})),
    "state at rest": ("weight_checksum", "inconclusive", lambda: group().step({"state_begin": {2: 1}})),
    **{f"weights, {sign}": ("weight_checksum", "software", lambda sign=sign: with_sign(sign)) for sign in WORDS},
    "reduce": ("gradient_checksum", "inconclusive", lambda: group().step({"reduced": {3: 1}})),
    "reduce, no majority": (
        "gradient_checksum",
        "inconclusive",
        lambda: group().step({"reduced": {rank: rank + 1 for rank in range(SIZE)}}),
    ),
    "reduce, environment": (
        "gradient_checksum",
        "software",
        lambda: group().step({"reduced": {3: 1}, "environment": {3: 9}}),
    ),
    "transport": ("gradient_checksum", "inconclusive", lost_row),
    "no agreement": ("gradient_checksum", "inconclusive", disagreement),
    "not the average": (
        "allreduce_conservation",
        "inconclusive",
        lambda: group().step(on_all("reduced_sum_2", 3.1)),
    ),
    "never the average": ("allreduce_conservation", "software", lambda: group(0).step(on_all("reduced_sum_2", 3.1))),
    "gradients edited": (
        "allreduce_conservation",
        "software",
        lambda: group().step({**on_all("reduced_sum_2", 3.1), "gradient_edits": {1: 2}}),
    ),
    "every replay of one": ("replay", "attributed", who_computes),
    "third node": ("replay", "attributed", lambda: audited().audit(edges(1))),
    "no third node agrees": (
        "replay",
        "inconclusive",
        lambda: audited().audit({**edges(1), "tie_digest": {1: 9}}),
    ),
    "not reproducible": ("replay", "inconclusive", lambda: audited().audit({"self_digest": {1: 4}})),
    "original, one rank": ("replay", "inconclusive", lambda: audited().audit({"original": {3: 1}})),
    "original, most ranks": (
        "replay",
        "software",
        lambda: audited().audit({**on_all("original", 1), **on_all("first_difference", 17)}),
    ),
    "two nodes": ("replay", "inconclusive", lambda: audited(2, 2).audit(edges(0, 2))),
    "some replays of one": ("replay", "inconclusive", lambda: audited(3, 1, 1).audit(edges(0, 1, 2))),
    "few replays": ("replay", "inconclusive", lambda: audited(*(1,) * 6).audit(edges(0, 3))),
    "most replays": ("replay", "software", lambda: audited(*(1,) * 6).audit(edges(0, 2, 4))),
    "replay rows": ("replay", "inconclusive", lost_audit_row),
    "same steps, replay": ("replay", "inconclusive", lambda: once_more("replay", who_computes())),
    "same steps, weights": (
        "weight_checksum",
        "inconclusive",
        lambda: once_more("weight_checksum", group().step(optimizer_fault(2))),
    ),
    "same steps, gradient": (
        "gradient_checksum",
        "inconclusive",
        lambda: once_more("gradient_checksum", group().step({"reduced": {3: 1}})),
    ),
    "same steps, average": (
        "allreduce_conservation",
        "inconclusive",
        lambda: once_more("allreduce_conservation", group().step(on_all("reduced_sum_2", 3.1))),
    ),
    "resumed from another state": (
        "checkpoint",
        "software",
        lambda: refused("ranks resumed from different states: most from step-4.pt, rank 2 from nothing", False),
    ),
    "checkpoint rotted": (
        "checkpoint",
        "inconclusive",
        lambda: refused("this is not the state of step-4.pt: rank 2: step-4.pt differs from its manifest", True),
    ),
}
#: `gradient_norm` only hints, the all-reduce can name nobody (docs/contracts.md), a resume has no majority to ask.
NEVER = {
    *(("gradient_norm", kind) for kind in EVENT_KINDS),
    ("gradient_checksum", "attributed"),
    ("allreduce_conservation", "attributed"),
    ("checkpoint", "attributed"),
}


def _left(made: SimulatedGroup, apart: dict[int, int]) -> Judgement:
    """Two ranks that were apart together part from each other."""
    made.step({name: dict.fromkeys(apart, 5) for name in ("weights_end", "weights_now")})
    return made.step({"weights_end": {6: 9}, "weights_now": {6: 9}}, apart=apart)


def _new(judgement: Judgement) -> Verdict:
    (verdict,) = [v for v in judgement.verdicts if v.new]
    return verdict


def _after_unseen(made: SimulatedGroup) -> Judgement:
    made.step(on_all("reduced", None))
    return made.step(optimizer_fault(3))


def given(row: str) -> Verdict:
    """The verdict of a row; it must be the row's check and kind, new, and the only one of them."""
    check, kind, make = TABLE[row]
    made = make()
    found = [made] if isinstance(made, Verdict) else [v for v in made.verdicts if v.check == check]
    assert [(v.check, v.kind, v.new) for v in found] == [(check, kind, True)], made
    return found[0]


def nodes(verdict: Verdict) -> Iterator[str]:
    """How a sentence calls each suspect."""
    for rank in verdict.suspects:
        yield f"rank {rank} on node-{rank}"


@pytest.mark.parametrize("row", TABLE)
def test_a_verdict_has_one_human_sentence(row: str) -> None:
    """One sentence, in words, that says which rank on which node, or that nobody is named."""
    verdict = given(row)
    text = verdict.sentence
    assert re.fullmatch(r"[A-Z0-9].*[a-z0-9)]\.", text), text
    assert ". " not in text, f"one sentence: {text}"
    assert not CODE.search(text), f"{CODE.search(text)} in: {text}"
    assert len(text) <= 320, f"{len(text)} characters: {text}"
    if verdict.kind == "attributed":
        assert verdict.suspects
        assert all(name in text.lower() for name in nodes(verdict)), text
        assert not any(words in text for words in ("nobody", "no node")), text
    else:
        assert not verdict.suspects
        assert any(words in text for words in NOBODY[verdict.kind]), text


def test_sentences_tell_the_rows_apart() -> None:
    """Two rows never say the same, whoever and whichever step it is about; so kinds and checks do not either."""
    shown: dict[str, str] = {}
    for row in TABLE:
        verdict = given(row)
        text = re.sub(r"\b[0-9][0-9.e+]*\b", "#", verdict.sentence.lower())
        assert text not in shown, f"{row} and {shown[text]} say the same: {verdict.sentence}"
        shown[text] = row


def test_every_check_and_kind_is_in_the_table() -> None:
    """A check or kind that the catalog gains needs a row, or a reason in NEVER."""
    held = {(check, kind) for check, kind, _ in TABLE.values()}
    assert held | NEVER == {(check, kind) for check in CHECKS for kind in EVENT_KINDS}
    assert not held & NEVER
    assert set(CHECK_WORDS) == set(CHECKS)


def test_every_sign_of_software_is_in_a_sentence() -> None:
    """A sign that the engine gains needs words, and a row that shows them."""
    for sign, words in WORDS.items():
        verdict = given(f"weights, {sign}")
        assert sign in verdict.evidence["signs"]
        assert words in verdict.sentence
    for words in conservation_module._WORDS.values():
        assert any(words in given(row).sentence for row in ("never the average", "gradients edited"))


def sites(tree: ast.AST) -> Iterator[int]:
    """First lines of the statements that make a verdict, a finding or a sentence."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Return | ast.Expr) and any(_makes(part) for part in ast.walk(node)):
            yield node.lineno


def _makes(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        return called in ("Verdict", "Finding") or any(word.arg == "sentence" for word in node.keywords)
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == "sentence"


def test_no_code_that_makes_a_sentence_is_left_out_of_the_table() -> None:
    """Every statement of the engine that makes a verdict runs in some row."""
    files = sorted(Path(sdcwatch.verdict.__file__).parent.glob("*.py"))
    files += [Path(module.__file__ or "") for module in (same_step, sys.modules[refusal.__module__])]
    wanted = {(str(file), line) for file in files for line in sites(ast.parse(file.read_text()))}
    assert len(wanted) > 20
    ran: set[tuple[str, int]] = set()
    names = {str(file) for file in files}

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            ran.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename in names else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for row in TABLE:
            given(row)
    finally:
        sys.settrace(before)
    left = sorted(f"{Path(name).name}:{line}" for name, line in wanted - ran)
    assert not left, f"no row of TABLE makes what stands at {left}"
