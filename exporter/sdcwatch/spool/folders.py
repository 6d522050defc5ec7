"""Where the spool lies, and the checks that keep a shared /tmp from turning it against us.

Folders are created 0700 and entered one by one without following a symlink, and the owner of each is checked, because
`<root>` stands in a folder that every user of the node can write. Names of jobs are made safe for paths here. It
writes no metrics and no events. Standard library only. Flow: **folders** -> rank, reader, agent.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote

from sdcwatch.errors import SpoolError

#: Longest job name, in characters, and longest folder name, in bytes, that it may become.
JOB_LENGTH = 200
_FOLDER_BYTES = 250

_EPOCH = re.compile(r"e(\d{1,16})-([0-9a-f]{8})\Z")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Endings of the files that stand beside job folders; a job named like one must not take its place.
_RESERVED = (".json", ".lock", ".log", ".partial")


def job_folder_name(job: str) -> str:
    """The folder name of a job: reversible (`job_of_folder`) and different for different jobs.

    Raises:
        SpoolError: the name is empty, too long, or holds a NUL or a broken character.
    """
    if not job or len(job) > JOB_LENGTH or "\0" in job:
        raise SpoolError(
            f"job name of {len(job)} characters: it must have 1 to {JOB_LENGTH} and no NUL; set SDCWATCH_JOB to another"
        )
    try:
        name = quote(job, safe="")
    except UnicodeEncodeError:
        raise SpoolError("job name is not valid text; set SDCWATCH_JOB to another") from None
    if name.startswith(".") or name.lower().endswith(_RESERVED):
        name = name.replace(".", "%2E")
    if len(name) > _FOLDER_BYTES:
        raise SpoolError(f"job name {job[:40]!r}... is too long for a folder name; set SDCWATCH_JOB to a shorter one")
    return name


def job_of_folder(name: str) -> str | None:
    """The job whose folder this is, or None for a folder that `job_folder_name` would never make."""
    try:
        job = unquote(name, errors="strict")
        return job if job_folder_name(job) == name else None
    except (UnicodeDecodeError, SpoolError):
        return None


def epoch_order(epoch: str) -> tuple[int, str] | None:
    """What epochs are sorted by (unix milliseconds first), or None for a name that is no epoch's."""
    match = _EPOCH.match(epoch)
    return (int(match.group(1)), match.group(2)) if match else None


def user_root(root: Path | str) -> Path:
    """`<root>/<uid>`, where this user's spool on this node lies. Creates and checks nothing."""
    return Path(root) / str(os.getuid())


def job_root(root: Path | str, job: str) -> Path:
    """`<root>/<uid>/<job>`, where a job's latch and epochs lie. Creates and checks nothing."""
    return user_root(root) / job_folder_name(job)


def prepare_user_root(root: Path | str) -> Path:
    """Creates `<root>` (1777) and `<root>/<uid>` (0700) where missing, and checks both.

    Raises:
        SpoolError: a symlink, another owner, or a place that cannot be written; the message says what to do.
    """
    root = Path(root)
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.mkdir(root, 0o1777)
            os.chmod(root, 0o1777)  # mkdir's mode went through the umask
        except FileExistsError:
            pass
        handle = os.open(root, _FOLDER_FLAGS)
    except OSError as error:
        raise _refusal(root, error) from error
    try:
        mode = os.fstat(handle).st_mode
        if mode & 0o022 and not mode & stat.S_ISVTX:
            raise SpoolError(
                f"{root} can be written by others and has no sticky bit: chmod +t {root}, or set SDCWATCH_SPOOL_DIR"
            )
        os.close(enter(handle, user_root(root)))
    finally:
        os.close(handle)
    return user_root(root)


def enter(parent: int, path: Path) -> int:
    """Creates `path` (0700) inside the open folder `parent` where missing; opens it and checks it is ours alone.

    Returns:
        A descriptor of the folder, which the caller closes.

    Raises:
        SpoolError: a symlink, another owner, or no permission.
    """
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path.name, 0o700, dir_fd=parent)
        handle = os.open(path.name, _FOLDER_FLAGS, dir_fd=parent)
    except OSError as error:
        raise _refusal(path, error) from error
    facts = os.fstat(handle)
    if facts.st_uid != os.geteuid():
        os.close(handle)
        raise SpoolError(
            f"{path} belongs to user {facts.st_uid}, not to {os.geteuid()}: remove it, or set SDCWATCH_SPOOL_DIR"
        )
    if facts.st_mode & 0o077:
        os.fchmod(handle, 0o700)
    return handle


def _refusal(path: Path, error: OSError) -> SpoolError:
    if path.is_symlink():
        return SpoolError(f"{path} is a symlink and is not followed: remove it, or set SDCWATCH_SPOOL_DIR")
    return SpoolError(f"cannot use {path}: {error.strerror or error}; set SDCWATCH_SPOOL_DIR to a folder of your own")


def open_regular(path: Path) -> BinaryIO | None:
    """Opens one of *our* regular files for reading; None for anything else, or where none is."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        os.close(handle)
        return None
    return os.fdopen(handle, "rb")


def read_regular(path: Path, limit: int) -> bytes | None:
    """The content of one of our regular files of at most `limit` bytes; None for anything else or where none is."""
    stream = open_regular(path)
    if stream is None:
        return None
    with stream:
        try:
            data = stream.read(limit + 1)
        except OSError:
            return None
    return None if len(data) > limit else data
