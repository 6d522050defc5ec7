"""Checkpoints that somebody else writes: noted at once, whole later, never loaded in between, tainted like others."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import fsspec
import pytest
from sdcwatch.checkpoints import content, record
from sdcwatch.checkpoints import manifest as checkpoint
from sdcwatch.checkpoints.trust import CheckpointTrust
from sdcwatch.errors import CheckpointError, ConfigurationError
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

    def state(self, state: str) -> None:
        """Exports nothing."""

    def swallow(self, what: str, error: BaseException) -> None:
        raise error


@pytest.fixture
def trust(tmp_path: Path) -> Iterator[CheckpointTrust]:
    reporter: Any = FakeReporter()
    made = CheckpointTrust(reporter, str(tmp_path))
    yield made
    made.halt()


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)


def write_shards(folder: Path) -> None:
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"shard of rank 0")
    (folder / ".metadata").write_bytes(b"metadata")


def test_an_upload_that_runs_is_pending_and_then_as_trusted_as_its_step(trust: CheckpointTrust, tmp_path: Path) -> None:
    """`async_save` returns a future: nothing loads the folder before it is whole; proof that came meanwhile counts."""
    write: Future[None] = Future()
    trust.note(tmp_path / "step-10", step=10, when=write)
    write_shards(tmp_path / "step-10")
    with pytest.raises(CheckpointError, match="never finished"):
        checkpoint.verify(tmp_path / "step-10")
    trust.promote(12, 11)
    assert checkpoint.last_clean(tmp_path, "candidate") is None
    write.set_result(None)
    until(lambda: checkpoint.list_checkpoints(tmp_path)[0].trust == "verified", "the upload is hashed and promoted")
    found = checkpoint.last_clean(tmp_path, "verified")
    assert found is not None
    assert [f.name for f in found.files] == [".metadata", "__0_0.distcp"]


def test_an_upload_that_fails_stays_pending(trust: CheckpointTrust, tmp_path: Path) -> None:
    """A future that raises: training goes on, and the half-written folder is never chosen, whatever its step earns."""
    write: Future[None] = Future()
    trust.note(tmp_path / "step-10", step=10, when=write)
    (tmp_path / "step-10").mkdir()
    write.set_exception(OSError("no space left"))
    trust.settle(20)
    trust.promote(20, 20)
    assert [(r.trust, r.pending) for r in checkpoint.list_checkpoints(tmp_path)] == [("candidate", True)]
    assert checkpoint.resume_point(tmp_path) is None


def test_a_verdict_reaches_an_upload_that_still_runs(trust: CheckpointTrust, tmp_path: Path) -> None:
    """Tainted before the data is there: as soon as it arrives it gets the suffix; "take the newest" passes over it."""
    write: Future[None] = Future()
    trust.note(tmp_path / "step-10", step=10, when=write)
    checkpoint.taint(tmp_path, 5, "sdc-1: rank 2", epoch=EPOCH)
    write_shards(tmp_path / "step-10")
    write.set_result(None)
    trust.settle(20)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10.manifest.json.tainted", "step-10.tainted"]


def test_hashing_ends_with_a_halt(trust: CheckpointTrust, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A halted job must end: it hashes no terabyte first."""
    monkeypatch.setattr(content, "_CHUNK", 1)
    (tmp_path / "big").write_bytes(bytes(1 << 20))
    reached = threading.Event()
    real = trust._stop.is_set
    monkeypatch.setattr(trust._stop, "is_set", lambda: (reached.set(), time.sleep(0.001), real())[2])
    trust.note(tmp_path / "big", step=3)
    assert reached.wait(20)
    trust.halt()
    trust.settle(20)
    assert checkpoint.list_checkpoints(tmp_path)[0].pending


def test_a_checkpoint_behind_a_url_has_the_whole_life(trust: CheckpointTrust, tmp_path: Path) -> None:
    """fsspec: noted, hashed, trusted, found damaged, tainted under its own name; its manifest stands locally."""
    bucket = fsspec.filesystem("memory")
    for step in (10, 20, 30):
        bucket.pipe(f"/bucket/run/step-{step}/shard-0", b"shard %d" % step)
        bucket.pipe(f"/bucket/run/step-{step}/inner/meta", b"meta")
        trust.note(f"memory://bucket/run/step-{step}", step=step)
    trust.settle(20)
    trust.promote(20, 20)
    found = checkpoint.last_clean(tmp_path, "verified")
    assert found is not None
    assert (found.step, found.location, found.where) == (20, "memory://bucket/run/step-20", found.location)
    assert [f.name for f in found.files] == ["inner/meta", "shard-0"]
    bucket.pipe("/bucket/run/step-20/shard-0", b"shard 2O")
    assert checkpoint.last_clean(tmp_path, "verified").step == 10  # type: ignore[union-attr]
    checkpoint.taint(tmp_path, 20, "sdc-1")
    assert sorted(Path(p).name for p in bucket.ls("/bucket/run", detail=False)) == [
        "step-10", "step-20", "step-30.tainted",
    ]  # fmt: skip
    assert [str(p.name) for p in checkpoint.prune(tmp_path, keep=1)] == ["step-10"]
    assert not bucket.exists("/bucket/run/step-10")
    bucket.rm("/bucket", recursive=True)
    with pytest.raises(CheckpointError, match="is not there"):
        checkpoint.verify(tmp_path / "step-20")


def test_a_url_needs_a_folder_and_a_future_must_be_one(tmp_path: Path) -> None:
    """Both are said to the caller at once, not to a log of a thread."""
    reporter: Any = FakeReporter()
    with pytest.raises(ConfigurationError, match="set checkpoint_dir"):
        CheckpointTrust(reporter, None).note("s3://bucket/x", step=1)
    with pytest.raises(ConfigurationError, match="a future"):
        CheckpointTrust(reporter, str(tmp_path)).note(tmp_path / "x", step=1, when=3)
    with pytest.raises(CheckpointError, match="needs fsspec"):
        content.digests("nosuchscheme://x", "x")


def test_a_second_note_of_a_name_replaces_the_first(trust: CheckpointTrust, tmp_path: Path) -> None:
    """`latest` is written again while the first is hashed: only the newer record counts."""
    first: Future[None] = Future()
    (tmp_path / "latest").write_bytes(b"old")
    trust.note(tmp_path / "latest", step=5, when=first)
    (tmp_path / "latest").write_bytes(b"new")
    trust.note(tmp_path / "latest", step=9)
    first.set_result(None)
    trust.settle(20)
    trust.promote(6, 6)
    assert [(r.step, r.trust) for r in checkpoint.list_checkpoints(tmp_path)] == [(9, "candidate")]
    assert json.loads(record.manifest_path(tmp_path / "latest").read_text())["step"] == 9
