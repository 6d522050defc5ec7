"""The spool as others read it: which ranks wrote here, which live, and what their journals hold.

Trusts nothing it finds: no symlink is followed, foreign owners and oversized files are passed over, and a partial
last line is no line. Writes nothing. Standard library only. Flow: rank -> **reader** -> agent.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdcwatch.spool.folders import epoch_order, job_of_folder, open_regular, read_regular

_RANK_FILE = re.compile(r"rank-(\d{1,9})\.(json|prom|events\.jsonl)\Z")
_CLAIM_BYTES = 1 << 20
#: Longest journal line; an event of 16,384 ranks takes about 3 MB.
LINE_BYTES = 8 << 20
#: Most bytes of lines in one answer; more is left off, visibly.
ANSWER_BYTES = 8 << 20
#: Most ranks of one epoch on one node that are looked at: the lowest.
MAX_RANKS = 1024


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one rank in one epoch.

    Attributes:
        changed: unix seconds of the newest change to any of its files.
        alive: some process holds the rank's claim.
    """

    job: str
    epoch: str
    rank: int
    directory: Path
    changed: float
    alive: bool

    @property
    def metrics(self) -> Path:
        return self.directory / f"rank-{self.rank}.prom"

    @property
    def journal(self) -> Path:
        return self.directory / f"rank-{self.rank}.events.jsonl"

    def claim(self) -> dict[str, Any]:
        """`rank-<rank>.json`, or an empty object while it is being written."""
        raw = read_regular(self.directory / f"rank-{self.rank}.json", _CLAIM_BYTES)
        with contextlib.suppress(ValueError):
            record = json.loads(raw or b"")
            if isinstance(record, dict):
                return record
        return {}


def iter_jobs(user_root: Path) -> Iterator[tuple[str, Path]]:
    """(job name, folder) of every job folder, sorted."""
    for name in _folders(user_root):
        job = job_of_folder(name)
        if job is not None:
            yield job, user_root / name


def iter_epochs(job_directory: Path) -> Iterator[Path]:
    """A job's epoch folders, the oldest first."""
    orders = [(order, name) for name in _folders(job_directory) if (order := epoch_order(name)) is not None]
    for _, name in sorted(orders):
        yield job_directory / name


def iter_ranks(user_root: Path) -> Iterator[RankFiles]:
    """Every rank of every epoch of every job: jobs by name, epochs by age, ranks by number."""
    for job, directory in iter_jobs(user_root):
        for epoch in iter_epochs(directory):
            yield from epoch_ranks(job, epoch)


def epoch_ranks(job: str, directory: Path) -> Iterator[RankFiles]:
    """The ranks of one epoch, by number."""
    found: dict[int, float] = {}
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            match = _RANK_FILE.match(entry.name)
            if match is not None:
                with contextlib.suppress(OSError):
                    changed = entry.stat(follow_symlinks=False).st_mtime
                    rank = int(match.group(1))
                    found[rank] = max(found.get(rank, 0.0), changed)
    for rank in sorted(found)[:MAX_RANKS]:
        alive = is_locked(directory / f"rank-{rank}.json")
        yield RankFiles(job, directory.name, rank, directory, found[rank], alive)


def is_locked(path: Path) -> bool:
    """True when some process holds the flock of this file. Holds it itself for an instant."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(handle)


def read_events(
    user_root: Path, *, instance: str | None = None, since: float = 0.0, limit: int = 1000
) -> tuple[list[dict[str, Any]], bool]:
    """Journal lines of all jobs and epochs as objects; see `read_event_lines`."""
    lines, cut = read_event_lines(user_root, instance=instance, since=since, limit=limit)
    return [json.loads(line) for line in lines], cut


def read_event_lines(
    user_root: Path, *, instance: str | None = None, since: float = 0.0, limit: int = 1000
) -> tuple[list[bytes], bool]:
    """Journal lines of all jobs and epochs as written, the oldest event first.

    Args:
        instance: only events in whose `ranks` this instance stands.
        since: only events of this time (unix seconds) or later.
        limit: most lines; the oldest are kept, so that a caller can go on from the newest one's time.

    Returns:
        The lines (fields this build does not know included), and whether some were left off.
    """
    found: list[tuple[float, bytes]] = []
    cut = False
    for _, directory in iter_jobs(user_root):
        for epoch in iter_epochs(directory):
            for path in sorted(_journals(epoch)):
                for when, raw, event in iter_journal(path):
                    if when >= since and _concerns(event, instance):
                        found.append((when, raw))
                if len(found) > limit:  # keeps memory flat however long the journals are
                    found, cut = sorted(found, key=lambda pair: pair[0])[:limit], True
    found.sort(key=lambda pair: pair[0])
    size = 0
    for position, (_, raw) in enumerate(found):
        size += len(raw)
        if size > ANSWER_BYTES:
            return [line for _, line in found[: max(position, 1)]], True
    return [line for _, line in found], cut


def iter_journal(path: Path) -> Iterator[tuple[float, bytes, dict[str, Any]]]:
    """(event time, line as written, its `event`) of one journal; lines that hold no event are passed over.

    A last line without its line end is still being written or was torn by a crash: it is no line.
    """
    stream = open_regular(path)
    if stream is None:
        return
    with stream:
        while text := stream.readline(LINE_BYTES):
            if not text.endswith(b"\n"):
                continue
            with contextlib.suppress(ValueError, TypeError, KeyError):
                event = json.loads(text)["event"]
                when = float(event["time"])
                if when == when:
                    yield when, text[:-1], event


def _concerns(event: dict[str, Any], instance: str | None) -> bool:
    if instance is None:
        return True
    ranks = event.get("ranks")
    return isinstance(ranks, list) and any(
        isinstance(rank, dict) and rank.get("instance") == instance for rank in ranks
    )


def _journals(epoch: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [epoch / name for name in os.listdir(epoch) if name.endswith(".events.jsonl") and _RANK_FILE.match(name)]
    return []


def _folders(directory: Path) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    return []
