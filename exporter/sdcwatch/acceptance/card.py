"""The card: what was tried, on what, and what came of it; as text for a person and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trial:
    """One fault: where it struck, and what was said. `rank` is the one that failed; None: no fault was injected."""

    location: str
    rank: int | None
    step: int | None
    expected: str
    seen: tuple[str, ...]
    named: tuple[int, ...]
    passed: bool


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of whole steps, p50 and p95, without and with the monitor, and the median ratio of pairs less one."""

    pairs: int
    without: tuple[float, float]
    watched: tuple[float, float]
    overhead: float


_BITS = {
    True: "equal, bit for bit",
    False: "DIFFERENT",
    None: "cannot be told, for two runs without the monitor differ as well; make the kernels deterministic "
    "(torch.use_deterministic_algorithms) and ask again",
}


@dataclass(frozen=True, slots=True)
class Card:
    """Everything that one run of acceptance found.

    Attributes:
        versions: what it ran on.
        same_bits: weights with the monitor equal those without, on every rank; None where two runs without it differ
            as well, so that nobody can tell.
        memory_mb: the most that one rank took beyond training alone (device memory, or resident memory on a CPU).
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
        """No weight changed by the monitor, every fault found, nobody healthy named."""
        return self.same_bits is not False and all(trial.passed for trial in self.trials)


def json_text(card: Card) -> str:
    """The card as JSON (schema 1)."""
    return json.dumps({"schema": 1, "passed": card.passed, **dataclasses.asdict(card)}, indent=1) + "\n"


def text(card: Card) -> str:
    """The card for a person."""
    times = card.times
    lines = [
        f"sdcwatch acceptance: {'PASSED' if card.passed else 'FAILED'}",
        f"  {card.world_size} ranks on {card.nodes} node(s), {card.backend}, {card.parameters / 1e6:.1f}M parameters",
        "  " + ", ".join(f"{name} {value}" for name, value in card.versions.items()),
        f"  weights with and without the monitor: {_BITS[card.same_bits]}",
        f"  step p50 {1000 * times.without[0]:.1f} -> {1000 * times.watched[0]:.1f} ms, "
        f"p95 {1000 * times.without[1]:.1f} -> {1000 * times.watched[1]:.1f} ms; "
        f"median of {times.pairs} pairs {100 * times.overhead:+.1f} %",
        f"  memory beyond training alone: {card.memory_mb:.0f} MB",
    ]  # fmt: skip
    for trial in card.trials:
        where = "no fault" if trial.rank is None else f"{trial.location} on rank {trial.rank} at step {trial.step}"
        named = f", names {', '.join(map(str, trial.named))}" if trial.named else ""
        said = "; ".join(trial.seen) or "nothing"
        lines.append(f"  [{'ok' if trial.passed else 'FAILED'}] {where}: expected {trial.expected}; said {said}{named}")
    lines += [f"  not tried: {why}" for why in card.skipped]
    return "\n".join(lines)
