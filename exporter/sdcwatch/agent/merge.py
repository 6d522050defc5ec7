"""All ranks' series of one job become one set: no series twice, nothing stale over something newer.

Pure: the files have been read and checked, and the answer depends on them alone. Rules: of one rank's epochs the
newest speaks, of one family of job or node gauges the newest epoch that has it speaks (lowest rank), counters go
through their chain, times of events keep their maximum. Standard library only.
Flow: rank_file, counters -> **merge** -> collector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sdcwatch.agent.counters import CounterChain
from sdcwatch.agent.rank_file import Series
from sdcwatch.catalog import BLAME


@dataclass(frozen=True, slots=True)
class EpochSeries:
    """One epoch of one job: (rank, its accepted series) by ascending rank; ranks without a file are left out."""

    epoch: str
    ranks: tuple[tuple[int, tuple[Series, ...]], ...]


def merge_job(epochs: Sequence[EpochSeries], chain: CounterChain) -> Iterator[tuple[str, str, float]]:
    """(family, series, value) of one job, each series once.

    Args:
        epochs: the job's epochs, the oldest first.
        chain: what was folded of expired epochs; it is moved on through `epochs`.
    """
    newest_of_rank: dict[int, int] = {}
    owner_of_family: dict[str, tuple[int, int]] = {}
    for position, epoch in enumerate(epochs):
        if not chain.contains(epoch.epoch):
            chain.add_epoch(accepted for _, accepted in epoch.ranks)
        for rank, accepted in epoch.ranks:
            newest_of_rank[rank] = position
            for series in accepted:
                owner = owner_of_family.get(series.metric.name)
                if owner is None or owner[0] != position:
                    owner_of_family[series.metric.name] = (position, rank)
    newest_event: dict[str, tuple[str, float]] = {}
    done: set[str] = set()
    for position in range(len(epochs) - 1, -1, -1):
        for rank, accepted in epochs[position].ranks:
            superseded = newest_of_rank[rank] != position
            for series in accepted:
                name, metric = series.metric.name, series.metric
                if metric.merge == "max":
                    before = newest_event.get(series.text, (name, series.value))[1]
                    newest_event[series.text] = (name, max(before, series.value))
                    continue
                if series.text in done:
                    continue
                if metric.scope == "rank":
                    hidden = superseded and name not in BLAME
                else:
                    hidden = metric.kind != "counter" and owner_of_family[name] != (position, rank)
                if not hidden:
                    done.add(series.text)
                    value = chain.value(series.text) if metric.kind == "counter" else series.value
                    yield name, series.text, value
    for text, (name, value) in newest_event.items():
        yield name, text, value
