"""Is what the ranks loaded really the checkpoint? Its bytes against the manifest, its state on every rank.

A resume that loaded on one rank only, a bad donor of weights, a host that garbled what it read: all look like a
healthy start until the replicas are compared, and the vote of the first check would be 3 to 1 for the wrong side. Here
each rank is compared with the manifest instead. Collective, at start only. Loads nothing itself.
Flow: manifest -> **resume** -> monitor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sdcwatch.checkpoints import manifest, record, state
from sdcwatch.checkpoints.record import CheckpointRecord
from sdcwatch.errors import CheckpointError, SpoolError
from sdcwatch.verdict import Verdict
from sdcwatch.verdict.records import CODE, INCONCLUSIVE, SOFTWARE
from sdcwatch.watch.exchange import Exchange
from sdcwatch.watch.report import Reporter, log

#: What a training script may say it resumed from: what `resume_point` gave, a path, or None: from the beginning.
ResumedFrom = CheckpointRecord | str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class Resumed:
    """What one rank brings to the comparison; the texts are empty where there is nothing to say."""

    checkpoint: str
    problem: str = ""
    incomparable: str = ""
    bytes_differ: bool = False
    step: int = 0
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class ResumeResult:
    """What all ranks concluded; the same on each.

    Attributes:
        refused: why this resume must not train, one sentence; empty where it may.
        ranks: the ranks that do not hold the checkpoint.
        unproven: why the state could not be compared; empty where it was, or where nothing was resumed.
        resumed: there was a checkpoint to compare with.
        bytes_differ: the file itself is not what its manifest says.
        step: the newest step that a rank said it resumed from.
        time: unix seconds, the median of the ranks' clocks.
    """

    refused: str
    ranks: tuple[int, ...]
    unproven: str
    resumed: bool
    bytes_differ: bool
    step: int
    time: float


def agree_on_resume(
    directory: str | os.PathLike[str], group: dist.ProcessGroup | None = None
) -> CheckpointRecord | None:
    """`resume_point` for all ranks at once: one rank reads and hashes, all get its answer. Collective.

    Returns:
        The checkpoint to load, on every rank the same; None: start from the beginning.
    """
    if not dist.is_available() or not dist.is_initialized():
        return manifest.resume_point(Path(directory))
    answer: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            answer[0] = manifest.resume_point(Path(directory))
        except Exception as error:  # the other ranks wait for an answer, whatever it is
            answer[1] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(answer, group=group, group_src=0)
    if answer[1] is not None:
        raise CheckpointError(f"rank 0 found no checkpoint to resume from in {directory}: {answer[1]}")
    found: CheckpointRecord | None = answer[0]
    return found


def compare(
    everyone: Callable[[Resumed], list[Resumed]],
    rank: int,
    resumed_from: ResumedFrom,
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
    optimizer: torch.optim.Optimizer,
) -> ResumeResult:
    """Compares this rank with the checkpoint, and the ranks with each other. Collective.

    Args:
        everyone: gathers one object a rank.
        resumed_from: a record says that its bytes have been compared already; a path's are compared by rank 0 here.
    """
    brought = everyone(_bring(rank, resumed_from, parameters, optimizer))
    when = sorted(b.time for b in brought)[len(brought) // 2]
    step = max(b.step for b in brought)
    taken = [b.checkpoint for b in brought]
    if len(set(taken)) > 1 and not any(b.bytes_differ for b in brought):
        usual = max(set(taken), key=lambda name: (taken.count(name), name))
        odd = tuple(r for r, name in enumerate(taken) if name != usual)
        said = ", ".join(f"rank {r} from {taken[r] or 'nothing'}" for r in odd[:4])
        why = f"ranks resumed from different states: most from {usual or 'nothing'}, {said}"
        return ResumeResult(why, odd, "", True, False, step, when)
    bad = tuple(r for r, b in enumerate(brought) if b.problem)
    if bad:
        said = "; ".join(f"rank {r}: {brought[r].problem}" for r in bad[:4])
        more = f"; and {len(bad) - 4} more ranks" if len(bad) > 4 else ""
        why = f"this is not the state of {taken[bad[0]]}: {said}{more}"
        return ResumeResult(why, bad, "", True, any(b.bytes_differ for b in brought), step, when)
    unproven = next((b.incomparable for b in brought if b.incomparable), "")
    return ResumeResult("", (), unproven, bool(taken[0]), False, step, when)


def require(
    exchange: Exchange,
    reporter: Reporter,
    resumed_from: ResumedFrom,
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Compares, and refuses a resume that is none: counted, written as an event that names nobody. Collective.

    Raises:
        CheckpointError: some rank does not hold the checkpoint; the same on all ranks.
    """
    result = compare(exchange.everyone, exchange.rank, resumed_from, parameters, optimizer)
    if result.unproven:
        log.warning("sdcwatch: the state after this resume was not compared with its checkpoint: %s", result.unproven)
        reporter.skipped("checkpoint", "undefined")
    elif result.resumed:
        reporter.metrics.inc("sdc_checks_total", check="checkpoint")
    if not result.refused:
        return
    reporter.publish(refusal(result), result.time)
    raise CheckpointError(
        f"{result.refused}. No step was trained: load the checkpoint again on every rank, or take an older one "
        "(see `sdcwatch checkpoints list`); leave resumed_from out only where another state is meant"
    )


def refusal(result: ResumeResult) -> Verdict:
    """The event of a refused resume; it names nobody and does not halt, since nothing was trained."""
    blame = "nobody can be named" if result.bytes_differ else "software, no node is blamed"
    return Verdict(
        step=result.step,
        check="checkpoint",
        kind=INCONCLUSIVE if result.bytes_differ else SOFTWARE,
        differing=result.ranks,
        candidates=result.ranks,
        path=CODE,
        sentence=f"The resume was refused, because {result.refused}: {blame}.",
        trust_needed="checked",
    )


def _bring(
    rank: int,
    resumed_from: ResumedFrom,
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
    optimizer: torch.optim.Optimizer,
) -> Resumed:
    if resumed_from is None:
        return Resumed("", time=time.time())
    given = resumed_from if isinstance(resumed_from, CheckpointRecord) else None
    name = given.path.name if given else Path(resumed_from).name  # type: ignore[arg-type]
    try:
        found = given or _read(Path(resumed_from), verified=rank == 0)  # type: ignore[arg-type]
        called = f"{found.path.name} (step {found.step}, written by epoch {found.epoch})"
        if found.state is None:
            why = "its manifest holds no fingerprints of the state, only of the bytes"
            return Resumed(called, incomparable=why, step=found.step, time=time.time())
        held = state.measure(parameters, optimizer)
        if not state.comparable(found.state, held):
            why = f"its fingerprints are of the form {found.state.form}, here they are {held.form}"
            return Resumed(called, incomparable=why, step=found.step, time=time.time())
        problem = state.difference(found.state, held) or ""
        return Resumed(called, problem, step=found.step, time=time.time())
    except (CheckpointError, SpoolError, OSError) as error:
        return Resumed(name, str(error), bytes_differ=True, time=time.time())


def _read(path: Path, *, verified: bool) -> CheckpointRecord:
    if verified:
        return manifest.verify(path)
    found = record.read(record.manifest_path(path), path)
    if found is None:
        raise CheckpointError(f"{path} has no manifest here: is the folder shared by all nodes?")
    return found[0]
