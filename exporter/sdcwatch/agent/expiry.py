"""Epochs whose ranks are all dead leave the spool after a while: metrics first, journals much later.

Strictly the oldest first, counters folded before a file goes (a kill in between loses and doubles nothing), and never
a latch, an event that may still be asked for, or an epoch of which one rank lives. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from sdcwatch.agent.counters import COUNTERS_FILE, CounterChain
from sdcwatch.agent.rank_file import RankFileReader
from sdcwatch.spool.reader import RankFiles, epoch_ranks, iter_epochs, iter_jobs

#: Most epochs of one job that are kept however new: a job that crashes at once, for hours, must not fill the spool.
MAX_EPOCHS = 64


@dataclass(frozen=True, slots=True)
class Expiry:
    """How long things stay after the last change to an epoch without a living rank.

    Attributes:
        keep: seconds for metrics; the page rule looks back one hour.
        keep_events: seconds for journals and evidence, and for the counters of a job that has no epoch left.
    """

    keep: float = 3600.0
    keep_events: float = 7 * 86400.0

    def run(self, user_root: Path, reader: RankFileReader, now: float) -> int:
        """Removes what is due.

        Args:
            now: unix seconds.

        Returns:
            How many files were removed.

        Raises:
            SpoolError: counters could not be folded; nothing of that epoch was removed.
        """
        removed = 0
        for job, directory in list(iter_jobs(user_root)):
            kept = False
            epochs = list(iter_epochs(directory))
            surplus = set(epochs[:-MAX_EPOCHS])
            for epoch in epochs:
                ranks = list(epoch_ranks(job, epoch))
                recent = now - _changed(epoch, ranks) < self.keep and epoch not in surplus
                if recent or any(files.alive for files in ranks):
                    kept = True
                    break
                removed += self._expire_epoch(directory, epoch, ranks, reader, now)
            if not kept:
                removed += self._forget_job(directory, now)
        return removed

    def _expire_epoch(
        self, job_directory: Path, epoch: Path, ranks: list[RankFiles], reader: RankFileReader, now: float
    ) -> int:
        chain = CounterChain.load(job_directory)
        if not chain.contains(epoch.name):
            chain.add_epoch([reader.read(files) for files in ranks])
            chain.folded = epoch.name
            chain.save(job_directory)
        removed = 0
        for name in _names(epoch):
            path = epoch / name
            if name.endswith((".events.jsonl", ".evidence")) and now - _mtime(path) < self.keep_events:
                continue
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
        with contextlib.suppress(OSError):
            epoch.rmdir()
        return removed

    def _forget_job(self, directory: Path, now: float) -> int:
        """Removes the folder of a job that has nothing left but its folded counters, once those are old."""
        counters = directory / COUNTERS_FILE
        if set(_names(directory)) != {COUNTERS_FILE} or now - _mtime(counters) < self.keep_events:
            return 0
        with contextlib.suppress(OSError):
            counters.unlink()
            directory.rmdir()
            return 1
        return 0


def _changed(epoch: Path, ranks: list[RankFiles]) -> float:
    # The folder's own time counts for an epoch that has no rank yet: its ranks are just being created.
    return max((files.changed for files in ranks), default=_mtime(epoch))


def _mtime(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return float("inf")


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
