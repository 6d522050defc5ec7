"""The spool as one rank writes it: metrics replaced whole, events appended durably, one claim a rank.

After `open` it never raises into training: what cannot be written is refused, counted (`refused`) and explained
(`last_refusal`). It never reads other ranks' files but the predecessor's of its own rank, never sends anything, and a
forked child writes nothing. Standard library only. Flow: metrics, event -> **rank** -> reader -> agent.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdcwatch.catalog import IDENTITY_LABELS
from sdcwatch.errors import SpoolError
from sdcwatch.spool.folders import (
    enter,
    epoch_order,
    job_folder_name,
    prepare_user_root,
    read_regular,
)
from sdcwatch.spool.reader import RankFiles, iter_ranks, read_events

__all__ = ["DEFAULT_QUOTA", "RankFiles", "Spool", "iter_ranks", "read_events"]

SCHEMA = 1
#: Most bytes of one job on one node, all its epochs together.
DEFAULT_QUOTA = 256 << 20
#: Largest metrics file; the agent does not read a larger one.
METRICS_BYTES = 1 << 20

#: An agent that looks whether a rank lives holds its claim for microseconds; a real owner holds it for good.
_CLAIM_SECONDS = 0.5
_USAGE_SECONDS = 30.0


class Spool:
    """One rank's files of one epoch. Use `Spool.open`.

    Attributes:
        directory: `<root>/<uid>/<job>/<epoch>`.
        job_directory: `<root>/<uid>/<job>`, where the latch stands.
        refused: how many writes were refused (quota, full disk, a value that is not JSON).
        last_refusal: why the newest one was, one sentence; empty where none was.
    """

    def __init__(
        self, directory: Path, rank: int, identity: Mapping[str, object], folder: int, claim: int, quota: int
    ) -> None:
        self.directory = directory
        self.job_directory = directory.parent
        self.refused = 0
        self.last_refusal = ""
        self._rank = rank
        self._identity = dict(identity)
        self._folder = folder
        self._claim = claim
        self._quota = quota
        self._pid = os.getpid()
        self._used = 0
        self._used_at = float("-inf")
        self._metrics_bytes = 0
        _OPEN.add(self)

    @classmethod
    def open(
        cls,
        root: Path | str,
        job: str,
        epoch: str,
        rank: int,
        local_rank: int,
        identity: Mapping[str, object],
        *,
        quota_bytes: int = DEFAULT_QUOTA,
    ) -> Spool:
        """Creates the folders and claims this rank.

        Args:
            identity: this rank's identity as JSON values; the labels of a rank series are the part that is compared.
            quota_bytes: most bytes that this job may hold on this node.

        Raises:
            SpoolError: the place cannot be used (symlink, owner, permission), the epoch has no valid name, or another
                process holds this rank's claim.
        """
        if epoch_order(epoch) is None:
            raise SpoolError(f"{epoch!r} is no epoch: expected e<unix milliseconds>-<8 hex digits>")
        if rank < 0:
            raise SpoolError(f"{rank} is no rank")
        user = prepare_user_root(root)
        directory = user / job_folder_name(job) / epoch
        with contextlib.ExitStack() as opened:
            handle = os.open(user, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            opened.callback(os.close, handle)
            for path in (directory.parent, directory):
                handle = enter(handle, path)
                opened.callback(os.close, handle)
            claim = _claim(handle, directory, rank)
            folder = os.dup(handle)
        spool = cls(directory, rank, identity, folder, claim, quota_bytes)
        record = {"schema": SCHEMA, "job": job, "epoch": epoch, "rank": rank, "local_rank": local_rank}
        try:
            spool._write_claim({**record, "pid": os.getpid(), "identity": dict(identity), "opened": time.time()})
        except BaseException:
            spool.close()
            raise
        return spool

    def write_metrics(self, text: str) -> bool:
        """Replaces `rank-<rank>.prom` whole. False where it was refused, or in a forked child."""
        data = text.encode("utf-8", errors="replace")
        if not self._mine():
            return False
        if len(data) > METRICS_BYTES:
            return self._refuse(f"metrics of {len(data)} bytes, at most {METRICS_BYTES} are read")
        if len(data) > self._metrics_bytes and not self._fits(len(data) - self._metrics_bytes):
            return False
        name = f"rank-{self._rank}.prom"
        beside = f".{name}.partial"
        try:
            handle = self._create(beside)
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            os.rename(beside, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError as error:
            return self._refuse(f"cannot write {self.directory / name}: {error.strerror or error}")
        self._used += len(data) - self._metrics_bytes
        self._metrics_bytes = len(data)
        return True

    def append_event(self, line: Mapping[str, Any]) -> bool:
        """Appends one journal line and makes it durable. True only when it is on the disk, whole.

        A refused line is worth stopping for: the caller still has stderr (see event.verdict_line).
        """
        if not self._mine():
            return False
        try:
            text = json.dumps(line, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            return self._refuse(f"event is not JSON: {error}")
        data = text.encode("utf-8", errors="replace") + b"\n"
        if not self._fits(len(data), fresh=True):
            return False
        name = f"rank-{self._rank}.events.jsonl"
        try:
            handle = os.open(
                name, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._folder
            )
            try:
                _append(handle, data)
            finally:
                os.close(handle)
            os.fsync(self._folder)
        except OSError as error:
            return self._refuse(f"cannot append to {self.directory / name}: {error.strerror or error}")
        self._used += len(data)
        return True

    def write_evidence(self, name: str, parts: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Writes one whole file beside the journal, durable when this returns. False where it was refused.

        It may fill half of the quota at most: the other half belongs to journals and metrics.
        """
        if not self._mine():
            return False
        size = sum(len(part) for part in parts)
        why = (
            f"{size} bytes more would fill over half of this job's quota of {self._quota} bytes on this node: "
            "raise SDCWATCH_SPOOL_QUOTA_MB, or lower SDCWATCH_EVIDENCE_MB"
        )
        if not self._fits(size + self._quota // 2, fresh=True, why=why):
            return False
        beside = f".{name}.partial"
        try:
            handle = self._create(beside)
            try:
                with os.fdopen(handle, "wb") as stream:
                    for part in parts:
                        stream.write(part)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.rename(beside, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(beside, dir_fd=self._folder)
                raise
            os.fsync(self._folder)
        except OSError as error:
            return self._refuse(f"cannot write {self.directory / name}: {error.strerror or error}")
        self._used += size
        return True

    def previous_metrics(self) -> str | None:
        """The newest metrics file that an earlier process of the same rank and identity left, or None.

        Hand it to `RankMetrics.restore`, so that counters go on where they stood.
        """
        if not self._mine():
            return None
        own = epoch_order(self.directory.name)
        older = [
            (order, name)
            for name in _names(self.job_directory)
            if (order := epoch_order(name)) is not None and own is not None and order < own
        ]
        for _, name in sorted(older, reverse=True):
            folder = self.job_directory / name
            raw = read_regular(folder / f"rank-{self._rank}.json", METRICS_BYTES)
            data = read_regular(folder / f"rank-{self._rank}.prom", METRICS_BYTES)
            if raw is None or data is None:
                continue
            with contextlib.suppress(ValueError):
                record = json.loads(raw)
                if isinstance(record, dict) and self._same_identity(record.get("identity")):
                    return data.decode("utf-8", errors="replace")
        return None

    def close(self) -> None:
        """Gives the claim back and says in `rank-<rank>.json` that this rank ended by itself. Idempotent."""
        if self._claim < 0:
            return
        claim, folder, self._claim, self._folder = self._claim, self._folder, -1, -1
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError, ValueError):
                record = json.loads(os.pread(claim, METRICS_BYTES, 0))
                _rewrite(claim, {**record, "closed": time.time()})
        for handle in (claim, folder):
            os.close(handle)

    def _mine(self) -> bool:
        return self._claim >= 0 and os.getpid() == self._pid

    def _create(self, name: str) -> int:
        """A handle on a new or emptied file of this epoch's folder; never through a link."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._folder)

    def _refuse(self, why: str) -> bool:
        self.refused += 1
        self.last_refusal = why
        return False

    def _fits(self, more: int, *, fresh: bool = False, why: str = "") -> bool:
        now = time.monotonic()
        if fresh or now - self._used_at > _USAGE_SECONDS:
            self._used, self._used_at = _usage(self.job_directory), now
        if self._used + more <= self._quota:
            return True
        return self._refuse(
            why
            or f"{self.job_directory} holds {self._used} bytes and its quota is {self._quota}: "
            "remove old epochs, or raise SDCWATCH_SPOOL_QUOTA_MB"
        )

    def _same_identity(self, other: object) -> bool:
        if not isinstance(other, dict):
            return False
        labels = IDENTITY_LABELS["rank"]
        if all(name in self._identity for name in labels):
            return all(str(other.get(name)) == str(self._identity[name]) for name in labels)
        return other == self._identity

    def _write_claim(self, record: Mapping[str, object]) -> None:
        try:
            _rewrite(self._claim, record)
        except (OSError, TypeError, ValueError) as error:
            raise SpoolError(f"cannot write {self.directory}/rank-{self._rank}.json: {error}") from error


def _claim(folder: int, directory: Path, rank: int) -> int:
    name = f"rank-{rank}.json"
    try:
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        raise SpoolError(f"cannot open {directory / name}: {error.strerror or error}") from error
    deadline = time.monotonic() + _CLAIM_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError:
            if time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            owner: object = "unknown"
            with contextlib.suppress(ValueError, AttributeError):
                owner = json.loads(os.pread(handle, METRICS_BYTES, 0)).get("pid", "unknown")
            os.close(handle)
            raise SpoolError(
                f"rank {rank} of {directory} is already claimed by process {owner}: two processes must not be the same "
                "rank; end that one, or give this job a name of its own (SDCWATCH_JOB)"
            ) from None


def _rewrite(handle: int, record: Mapping[str, object]) -> None:
    # In place: a rename would leave the lock on the old file.
    data = json.dumps(record, ensure_ascii=False).encode("utf-8", errors="replace") + b"\n"
    os.pwrite(handle, data, 0)
    os.ftruncate(handle, len(data))
    os.fsync(handle)


def _append(handle: int, data: bytes) -> None:
    size = os.fstat(handle).st_size
    if size and os.pread(handle, 1, size - 1) != b"\n":
        data = b"\n" + data  # a predecessor died within a line: close it, readers pass it over
    try:
        written = os.write(handle, data)
        if written != len(data):
            raise OSError(28, "no space left for a whole line")
        os.fsync(handle)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, size)
        raise


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _usage(directory: Path) -> int:
    total = 0
    for name in _names(directory):
        with contextlib.suppress(OSError), os.scandir(directory / name) as entries:
            total += sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    return total


#: Spools of this process, so that a forked child lets go of their claims: a claim must end with its owner.
_OPEN: weakref.WeakSet[Spool] = weakref.WeakSet()


def _close_in_child() -> None:
    for spool in list(_OPEN):
        for handle in (spool._claim, spool._folder):
            if handle >= 0:
                with contextlib.suppress(OSError):
                    os.close(handle)
        spool._claim = spool._folder = -1


os.register_at_fork(after_in_child=_close_in_child)
