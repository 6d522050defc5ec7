"""At start: does each check still see? Wrong numbers go into scratch copies and through the code that judges training.

Three ranks that do not exist, on three nodes that do not exist, hold a small scratch tensor on this rank's device; one
of them holds it with one bit flipped. What fingerprints, norms and weighted sums make of that goes through the real
verdict, which must name the odd one. A labelled injection: it touches no model, no random state, no group, no spool,
and its verdicts go nowhere. Flow: monitor -> **self_test** -> start, metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sdcwatch.checks.conservation import weights
from sdcwatch.checks.gradients import norm
from sdcwatch.fingerprint import fingerprint
from sdcwatch.observation import CONSERVATION_GROUPS, AuditRow, Row
from sdcwatch.verdict import Group, History, Judgement, judge
from sdcwatch.verdict.records import (
    ALLREDUCE_CONSERVATION,
    ATTRIBUTED,
    CLEAN,
    GRADIENT_CHECKSUM,
    GRADIENT_NORM,
    INCONCLUSIVE,
    REPLAY,
    WEIGHT_CHECKSUM,
)

#: Elements of the scratch tensor: enough for whole words and a rest, small enough for microseconds.
_ELEMENTS = 1021
_RANKS, _ODD, _STEPS = 3, 1, 3
_EPOCH = 0x5E1F7E57
_GROUP = Group(
    nodes=tuple(f"self-test-{rank}" for rank in range(_RANKS)),
    instances=tuple(range(1, _RANKS + 1)),
    environments=(1,) * _RANKS,
    epoch=_EPOCH,
)


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What the checks saw of the injection.

    Attributes:
        blind: checks that did not find it, or that saw something where nothing was.
        seconds: what all of it took.
    """

    blind: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What the checks measure on a healthy copy and on the one with a flipped bit."""

    digest: int
    wrong_digest: int
    norm: float
    wrong_norm: float
    sum: float
    wrong_sum: float


def run(device: torch.device) -> SelfTest:
    """Runs the self-test; an exception in a check counts as a check that is blind.

    Args:
        device: where the scratch tensors are made: the model's own device, whose fingerprints are the ones in use.
    """
    begin = time.perf_counter()
    blind = []
    try:
        scratch = _measure(device)
    except Exception:  # our border: what cannot measure cannot see, and training goes on
        return SelfTest(tuple(_SEES), time.perf_counter() - begin)
    for check, sees in _SEES.items():
        try:
            if not sees(scratch):
                blind.append(check)
        except Exception:  # our border, as above
            blind.append(check)
    return SelfTest(tuple(blind), time.perf_counter() - begin)


def _measure(device: torch.device) -> _Scratch:
    # counted, not drawn: the random state is the user's
    healthy = torch.arange(1, _ELEMENTS + 1, dtype=torch.float32, device=device) / _ELEMENTS
    flipped = healthy.clone()
    flipped.view(torch.int32)[_ELEMENTS // 2] ^= 1 << 22
    factors = weights(_ELEMENTS, seed=_EPOCH).to(device)
    return _Scratch(
        digest=fingerprint([healthy]),
        wrong_digest=fingerprint([flipped]),
        norm=float(norm(healthy)),
        wrong_norm=float(norm(flipped * 1e4)),
        sum=float(healthy.double().dot(factors)),
        wrong_sum=float(flipped.double().dot(factors)),
    )


def _rows(scratch: _Scratch, step: int) -> list[Row]:
    """Healthy rows of one step."""
    sums: dict[str, Any] = {f"local_sum_{i}": scratch.sum for i in range(CONSERVATION_GROUPS)}
    sums |= {f"reduced_sum_{i}": scratch.sum for i in range(CONSERVATION_GROUPS)}
    sums |= {f"reduce_noise_{i}": 2.0**-24 * scratch.norm for i in range(CONSERVATION_GROUPS)}
    row = Row(
        epoch=_EPOCH, step=step, error=0, environment=1, schema=1, hyperparameters=1, compile_count=0,
        optimizer_steps=step, local_norm=scratch.norm, local_nonfinite=0, reduced=scratch.digest, reduced_nonfinite=0,
        weights_now=scratch.digest, versions_now=step, batch_bytes=1, batch_signature=1, replay_ready=1,
        conservation=1, gradient_edits=1, unfinished=0, **sums,
    )  # fmt: skip
    if step:
        row = replace(
            row, optimizer_step_of=step - 1, gradient_begin=scratch.digest, weights_begin=scratch.digest,
            weights_end=scratch.digest, state_begin=scratch.digest, state_end=scratch.digest,
            versions_begin=step - 1, versions_end=step,
        )  # fmt: skip
    return [replace(row, rank=rank, instance=_GROUP.instances[rank]) for rank in range(_RANKS)]


def _judged(scratch: _Scratch, audited: bool = False, **odd: Any) -> tuple[Judgement, Judgement]:
    """Judges healthy steps and then one in which the odd rank measured something else; the last two judgements."""
    history, judgements = History.initial(), []
    for step in range(_STEPS):
        rows, audit = _rows(scratch, step), _audit(scratch, step, step == _STEPS - 1) if audited else None
        if step == _STEPS - 1:
            rows[_ODD] = replace(rows[_ODD], **odd)
        judgement, history = judge(history, _GROUP, step, rows, audit)
        judgements.append(judgement)
    return judgements[-2], judgements[-1]


def _audit(scratch: _Scratch, step: int, wrong: bool) -> list[AuditRow]:
    """Each rank replays its own batch and the one before it; the odd rank computes wrong where asked to."""
    healthy = AuditRow(
        epoch=_EPOCH, step=step, error=0, round=0, batch_sent=1, batch_received=1, batch_unchanged=1,
        weights_now=scratch.digest,
    )  # fmt: skip
    made = []
    for rank in range(_RANKS):
        digest = scratch.wrong_digest if wrong and rank == _ODD else scratch.digest
        made.append(
            replace(
                healthy,
                rank=rank,
                instance=_GROUP.instances[rank],
                original=digest,
                self_digest=digest,
                served_rank=_GROUP.served_by(rank)[0],
                served_digest=digest,
            )
        )
    return made


def _names(judged: tuple[Judgement, Judgement], check: str) -> bool:
    """Whether the healthy steps were clean and the last one named exactly the odd rank."""
    before, last = judged
    found = [(v.kind, v.suspects) for v in last.verdicts if v.check == check]
    return not before.verdicts and found == [(ATTRIBUTED, (_ODD,))]


def _sees_norm(scratch: _Scratch) -> bool:
    before, last = _judged(scratch, local_norm=scratch.wrong_norm)
    quiet = max(before.deviations) < 1 and not last.verdicts
    return quiet and last.deviations[_ODD] > 10 > max(d for r, d in enumerate(last.deviations) if r != _ODD)


def _sees_gradient(scratch: _Scratch) -> bool:
    before, last = _judged(scratch, reduced=scratch.wrong_digest)
    found = [(v.kind, v.differing) for v in last.verdicts if v.check == GRADIENT_CHECKSUM]
    return dict(before.checks)[GRADIENT_CHECKSUM] == CLEAN and found == [(INCONCLUSIVE, (_ODD,))]


def _sees_conservation(scratch: _Scratch) -> bool:
    before, last = _judged(scratch, local_sum_0=scratch.wrong_sum)
    found = [v.kind for v in last.verdicts if v.check == ALLREDUCE_CONSERVATION]
    return dict(before.checks)[ALLREDUCE_CONSERVATION] == CLEAN and found == [INCONCLUSIVE]


def _sees_weights(scratch: _Scratch) -> bool:
    wrong = scratch.wrong_digest
    return _names(_judged(scratch, weights_end=wrong, weights_now=wrong), WEIGHT_CHECKSUM)


def _sees_replay(scratch: _Scratch) -> bool:
    return _names(_judged(scratch, audited=True), REPLAY)


_SEES: dict[str, Callable[[_Scratch], bool]] = {
    GRADIENT_NORM: _sees_norm,
    GRADIENT_CHECKSUM: _sees_gradient,
    ALLREDUCE_CONSERVATION: _sees_conservation,
    WEIGHT_CHECKSUM: _sees_weights,
    REPLAY: _sees_replay,
}

#: The checks that are tested; `checkpoint` reads back every file that it vouches for.
CHECKS = tuple(_SEES)
