"""A scrape's text as OTLP metrics: the same names, label sets and values, because it is the same text.

Counters become monotonic cumulative sums, everything else gauges, and every value is a double: an integer point cannot
hold what is above 2^63-1, and one that cannot be encoded costs its whole batch. Units are left out where a number has
none (a unit of `1` would make a collector append `_ratio`). It asks nobody and sends nothing.
Flow: collector -> **otlp_metrics** -> otlp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sdcwatch.agent.collector import Snapshot
from sdcwatch.agent.node import Node
from sdcwatch.agent.openmetrics import Exemplar
from sdcwatch.agent.otlp_wire import Wire, attributes, clean, nanoseconds, resource_of, scope
from sdcwatch.catalog import METRICS, Metric
from sdcwatch.exposition import Sample, parse, series

#: Data points in one request: about 1 MB, and gRPC servers take 4 MB unless told otherwise.
POINTS_A_REQUEST = 2000
#: UCUM words of the catalogue's units. Each translates back to the word that the name ends in already.
UNITS = {"seconds": "s", "bytes": "By", "": ""}

_Key = tuple[str, tuple[tuple[str, str], ...]]


class MetricsEncoder:
    """Turns one snapshot after another into requests, and remembers what a receiver must be told about the change.

    Args:
        since: unix seconds from which counters of ranks count; kept over restarts of the agent, as the counters are.
        started: unix seconds of this agent's start, from which its own counters count.
    """

    def __init__(self, wire: Wire, node: Node, *, since: float, started: float) -> None:
        self._wire = wire
        self._resource = resource_of(wire, node)
        self._since = since
        self._started = started
        self._known: dict[_Key, tuple[float, float]] = {}  # (start, value) as last delivered
        self._when = started
        self._offered: tuple[float, dict[_Key, tuple[float, float]]] = (started, {})

    def encode(self, snapshot: Snapshot) -> list[Any]:
        """The requests of one snapshot, none above `POINTS_A_REQUEST` points. Call `delivered` once all were taken."""
        offered: dict[_Key, tuple[float, float]] = {}
        points: list[tuple[Metric, Any]] = []
        for sample in parse(snapshot.text):
            if isinstance(sample, Sample):
                metric, key = METRICS[sample.name], (sample.name, sample.labels)
                start = self._start(metric, key, sample.value, snapshot.time)
                offered[key] = (start, sample.value)
                point = self._point(key, snapshot.time, start, sample.value)
                exemplar = snapshot.exemplars.get(series(*key)) if metric.kind == "counter" else None
                if exemplar is not None:
                    point.exemplars.append(self._exemplar(exemplar))
                points.append((metric, point))
        # A series that is gone from the scrape ends here too, instead of keeping its last value.
        for key in self._known.keys() - offered.keys():
            points.append((METRICS[key[0]], self._point(key, snapshot.time, self._known[key][0], None)))
        self._offered = (snapshot.time, offered)
        return [self._request(points[at : at + POINTS_A_REQUEST]) for at in range(0, len(points), POINTS_A_REQUEST)]

    def delivered(self) -> None:
        """The receiver has all of the last snapshot."""
        self._when, self._known = self._offered

    def _start(self, metric: Metric, key: _Key, value: float, now: float) -> float:
        if metric.kind != "counter":
            return 0.0
        known = self._known.get(key)
        if known is None:
            start = self._started if metric.scope == "agent" else self._since
        else:
            start = known[0] if value >= known[1] else self._when  # it began anew since the last push
        return min(start, now)

    def _point(self, key: _Key, when: float, start: float, value: float | None) -> Any:
        types = self._wire.metrics
        point = types.NumberDataPoint(
            attributes=attributes(self._wire, dict(key[1])),
            start_time_unix_nano=nanoseconds(start),
            time_unix_nano=nanoseconds(when),
        )
        if value is None:
            point.flags = types.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
        else:
            point.as_double = value
        return point

    def _exemplar(self, exemplar: Exemplar) -> Any:
        return self._wire.metrics.Exemplar(
            filtered_attributes=attributes(self._wire, dict(exemplar.labels)),
            time_unix_nano=nanoseconds(exemplar.time),
            as_double=1.0,
        )

    def _request(self, points: list[tuple[Metric, Any]]) -> Any:
        types = self._wire.metrics
        scoped = types.ScopeMetrics(scope=scope(self._wire), metrics=self._families(points))
        resource = types.ResourceMetrics(resource=self._resource, scope_metrics=[scoped])
        return self._wire.metrics_service.ExportMetricsServiceRequest(resource_metrics=[resource])

    def _families(self, points: list[tuple[Metric, Any]]) -> Iterator[Any]:
        types = self._wire.metrics
        families: dict[str, list[Any]] = {}
        for metric, point in points:
            families.setdefault(metric.name, []).append(point)
        for name, mine in families.items():
            metric = METRICS[name]
            family = types.Metric(name=name, description=clean(metric.help), unit=UNITS.get(metric.unit, ""))
            if metric.kind == "counter":
                family.sum.data_points.extend(mine)
                family.sum.is_monotonic = True
                family.sum.aggregation_temporality = types.AGGREGATION_TEMPORALITY_CUMULATIVE
            else:
                family.gauge.data_points.extend(mine)
            yield family
