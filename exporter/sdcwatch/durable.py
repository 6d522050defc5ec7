"""Small files that must be whole or absent: written beside their place, fsynced, then renamed or linked into it.

Never follows a symlink at the last component and never leaves a half-written file under the final name. Standard
library only. Used by latches, quarantine marks, manifests and preflight results.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdcwatch.errors import SpoolError

#: Larger than any record this package writes; a bigger file is not ours and is not read.
MAX_BYTES = 4 << 20


def sync_directory(directory: Path) -> None:
    """Makes renames inside `directory` durable; a file system that cannot sync folders is left alone."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _beside(path: Path, data: bytes) -> Path:
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return beside


def encode(record: Mapping[str, Any]) -> bytes:
    """One JSON object and a newline, keys in the order given."""
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def replace_json(path: Path, record: Mapping[str, Any]) -> None:
    """Writes `record` to `path`, replacing what stood there.

    Raises:
        SpoolError: the folder cannot be written.
    """
    try:
        beside = _beside(path, encode(record))
        try:
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SpoolError(
            f"cannot write {path}: {error.strerror or error}; check the folder's owner, mode and space"
        ) from error
    sync_directory(path.parent)


def create_json(path: Path, record: Mapping[str, Any]) -> bool:
    """Writes `record` to `path` unless something stands there already; of several writers exactly one wins.

    Returns:
        True when this call wrote it.

    Raises:
        SpoolError: the folder cannot be written.
    """
    try:
        beside = _beside(path, encode(record))
        try:
            os.link(beside, path, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError:
            # Some shared file systems have no hard links. An exclusive create still picks one winner; a reader that
            # meets the half-written file treats it as standing.
            return _create_exclusively(path, encode(record))
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise SpoolError(
            f"cannot write {path}: {error.strerror or error}; check the folder's owner, mode and space"
        ) from error
    sync_directory(path.parent)
    return True


def _create_exclusively(path: Path, data: bytes) -> bool:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(handle, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    sync_directory(path.parent)
    return True


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, or None where no file stands.

    Raises:
        SpoolError: something stands there that is not one readable JSON object in a regular file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SpoolError(f"cannot read {path}: {error.strerror or error}") from error
    with os.fdopen(handle, "rb") as stream:
        facts = os.fstat(stream.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_BYTES:
            raise SpoolError(f"{path} is not a regular file of at most {MAX_BYTES} bytes")
        try:
            record = json.loads(stream.read())
        except (ValueError, OSError) as error:
            raise SpoolError(f"{path} does not hold JSON: {error}") from error
    if not isinstance(record, dict):
        raise SpoolError(f"{path} does not hold a JSON object")
    return record
