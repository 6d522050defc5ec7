"""The trust of a running epoch's checkpoints: it rises when proof comes, and steps that prove nothing read no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sdcwatch.checkpoints import manifest as checkpoint
from sdcwatch.checkpoints.trust import CheckpointTrust
from sdcwatch.identity import Identity
from sdcwatch.metrics import RankMetrics

EPOCH = "e1764600000000-00000001"


class FakeReporter:
    """What `CheckpointTrust` asks of a reporter."""

    def __init__(self) -> None:
        self.rank = 0
        self.membership: Any = type("Membership", (), {"epoch": EPOCH, "reporters": staticmethod(lambda: (0,))})
        self.identity = Identity("gpt", "c1", "n0", "i-0", "n0", "GPU-0", 0, 0)
        self.metrics = RankMetrics(self.identity.labels(), writes_node=True, writes_job=True)
        self.swallowed: list[BaseException] = []

    def state(self, state: str) -> None:
        """Exports nothing."""

    def swallow(self, what: str, error: BaseException) -> None:
        self.swallowed.append(error)

    def clean_step(self) -> int | None:
        """`sdc_last_clean_checkpoint_step` as exported, None where it is not."""
        lines = self.metrics.lines().splitlines()
        return next((int(float(i.split()[-1])) for i in lines if i.startswith("sdc_last_clean_checkpoint_step")), None)


def make(folder: Path) -> tuple[CheckpointTrust, FakeReporter]:
    reporter: Any = FakeReporter()
    return CheckpointTrust(reporter, str(folder)), reporter


def save(trust: CheckpointTrust, folder: Path, step: int) -> None:
    trust.save(folder / f"s{step}.pt", lambda path: path.write_bytes(b"x"), step=step, then="training")


def trusts(folder: Path) -> list[tuple[int, str]]:
    return [(r.step, r.trust) for r in checkpoint.list_checkpoints(folder)]


def test_a_step_that_proves_nothing_reads_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 checkpoints, of an earlier epoch, verified or still candidates: promoting costs nothing until one can rise."""
    for step in range(30):
        checkpoint.save(tmp_path / f"old{step}", lambda p: p.write_bytes(b"x"), step=step, epoch="e0-old", job="gpt")
    trust, reporter = make(tmp_path)
    for step in range(30, 50):
        save(trust, tmp_path, step)
    trust.promote(39, 39)
    touched: list[str] = []
    for name in ("list_checkpoints", "promote"):
        real = getattr(checkpoint, name)
        monkeypatch.setattr(checkpoint, name, lambda *a, n=name, r=real, **k: (touched.append(n), r(*a, **k))[1])
    for _ in range(20):
        trust.promote(39, 39)
        trust.promote(None, None)
    assert touched == []
    trust.promote(40, 39)
    assert "promote" in touched
    assert reporter.clean_step() == 40


def test_trust_rises_as_proof_comes_and_the_metric_follows(tmp_path: Path) -> None:
    """Candidate, checked, verified, each as soon as it is earned; an overwritten name starts over as a candidate."""
    trust, reporter = make(tmp_path)
    assert reporter.clean_step() is None
    for step in (5, 10):
        save(trust, tmp_path, step)
    trust.promote(4, None)
    assert (trusts(tmp_path), reporter.clean_step()) == ([(5, "candidate"), (10, "candidate")], None)
    trust.promote(6, None)
    assert (trusts(tmp_path), reporter.clean_step()) == ([(5, "checked"), (10, "candidate")], 5)
    trust.promote(12, 6)
    assert (trusts(tmp_path), reporter.clean_step()) == ([(5, "verified"), (10, "checked")], 10)
    trust.save(tmp_path / "s5.pt", lambda path: path.write_bytes(b"y"), step=15, then="training")
    trust.promote(14, 12)
    assert trusts(tmp_path) == [(10, "verified"), (15, "candidate")]
    trust.promote(15, 15)
    assert (trusts(tmp_path), reporter.clean_step()) == ([(10, "verified"), (15, "verified")], 15)


def test_a_new_epoch_exports_the_clean_step_it_finds(tmp_path: Path) -> None:
    """After a restart the metric speaks of what the epochs before have left, and trusts none of it further."""
    checkpoint.save(tmp_path / "a", lambda p: p.write_bytes(b"x"), step=7, epoch="e0-old", job="gpt")
    checkpoint.promote(tmp_path, 7, None, epoch="e0-old")
    trust, reporter = make(tmp_path)
    assert reporter.clean_step() == 7
    trust.promote(20, 20)
    assert trusts(tmp_path) == [(7, "checked")]


def test_a_folder_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input/output error on one step is swallowed; the trust comes with the next step."""
    trust, reporter = make(tmp_path)
    save(trust, tmp_path, 5)

    def broken(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "promote", broken)
        trust.promote(6, 6)
    assert len(reporter.swallowed) == 1
    trust.promote(6, 6)
    assert trusts(tmp_path) == [(5, "verified")]
