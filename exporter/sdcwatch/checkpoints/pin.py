"""The newest verified checkpoint, pinned against whatever rotates the folder: a second name for the same bytes.

Hard links in `.sdcwatch-pinned/` inside the checkpoint folder, and a copy of the manifest beside them: no byte is
copied, and a rotation that removes its own names (`save_total_limit`, `rmtree` of the oldest) leaves these. One pin at
a time. It cannot hold bytes that somebody overwrites in place, nor data behind a URL; both are said. Flow: content,
record -> **pin** -> manifest.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import replace
from pathlib import Path

from sdcwatch import durable
from sdcwatch.checkpoints import content, record
from sdcwatch.checkpoints.record import CheckpointRecord
from sdcwatch.errors import CheckpointError, SpoolError

#: A hidden folder, so that no pattern of a rotation (`checkpoint-*`, `*.pt`) meets it.
FOLDER = ".sdcwatch-pinned"


def scan(directory: Path) -> list[tuple[Path, Path]]:
    """Pairs of (manifest, checkpoint) of what is pinned in this checkpoint folder; neither has to be readable."""
    return [pair for place in _places(directory) for pair in record.scan(place)]


def pinned(directory: Path) -> tuple[CheckpointRecord, ...]:
    """What is pinned here and not tainted; bytes are not read."""
    found: list[CheckpointRecord] = []
    for manifest, path in scan(directory):
        with contextlib.suppress(CheckpointError):
            held = record.read(manifest, path)
            if held is not None and path.exists():
                found.append(held[0])
    return tuple(found)


def is_pin(found: CheckpointRecord) -> bool:
    """Whether this record is of a pin, not of a checkpoint under its own name."""
    return found.path.parent.parent.name == FOLDER


def hold(directory: Path, found: CheckpointRecord) -> CheckpointRecord:
    """Pins one checkpoint of `directory` and lets go of what was pinned before.

    A kill at any moment leaves the pin before, or both: the new one appears whole, under its name.

    Returns:
        The record of the pin.

    Raises:
        CheckpointError: it lies behind a URL, this file system has no hard links, or a file is gone or not as large
            as its manifest says.
    """
    if found.location is not None:
        raise CheckpointError(f"{found.location} lies behind a URL, where nothing can be linked")
    home = directory / FOLDER
    name = f"{found.step}-{secrets.token_hex(4)}"
    beside, place = home / f".{name}.partial", home / name
    try:
        beside.mkdir(parents=True)
        _link(found, beside / found.path.name)
        record.write(replace(found, path=place / found.path.name), record.manifest_path(beside / found.path.name))
        os.rename(beside, place)
    except (OSError, SpoolError) as error:
        raise CheckpointError(f"{found.path} cannot be linked to {place}: {error}") from error
    finally:
        content.remove(beside)
    durable.sync_directory(home)
    release(directory, but=place)
    return replace(found, path=place / found.path.name)


def release(directory: Path, *, but: Path | None = None) -> None:
    """Removes all pins but one, and what a kill left half made; the checkpoints themselves stay."""
    home = directory / FOLDER
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(home):
            if but is None or name != but.name:
                content.remove(home / name)


def _places(directory: Path) -> list[Path]:
    home = directory / FOLDER
    try:
        return [home / name for name in sorted(os.listdir(home)) if not name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _link(found: CheckpointRecord, target: Path) -> None:
    """Links every file of the manifest. Sizes are compared, bytes are not: a resume reads those."""
    if found.path.is_dir():
        target.mkdir()
    for file in found.files:
        whole = found.path.is_dir()
        source, link = (found.path / file.name, target / file.name) if whole else (found.path, target)
        link.parent.mkdir(parents=True, exist_ok=True)
        os.link(source, link, follow_symlinks=False)
        size = link.stat(follow_symlinks=False).st_size
        if size != file.bytes:
            raise CheckpointError(f"{source} holds {size} bytes, its manifest says {file.bytes}")
