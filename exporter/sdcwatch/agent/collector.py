"""One scrape: reads the spool, merges all jobs, adds what the agent says of itself, and renders the text.

Calls nobody and changes no file. One scrape at a time; a second one waits for milliseconds. Standard library only.
Flow: rank_file, counters, merge -> **collector** -> server, textfile.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from sdcwatch._version import __version__
from sdcwatch.agent.counters import CounterChain
from sdcwatch.agent.merge import EpochSeries, merge_job
from sdcwatch.agent.node import Node
from sdcwatch.agent.rank_file import RankFileReader
from sdcwatch.agent.state import StateFile
from sdcwatch.agent.tally import Tally
from sdcwatch.catalog import METRICS
from sdcwatch.exposition import render, series
from sdcwatch.spool_reader import epoch_ranks, iter_epochs, iter_jobs, iter_journal

#: Most series that one agent serves, by scope, whatever its ranks write.
TOTAL_CAPS = {"rank": 8192, "node": 1024, "job": 4096}

_Rows = list[tuple[str, str, float]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One read of the spool. `time` is unix seconds, taken before the first file was read."""

    time: float
    text: str


class Collector:
    """Reads this node's spool on demand.

    Args:
        user_root: `<root>/<uid>`, checked by `prepare_user_root`.
        state: tells when Prometheus last scraped.
    """

    def __init__(self, user_root: Path, node: Node, state: StateFile, tally: Tally) -> None:
        self._root = user_root
        self._node = node
        self._state = state
        self._tally = tally
        self._reader = RankFileReader(node, tally)
        self._journals: dict[Path, tuple[tuple[int, int], tuple[float, ...]]] = {}
        self._lock = threading.Lock()

    def collect(self) -> Snapshot:
        """Reads, merges and renders."""
        with self._lock:
            now = time.time()
            rows: _Rows = []
            alive, pending = 0, 0
            paths: set[Path] = set()
            for job, directory in iter_jobs(self._root):
                epochs: list[EpochSeries] = []
                for epoch in iter_epochs(directory):
                    ranks = []
                    for files in epoch_ranks(job, epoch):
                        alive += files.alive
                        pending += self._pending(files.journal)
                        paths |= {files.metrics, files.journal}
                        accepted = self._reader.read(files)
                        if accepted:
                            ranks.append((files.rank, accepted))
                    epochs.append(EpochSeries(epoch.name, tuple(ranks)))
                if any(epoch.ranks for epoch in epochs):
                    rows += merge_job(epochs, CounterChain.load(directory))
            self._reader.forget_all_but(paths)
            for path in self._journals.keys() - paths:
                del self._journals[path]
            rows = self._capped(rows) + self._own(alive, pending)
            return Snapshot(now, render(rows))

    def _capped(self, rows: _Rows) -> _Rows:
        counts: Counter[str] = Counter()
        kept: _Rows = []
        for row in sorted(rows, key=lambda row: row[1]):
            scope = METRICS[row[0]].scope
            counts[scope] += 1
            if counts[scope] <= TOTAL_CAPS[scope]:
                kept.append(row)
            else:
                self._tally.drop("cap")
        return kept

    def _pending(self, journal: Path) -> int:
        try:
            facts = os.lstat(journal)
        except OSError:
            return 0
        version = (facts.st_size, facts.st_mtime_ns)
        known = self._journals.get(journal)
        if known is None or known[0] != version:
            known = self._journals[journal] = (version, tuple(when for when, _, _ in iter_journal(journal)))
        last = self._state.last_scrape
        return len(known[1]) if last is None else sum(when > last for when in known[1])

    def _own(self, alive: int, pending: int) -> _Rows:
        labels = tuple(self._node.labels().items())

        def row(name: str, value: float, **own: str) -> tuple[str, str, float]:
            return name, series(name, (*labels, *own.items())), float(value)

        tally = self._tally
        rows = [
            row("sdc_build_info", 1, version=__version__),
            row("sdc_agent_ranks_seen", alive),
            row("sdc_agent_events_pending", pending),
            row("sdc_agent_parse_errors_total", tally.parse_errors),
            row("sdc_agent_files_expired_total", tally.expired),
        ]
        for name, counts in (
            ("sdc_agent_series_dropped_total", tally.dropped),
            ("sdc_agent_requests_refused_total", tally.refused),
        ):
            rows += [row(name, counts[reason], reason=reason) for reason in METRICS[name].enums["reason"]]
        if self._state.last_scrape is not None:
            rows.append(row("sdc_agent_last_scrape_timestamp_seconds", self._state.last_scrape))
        return rows
