"""What stands on the disk when a job is killed, or its log is lost, while an event is being written."""

from __future__ import annotations

import io
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sdcwatch.checkpoints import manifest as checkpoint
from sdcwatch.errors import CorruptionDetected
from sdcwatch.identity import Identity
from sdcwatch.spool.rank import Spool
from sdcwatch.verdict import Verdict
from sdcwatch.watch.contain import Halt
from sdcwatch.watch.report import Reporter
from sdcwatch.watch.start import Membership

EPOCH = "e1764600000000-00000001"


class Killed(BaseException):
    """SIGKILL, as far as the code after it is concerned."""


@pytest.fixture
def reporter(tmp_path: Path) -> Reporter:
    """Rank 0 of three, on a node other than the suspect's."""
    identities = tuple(Identity("gpt", "c1", f"n{n}", f"i-{n}", f"n{n}", f"GPU-{n}", n, 0) for n in range(3))
    group: Any = SimpleNamespace(environments=(1, 1, 1))
    membership = Membership(EPOCH, identities, ({"cpu": "x"},) * 3, group, replays=True)
    spool = Spool.open(tmp_path, "gpt", EPOCH, 0, 0, identities[0].labels())
    return Reporter(membership, 0, spool, on_fault="observe", kept=8, interval=5.0)


@pytest.mark.parametrize(
    ("kind", "suspects", "series"),
    [
        ("attributed", (2,), 'sdc_last_mismatch_timestamp_seconds{training_job="gpt"'),
        ("inconclusive", (), 'sdc_last_unattributed_timestamp_seconds{training_job="gpt"'),
    ],
)
def test_the_page_is_on_the_disk_before_the_proof(
    reporter: Reporter, monkeypatch: pytest.MonkeyPatch, kind: str, suspects: tuple[int, ...], series: str
) -> None:
    """Every rank may die in the journal's fsync: the page must come all the same, so the metrics are written first."""
    spool = reporter.spool
    assert spool is not None

    def killed(line: object) -> bool:
        raise Killed

    monkeypatch.setattr(spool, "append_event", killed)
    verdict = Verdict(step=7, check="replay", kind=kind, suspects=suspects, differing=(2,), contains=True)
    judgement: Any = SimpleNamespace(
        verdicts=(verdict,), checks=(), group_sizes={}, deviations=None, calibration_outliers=()
    )
    row: Any = SimpleNamespace(local_norm=None, local_nonfinite=False)
    with pytest.raises(Killed):
        reporter.judged(judgement, row, when=1_764_600_060.125, checked=6, verified=5)
    text = (spool.directory / "rank-0.prom").read_text()
    assert any(line.startswith(series) and line.endswith(" 1764600060.125") for line in text.splitlines())
    spool.close()


class FullDisk(io.StringIO):
    """A stderr that goes to a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def closed() -> io.StringIO:
    """A stderr that somebody has closed."""
    stream = io.StringIO()
    stream.close()
    return stream


def test_a_line_of_the_log_is_one_write(reporter: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a node share one pipe: a line written in two pieces can be cut in two by another rank's."""
    pieces: list[str] = []
    stream = io.StringIO()
    monkeypatch.setattr(stream, "write", lambda text: pieces.append(text) or len(text))
    monkeypatch.setattr(sys, "stderr", stream)
    reporter.say("SDCWATCH_VERDICT {}\nblock")
    assert pieces == ["SDCWATCH_VERDICT {}\nblock\n"]


@pytest.mark.parametrize("broken", [FullDisk, closed, lambda: None])
def test_a_log_that_cannot_be_written_costs_neither_the_proof_nor_training(
    reporter: Reporter, monkeypatch: pytest.MonkeyPatch, broken: Any
) -> None:
    """A full disk or a closed pipe behind stderr: the event is in the journal, the loss is counted, nothing raises."""
    spool = reporter.spool
    assert spool is not None
    monkeypatch.setattr(logging, "lastResort", logging.StreamHandler(broken()))
    monkeypatch.setattr(sys, "stderr", broken())
    verdict = Verdict(step=7, check="replay", kind="attributed", suspects=(2,), differing=(2,), contains=True)
    event = reporter.event(verdict, 1_764_600_060.125)
    reporter._publish(verdict, event)
    journal = "".join(p.read_text() for p in spool.directory.glob("*.events.jsonl"))
    assert event.id in journal
    lost = [i for i in reporter.metrics.lines().splitlines() if i.startswith("sdc_checks_skipped_total{")]
    assert [i.split()[-1] for i in lost] == ["1"]
    spool.close()


@pytest.fixture
def halted(reporter: Reporter, tmp_path: Path) -> Halt:
    """A halt after a fault before any clean step; a checkpoint of an earlier epoch and one of this are there."""
    folder = tmp_path / "checkpoints"
    for step, epoch in ((5, "e0-old"), (6, EPOCH)):
        checkpoint.save(folder / f"{step}.pt", lambda path: path.write_bytes(b"x"), step=step, epoch=epoch, job="gpt")
        checkpoint.promote(folder, step, step, epoch=epoch)
    hook = sys.excepthook
    halt = Halt(reporter, checkpoint_dir=folder, scrapes=0, seconds=0.0)
    verdict = Verdict(step=7, check="replay", kind="attributed", suspects=(2,), differing=(2,), contains=True)
    try:
        with pytest.raises(CorruptionDetected):
            halt.raise_for(reporter.event(verdict, 1_764_600_060.125), None)
    finally:
        sys.excepthook = hook
        assert reporter.spool is not None
        reporter.spool.close()
    return halt


def test_a_halt_spares_what_an_earlier_epoch_verified(halted: Halt, tmp_path: Path) -> None:
    """No clean step is known in this epoch: its own checkpoints go, the verified one of the epoch before stays."""
    assert [r.step for r in checkpoint.list_checkpoints(tmp_path / "checkpoints")] == [5]


@pytest.mark.parametrize("broken", [FullDisk, closed])
def test_a_halted_loop_ends_with_its_status_without_a_log(
    halted: Halt, monkeypatch: pytest.MonkeyPatch, broken: Any
) -> None:
    """A loop that goes on after a halt is ended with status 86, whatever state stderr is in."""
    monkeypatch.setattr(logging, "lastResort", logging.StreamHandler(broken()))
    monkeypatch.setattr(sys, "stderr", broken())

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit) as left:
        halted.meet()
    assert left.value.code == 86
