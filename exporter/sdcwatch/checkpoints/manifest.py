"""Checkpoints with manifests: what is on disk, which step it holds, and how far it was checked.

Saves through a temporary name, writes `<checkpoint>.manifest.json` with sizes and SHA-256, promotes `candidate` to
`checked` to `verified`, renames what must not be loaded, and never removes the newest verified one. It never reads
the content of a checkpoint and never imports torch: the caller's `save_fn` writes whatever it likes. Only one process
of a job (its lowest rank) calls what writes here. Flow: monitor -> **checkpoint** -> resume.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from sdcwatch import durable
from sdcwatch.errors import CheckpointError, SpoolError
from sdcwatch.latch.files import released_latches

SCHEMA = 1
MANIFEST_SUFFIX = ".manifest.json"
TAINTED_SUFFIX = ".tainted"
#: From least to most: candidate (nothing known yet), checked, verified. See docs/contracts.md.
TRUST = ("candidate", "checked", "verified")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class FileDigest:
    """One file of a checkpoint: its name inside it (posix, relative), size in bytes, SHA-256 in hex."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """One checkpoint as its manifest has it. `step` is the last completed step; training resumes at `step + 1`."""

    path: Path
    step: int
    trust: str
    epoch: str
    training_job: str
    time: float
    files: tuple[FileDigest, ...]

    def trusted(self, trust: str) -> bool:
        """Whether this checkpoint has at least this trust."""
        return TRUST.index(self.trust) >= TRUST.index(trust)


def manifest_path(path: Path | str) -> Path:
    """Where the manifest of this checkpoint stands: beside it."""
    path = Path(path)
    return path.with_name(path.name + MANIFEST_SUFFIX)


def save(path: Path | str, save_fn: Callable[[Path], object], *, step: int, epoch: str, job: str) -> CheckpointRecord:
    """Writes one checkpoint and its manifest, with trust `candidate`.

    `save_fn` gets a temporary path on the same file system and creates a file or a folder there. The manifest is in
    place before the data appears under its name, so no crash leaves data of unknown step behind.

    Args:
        path: final place, a file or a folder.
        save_fn: writes the content; whatever it raises leaves `path` as it was.
        step: last completed step that the content holds.
        epoch: id of the membership epoch that wrote it; promotion never crosses epochs.
        job: training job.

    Raises:
        CheckpointError: `save_fn` created nothing, or something that is neither file nor folder.
        SpoolError: the manifest cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        save_fn(beside)
        record = CheckpointRecord(
            path=path,
            step=step,
            trust="candidate",
            epoch=epoch,
            training_job=job,
            time=time.time(),
            files=_digests(beside, path.name, sync=True),
        )
        _write_manifest(record)
        _swap_in(beside, path)
    finally:
        _remove(beside)
    durable.sync_directory(path.parent)
    return record


def _digests(path: Path, name: str, *, sync: bool = False) -> tuple[FileDigest, ...]:
    """Digests of a file (under `name`) or of all files of a folder (under their relative names), sorted."""
    if path.is_symlink() or not path.exists():
        raise CheckpointError(
            f"{path} is not there: the save function must create a file or folder at the path it gets"
        )
    if path.is_file():
        return (_digest(path, name, sync),)
    if not path.is_dir():
        raise CheckpointError(f"{path} is neither a file nor a folder")
    found: list[FileDigest] = []
    for inner in sorted(path.rglob("*")):
        if inner.is_symlink() or not (inner.is_file() or inner.is_dir()):
            raise CheckpointError(f"{inner} is neither a regular file nor a folder; a manifest cannot vouch for it")
        if inner.is_file():
            found.append(_digest(inner, inner.relative_to(path).as_posix(), sync))
    return tuple(found)


def _digest(path: Path, name: str, sync: bool) -> FileDigest:
    hasher, size = hashlib.sha256(), 0
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            hasher.update(chunk)
            size += len(chunk)
        if sync:
            os.fsync(stream.fileno())
    return FileDigest(name, size, hasher.hexdigest())


def _swap_in(beside: Path, path: Path) -> None:
    """Renames `beside` to `path`. A folder cannot replace a folder in one step: the old one steps aside first."""
    aside = None
    if path.is_dir() or (path.exists() and beside.is_dir()):
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        os.rename(path, aside)
    os.rename(beside, path)
    if aside is not None:
        _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _write_manifest(record: CheckpointRecord, at: Path | None = None, **extra: Any) -> None:
    durable.replace_json(
        at or manifest_path(record.path),
        {
            "schema": SCHEMA,
            "step": record.step,
            "files": {f.name: {"bytes": f.bytes, "sha256": f.sha256} for f in record.files},
            "trust": record.trust,
            "epoch": record.epoch,
            "training_job": record.training_job,
            "time": record.time,
            **extra,
        },
    )


def _read_manifest(manifest: Path, path: Path) -> CheckpointRecord | None:
    try:
        content = durable.read_json(manifest)
        if content is None:
            return None
        if content["schema"] != SCHEMA or content["trust"] not in TRUST:
            raise ValueError(f"schema {content['schema']!r}, trust {content['trust']!r}")
        files = tuple(
            FileDigest(str(name), int(facts["bytes"]), str(facts["sha256"])) for name, facts in content["files"].items()
        )
        if any(PurePosixPath(f.name).is_absolute() or ".." in PurePosixPath(f.name).parts for f in files):
            raise ValueError("a file name leaves the checkpoint")
        return CheckpointRecord(
            path=path,
            step=int(content["step"]),
            trust=content["trust"],
            epoch=str(content["epoch"]),
            training_job=str(content["training_job"]),
            time=float(content["time"]),
            files=files,
        )
    except (SpoolError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{manifest} is no manifest this build can read: {error}; do not load {path}") from error


def _scan(directory: Path) -> list[tuple[Path, Path]]:
    """Pairs of (manifest, checkpoint) in one folder; neither has to be readable."""
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [
        (directory / n, directory / n[: -len(MANIFEST_SUFFIX)])
        for n in names
        if n.endswith(MANIFEST_SUFFIX) and not n.startswith(".")
    ]


def list_checkpoints(directory: Path | str) -> tuple[CheckpointRecord, ...]:
    """All checkpoints of one folder that have a readable manifest and data, by step, the newest last.

    Bytes are not read. Tainted ones are not among them.
    """
    found: list[CheckpointRecord] = []
    for manifest, path in _scan(Path(directory)):
        with contextlib.suppress(CheckpointError):
            record = _read_manifest(manifest, path)
            if record is not None and path.exists():
                found.append(record)
    return tuple(sorted(found, key=lambda r: (r.step, r.time, r.path.name)))


def unreadable(directory: Path | str) -> tuple[str, ...]:
    """One sentence for each manifest in this folder that cannot be used."""
    problems: list[str] = []
    for manifest, path in _scan(Path(directory)):
        try:
            _read_manifest(manifest, path)
        except CheckpointError as error:
            problems.append(str(error))
    return tuple(problems)


def verify(path: Path | str) -> CheckpointRecord:
    """Compares the bytes on disk with the manifest.

    Raises:
        CheckpointError: tainted, without a manifest, or a file is missing, added or changed; names the first one.
    """
    path = Path(path)
    if path.name.endswith(TAINTED_SUFFIX):
        raise CheckpointError(f"{path} is tainted: it was written after the last clean step; take an older one")
    record = _read_manifest(manifest_path(path), path)
    if record is None:
        raise CheckpointError(f"{path} has no manifest ({manifest_path(path).name}): nothing vouches for its bytes")
    found = {f.name: f for f in _digests(path, path.name)}
    for expected in record.files:
        actual = found.pop(expected.name, None)
        if actual is None:
            raise CheckpointError(f"{path}: {expected.name} is missing; take an older checkpoint")
        if actual != expected:
            raise CheckpointError(
                f"{path}: {expected.name} differs from its manifest ({actual.bytes} bytes, {actual.sha256[:12]}; "
                f"expected {expected.bytes} bytes, {expected.sha256[:12]}): torn, rotten or changed; "
                "take an older checkpoint"
            )
    if found:
        raise CheckpointError(f"{path}: {min(found)} is not in its manifest; take an older checkpoint")
    return record


def last_clean(directory: Path | str, trust: str = "checked") -> CheckpointRecord | None:
    """The newest checkpoint of at least this trust whose bytes equal its manifest; None where there is none.

    Raises:
        ValueError: `trust` is not one of `candidate`, `checked`, `verified`.
    """
    if trust not in TRUST:
        raise ValueError(f"trust {trust!r} is not one of {', '.join(TRUST)}")
    for record in reversed(list_checkpoints(directory)):
        if record.trusted(trust):
            with contextlib.suppress(CheckpointError):
                return verify(record.path)
    return None


def resume_point(directory: Path | str) -> CheckpointRecord | None:
    """The checkpoint to resume from: the newest checked one, but as trusted as the newest released latch asks.

    What that latch asks holds for checkpoints written before its release; those of later epochs need to be checked.
    Its bytes have been compared with the manifest. Local, not collective; None means: start from the beginning.
    """
    released = released_latches(directory)
    for record in reversed(list_checkpoints(directory)):
        asked = released[-1].latch.trust_needed if released and record.time <= released[-1].release.time else "checked"
        if record.trusted(asked):
            with contextlib.suppress(CheckpointError):
                return verify(record.path)
    return None


def earned(step: int, checked_through: int | None, verified_through: int | None) -> str:
    """The trust that a checkpoint of this step has earned in its own epoch; arguments as of `promote`."""
    if verified_through is not None and step <= verified_through:
        return "verified"
    return "checked" if checked_through is not None and step <= checked_through else "candidate"


def promote(
    directory: Path | str, checked_through: int | None, verified_through: int | None, *, epoch: str
) -> tuple[CheckpointRecord, ...]:
    """Raises the trust of this epoch's checkpoints; nothing is ever lowered, and other epochs are left alone.

    A checkpoint of an earlier epoch may hold a step that this epoch trained again: its number proves nothing here.

    Args:
        checked_through: newest step up to which weight and gradient checks were clean.
        verified_through: newest step up to which a replay audit on every rank was clean, too.
        epoch: the epoch that ran those checks.

    Returns:
        The records that changed.
    """
    changed: list[CheckpointRecord] = []
    for record in list_checkpoints(directory):
        deserved = earned(record.step, checked_through, verified_through)
        if record.epoch == epoch and not record.trusted(deserved):
            better = replace(record, trust=deserved)
            _write_manifest(better)
            changed.append(better)
    return tuple(changed)


def taint(directory: Path | str, newer_than: int | None, reason: str, *, epoch: str | None = None) -> tuple[Path, ...]:
    """Renames checkpoints (and their manifests) so that neither we nor "take the newest file" logic loads them.

    Repeating it after a crash finishes what was begun.

    Args:
        newer_than: those with a larger step; None: all.
        reason: kept in the renamed manifest.
        epoch: the epoch that halted. An unknown last clean step of that epoch says nothing against what another
            epoch verified: with it and `newer_than=None`, verified checkpoints of other epochs stay.

    Returns:
        The new paths of the data that was renamed by this call.
    """
    renamed: list[Path] = []
    for manifest, path in _scan(Path(directory)):
        try:
            record = _read_manifest(manifest, path)
        except CheckpointError:
            record = None  # a step that cannot be read cannot be shown to be old enough
        if record is not None and newer_than is not None and record.step <= newer_than:
            continue
        if newer_than is None and epoch is not None and record and record.trusted("verified") and record.epoch != epoch:
            continue
        target = path.with_name(path.name + TAINTED_SUFFIX)
        if path.exists():
            _remove(target)
            os.rename(path, target)
            renamed.append(target)
        tainted_manifest = manifest.with_name(manifest.name + TAINTED_SUFFIX)
        if record is None:
            os.replace(manifest, tainted_manifest)
        else:
            _write_manifest(record, tainted_manifest, tainted={"reason": reason, "time": time.time()})
            manifest.unlink(missing_ok=True)
    durable.sync_directory(Path(directory))
    return tuple(renamed)


def prune(directory: Path | str, keep: int) -> tuple[Path, ...]:
    """Removes all but the `keep` newest checkpoints. The newest verified one always stays.

    Raises:
        ValueError: `keep` is below 1.

    Returns:
        The paths that were removed.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
    records = list_checkpoints(directory)
    pinned = next((r.path for r in reversed(records) if r.trust == "verified"), None)
    gone = [r.path for r in records[:-keep] if r.path != pinned]
    for path in gone:
        # Data first: a manifest without data is ignored, data without a manifest might be loaded.
        _remove(path)
        manifest_path(path).unlink(missing_ok=True)
    durable.sync_directory(Path(directory))
    return tuple(gone)
