"""Asks a Prometheus what a dashboard would ask: variables, queries over the range, marks.

What it never does: write to Prometheus, or draw. Flow: queries -> **ask** -> draw, by preview.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from queries import Target, marks, targets

SECONDS = 20.0
#: Where the first value of a variable is looked for: what a fault was about is what the reviewer wants to see.
_NAMED = "sdc_last_mismatch_timestamp_seconds"
_VALUES_OF = re.compile(r"label_values\((.*), *(\w+)\)$")


class PreviewError(Exception):
    """Prometheus cannot be reached, or refused a query; the message says which and what to do."""


@dataclass(frozen=True, slots=True)
class Line:
    """One series of an answer: its labels, its legend, and its samples as unix seconds and values."""

    labels: Mapping[str, str]
    legend: str
    times: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One query of a panel and what came back."""

    target: Target
    lines: Sequence[Line]


@dataclass(frozen=True, slots=True)
class Mark:
    """One mark of an annotation: when, in unix seconds, its colour, and its title."""

    time: float
    colour: str
    title: str


@dataclass(frozen=True, slots=True)
class Source:
    """A Prometheus and the time range that is shown, in unix seconds."""

    url: str
    start: float
    end: float

    def ask(self, path: str, parameters: Mapping[str, object]) -> Any:
        """The `data` of one answer of Prometheus's HTTP API.

        Raises:
            PreviewError: no answer, or a refusal.
        """
        url = f"{self.url.rstrip('/')}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=SECONDS) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise PreviewError(f"Prometheus refused {parameters}: {error.read().decode(errors='replace')}") from error
        except OSError as error:
            raise PreviewError(f"no answer from {self.url}: {error}; is Prometheus running there?") from error

    def lines(self, target: Target) -> list[Line]:
        """Runs one query, over the range or at its end."""
        if target.instant:
            data = self.ask("query", {"query": target.expr, "time": self.end})
        else:
            step = max((self.end - self.start) / target.points, 1.0)
            data = self.ask("query_range", {"query": target.expr, "start": self.start, "end": self.end, "step": step})
        found = []
        for series in data["result"]:
            samples = series["values"] if "values" in series else [series["value"]]
            times, values = zip(*((float(time), float(value)) for time, value in samples), strict=True)
            found.append(Line(series["metric"], _fill(target.legend, series["metric"]), times, values))
        return found

    def variables(self, document: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, str]:
        """Value of every variable: as given, else what Grafana would choose at first.

        Raises:
            PreviewError: a variable has no value in this range.
        """
        length = max(int(self.end - self.start), 1)
        found = {"datasource": "prometheus", "__rate_interval": "30s", "__interval": "5s"}
        found |= {"__range": f"{length}s", "__range_s": str(length)} | dict(given)
        for variable in document["templating"]["list"]:
            name = variable["name"]
            if name not in found:
                found[name] = self._first(variable) if variable["type"] == "query" else variable["current"]["value"]
        return found

    def _first(self, variable: Mapping[str, Any]) -> str:
        if variable["includeAll"]:
            return str(variable["allValue"])
        match = _VALUES_OF.match(variable["definition"])
        if match is None:
            raise PreviewError(f"cannot tell the values of variable {variable['name']}; give one with --var")
        metric, label = match.group(1).split("{")[0], match.group(2)
        for selector in (_NAMED, metric):
            values = self.ask(f"label/{label}/values", {"match[]": selector, "start": self.start, "end": self.end})
            if values:
                return str(values[0])
        raise PreviewError(
            f"no {label} in that range; choose --start and --end within the run, or --var {variable['name']}=..."
        )

    def answers(self, document: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, list[Answer]]:
        """Panel title -> the answers to its queries."""
        found: dict[str, list[Answer]] = {panel["title"]: [] for panel in document["panels"]}
        for target in targets(document, variables):
            found[target.panel].append(Answer(target, self.lines(target)))
        return found

    def marks(self, document: Mapping[str, Any], variables: Mapping[str, str]) -> list[Mark]:
        """The marks of all annotations; one that stays for many steps is marked where it begins."""
        found = []
        for annotation, target in zip(document["annotations"]["list"], marks(document, variables), strict=True):
            for line in self.lines(target):
                time = line.values[0] / 1000 if annotation.get("useValueForTime") else line.times[0]
                if self.start <= time <= self.end:
                    found.append(Mark(time, annotation["iconColor"], line.legend))
        return sorted(found, key=lambda mark: mark.time)


def recorded(url: str) -> Source:
    """A Prometheus with the whole range that its head holds.

    Raises:
        PreviewError: it holds nothing.
    """
    stats = Source(url, 0.0, 0.0).ask("status/tsdb", {})["headStats"]
    if stats["numSeries"] == 0:
        raise PreviewError(f"{url} holds no series; let a job run first, or give --start and --end")
    return Source(url, stats["minTime"] / 1000, stats["maxTime"] / 1000)


def _fill(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match.group(1), ""), legend)
