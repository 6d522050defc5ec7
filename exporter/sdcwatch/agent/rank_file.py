"""One rank's metrics file as the agent accepts it: each series is checked before it may leave this node.

A file may speak only for its own job, node and rank; the one exception is the series that blame a suspect, because a
suspect's own node may be gone. What fails is dropped and counted, never repaired. Files are read again only when they
changed. Standard library only. Flow: spool -> **rank_file** -> merge.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sdcwatch.agent.node import Node
from sdcwatch.agent.tally import Tally
from sdcwatch.catalog import BLAME, METRICS, Metric
from sdcwatch.exposition import Sample, parse, series
from sdcwatch.metrics import CAPS, LABEL_LENGTH
from sdcwatch.spool.folders import read_regular
from sdcwatch.spool.rank import METRICS_BYTES
from sdcwatch.spool.reader import RankFiles

#: What a rank says of itself while it lives. A signal can end it before it says otherwise (it installs no handler), and
#: a job that was preempted or crashed neither trains nor stands still: the liveness alerts must not burn for it.
_LIVE_STATES = tuple(f'state="{name}"}}' for name in ("starting", "training", "evaluating", "checkpointing"))


@dataclass(frozen=True, slots=True)
class Series:
    """One accepted series. `text` is its name and labels in the catalogue's order, and identifies it."""

    metric: Metric
    text: str
    value: float


def ended(accepted: Sequence[Series]) -> tuple[Series, ...]:
    """The series of a rank whose process is gone: all that it counted stays, but it is in no living state."""
    return tuple(
        replace(one, value=0.0) if one.metric.name == "sdc_training_state" and one.text.endswith(_LIVE_STATES) else one
        for one in accepted
    )


class RankFileReader:
    """Reads and checks rank files, remembering those that did not change."""

    def __init__(self, node: Node, tally: Tally) -> None:
        self._node = node
        self._tally = tally
        self._cache: dict[Path, tuple[tuple[int, ...], tuple[Series, ...]]] = {}

    def read(self, files: RankFiles) -> tuple[Series, ...]:
        """The accepted series of one rank; empty where it has written none yet."""
        path = files.metrics
        try:
            facts = os.lstat(path)
        except OSError:
            self._cache.pop(path, None)
            return ()
        version = (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        known = self._cache.get(path)
        if known is None or known[0] != version:
            raw = read_regular(path, METRICS_BYTES)
            if raw is None:
                self._tally.unreadable(1)
            known = (version, self._accept((raw or b"").decode("utf-8", errors="replace"), files))
            self._cache[path] = known
        return known[1]

    def forget_all_but(self, paths: set[Path]) -> None:
        """Lets go of files that are no longer there."""
        for path in self._cache.keys() - paths:
            del self._cache[path]

    def _accept(self, text: str, files: RankFiles) -> tuple[Series, ...]:
        accepted: dict[str, Series] = {}
        counts: Counter[str] = Counter()
        for sample in parse(text):
            if isinstance(sample, str):
                self._tally.unreadable(1)
                continue
            result = self._check(sample, files)
            if isinstance(result, str):
                self._tally.drop(result)
                continue
            found, group = result
            counts[group] += 1
            if counts[group] > CAPS[group]:
                self._tally.drop("cap")
                continue
            accepted[found.text] = found
        return tuple(accepted.values())

    def _check(self, sample: Sample, files: RankFiles) -> tuple[Series, str] | str:
        """The series and the cap it counts against, or the reason for which it is dropped."""
        metric = METRICS.get(sample.name)
        if metric is None or metric.scope == "agent":
            return "unknown_family"
        labels = dict(sample.labels)
        if len(labels) != len(sample.labels) or labels.keys() != set(metric.all_labels):
            return "labels"
        for name, value in labels.items():
            if len(value) > LABEL_LENGTH or value not in metric.enums.get(name, (value,)):
                return "labels"
        if metric.kind == "counter" and not (math.isfinite(sample.value) and sample.value >= 0):
            return "labels"
        if labels["training_job"] != files.job:
            return "foreign_job"
        if labels["training_cluster"] != self._node.cluster:
            return "foreign_node"
        group = self._group(metric, labels, files.rank)
        if group is None:
            return "foreign_node"
        return Series(metric, series(metric.name, ((n, labels[n]) for n in metric.all_labels)), sample.value), group

    def _group(self, metric: Metric, labels: dict[str, str], rank: int) -> str | None:
        if metric.scope == "job":
            return "job"
        own = labels["training_node"] == self._node.node and labels["training_instance"] == self._node.instance
        if metric.scope == "node":
            return "node" if own else None
        if own and labels["rank"] == str(rank):
            return "rank"
        return "blame" if metric.name in BLAME else None
