"""Did these steps halt before, on other hardware? Then no node is blamed a second time.

A node was named and replaced, and the same check fails at the same steps on another one: the cause travels with the
job (a checkpoint, the data of that step, a build), and taking out a second healthy machine would not help. The proof
stands, the suspects do not, and the halt waits for a person. What it knows are released latches, exchanged at start,
so every rank decides alike. Pure; reads and writes nothing. Flow: verdict -> **same_step** -> report, contain.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from sdcwatch.identity import Identity
from sdcwatch.latch.files import Latch, LatchNode, NamedRank, places, released_latches
from sdcwatch.verdict import Verdict
from sdcwatch.verdict.sentences import CHECK_WORDS, capital

#: A halt that lies further back says nothing about this one.
WINDOW_SECONDS = 30 * 86400.0
#: Key of the event's evidence that holds the id of the former halt.
EVIDENCE = "same_step_as"
#: Key of the event's evidence that holds what this life alone would have said.
ALONE = "alone"


def former_halts(directories: Iterable[Path], job: str) -> tuple[Latch, ...]:
    """This job's released latches in these folders that are younger than the window, the newest last."""
    oldest = time.time() - WINDOW_SECONDS
    found = {
        entry.latch.latch_id: entry.latch
        for place in places(directories)
        for entry in released_latches(place)
        if entry.latch.training_job == job and entry.latch.time >= oldest
    }
    return merged([tuple(found.values())])


def merged(brought: Iterable[Sequence[Latch]]) -> tuple[Latch, ...]:
    """What all ranks know, each halt once, in an order that is the same on all."""
    found = {latch.latch_id: latch for latches in brought for latch in latches}
    return tuple(sorted(found.values(), key=lambda latch: (latch.time, latch.latch_id)))


def judged(verdict: Verdict, identities: Sequence[Identity], halts: Sequence[Latch]) -> Verdict:
    """The verdict, or where it repeats a former halt on other hardware, the same proof that names nobody."""
    former = next((halt for halt in reversed(halts) if _repeats(verdict, identities, halt)), None)
    if former is None:
        return verdict
    before = ", ".join(sorted({n.node for n in former.named or former.nodes}))
    sentence = (
        f"{capital(CHECK_WORDS[verdict.check])} failed at step {verdict.step}, as it did at step {former.step} on "
        f"other hardware ({before}): no node is blamed a second time, so look at the checkpoint, at the data of this "
        "step and at the build."
    )
    return replace(
        verdict,
        kind="inconclusive",
        suspects=(),
        candidates=(),
        persistence=None,
        trust_needed="verified",
        sentence=sentence,
        evidence={**verdict.evidence, EVIDENCE: former.latch_id, ALONE: verdict.sentence},
    )


def _repeats(verdict: Verdict, identities: Sequence[Identity], former: Latch) -> bool:
    if not verdict.contains or verdict.kind == "software" or former.check != verdict.check:
        return False
    begin, end = _steps(verdict.last_clean_step, verdict.step)
    former_begin, former_end = _steps(former.last_clean_step, former.step)
    if max(begin, former_begin) >= min(end, former_end):
        return False
    accused = [identities[rank] for rank in verdict.suspects]
    if former.named:
        # Nobody is named now: it is a repetition only where none of that hardware is here any more.
        return not any(_same(now, then) for now in accused or identities for then in former.named)
    return bool(accused) and not any(_same(now, then) for now in accused for then in former.nodes)


def _steps(last_clean: int | None, step: int) -> tuple[int, int]:
    """The steps in which the fault began: after the first number, up to the second."""
    return (step - 1 if last_clean is None else min(last_clean, step - 1), step)


def _same(now: Identity, then: NamedRank | LatchNode) -> bool:
    """Whether both are one machine. Under Slurm a replacement has the old host name, and another instance id."""
    if now.instance and then.instance:
        return now.instance == then.instance
    return now.node == then.node
