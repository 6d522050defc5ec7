"""The last verified checkpoint outlives a rotation that knows nothing of sdcwatch."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from sdcwatch.checkpoints import manifest as checkpoint
from sdcwatch.checkpoints import pin
from sdcwatch.checkpoints.trust import CheckpointTrust
from sdcwatch.cli import main
from sdcwatch.identity import Identity
from sdcwatch.metrics import RankMetrics

EPOCH = "e1764600000000-00000001"


def trusting(folder: Path) -> CheckpointTrust:
    """The lowest rank's part, as a monitor has it, with a reporter that only counts."""
    identity = Identity("gpt", "c1", "n0", "i-0", "n0", "GPU-0", 0, 0)
    reporter: Any = type("Reporter", (), {})()
    reporter.rank, reporter.identity = 0, identity
    reporter.membership = type("Membership", (), {"epoch": EPOCH, "reporters": staticmethod(lambda: (0,))})
    reporter.metrics = RankMetrics(identity.labels(), writes_node=True, writes_job=True)
    reporter.state = lambda state: None
    return CheckpointTrust(reporter, str(folder))


def shards(step: int) -> Any:
    def write(path: Path) -> None:
        (path / "shards").mkdir(parents=True)
        (path / ".metadata").write_bytes(b"index of %d" % step)
        for rank in range(2):
            (path / "shards" / f"__{rank}_0.distcp").write_bytes(b"shard %d of step %d" % (rank, step))

    return write


def rotate(folder: Path, keep: int) -> None:
    """What `save_total_limit` does: the newest stay, whole folders of the oldest go; manifests are not its business."""
    found = sorted(folder.glob("checkpoint-*/"), key=lambda p: int(p.name.split("-")[1]))
    for old in found[:-keep]:
        shutil.rmtree(old)


def trained(folder: Path, *, verified: int, until: int, keep: int) -> CheckpointTrust:
    """A checkpoint every 10 steps, rotated after each save; an audit was clean up to step `verified`."""
    trust = trusting(folder)
    for step in range(10, until + 1, 10):
        trust.save(folder / f"checkpoint-{step}", shards(step), step=step, then="training")
        trust.promote(step, min(step, verified))
        trust.settle(20)
        rotate(folder, keep)
    return trust


def test_the_last_verified_one_survives_a_rotation_of_the_users_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keep-last-two removed it under its own name; the pin is returned, verifies, and holds the very same bytes."""
    trained(tmp_path, verified=20, until=60, keep=2)
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*/")) == ["checkpoint-50", "checkpoint-60"]
    found = checkpoint.last_clean(tmp_path, "verified")
    assert found is not None
    assert (found.step, found.path.name, pin.is_pin(found)) == (20, "checkpoint-20", True)
    assert checkpoint.verify(found.path).trust == "verified"
    assert (found.path / "shards" / "__1_0.distcp").read_bytes() == b"shard 1 of step 20"
    assert main(["checkpoints", "last-clean", str(tmp_path), "--trust", "verified"]) == 0
    assert capsys.readouterr().out == f"{found.path}\n"
    assert main(["checkpoints", "list", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(c["step"], c["trust"], c["pinned"]) for c in listed] == [
        (20, "verified", True), (50, "checked", False), (60, "checked", False),
    ]  # fmt: skip


def test_nothing_is_copied_and_one_pin_stands_at_a_time(tmp_path: Path) -> None:
    """The pin is a second name for the same file on disk; the next verified one takes its place."""
    trust = trusting(tmp_path)
    for step in (10, 20, 30):
        trust.save(tmp_path / f"step-{step}.pt", lambda p, s=step: p.write_bytes(b"%d" % s), step=step, then="training")
        trust.promote(step, step)
        trust.settle(20)
        (held,) = pin.pinned(tmp_path)
        assert held.step == step
        assert held.path.samefile(tmp_path / f"step-{step}.pt")
        assert len(list((tmp_path / pin.FOLDER).iterdir())) == 1
    found = checkpoint.last_clean(tmp_path, "verified")
    assert found is not None
    assert found.path == tmp_path / "step-30.pt"  # its own name, while it has one


def test_our_own_rotation_keeps_it_under_its_own_name(tmp_path: Path) -> None:
    """`prune` removes neither the newest verified one nor the pin."""
    trust = trusting(tmp_path)
    for step in range(10, 70, 10):
        trust.save(tmp_path / f"checkpoint-{step}", shards(step), step=step, then="training")
    trust.promote(60, 20)
    trust.settle(20)
    assert main(["checkpoints", "prune", str(tmp_path), "--keep", "1"]) == 0
    assert [r.step for r in checkpoint.list_checkpoints(tmp_path)] == [20, 60]
    assert [r.step for r in pin.pinned(tmp_path)] == [20]


def test_a_verdict_that_reaches_back_taints_the_pin_as_well(tmp_path: Path) -> None:
    """Under a second name corruption would come back; a halt behind the pinned step leaves it."""
    trained(tmp_path, verified=20, until=40, keep=1)
    checkpoint.taint(tmp_path, 20, "sdc-1: rank 2 computes wrong gradients", epoch=EPOCH)
    assert checkpoint.resume_point(tmp_path).step == 20  # type: ignore[union-attr]
    renamed = checkpoint.taint(tmp_path, 10, "sdc-2: the audit of step 20 was wrong", epoch=EPOCH)
    assert [p.name for p in renamed] == ["checkpoint-20.tainted"]
    assert checkpoint.resume_point(tmp_path) is None
    assert checkpoint.last_clean(tmp_path, "candidate") is None


def test_a_verdict_that_comes_while_it_is_pinned_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that pins and the halt of the training thread may cross: no clean-looking pin is left."""
    trust = trusting(tmp_path)
    trust.save(tmp_path / "checkpoint-10", shards(10), step=10, then="training")
    checkpoint.promote(tmp_path, 10, 10, epoch=EPOCH)
    real = pin.hold

    def crossed(directory: Path, found: checkpoint.CheckpointRecord) -> checkpoint.CheckpointRecord:
        made = real(directory, found)
        checkpoint.manifest_path(found.path).rename(f"{checkpoint.manifest_path(found.path)}.tainted")
        return made

    monkeypatch.setattr(pin, "hold", crossed)
    assert checkpoint.pin_newest(tmp_path) is None
    assert pin.pinned(tmp_path) == ()


def test_bytes_overwritten_in_place_are_refused(tmp_path: Path) -> None:
    """The pin shares them, so it rots with them; the resume says so by taking an older one."""
    trust = trusting(tmp_path)
    trust.save(tmp_path / "old.pt", lambda p: p.write_bytes(b"old"), step=10, then="training")
    trust.save(tmp_path / "last.pt", lambda p: p.write_bytes(b"new"), step=20, then="training")
    trust.promote(20, 20)
    trust.settle(20)
    (tmp_path / "last.pt").write_bytes(b"bad")
    assert checkpoint.last_clean(tmp_path, "verified").step == 10  # type: ignore[union-attr]


def test_replacing_the_same_name_leaves_the_verified_bytes(tmp_path: Path) -> None:
    """A loop that always saves to `last.pt` through our save: the verified state stays behind as the pin."""
    trust = trusting(tmp_path)
    trust.save(tmp_path / "last.pt", lambda p: p.write_bytes(b"state of 10"), step=10, then="training")
    trust.promote(10, 10)
    trust.settle(20)
    trust.save(tmp_path / "last.pt", lambda p: p.write_bytes(b"state of 20"), step=20, then="training")
    found = checkpoint.last_clean(tmp_path, "verified")
    assert found is not None
    assert (found.step, found.path.read_bytes()) == (10, b"state of 10")


@pytest.mark.parametrize("why", ["no links", "url"])
def test_what_cannot_be_pinned_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    """A file system without hard links, and data behind a URL: a sentence in the log, and training goes on."""

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if why == "no links":
        monkeypatch.setattr(os, "link", refused)
    trust = trusting(tmp_path)
    with caplog.at_level(logging.WARNING, logger="sdcwatch"):
        for step in (10, 20):
            if why == "url":
                (tmp_path / "store").mkdir(exist_ok=True)
                (tmp_path / "store" / f"s{step}").write_bytes(b"x")
                trust.note(f"file://{tmp_path}/store/s{step}", step=step)
            else:
                trust.save(tmp_path / f"s{step}", lambda p: p.write_bytes(b"x"), step=step, then="training")
            trust.settle(20)
            trust.promote(step, step)
            trust.settle(20)
    assert len([r for r in caplog.records if "cannot be pinned" in r.getMessage()]) == 1
    assert checkpoint.last_clean(tmp_path, "verified").step == 20  # type: ignore[union-attr]
    assert pin.pinned(tmp_path) == ()


def test_what_a_kill_left_half_made_is_no_pin_and_goes(tmp_path: Path) -> None:
    """Half-made names begin with a dot: nothing loads them, and the next pin removes them."""
    trust = trusting(tmp_path)
    trust.save(tmp_path / "s1", lambda p: p.write_bytes(b"x"), step=1, then="training")
    half = tmp_path / pin.FOLDER / ".1-0badf00d.partial"
    half.mkdir(parents=True)
    os.link(tmp_path / "s1", half / "s1")
    shutil.copy(checkpoint.manifest_path(tmp_path / "s1"), checkpoint.manifest_path(half / "s1"))
    assert pin.pinned(tmp_path) == ()
    trust.promote(1, 1)
    trust.settle(20)
    assert not half.exists()
    assert [r.step for r in pin.pinned(tmp_path)] == [1]
