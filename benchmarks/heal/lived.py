"""One case from its first life to its end, as a job lives it: halted, released, resumed; or killed and started again.

Where it halts, the bad node is replaced before the latch is released, so the second life has no fault. What must hold
is judged here and nowhere else: `Result.trouble`. Flow: main -> **lived** -> ranks -> life.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sdcwatch.checkpoints.manifest import list_checkpoints, verify
from sdcwatch.errors import CheckpointError
from sdcwatch.latch import files as latches
from sdcwatch.testing import corrupt_file

from benchmarks.heal import life, ranks
from benchmarks.heal.cases import STEPS, Case

MOST_LIVES = 4
#: Steps before this are `life`'s last: where a run whose checkpoint is to rot ends.
ROT_AFTER = STEPS - 3


@dataclass
class Result:
    """What became of a case.

    Attributes:
        equal: parameters, optimizer state and rank 0's buffers are a clean run's, to the bit.
        outliers: ranks that a calibration found unlike the others; an alert, never an accusation.
        verified: the newest step that counts as verified in the end.
        repeated: steps that a later life began again, the one that halted or was killed included.
        resumed: the step of the checkpoint that each later life resumed from; None: none could be trusted.
        trouble: why this is not what must be; "" where it is.
    """

    case: Case
    equal: bool = False
    lives: int = 0
    repeated: int = 0
    healed: int = 0
    struck: int = 0
    outliers: list[int] = field(default_factory=list)
    verified: int | None = None
    resumed: list[int | None] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    suspects: list[int] = field(default_factory=list)
    trouble: str = ""
    seconds: float = 0.0

    def stored(self) -> dict[str, Any]:
        """As the journal keeps it."""
        return {name: value for name, value in asdict(self).items() if name != "case"}

    @classmethod
    def read(cls, case: Case, content: dict[str, Any]) -> Result:
        """A journal's entry of this case."""
        return cls(case, **content)


def clean_digests(size: int, root: Path) -> list[str]:
    """By rank: final state of a run in which nothing is wrong, and of which nothing is said.

    Raises:
        AssertionError: it did not end, or something was said.
    """
    (root / "checkpoints").mkdir(parents=True)
    job = {"on_fault": "observe", "replay_every": STEPS, "ranks_per_node": 1, "trust": "checked"}
    found = ranks.run(life.train, size, str(root), job, log=root / "clean")
    assert all(kind == "value" and not value["events"] for kind, value in found), found
    digests = [str(value["digest"]) for _, value in found]
    assert len(set(digests[1:])) == 1, found
    return digests


def lived(case: Case, root: Path, clean: Sequence[str]) -> Result:
    """Lives through one case; what each rank printed stays in `root`."""
    result, begin = Result(case), time.monotonic()
    (root / "checkpoints").mkdir(parents=True)
    while not result.trouble and not result.equal:
        if result.lives == MOST_LIVES:
            result.trouble = f"not finished after {MOST_LIVES} lives"
            break
        found = _one_life(case, root, result.lives)
        killed = case.kill is not None and result.lives == 0
        result.lives += 1
        result.trouble = _not_ended_well(found, killed)
        values = [value for kind, value in found if kind == "value"]
        _take(result, values)
        if len(values) == case.size and None not in [v["digest"] for v in values]:
            result.equal = [v["digest"] for v in values] == list(clean)
            break
        if not result.trouble:
            _between_lives(case, root, result.lives)
    records = list_checkpoints(root / "checkpoints")
    result.verified = max((r.step for r in records if r.trusted("verified")), default=None)
    begun = [len(file.read_text().split()) for file in root.glob("begun-*")]
    result.repeated = max(begun, default=STEPS) - STEPS
    result.trouble = result.trouble or wrong(result)
    result.seconds = round(time.monotonic() - begin, 1)
    return result


def _one_life(case: Case, root: Path, number: int) -> list[tuple[str, Any]]:
    job: dict[str, Any] = {
        "on_fault": case.on_fault, "replay_every": case.replay_every, "ranks_per_node": case.ranks_per_node,
        "trust": case.trust,
    }  # fmt: skip
    if number < case.bad_lives:
        job["faults"] = case.faults
    if number == 0:
        job["kill"] = case.kill
        if case.rot:
            job["stop_after"] = ROT_AFTER
    killed = case.kill is not None and number == 0
    timeout = ranks.KILLED_SECONDS if killed else ranks.TIMEOUT_SECONDS
    return ranks.run(life.train, case.size, str(root), job, log=root / f"life-{number}", timeout=timeout)


def _not_ended_well(found: list[tuple[str, Any]], killed: bool) -> str:
    said = [f"rank {r} {kind}: {value}" for r, (kind, value) in enumerate(found) if kind != "value"]
    if any(kind == "hung" for kind, _ in found) or (said and not killed):
        return "; ".join(said)
    if killed and ("died", -9) not in found:
        return f"nobody was killed: {said}"
    return ""


def _take(result: Result, values: list[dict[str, Any]]) -> None:
    if not values:
        return
    if result.lives > 1:
        first = values[0]["first"]
        result.resumed.append(first - 1 if first else None)
    result.healed = max(v["healed"] for v in values)  # counters go on after a restart
    result.struck += sum(v["struck"] for v in values)
    result.events = list(dict.fromkeys([*result.events, *values[0]["events"]]))
    result.outliers = sorted({*result.outliers, *(r for r, v in enumerate(values) if v["outliers"])})
    result.suspects = sorted({*result.suspects, *values[0]["suspects"]})


def _between_lives(case: Case, root: Path, number: int) -> None:
    """What people and machines do after a halt: the latch is released once the node has been replaced."""
    folders = [root / "checkpoints", *root.glob("spool-*/*/campaign-heal")]
    for folder in folders:
        latch = latches.standing((folder,))
        if latch is not None:
            for place in folders:
                latches.release(place, latch.latch_id, by="campaign", reason="node replaced")
    if case.rot and number == 1:
        newest = list_checkpoints(root / "checkpoints")[-1]
        corrupt_file(newest.path, pattern="bit_flip", seed=case.size)
        try:
            verify(newest.path)
        except CheckpointError:
            return
        raise AssertionError("a corrupted checkpoint verifies")


def wrong(result: Result) -> str:
    """Why a case that ran to its end is not as it must be."""
    case = result.case
    accused = {fault["rank"] for fault in case.faults}
    begins = min((fault["step"] for fault in case.faults), default=STEPS)
    if not {*result.suspects, *result.outliers} <= accused:
        return f"ranks {result.suspects} were named, {result.outliers} outliers, ranks {sorted(accused)} were bad"
    if case.faults and case.kill is None and not result.struck:
        return "the fault never struck"
    if case.bad_lives > 1 and (not result.outliers or (result.verified or 0) >= begins):
        return f"outliers {result.outliers}, verified up to {result.verified}: the bad node went by in silence"
    if case.blind:
        return f"seen, though nothing is there to see it: {result.events or 'equal'}" if _seen(result) else ""
    if not result.equal:
        return "the final weights are not a clean run's"
    if case.faults and case.kill is None and not result.events:
        return "the weights are equal, but nothing was seen"
    # What the first life wrote from the faulty step on may be wrong; the second one must not begin there.
    if case.faults and result.resumed and (result.resumed[0] or -1) >= begins:
        return f"resumed after step {result.resumed[0]}, the fault began at {begins}"
    return ""


def _seen(result: Result) -> bool:
    return bool(result.events) or result.equal
