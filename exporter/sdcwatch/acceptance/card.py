"""The card: what was tried, on what, and what came of it; as text for a person and as JSON."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trial:
    """One fault: where it struck, and what was said.

    Attributes:
        rank: the one that failed; None: no fault was injected.
        passed: None where runs without a fault do not repeat themselves, so that nobody can tell.
        control: what such a run showed; empty where none was needed.
    """

    location: str
    rank: int | None
    step: int | None
    expected: str
    seen: tuple[str, ...]
    named: tuple[int, ...]
    passed: bool | None
    control: str = ""


@dataclass(frozen=True, slots=True)
class Cadence:
    """How often one check ran in the pairs: every `least` to `most` steps, as the budget stretched it (0: off)."""

    least: int
    most: int
    ran: int


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of whole steps, p50 and p95, without and with the monitor, and the median ratio of pairs less one.

    `cadence`, by check, is that of the steps with the monitor.
    """

    pairs: int
    without: tuple[float, float]
    watched: tuple[float, float]
    overhead: float
    cadence: Mapping[str, Cadence]


_ASK_AGAIN = "make the kernels deterministic (torch.use_deterministic_algorithms) and ask again"
_BITS = {
    True: "equal, bit for bit",
    False: "DIFFERENT",
    None: f"cannot be told, for two runs without the monitor differ as well; {_ASK_AGAIN}",
}


@dataclass(frozen=True, slots=True)
class Card:
    """Everything that one run of acceptance found.

    Attributes:
        versions: what it ran on, all ranks together.
        same_bits: weights with the monitor equal those without, on every rank; None where two runs without it differ
            as well, so that nobody can tell.
        memory_mb: by how much more a watched model raised a rank's peak than the same model without the monitor did
            before it, on the rank where that is most (device memory, or resident memory on a CPU). Below 0 where the
            two differ by less than peaks repeat.
        trials: faults, and one run without any.
        skipped: what could not be tried here, and why.
    """

    versions: Mapping[str, str]
    world_size: int
    nodes: int
    backend: str
    parameters: int
    same_bits: bool | None
    times: Times
    memory_mb: float
    trials: tuple[Trial, ...]
    skipped: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """No weight changed by the monitor, every fault found, nobody healthy named, as far as it can be told."""
        return self.same_bits is not False and all(trial.passed is not False for trial in self.trials)


def json_text(card: Card) -> str:
    """The card as JSON (schema 1)."""
    return json.dumps({"schema": 1, "passed": card.passed, **dataclasses.asdict(card)}, indent=1) + "\n"


def text(card: Card) -> str:
    """The card for a person."""
    times = card.times
    lines = [
        f"sdcwatch acceptance: {'PASSED' if card.passed else 'FAILED'}",
        f"  {card.world_size} ranks on {card.nodes} node(s), {card.backend}, {card.parameters / 1e6:.1f}M parameters",
        *_wrapped(", ".join(f"{name} {value}" for name, value in card.versions.items())),
        f"  weights with and without the monitor: {_BITS[card.same_bits]}",
        f"  step p50 {1000 * times.without[0]:.1f} -> {1000 * times.watched[0]:.1f} ms, "
        f"p95 {1000 * times.without[1]:.1f} -> {1000 * times.watched[1]:.1f} ms; "
        f"median of {times.pairs} pairs {100 * times.overhead:+.1f} %",
        *_wrapped("checks in these pairs: " + ", ".join(f"{name} {_often(c)}" for name, c in times.cadence.items())),
        f"  peak memory beyond the same model without the monitor: {card.memory_mb:.0f} MB",
    ]  # fmt: skip
    lines += [_trial(trial) for trial in card.trials]
    lines += [f"  not tried: {why}" for why in card.skipped]
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, 120, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    )


def _often(cadence: Cadence) -> str:
    if not cadence.most:
        return "off"
    every = f"{cadence.least} to {cadence.most}" if cadence.least != cadence.most else str(cadence.most)
    return f"every {every} steps (ran {cadence.ran} times)" if every != "1" else f"every step (ran {cadence.ran} times)"


def _trial(trial: Trial) -> str:
    where = "no fault" if trial.rank is None else f"{trial.location} on rank {trial.rank} at step {trial.step}"
    if trial.passed is None:
        return (
            f"  [cannot be told] {where}: expected {trial.expected}; without a fault, {trial.control}, so kernels are "
            f"not deterministic, or a device errs (sdcwatch preflight); {_ASK_AGAIN}"
        )
    named = f", names {', '.join(map(str, trial.named))}" if trial.named else ""
    said = "; ".join(trial.seen) or "nothing"
    return f"  [{'ok' if trial.passed else 'FAILED'}] {where}: expected {trial.expected}; said {said}{named}"
