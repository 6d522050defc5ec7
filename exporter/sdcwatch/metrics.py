"""A rank's metrics: a store in memory, the only thing of the export that the training loop touches.

It checks every name and label against the catalogue, holds the caps, and gives the lines that the spool writes; the
text that is scraped is rendered by the agent, outside the training process. It opens no file, no socket and no thread,
and takes no lock (a lock held across fork would hang a DataLoader worker): only the training thread writes, and `lines`
copies before it reads. Flow: monitor -> **metrics** -> spool -> agent.
"""

from __future__ import annotations

from collections.abc import Mapping

from sdcwatch.catalog import ACCUSING_CHECKS, BLAME, IDENTITY_LABELS, LAST_MISMATCH, METRICS, MISMATCHES, Metric, Scope
from sdcwatch.exposition import Sample, lines, parse, series

#: Most series that one rank writes, by scope; `blame` are the series of other ranks that it reports on.
CAPS: Mapping[str, int] = {"rank": 15, "blame": 128, "node": 64, "job": 256}

#: Longest label value, in characters; longer ones are cut so that one odd host name cannot bloat every series.
LABEL_LENGTH = 200

_DROPPED = "sdc_series_dropped_total"
_Key = tuple[str, tuple[str, ...]]


class RankMetrics:
    """What one rank exports.

    Args:
        identity: `training_job`, `training_cluster`, `training_node`, `training_instance`, `gpu_uuid`, `rank`.
        writes_node: this rank writes the per-node series (local rank 0). Otherwise setting one does nothing.
        writes_job: this rank writes the per-job series (the lowest rank of each of the two lowest nodes).

    Raises:
        ValueError: the identity lacks a key; in every method, a name or label that the catalogue does not hold.
    """

    def __init__(self, identity: Mapping[str, str], *, writes_node: bool, writes_job: bool) -> None:
        missing = [name for name in IDENTITY_LABELS["rank"] if name not in identity]
        if missing:
            raise ValueError(f"identity lacks {', '.join(missing)}")
        self._identity = {name: str(identity[name])[:LABEL_LENGTH] for name in IDENTITY_LABELS["rank"]}
        self._own: dict[Scope, tuple[str, ...]] = {
            scope: tuple(self._identity[name] for name in names)
            for scope, names in IDENTITY_LABELS.items()
            if scope != "agent"
        }
        self._writes: dict[str, bool] = {"rank": True, "blame": True, "node": writes_node, "job": writes_job}
        self._values: dict[_Key, float] = {}
        self._texts: dict[_Key, str] = {}
        self._counts = dict.fromkeys(CAPS, 0)
        self.dropped = 0
        for check in ACCUSING_CHECKS:
            self.inc(MISMATCHES, 0.0, check=check)

    def set(self, name: str, value: float, **labels: object) -> None:
        """Sets a gauge or an info. Setting an info replaces the one before, whatever its labels were."""
        metric = self._metric(name)
        if metric.kind == "counter":
            raise ValueError(f"{name} is a counter: use inc")
        key = self._key(metric, labels)
        if metric.kind == "info":
            self._forget(metric, key)
        self._store(metric.scope, key, float(value))

    def inc(self, name: str, amount: float = 1.0, **labels: object) -> None:
        """Adds to a counter; an amount of 0 creates it."""
        metric = self._metric(name)
        if metric.kind != "counter":
            raise ValueError(f"{name} is not a counter: use set")
        if not amount >= 0:
            raise ValueError(f"{name} cannot go down by {amount}")
        key = self._key(metric, labels)
        self._store(metric.scope, key, self._values.get(key, 0.0) + amount)

    def get(self, name: str, **labels: object) -> float | None:
        """The value of one of this rank's own series, or None where it was never written."""
        return self._values.get(self._key(self._metric(name), labels))

    def blame(self, identity_of_suspect: Mapping[str, str], check: str, time: float) -> None:
        """Counts one event that names a rank, this one or another.

        Args:
            identity_of_suspect: the suspect's identity labels; job and cluster default to this rank's own.
            check: one of `ACCUSING_CHECKS`.
            time: the event's own time, unix seconds. An older event never moves the newest one's time back.
        """
        if check not in ACCUSING_CHECKS:
            raise ValueError(f"check {check!r} may name nobody, only {', '.join(ACCUSING_CHECKS)}")
        identity = {**self._own_job(), **identity_of_suspect}
        try:
            suspect = tuple(str(identity[name])[:LABEL_LENGTH] for name in IDENTITY_LABELS["rank"])
        except KeyError as error:
            raise ValueError(f"the suspect's identity lacks {error.args[0]}") from None
        scope = "rank" if suspect == self._own["rank"] else "blame"
        counter, newest = (MISMATCHES, (*suspect, check)), (LAST_MISMATCH, (*suspect, check))
        self._store(scope, counter, self._values.get(counter, 0.0) + 1.0)
        self._store(scope, newest, max(self._values.get(newest, time), time))

    def lines(self) -> str:
        """The text of this rank's file: one line a series, as they came, without help, types or families."""
        values = [(self._texts[key], value) for key, value in list(self._values.items())]
        if self.dropped:
            values.append((series(_DROPPED, self._identity.items()), float(self.dropped)))
        return lines(values)

    def restore(self, text: str) -> int:
        """Continues from the file that an earlier process of the *same identity* left; call it once, at the start.

        Counters are added to, times of events are kept, other gauges are forgotten: they described a process that is
        gone. Lines that cannot be read or belong to another identity are passed over.

        Returns:
            How many series were taken over.
        """
        taken = 0
        for sample in parse(text):
            taken += isinstance(sample, Sample) and self._take(sample)
        return taken

    def _take(self, sample: Sample) -> bool:
        metric = METRICS.get(sample.name)
        if metric is None or metric.scope == "agent" or not sample.value >= 0:
            return False
        if metric.kind != "counter" and metric.merge != "max":
            return False
        labels = dict(sample.labels)
        identity = tuple(labels.pop(name, "") for name in IDENTITY_LABELS[metric.scope])
        own = identity == self._own[metric.scope]
        if sample.name == _DROPPED:
            self.dropped += int(sample.value) if own else 0
            return own
        if not own and (sample.name not in BLAME or identity[:2] != self._own["job"]):
            return False
        try:
            key = (metric.name, identity + self._own_labels(metric, labels))
        except ValueError:
            return False
        value = self._values.get(key, 0.0)
        merged = value + sample.value if metric.kind == "counter" else max(value, sample.value)
        return self._store(metric.scope if own else "blame", key, merged)

    def _own_job(self) -> dict[str, str]:
        return {name: self._identity[name] for name in IDENTITY_LABELS["job"]}

    @staticmethod
    def _metric(name: str) -> Metric:
        metric = METRICS.get(name)
        if metric is None or metric.scope == "agent":
            raise ValueError(f"{name} is not a metric that a rank writes (see catalog.py)")
        return metric

    def _key(self, metric: Metric, labels: Mapping[str, object]) -> _Key:
        return metric.name, self._own[metric.scope] + self._own_labels(metric, labels)

    @staticmethod
    def _own_labels(metric: Metric, labels: Mapping[str, object]) -> tuple[str, ...]:
        if len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name} takes the labels {metric.labels}, not {tuple(labels)}")
        values: list[str] = []
        for name in metric.labels:
            if name not in labels:
                raise ValueError(f"{metric.name} takes the labels {metric.labels}, not {tuple(labels)}")
            value = str(labels[name])[:LABEL_LENGTH]
            if name in metric.enums and value not in metric.enums[name]:
                raise ValueError(f"{metric.name}: {name}={value!r} is none of {', '.join(metric.enums[name])}")
            values.append(value)
        return tuple(values)

    def _store(self, scope: str, key: _Key, value: float) -> bool:
        if not self._writes[scope]:
            return False
        if key not in self._values:
            if self._counts[scope] >= CAPS[scope]:
                self.dropped += 1
                return False
            self._counts[scope] += 1
            self._texts[key] = series(key[0], zip(METRICS[key[0]].all_labels, key[1], strict=True))
        self._values[key] = value
        return True

    def _forget(self, metric: Metric, keep: _Key) -> None:
        for key in [k for k in self._values if k[0] == metric.name and k != keep]:
            del self._values[key]
            self._counts[metric.scope] -= 1
