"""One scrape: reads the spool, merges all jobs, adds what the agent says of itself, and renders the text.

Calls nobody and changes no file. One scrape at a time; a second one waits for milliseconds. Standard library only.
Flow: rank_file, counters, merge -> **collector** -> server, textfile.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sdcwatch._version import __version__
from sdcwatch.agent import openmetrics
from sdcwatch.agent.counters import CounterChain
from sdcwatch.agent.merge import EpochSeries, merge_job
from sdcwatch.agent.node import Node
from sdcwatch.agent.openmetrics import Exemplar
from sdcwatch.agent.rank_file import RankFileReader, ended
from sdcwatch.agent.state import StateFile
from sdcwatch.agent.tally import Tally
from sdcwatch.catalog import METRICS
from sdcwatch.exposition import render, series
from sdcwatch.spool.reader import RankFiles, epoch_ranks, iter_epochs, iter_jobs, iter_journal

#: Most series that one agent serves, by scope, whatever its ranks write.
TOTAL_CAPS = {"rank": 8192, "node": 1024, "job": 4096}

_Rows = list[tuple[str, str, float]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One read of the spool.

    Attributes:
        time: unix seconds, taken before the first file was read.
        rows: (family, series text, value) of everything that is served.
        exemplars: which event last moved a counter, by series text.
    """

    time: float
    rows: tuple[tuple[str, str, float], ...]
    exemplars: Mapping[str, Exemplar]

    @property
    def text(self) -> str:
        """The Prometheus text format."""
        return render(self.rows)

    @property
    def openmetrics(self) -> str:
        """The same samples as OpenMetrics, with exemplars."""
        return openmetrics.render(self.rows, self.exemplars)


@dataclass(frozen=True, slots=True)
class _Journal:
    """What one version of a journal holds: times of its events (unix seconds), and their exemplars."""

    version: tuple[int, int]
    times: tuple[float, ...]
    exemplars: Mapping[str, Exemplar]


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
        self._journals: dict[Path, _Journal] = {}
        self._lock = threading.Lock()

    @property
    def tally(self) -> Tally:
        """What this agent counts about itself."""
        return self._tally

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
                        pending += self._pending(files)
                        paths |= {files.metrics, files.journal}
                        accepted = self._reader.read(files)
                        if not files.alive:
                            accepted = ended(accepted)
                        if accepted:
                            ranks.append((files.rank, accepted))
                    epochs.append(EpochSeries(epoch.name, tuple(ranks)))
                if any(epoch.ranks for epoch in epochs):
                    rows += merge_job(epochs, CounterChain.load(directory))
            self._reader.forget_all_but(paths)
            for path in self._journals.keys() - paths:
                del self._journals[path]
            rows = self._capped(rows) + self._own(alive, pending)
            exemplars: dict[str, Exemplar] = {}
            for journal in self._journals.values():
                for text, exemplar in journal.exemplars.items():
                    openmetrics.keep_newest(exemplars, text, exemplar)
            return Snapshot(now, tuple(rows), exemplars)

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

    def _pending(self, files: RankFiles) -> int:
        try:
            facts = os.lstat(files.journal)
        except OSError:
            return 0
        version = (facts.st_size, facts.st_mtime_ns)
        known = self._journals.get(files.journal)
        if known is None or known.version != version:
            times: list[float] = []
            exemplars: dict[str, Exemplar] = {}
            for when, _, event in iter_journal(files.journal):  # one at a time: a line may be megabytes long
                times.append(when)
                for text, exemplar in openmetrics.exemplars_of([event], files.job).items():
                    openmetrics.keep_newest(exemplars, text, exemplar)
            known = self._journals[files.journal] = _Journal(version, tuple(times), exemplars)
        last = self._state.last_scrape
        return len(known.times) if last is None else sum(when > last for when in known.times)

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
        pushes = METRICS["sdc_agent_otlp_requests_total"]
        for signal in pushes.enums["signal"]:
            for result in pushes.enums["result"]:
                rows.append(row(pushes.name, tally.pushed[signal, result], signal=signal, result=result))
        if self._state.last_scrape is not None:
            rows.append(row("sdc_agent_last_scrape_timestamp_seconds", self._state.last_scrape))
        return rows
