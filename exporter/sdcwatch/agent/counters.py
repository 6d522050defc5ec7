"""Counters that never go down, whatever restarts: a rank, the agent, or both, or an epoch that expired.

A counter's value is the sum over its restarts, seen as a chain through the job's epochs: where a newer epoch's number
is lower than the older one's, the rank began at 0 and the older number is added. That is a pure function of the files
in the spool, so a killed agent loses nothing; what expires is first folded into a small file per job. Standard
library only. Flow: rank_file -> **counters** -> merge, expiry.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from sdcwatch import durable
from sdcwatch.agent.rank_file import Series
from sdcwatch.errors import SpoolError
from sdcwatch.spool.folders import epoch_order

SCHEMA = 1
COUNTERS_FILE = "agent-counters.json"
#: Most counters of one job that are remembered across expiry.
MAX_COUNTERS = 4096


class CounterChain:
    """One job's counters.

    Attributes:
        folded: newest epoch that is already contained; empty where none is.
    """

    def __init__(self, folded: str = "", values: dict[str, tuple[float, float]] | None = None) -> None:
        self.folded = folded
        self._values = values or {}  # series -> (sum of what earlier restarts counted, newest number)

    @classmethod
    def load(cls, job_directory: Path) -> CounterChain:
        """What was folded before; nothing where there is no file, or one that cannot be read."""
        with contextlib.suppress(SpoolError, KeyError, TypeError, ValueError, AttributeError):
            record = durable.read_json(job_directory / COUNTERS_FILE)
            if record is not None and record["schema"] == SCHEMA and epoch_order(record["folded"]) is not None:
                values = {str(text): (float(base), float(last)) for text, (base, last) in record["counters"].items()}
                return cls(record["folded"], values)
        return cls()

    def save(self, job_directory: Path) -> None:
        """Writes the file that `load` reads.

        Raises:
            SpoolError: the spool cannot be written.
        """
        counters = dict(sorted(self._values.items())[:MAX_COUNTERS])
        durable.replace_json(
            job_directory / COUNTERS_FILE, {"schema": SCHEMA, "folded": self.folded, "counters": counters}
        )

    def contains(self, epoch: str) -> bool:
        """True when this epoch was folded in before, so that adding it again would count it twice."""
        folded, order = epoch_order(self.folded), epoch_order(epoch)
        return folded is not None and order is not None and order <= folded

    def add_epoch(self, ranks: Iterable[tuple[Series, ...]]) -> None:
        """Goes on through one epoch, given its ranks in ascending order; a series counts from the lowest rank."""
        seen: set[str] = set()
        for accepted in ranks:
            for series in accepted:
                if series.metric.kind == "counter" and series.text not in seen:
                    seen.add(series.text)
                    base, last = self._values.get(series.text, (0.0, 0.0))
                    self._values[series.text] = (base + last if series.value < last else base, series.value)

    def value(self, text: str) -> float:
        """The exported value of a series of an epoch that was added."""
        base, last = self._values.get(text, (0.0, 0.0))
        return base + last
