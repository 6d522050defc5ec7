"""A job as its spools and its checkpoint folder have it: what ran, what was skipped, what was found.

Reads only; trusts no file: what cannot be read is passed over. Counters of several nodes are put together as the alert
rules do it: the largest for what each writer says of the whole job, the sum for what each node measured of itself.
Standard library only. Flow: spool -> **facts** -> chart, page.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdcwatch.catalog import CHECKS
from sdcwatch.checkpoints import manifest, pin
from sdcwatch.checkpoints.record import MANIFEST_SUFFIX, TAINTED_SUFFIX
from sdcwatch.event import Event, EventError, parse_line
from sdcwatch.exposition import Sample, parse
from sdcwatch.spool.folders import epoch_order, job_of_folder, read_regular
from sdcwatch.spool.reader import LINE_BYTES, epoch_ranks

_METRICS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckFacts:
    """One check: how often it ran, why it did not, its seconds, and bytes of state that it reaches and misses."""

    name: str
    ran: int
    skipped: dict[str, int]
    enabled: bool | None
    seconds: float
    covered: int
    uncovered: int


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """One checkpoint: name, step (None where its manifest cannot be read), and trust or `tainted`."""

    name: str
    step: int | None
    trust: str


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One job.

    Attributes:
        steps: newest training step, None where none ran; `checked`, `verified` and `clean_checkpoint` likewise.
        step_seconds: seconds spent in steps, all nodes together; checks included.
        heals: outcome -> count.
        events: each once, the oldest first; drills are left out.
    """

    job: str
    epochs: tuple[str, ...]
    world_size: int
    steps: int | None
    checked: int | None
    verified: int | None
    clean_checkpoint: int | None
    state: str
    step_seconds: float
    checks: tuple[CheckFacts, ...]
    heals: dict[str, int]
    events: tuple[Event, ...]
    checkpoints: tuple[CheckpointFacts, ...]

    @property
    def overhead(self) -> float | None:
        """Share of the steps' time that checks took; None where no step was timed."""
        spent = sum(check.seconds for check in self.checks)
        return spent / self.step_seconds if self.step_seconds > 0 else None


@dataclass(slots=True)
class _Series:
    """Samples of one job, by (metric, label of interest)."""

    largest: dict[tuple[str, str, str], float] = field(default_factory=dict)
    summed: dict[tuple[str, str, str], float] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        labels = dict(sample.labels)
        second = next((labels[n] for n in ("reason", "covered", "outcome", "state") if n in labels), "")
        key = (sample.name, labels.get("check", ""), second)
        self.largest[key] = max(self.largest.get(key, sample.value), sample.value)
        self.summed[key] = self.summed.get(key, 0.0) + sample.value

    def number(self, name: str, check: str = "", second: str = "") -> int | None:
        value = self.largest.get((name, check, second))
        return None if value is None else int(value)

    def by_second(self, name: str, check: str) -> dict[str, int]:
        return {k[2]: int(v) for k, v in sorted(self.largest.items()) if k[:2] == (name, check) and v > 0}


def jobs(spools: Sequence[Path]) -> dict[str, list[Path]]:
    """Job -> its epoch folders, the oldest first, below these folders (a root, a user's, a job's, or an epoch)."""
    found: dict[str, set[Path]] = {}
    for spool in spools:
        for folder, names, _ in os.walk(spool):
            path = Path(folder)
            if epoch_order(path.name) is not None:
                names.clear()
                found.setdefault(job_of_folder(path.parent.name) or path.parent.name, set()).add(path)
    return {job: sorted(paths, key=lambda p: (epoch_order(p.name) or (0, ""), str(p))) for job, paths in found.items()}


def read(job: str, epochs: Iterable[Path], checkpoints: Path | None) -> RunFacts:
    """Puts one job together.

    Args:
        epochs: its epoch folders, of all nodes.
        checkpoints: its checkpoint folder, None where it is not known.
    """
    series = _Series()
    events: dict[str, Event] = {}
    names: list[str] = []
    newest: dict[str, Sequence[Sample]] = {}
    for epoch in epochs:
        if epoch.name not in names:
            names.append(epoch.name)
        for rank in epoch_ranks(job, epoch):
            text = (read_regular(rank.metrics, _METRICS_BYTES) or b"").decode(errors="replace")
            # A later life of a rank goes on with the counters of the one before, so only its newest file counts.
            newest[f"{epoch.parent}/{rank.rank}"] = [s for s in parse(text) if isinstance(s, Sample)]
            for event in _events(rank.journal):
                events.setdefault(event.id, event)
    for samples in newest.values():
        for sample in samples:
            series.add(sample)
    state = [k[2] for k, v in series.largest.items() if k[0] == "sdc_training_state" and v == 1]
    return RunFacts(
        job=job,
        epochs=tuple(names),
        world_size=series.number("sdc_world_size") or 0,
        steps=series.number("sdc_training_step"),
        checked=series.number("sdc_checked_step"),
        verified=series.number("sdc_verified_step"),
        clean_checkpoint=series.number("sdc_last_clean_checkpoint_step"),
        state="halted" if "halted" in state else (state[0] if state else "unknown"),
        step_seconds=series.summed.get(("sdc_step_seconds_total", "", ""), 0.0),
        checks=tuple(_check(series, name) for name in CHECKS),
        heals=_heals(series),
        events=tuple(sorted((e for e in events.values() if not e.drill), key=lambda e: e.time)),
        checkpoints=_checkpoints(checkpoints) if checkpoints is not None else (),
    )


def _check(series: _Series, name: str) -> CheckFacts:
    enabled = series.largest.get(("sdc_detector_enabled", name, ""))
    return CheckFacts(
        name=name,
        ran=series.number("sdc_checks_total", name) or 0,
        skipped=series.by_second("sdc_skips_total", name),
        enabled=None if enabled is None else bool(enabled),
        seconds=series.summed.get(("sdc_check_seconds_total", name, ""), 0.0),
        covered=series.number("sdc_coverage_bytes", name, "yes") or 0,
        uncovered=series.number("sdc_coverage_bytes", name, "no") or 0,
    )


def _heals(series: _Series) -> dict[str, int]:
    found: dict[str, int] = {}
    for (name, _, outcome), value in series.largest.items():
        if name == "sdc_heals_total" and value > 0:
            found[outcome] = found.get(outcome, 0) + int(value)
    return found


def _events(journal: Path) -> Iterable[Event]:
    raw = read_regular(journal, 64 << 20) or b""
    for line in raw.splitlines(keepends=True):
        if line.endswith(b"\n") and len(line) <= LINE_BYTES:
            with contextlib.suppress(EventError):
                yield parse_line(line)[0]


def _checkpoints(folder: Path) -> tuple[CheckpointFacts, ...]:
    own = manifest.list_checkpoints(folder)
    found = [CheckpointFacts(r.path.name, r.step, "pending" if r.pending else r.trust) for r in own]
    standing = {(r.step, r.time) for r in own}
    found += [
        CheckpointFacts(f"{r.path.name} (pinned)", r.step, r.trust)
        for r in pin.pinned(folder)
        if (r.step, r.time) not in standing  # else it is a second name for one that is listed
    ]
    found += [CheckpointFacts(problem, None, "unreadable") for problem in manifest.unreadable(folder)]
    for path in sorted(folder.glob(f"*{MANIFEST_SUFFIX}{TAINTED_SUFFIX}")):
        step: Any = None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            step = json.loads(path.read_text(encoding="utf-8")).get("step")
        name = path.name.removesuffix(MANIFEST_SUFFIX + TAINTED_SUFFIX) + TAINTED_SUFFIX
        found.append(CheckpointFacts(name, step if isinstance(step, int) else None, "tainted"))
    return tuple(sorted(found, key=lambda c: (c.step if c.step is not None else -1, c.name)))
