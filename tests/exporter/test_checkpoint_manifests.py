"""Checkpoints and their manifests: nothing corrupt is ever the newest, nothing unverified is ever called verified."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from sdcwatch.checkpoints import content as contents
from sdcwatch.checkpoints import manifest as checkpoint
from sdcwatch.checkpoints import record as records
from sdcwatch.cli import main
from sdcwatch.errors import CheckpointError
from sdcwatch.latch import files as latches


def store(directory: Path, step: int, epoch: str = "e1", content: bytes | None = None) -> checkpoint.CheckpointRecord:
    data = content if content is not None else b"weights of step %d" % step
    return checkpoint.save(
        directory / f"step-{step:06d}.pt", lambda path: path.write_bytes(data), step=step, epoch=epoch, job="job"
    )


def newest_file(directory: Path) -> Path:
    """The unmodified logic of countless training scripts."""
    return max(directory.glob("*.pt"), key=lambda p: p.stat().st_mtime_ns)


def test_manifest_is_the_contract_record(tmp_path: Path) -> None:
    """Keys, digests and the first trust are those of docs/contracts.md."""
    record = store(tmp_path, 5)
    content = json.loads((tmp_path / "step-000005.pt.manifest.json").read_text())
    assert set(content) == {
        "schema", "step", "files", "trust", "epoch", "training_job", "time", "location", "state", "sha256",
    }  # fmt: skip
    assert (content["schema"], content["step"], content["trust"]) == (1, 5, "candidate")
    assert content["files"]["step-000005.pt"]["bytes"] == len(b"weights of step 5")
    assert checkpoint.verify(record.path) == record


def test_failed_save_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    """A save function that raises, or creates nothing, changes no file."""
    record = store(tmp_path, 5)

    def half(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(record.path, half, step=6, epoch="e1", job="job")
    with pytest.raises(CheckpointError, match="must create"):
        checkpoint.save(record.path, lambda path: None, step=6, epoch="e1", job="job")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000005.pt", "step-000005.pt.manifest.json"]
    assert checkpoint.verify(record.path) == record


def test_a_crash_between_manifest_and_data_keeps_the_checkpoint_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`latest.pt` is overwritten again and again: a kill before the rename leaves the old one, with its own trust."""
    store(tmp_path, 5)
    checkpoint.promote(tmp_path, 5, 5, epoch="e1")
    path = tmp_path / "step-000005.pt"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(contents, "swap_in", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(path, lambda p: p.write_bytes(b"step 9"), step=9, epoch="e2", job="job")
    monkeypatch.undo()
    found = checkpoint.last_clean(tmp_path, "verified")
    assert found is not None
    assert (found.step, found.trust, checkpoint.verify(path).step) == (5, "verified", 5)
    assert checkpoint.taint(tmp_path, 7, "the new one would be too new, and never arrived") == ()
    checkpoint.save(path, lambda p: p.write_bytes(b"step 9"), step=9, epoch="e2", job="job")
    assert (checkpoint.verify(path).step, checkpoint.verify(path).trust) == (9, "candidate")


def test_folder_checkpoint_is_saved_replaced_and_verified(tmp_path: Path) -> None:
    """Sharded checkpoints are folders: every file in them is vouched for, and one too many is refused."""

    def shards(number: int):  # type: ignore[no-untyped-def]
        def write(path: Path) -> None:
            (path / "inner").mkdir(parents=True)
            (path / "inner" / "shard-0").write_bytes(b"%d" % number)
            (path / "meta").write_bytes(b"m")

        return write

    for number in (1, 2):
        record = checkpoint.save(tmp_path / "ckpt", shards(number), step=number, epoch="e1", job="job")
    assert (tmp_path / "ckpt" / "inner" / "shard-0").read_bytes() == b"2"
    assert [f.name for f in record.files] == ["inner/shard-0", "meta"]
    assert checkpoint.verify(tmp_path / "ckpt").step == 2
    (tmp_path / "ckpt" / "extra").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="extra"):
        checkpoint.verify(tmp_path / "ckpt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt", "ckpt.manifest.json"]


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "no manifest", "bad manifest", "leaves"])
def test_damaged_checkpoint_is_refused_and_passed_over(tmp_path: Path, damage: str) -> None:
    """Rot, a torn write, a lost file or a lost manifest: `verify` says which, `last_clean` takes the one before."""
    store(tmp_path, 5)
    bad = store(tmp_path, 10).path
    checkpoint.promote(tmp_path, 10, 10, epoch="e1")
    manifest = checkpoint.manifest_path(bad)
    data = bytearray(bad.read_bytes())
    if damage == "flip":
        data[3] ^= 1
        bad.write_bytes(data)
    elif damage == "cut":
        bad.write_bytes(data[:-1])
    elif damage == "gone":
        bad.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "bad manifest":
        manifest.write_text("{")
    else:
        outside = dataclasses.replace(checkpoint.verify(bad), files=(checkpoint.FileDigest("../../x", 1, ""),))
        records.write(outside)
    with pytest.raises(CheckpointError, match=r"step-000010"):
        checkpoint.verify(bad)
    found = checkpoint.last_clean(tmp_path, "verified")
    assert found is not None
    assert found.step == 5


def test_trust_rises_by_what_was_checked_and_never_falls(tmp_path: Path) -> None:
    """A candidate between two audits stays below verified; an earlier promotion is not taken back."""
    for step in (5, 10, 15, 20):
        store(tmp_path, step)
    checkpoint.promote(tmp_path, 15, 10, epoch="e1")
    assert [r.trust for r in checkpoint.list_checkpoints(tmp_path)] == ["verified", "verified", "checked", "candidate"]
    assert checkpoint.promote(tmp_path, 5, None, epoch="e1") == ()
    assert [r.trust for r in checkpoint.list_checkpoints(tmp_path)][:2] == ["verified", "verified"]
    assert checkpoint.last_clean(tmp_path, "checked").step == 15  # type: ignore[union-attr]
    assert checkpoint.last_clean(tmp_path, "verified").step == 10  # type: ignore[union-attr]


def test_promotion_never_crosses_epochs(tmp_path: Path) -> None:
    """A corrupt step 15 of the epoch before is not verified because the new epoch reached step 20 cleanly."""
    store(tmp_path, 15, epoch="e1")
    store(tmp_path, 20, epoch="e2")
    checkpoint.promote(tmp_path, 20, 20, epoch="e2")
    assert [(r.step, r.trust) for r in checkpoint.list_checkpoints(tmp_path)] == [(15, "candidate"), (20, "verified")]


def test_take_the_newest_file_lands_on_a_clean_one_after_taint(tmp_path: Path) -> None:
    """Scripts that know nothing of us load the newest name: after tainting, that one is clean."""
    for step in (5, 10, 15, 20):
        store(tmp_path, step)
    renamed = checkpoint.taint(tmp_path, 10, "sdc-1: rank 2 computes wrong gradients")
    assert [p.name for p in renamed] == ["step-000015.pt.tainted", "step-000020.pt.tainted"]
    assert newest_file(tmp_path).name == "step-000010.pt"
    tainted = json.loads((tmp_path / "step-000015.pt.manifest.json.tainted").read_text())
    assert tainted["tainted"]["reason"].startswith("sdc-1")
    with pytest.raises(CheckpointError, match="tainted"):
        checkpoint.verify(renamed[0])
    assert checkpoint.taint(tmp_path, 10, "again") == ()
    store(tmp_path, 15, epoch="e2")
    assert [p.name for p in checkpoint.taint(tmp_path, 10, "again")] == ["step-000015.pt.tainted"]


def test_taint_killed_half_way_is_finished_by_the_next(tmp_path: Path) -> None:
    """Data renamed and manifest not: the next call renames the manifest; one that cannot be read goes, too."""
    record = store(tmp_path, 15)
    record.path.rename(record.path.with_name(record.path.name + ".tainted"))
    unreadable = store(tmp_path, 20)
    checkpoint.manifest_path(unreadable.path).write_text("{")
    checkpoint.taint(tmp_path, 10, "reason")
    assert all(p.name.endswith(".tainted") for p in tmp_path.iterdir())


def test_an_unknown_clean_step_spares_what_other_epochs_verified(tmp_path: Path) -> None:
    """A verdict before anything was clean in its epoch says nothing against a verified checkpoint of another epoch."""
    for step in (5, 10, 15):
        store(tmp_path, step, epoch="e1")
    checkpoint.promote(tmp_path, 10, 5, epoch="e1")
    for step in (20, 25):
        store(tmp_path, step, epoch="e2")
    checkpoint.promote(tmp_path, 20, 20, epoch="e2")
    renamed = checkpoint.taint(tmp_path, None, "sdc-1: no clean step is known", epoch="e2")
    assert [p.name for p in renamed] == [f"step-{step:06d}.pt.tainted" for step in (10, 15, 20, 25)]
    assert checkpoint.last_clean(tmp_path, "verified").step == 5  # type: ignore[union-attr]
    checkpoint.taint(tmp_path, None, "by hand: all of them")
    assert checkpoint.list_checkpoints(tmp_path) == ()


def test_newest_verified_survives_any_rotation(tmp_path: Path) -> None:
    """Rotation by count would throw away the only state that a compute fault leaves clean."""
    for step in (5, 10, 15, 20, 25):
        store(tmp_path, step)
    checkpoint.promote(tmp_path, 20, 10, epoch="e1")
    checkpoint.prune(tmp_path, keep=1)
    assert [r.step for r in checkpoint.list_checkpoints(tmp_path)] == [10, 25]
    assert len(list(tmp_path.iterdir())) == 4
    with pytest.raises(ValueError, match="keep"):
        checkpoint.prune(tmp_path, keep=0)


def test_resume_takes_the_trust_that_the_newest_released_latch_asks_for(tmp_path: Path) -> None:
    """Checked is enough after a reduce-path halt or a plain crash; after a compute fault only verified is."""
    for step in (5, 10, 15):
        store(tmp_path, step)
    checkpoint.promote(tmp_path, 10, 5, epoch="e1")
    assert checkpoint.resume_point(tmp_path).step == 10  # type: ignore[union-attr]
    for number, trust in enumerate(("checked", "verified")):
        latch = latches.Latch(
            f"sdc-{number}", "job", "e1", 16, "replay", "attributed", number, (), (), 5, trust, str(tmp_path), "s"
        )
        latches.write_latch([tmp_path], latch)
        latches.release(tmp_path, latch.latch_id, by="a", reason="b")
    assert checkpoint.resume_point(tmp_path).step == 5  # type: ignore[union-attr]
    assert checkpoint.resume_point(tmp_path / "nothing") is None


def test_command_lists_verifies_and_chooses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each action's status and words, on a folder with one damaged checkpoint."""
    store(tmp_path, 5)
    bad = store(tmp_path, 10).path
    checkpoint.promote(tmp_path, 10, 5, epoch="e1")
    assert main(["checkpoints", "list", str(tmp_path), "--json"]) == 0
    assert [c["trust"] for c in json.loads(capsys.readouterr().out)["checkpoints"]] == ["verified", "checked"]
    bad.write_bytes(b"rot")
    assert main(["checkpoints", "verify", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "intact" in said.out
    assert "step-000010.pt differs" in said.err
    assert main(["checkpoints", "last-clean", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(tmp_path / "step-000005.pt")
    assert "step 5, verified, bytes intact" in said.err
    assert main(["checkpoints", "taint", str(tmp_path), "--newer-than", "4", "--reason", "r"]) == 0
    assert main(["checkpoints", "last-clean", str(tmp_path)]) == 1
    assert main(["checkpoints", "prune", str(tmp_path), "--keep", "0"]) == 2
    assert main(["checkpoints", "list", str(tmp_path / "none")]) == 2
