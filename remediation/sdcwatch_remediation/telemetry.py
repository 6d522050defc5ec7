"""Count what the service does and show it as `/metrics`, on a registry of its own.

What it does: makes the families of `catalog`; gauges about cases are computed from the database at each scrape.
What it never does: use prometheus_client's global registry, or decide anything.
Its place: created by `service`, handed to `app`, `worker` and `casework`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric

from sdcwatch_remediation import catalog
from sdcwatch_remediation._version import __version__
from sdcwatch_remediation.facts import Decision

Snapshot = Callable[[], dict[str, dict[tuple[str, ...], float]]]
"""Returns, per gauge name of the catalogue, its values by label values."""


class Telemetry:
    """All counters and gauges of one service."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Register every counter of the catalogue on `registry` (a new one by default)."""
        disable_created_metrics()  # a second series for every counter, which no rule and no dashboard reads
        self.registry = registry or CollectorRegistry()
        self._counters = {
            metric.name: Counter(metric.name.removesuffix("_total"), metric.help, metric.labels, registry=self.registry)
            for metric in catalog.CATALOG
            if metric.kind == "counter"
        }
        for where in ("case", "round", "traces"):  # at 0 from the start, so that the first error is seen to rise
            self._counters["sdc_remediation_errors_total"].labels(where)
        self._last_round = Gauge(*_named("sdc_remediation_last_round_timestamp_seconds"), registry=self.registry)
        build = Gauge(*_named("sdc_remediation_build_info"), registry=self.registry)
        build.labels(__version__).set(1)
        self._lock = threading.Lock()
        self._round_at = 0.0

    def count(self, name: str, *labels: str) -> None:
        """Add one to a counter of the catalogue."""
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc()

    def decided(self, decision: Decision) -> None:
        """Count the gates of one decision."""
        for gate in decision.gates:
            self.count("sdc_remediation_gates_total", gate.name, "pass" if gate.passed else "fail")

    def round_ended(self, now: float) -> None:
        """Note that the worker ended a round; `now` in unix seconds."""
        with self._lock:
            self._round_at = now
        self._last_round.set(now)

    @property
    def last_round(self) -> float:
        """When the worker last ended a round, in unix seconds; 0: never."""
        with self._lock:
            return self._round_at

    def watch(self, snapshot: Snapshot) -> None:
        """Show at each scrape what `snapshot` then returns."""
        self.registry.register(_FromDatabase(snapshot))


class _FromDatabase:
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        metrics = {metric.name: metric for metric in catalog.CATALOG}
        for name, values in self._snapshot().items():
            family = GaugeMetricFamily(name, metrics[name].help, labels=metrics[name].labels)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family


def _named(name: str) -> tuple[str, str, tuple[str, ...]]:
    metric = next(metric for metric in catalog.CATALOG if metric.name == name)
    return metric.name, metric.help, metric.labels
