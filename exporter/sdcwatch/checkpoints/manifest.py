"""Checkpoints with manifests: what is on disk, which step it holds, and how far it was checked.

Saves through a temporary name, writes `<checkpoint>.manifest.json` with sizes and SHA-256, promotes `candidate` to
`checked` to `verified`, renames what must not be loaded, and never removes the newest verified one. It never reads
the content of a checkpoint and never imports torch: the caller's `save_fn` writes whatever it likes. Only one process
of a job (its lowest rank) calls what writes here. Flow: monitor -> **manifest** -> resume.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sdcwatch import durable
from sdcwatch.checkpoints import content, pin, record
from sdcwatch.checkpoints.record import (
    MANIFEST_SUFFIX,
    TAINTED_SUFFIX,
    TRUST,
    CheckpointRecord,
    FileDigest,
    StateDigests,
    manifest_path,
)
from sdcwatch.errors import CheckpointError
from sdcwatch.latch.files import released_latches

__all__ = [
    "MANIFEST_SUFFIX",
    "TAINTED_SUFFIX",
    "TRUST",
    "CheckpointRecord",
    "FileDigest",
    "StateDigests",
    "adopt",
    "announce",
    "complete",
    "earned",
    "follow_taint",
    "last_clean",
    "list_checkpoints",
    "loadable",
    "manifest_path",
    "pin_newest",
    "promote",
    "prune",
    "resume_point",
    "save",
    "step_back",
    "taint",
    "unreadable",
    "verify",
]


def save(
    path: Path | str,
    save_fn: Callable[[Path], object],
    *,
    step: int,
    epoch: str,
    job: str,
    state: StateDigests | None = None,
) -> CheckpointRecord:
    """Writes one checkpoint and its manifest, with trust `candidate`.

    `save_fn` gets a temporary path on the same file system and creates a file or a folder there. The manifest is in
    place before the data appears under its name, so no crash leaves data of unknown step behind; where it replaces
    another one, that one's facts stay in it until the data has been replaced, too.

    Args:
        path: final place, a file or a folder.
        save_fn: writes the content; whatever it raises leaves `path` as it was.
        step: last completed step that the content holds.
        epoch: id of the membership epoch that wrote it; promotion never crosses epochs.
        job: training job.
        state: fingerprints of the state that is being saved.

    Raises:
        CheckpointError: `save_fn` created nothing, or something that is neither file nor folder.
        SpoolError: the manifest cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        save_fn(beside)
        return adopt(beside, path, step=step, epoch=epoch, job=job, state=state)
    finally:
        content.remove(beside)


def adopt(
    beside: Path, path: Path, *, step: int, epoch: str, job: str, state: StateDigests | None = None
) -> CheckpointRecord:
    """The second half of `save`: gives what lies at `beside` (same file system) a manifest and its final name."""
    made = CheckpointRecord(
        path=path,
        step=step,
        trust="candidate",
        epoch=epoch,
        training_job=job,
        time=time.time(),
        files=content.digests(beside, path.name, sync=True),
        state=state,
    )
    previous = _known(path)
    record.write(made, previous=previous)
    content.swap_in(beside, path)
    if previous is not None:
        record.write(made)
    durable.sync_directory(path.parent)
    return made


def announce(
    path: Path, *, step: int, epoch: str, job: str, state: StateDigests | None = None, location: str | None = None
) -> CheckpointRecord:
    """Notes a checkpoint that somebody else writes or wrote. Until `complete`, it is pending: nothing loads it.

    Args:
        path: where it lies, or with `location` the name under which its manifest stands.
        location: URL of the data.
    """
    noted = CheckpointRecord(path, step, "candidate", epoch, job, time.time(), (), location, state)
    path.parent.mkdir(parents=True, exist_ok=True)
    record.write(noted)
    return noted


def complete(noted: CheckpointRecord, stop: Callable[[], bool] = lambda: False) -> CheckpointRecord | None:
    """Hashes the data of a pending checkpoint and completes its manifest.

    Returns:
        The new record; None where the manifest has been tainted, removed or replaced meanwhile.

    Raises:
        CheckpointError: the data is not there.
        Cancelled: `stop` said so.
    """
    if not _still(noted):
        return None
    done = replace(noted, files=content.digests(noted.location or noted.path, noted.path.name, stop=stop))
    if not _still(noted):
        return None
    record.write(done)
    return done


def _still(noted: CheckpointRecord) -> bool:
    found = record.read(manifest_path(noted.path), noted.path)
    return found is not None and found[0] == noted


def follow_taint(noted: CheckpointRecord) -> None:
    """Renames data that arrived after its manifest had been tainted."""
    if not manifest_path(noted.path).exists() and _tainted(noted):
        content.rename(noted.location or noted.path, TAINTED_SUFFIX)


def _known(path: Path) -> CheckpointRecord | None:
    """The record of what stands at `path` now, None where its manifest does not say."""
    if not content.exists(path):
        return None
    with contextlib.suppress(CheckpointError):
        return _standing(manifest_path(path), path)
    return None


def _standing(manifest: Path, path: Path) -> CheckpointRecord | None:
    """The record that fits the data at `path`: a save that a crash cut off leaves the old data and both records."""
    found = record.read(manifest, path)
    if found is None:
        return None
    made, previous = found
    if previous is None or not content.exists(made.location or path):
        return made
    actual = content.digests(path, path.name)
    return previous if actual == previous.files and actual != made.files else made


def list_checkpoints(directory: Path | str) -> tuple[CheckpointRecord, ...]:
    """All checkpoints of one folder that have a readable manifest and data, by step, the newest last.

    Bytes are not read, and a URL is not asked. Tainted ones are not among them; pending ones are.
    """
    found: list[CheckpointRecord] = []
    for manifest, path in record.scan(Path(directory)):
        with contextlib.suppress(CheckpointError):
            standing = _standing(manifest, path)
            if standing is not None and (standing.location is not None or standing.pending or path.exists()):
                found.append(standing)
    return tuple(sorted(found, key=lambda r: (r.step, r.time, r.path.name)))


def loadable(directory: Path | str) -> tuple[CheckpointRecord, ...]:
    """`list_checkpoints`, and what is pinned; of two names for one checkpoint its own comes last, as the newest."""
    found = [*pin.pinned(Path(directory)), *list_checkpoints(directory)]
    return tuple(sorted(found, key=lambda r: (r.step, r.time, not pin.is_pin(r))))


def pin_newest(directory: Path | str) -> CheckpointRecord | None:
    """Pins the newest verified checkpoint, where it is not pinned yet.

    Returns:
        The record of the new pin; None where nothing was to do.

    Raises:
        CheckpointError: it cannot be pinned; says why.
    """
    directory = Path(directory)
    newest = next((r for r in reversed(loadable(directory)) if r.trusted("verified") and not r.pending), None)
    held = [(r.step, r.time, r.files) for r in pin.pinned(directory)]
    if newest is None or (newest.step, newest.time, newest.files) in held:
        return None
    made = pin.hold(directory, newest)
    if not manifest_path(newest.path).exists() and _tainted(newest):
        pin.release(directory)  # a verdict reached back over it meanwhile
        return None
    return made


def _tainted(found: CheckpointRecord) -> bool:
    manifest = manifest_path(found.path)
    return manifest.with_name(manifest.name + TAINTED_SUFFIX).exists()


def unreadable(directory: Path | str) -> tuple[str, ...]:
    """One sentence for each manifest in this folder that cannot be used."""
    problems: list[str] = []
    for manifest, path in [*record.scan(Path(directory)), *pin.scan(Path(directory))]:
        try:
            _standing(manifest, path)
        except CheckpointError as error:
            problems.append(str(error))
    return tuple(problems)


def verify(path: Path | str) -> CheckpointRecord:
    """Compares the bytes of a checkpoint with its manifest.

    Args:
        path: as `CheckpointRecord.path` has it; for data behind a URL that is where the manifest stands.

    Raises:
        CheckpointError: tainted, without a manifest, pending, or a file is missing, added or changed; names the first.
    """
    path = Path(path)
    if path.name.endswith(TAINTED_SUFFIX):
        raise CheckpointError(f"{path} is tainted: it was written after the last clean step; take an older one")
    standing = _standing(manifest_path(path), path)
    if standing is None:
        raise CheckpointError(f"{path} has no manifest ({manifest_path(path).name}): nothing vouches for its bytes")
    if standing.pending:
        raise CheckpointError(f"{path} was never finished: its manifest has no digests; take an older checkpoint")
    found = {f.name: f for f in content.digests(standing.location or path, path.name)}
    for expected in standing.files:
        actual = found.pop(expected.name, None)
        if actual is None:
            raise CheckpointError(f"{standing.where}: {expected.name} is missing; take an older checkpoint")
        if actual != expected:
            raise CheckpointError(
                f"{standing.where}: {expected.name} differs from its manifest ({actual.bytes} bytes with SHA-256 "
                f"{actual.sha256[:12]}..., expected {expected.bytes} with {expected.sha256[:12]}...); "
                "take an older checkpoint"
            )
    if found:
        raise CheckpointError(f"{standing.where}: {min(found)} is not in its manifest; take an older checkpoint")
    return standing


def last_clean(directory: Path | str, trust: str = "checked") -> CheckpointRecord | None:
    """The newest checkpoint of at least this trust whose bytes equal its manifest; None where there is none.

    Where a rotation removed it, its pin.

    Raises:
        ValueError: `trust` is not one of `candidate`, `checked`, `verified`.
    """
    if trust not in TRUST:
        raise ValueError(f"trust {trust!r} is not one of {', '.join(TRUST)}")
    for found in reversed(loadable(directory)):
        if found.trusted(trust):
            with contextlib.suppress(CheckpointError):
                return verify(found.path)
    return None


def resume_point(directory: Path | str) -> CheckpointRecord | None:
    """The checkpoint to resume from: the newest checked one, but as trusted as the newest released latch asks.

    What that latch asks holds for checkpoints written before its release; those of later epochs need to be checked.
    Its bytes have been compared with the manifest. Local, not collective; None means: start from the beginning.
    """
    released = released_latches(directory)
    for found in reversed(loadable(directory)):
        asked = released[-1].latch.trust_needed if released and found.time <= released[-1].release.time else "checked"
        if found.trusted(asked):
            with contextlib.suppress(CheckpointError):
                return verify(found.path)
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
    A pending one is not raised before its digests are known.

    Args:
        checked_through: newest step up to which weight and gradient checks were clean.
        verified_through: newest step up to which a replay audit on every rank was clean, too.
        epoch: the epoch that ran those checks.

    Returns:
        The records that changed.
    """
    changed: list[CheckpointRecord] = []
    for found in list_checkpoints(directory):
        deserved = earned(found.step, checked_through, verified_through)
        if found.epoch == epoch and not found.pending and not found.trusted(deserved):
            better = replace(found, trust=deserved)
            record.write(better)
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
        The new paths (or URLs, as paths of their manifests) of the data that was renamed by this call.
    """
    renamed: list[Path] = []
    for manifest, path in [*record.scan(Path(directory)), *pin.scan(Path(directory))]:
        try:
            found = _standing(manifest, path)
        except CheckpointError:
            found = None  # a step that cannot be read cannot be shown to be old enough
        if found is not None and newer_than is not None and found.step <= newer_than:
            continue
        if newer_than is None and epoch is not None and found and found.trusted("verified") and found.epoch != epoch:
            continue
        location = found.location if found is not None else None
        if content.rename(location or path, TAINTED_SUFFIX) is not None:
            renamed.append(path.with_name(path.name + TAINTED_SUFFIX))
        tainted_manifest = manifest.with_name(manifest.name + TAINTED_SUFFIX)
        if found is None:
            os.replace(manifest, tainted_manifest)
        else:
            target = None if location is None else location.rstrip("/") + TAINTED_SUFFIX
            facts = {"reason": reason, "time": time.time()}
            record.write(replace(found, location=target), tainted_manifest, tainted=facts)
            manifest.unlink(missing_ok=True)
    durable.sync_directory(Path(directory))
    return tuple(renamed)


def step_back(directory: Path | str, reason: str) -> tuple[Path, ...]:
    """Taints the newest verified checkpoint and what is newer, so that a resume lands on the verified one before it.

    Returns:
        As `taint`; empty, with nothing renamed, where no older verified one is left to land on.
    """
    steps = sorted({r.step for r in loadable(directory) if r.trusted("verified")})
    return taint(directory, steps[-2], reason) if len(steps) > 1 else ()


def prune(directory: Path | str, keep: int) -> tuple[Path, ...]:
    """Removes all but the `keep` newest checkpoints. The newest verified one always stays; pending ones do not count.

    Raises:
        ValueError: `keep` is below 1.

    Returns:
        The paths that were removed.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
    records = [r for r in list_checkpoints(directory) if not r.pending]
    pinned = next((r.path for r in reversed(records) if r.trust == "verified"), None)
    gone = [r for r in records[:-keep] if r.path != pinned]
    for old in gone:
        # Data first: a manifest without data is ignored, data without a manifest might be loaded.
        content.remove(old.location or old.path)
        manifest_path(old.path).unlink(missing_ok=True)
    durable.sync_directory(Path(directory))
    return tuple(r.path for r in gone)
