"""500 checkpoints, each damaged as disks, copies and people do it: none is loaded, the last clean one is."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from sdcwatch.checkpoints import manifest as checkpoint
from sdcwatch.errors import CheckpointError

SHARDS = ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp", ".metadata")
DAMAGES = 500
Damage = Callable[[random.Random, Path, Path], str]


def write_shards(step: int) -> Callable[[Path], None]:
    def write(place: Path) -> None:
        generator = random.Random(step)
        place.mkdir()
        for name in SHARDS:
            (place / name).write_bytes(generator.randbytes(generator.randint(300, 900)))

    return write


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three verified checkpoints: steps 10 and 20, whole for good, and step 30, the one to be damaged."""
    folder = tmp_path_factory.mktemp("originals")
    for step in (10, 20, 30):
        checkpoint.save(folder / f"step-{step}", write_shards(step), step=step, epoch="e1", job="job")
    checkpoint.promote(folder, 30, 30, epoch="e1")
    return folder


def flip(chance: random.Random, bad: Path, good: Path) -> str:
    shard = bad / chance.choice(SHARDS)
    data = bytearray(shard.read_bytes())
    bit = chance.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    shard.write_bytes(data)
    return f"bit {bit} of {shard.name}"


def cut(chance: random.Random, bad: Path, good: Path) -> str:
    shard = bad / chance.choice(SHARDS)
    data = shard.read_bytes()
    shard.write_bytes(data[: chance.randrange(len(data))])
    return f"{shard.name} cut"


def swap(chance: random.Random, bad: Path, good: Path) -> str:
    one, other = chance.sample(SHARDS, 2)
    first, second = (bad / one).read_bytes(), (bad / other).read_bytes()
    (bad / one).write_bytes(second)
    (bad / other).write_bytes(first)
    return f"{one} and {other} changed places"


def foreign(chance: random.Random, bad: Path, good: Path) -> str:
    name = chance.choice(SHARDS)
    shutil.copyfile(good / name, bad / name)
    return f"{name} of another step"


def missing(chance: random.Random, bad: Path, good: Path) -> str:
    name = chance.choice(SHARDS)
    (bad / name).unlink()
    return f"{name} is gone"


def added(chance: random.Random, bad: Path, good: Path) -> str:
    (bad / f"__{chance.randint(3, 9)}_0.distcp").write_bytes(chance.randbytes(40))
    return "a shard too many"


def zeroed(chance: random.Random, bad: Path, good: Path) -> str:
    shard = bad / chance.choice(SHARDS)
    data = bytearray(shard.read_bytes())
    start = chance.randrange(len(data) - 64)
    data[start : start + 64] = bytes(64)
    shard.write_bytes(data)
    return f"64 zeros in {shard.name}"


def old_manifest(chance: random.Random, bad: Path, good: Path) -> str:
    """A crash, or a copy that stopped: the bytes are those of step 30, the manifest is the one of step 20."""
    shutil.copyfile(checkpoint.manifest_path(good), checkpoint.manifest_path(bad))
    return "the manifest of an older checkpoint"


def old_bytes(chance: random.Random, bad: Path, good: Path) -> str:
    shutil.rmtree(bad)
    shutil.copytree(good, bad)
    return "the bytes of an older checkpoint"


def manifest_flip(chance: random.Random, bad: Path, good: Path) -> str:
    path = checkpoint.manifest_path(bad)
    data = bytearray(path.read_bytes())
    bit = chance.randrange(8 * len(data.rstrip()))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"bit {bit} of the manifest"


def manifest_gone(chance: random.Random, bad: Path, good: Path) -> str:
    checkpoint.manifest_path(bad).unlink()
    return "no manifest"


DAMAGE: tuple[Damage, ...] = (
    flip, flip, cut, swap, foreign, missing, added, zeroed, old_manifest, old_bytes, manifest_flip, manifest_flip,
    manifest_gone,
)  # fmt: skip


def test_none_of_500_damaged_checkpoints_is_loaded(originals: Path, tmp_path: Path) -> None:
    """`verify` refuses each, `last_clean` and `resume_point` take the one before, and the whole ones stay whole."""
    chance = random.Random(20261202)
    done: dict[str, int] = {}
    bad, good = tmp_path / "step-30", tmp_path / "step-20"
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    for number in range(DAMAGES):
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(originals / "step-30", bad)
        shutil.copyfile(checkpoint.manifest_path(originals / "step-30"), checkpoint.manifest_path(bad))
        if number == 0:
            assert checkpoint.last_clean(tmp_path, "verified").step == 30  # type: ignore[union-attr]
        kind = DAMAGE[number % len(DAMAGE)]
        what = kind(chance, bad, good)
        done[kind.__name__] = done.get(kind.__name__, 0) + 1
        with pytest.raises(CheckpointError):
            pytest.fail(f"damage {number} ({what}) was accepted: {checkpoint.verify(bad)}")
        chosen = checkpoint.resume_point(tmp_path) if number % 2 else checkpoint.last_clean(tmp_path, "verified")
        assert chosen is not None
        assert (chosen.path, chosen.step) == (good, 20), f"damage {number} ({what}): took {chosen}"
    assert sum(done.values()) == DAMAGES
    print(f"{DAMAGES} damaged checkpoints refused, the last clean one chosen each time: {done}")


def test_a_manifest_edited_by_hand_is_refused(originals: Path, tmp_path: Path) -> None:
    """A trust or a step that nobody proved: the manifest's own digest does not fit any more."""
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    path = checkpoint.manifest_path(tmp_path / "step-30")
    for change in ({"trust": "checked"}, {"step": 31}, {"epoch": "e2"}):
        content = json.loads(checkpoint.manifest_path(originals / "step-30").read_text()) | change
        path.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match="own digest"):
            checkpoint.verify(tmp_path / "step-30")


def test_the_manifests_digest_can_be_made_by_anybody(originals: Path) -> None:
    """As docs/contracts.md says: SHA-256 over the canonical JSON of everything else."""
    content = json.loads(checkpoint.manifest_path(originals / "step-20").read_text())
    claimed = content.pop("sha256")
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert hashlib.sha256(text.encode()).hexdigest() == claimed
