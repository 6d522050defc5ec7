"""The bytes of a checkpoint, wherever they lie: a file, a folder of shards, or either behind an fsspec URL.

Hashes, renames and removes; knows no manifest and no trust, and never looks into a file. fsspec (which torch brings)
is imported only for a URL. Flow: **content** -> manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from sdcwatch.checkpoints.record import FileDigest
from sdcwatch.errors import CheckpointError

_CHUNK = 1 << 20


class Cancelled(Exception):
    """Hashing was asked to stop; what was hashed says nothing."""


def is_url(place: str) -> bool:
    """Whether this is a place for fsspec: `s3://...`, `gs://...`, `memory://...`."""
    scheme, separator, _ = place.partition("://")
    return bool(separator) and scheme.replace("+", "").isalnum()


def digests(
    place: Path | str, name: str, *, sync: bool = False, stop: Callable[[], bool] = lambda: False
) -> tuple[FileDigest, ...]:
    """Digests of a file (under `name`) or of all files of a folder (under their relative names), sorted.

    Args:
        place: a local path, or a URL.
        sync: also make local files durable.
        stop: asked between two pieces of a file; True ends it.

    Raises:
        CheckpointError: nothing is there, or something that is neither a regular file nor a folder.
        Cancelled: `stop` said so.
    """
    if isinstance(place, str) and is_url(place):
        return _remote(place, name, stop)
    return _local(Path(place), name, sync, stop)


def exists(place: Path | str) -> bool:
    """Whether anything stands there."""
    if isinstance(place, str) and is_url(place):
        fs, inner = _filesystem(place)
        return bool(fs.exists(inner))
    return os.path.lexists(place)


def remove(place: Path | str) -> None:
    """Removes a file or a folder with all it holds; nothing there is no error."""
    if isinstance(place, str) and is_url(place):
        fs, inner = _filesystem(place)
        with contextlib.suppress(FileNotFoundError):
            fs.rm(inner, recursive=True)
        return
    path = Path(place)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def rename(place: Path | str, suffix: str) -> str | None:
    """Gives it a name with `suffix`, over whatever has that name; None where nothing stands.

    An object store has no rename: fsspec copies there and deletes.
    """
    if not exists(place):
        return None
    target = str(place).rstrip("/") + suffix
    remove(target)
    if isinstance(place, str) and is_url(place):
        fs, inner = _filesystem(place.rstrip("/"))
        fs.mv(inner, inner + suffix, recursive=True)
    else:
        os.rename(place, target)
    return target


def swap_in(beside: Path, path: Path) -> None:
    """Renames `beside` to `path`. A folder cannot replace a folder in one step: the old one steps aside first."""
    aside = None
    if path.is_dir() or (path.exists() and beside.is_dir()):
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        os.rename(path, aside)
    os.rename(beside, path)
    if aside is not None:
        remove(aside)


def _local(path: Path, name: str, sync: bool, stop: Callable[[], bool]) -> tuple[FileDigest, ...]:
    if path.is_symlink() or not path.exists():
        raise CheckpointError(
            f"{path} is not there: the save function must create a file or folder at the path it gets"
        )
    if path.is_file():
        return (_of_file(path, name, sync, stop),)
    if not path.is_dir():
        raise CheckpointError(f"{path} is neither a file nor a folder")
    found: list[FileDigest] = []
    for inner in sorted(path.rglob("*")):
        if inner.is_symlink() or not (inner.is_file() or inner.is_dir()):
            raise CheckpointError(f"{inner} is neither a regular file nor a folder; a manifest cannot vouch for it")
        if inner.is_file():
            found.append(_of_file(inner, inner.relative_to(path).as_posix(), sync, stop))
    if not found:
        raise CheckpointError(f"{path} is a folder without a file")
    return tuple(found)


def _of_file(path: Path, name: str, sync: bool, stop: Callable[[], bool]) -> FileDigest:
    with open(path, "rb") as stream:
        digest = _of_stream(stream, name, stop)
        if sync:
            os.fsync(stream.fileno())
    return digest


def _of_stream(stream: IO[bytes], name: str, stop: Callable[[], bool]) -> FileDigest:
    hasher, size = hashlib.sha256(), 0
    while chunk := stream.read(_CHUNK):
        if stop():
            raise Cancelled
        hasher.update(chunk)
        size += len(chunk)
    return FileDigest(name, size, hasher.hexdigest())


def _remote(url: str, name: str, stop: Callable[[], bool]) -> tuple[FileDigest, ...]:
    fs, inner = _filesystem(url)
    with _as_checkpoint_error(url):
        if fs.isfile(inner):
            with fs.open(inner, "rb") as stream:
                return (_of_stream(stream, name, stop),)
        found: list[FileDigest] = []
        for file in sorted(fs.find(inner)):
            with fs.open(file, "rb") as stream:
                found.append(_of_stream(stream, file[len(inner.rstrip("/")) + 1 :], stop))
    if not found:
        raise CheckpointError(f"{url} is not there")
    return tuple(found)


@contextlib.contextmanager
def _as_checkpoint_error(url: str) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, Cancelled):
        raise
    except Exception as error:  # each fsspec backend raises its own client's errors
        raise CheckpointError(f"{url} cannot be read: {type(error).__name__}: {error}") from error


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        core = importlib.import_module("fsspec.core")
        fs, inner = core.url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        raise CheckpointError(f"{url} needs fsspec and the package of its scheme: {error}") from error
    return fs, str(inner).rstrip("/")
