"""Reads dashboard JSON back: its queries, with variables filled in as Grafana would.

What it never does: import the SDK; it reads the committed file, whoever wrote it. Flow: *.json -> **queries** ->
lint, preview and the tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")
#: Variables that Grafana fills in by itself, and what the preview and the tests put there.
BUILT_IN = {"__rate_interval": "30s", "__interval": "5s", "__range": "3600s", "__range_s": "3600"}

#: Steps at which an annotation is evaluated, roughly as Grafana does.
MARK_POINTS = 300


@dataclass(frozen=True, slots=True)
class Target:
    """One query of one panel, variables filled in.

    Attributes:
        panel: the panel's title.
        ref: refId.
        legend: legend template; in a table, the title of the value's column.
        instant: asked once, for the end of the range.
        points: samples a line at most, over a range.
        empty: why the panel may rightly show nothing, as Grafana says it; empty: it must show something.
    """

    panel: str
    ref: str
    expr: str
    legend: str
    instant: bool
    points: int
    empty: str


def load(path: Path) -> dict[str, Any]:
    """The dashboard in a file."""
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def substitute(expr: str, variables: Mapping[str, str]) -> str:
    """Fills in variables; `$__rate_interval` and the like are among them.

    Raises:
        KeyError: a variable that nobody gave a value.
    """
    return _VARIABLE.sub(lambda match: variables[match.group(1) or match.group(2)], expr)


def used(expr: str) -> set[str]:
    """Names of the variables in it."""
    return {braced or bare for braced, bare in _VARIABLE.findall(expr)}


def targets(document: Mapping[str, Any], variables: Mapping[str, str]) -> Iterator[Target]:
    """All targets of a dashboard, in the order of its panels."""
    for panel in document["panels"]:
        empty = panel["fieldConfig"]["defaults"].get("noValue", "")
        for target in panel["targets"]:
            yield Target(
                panel=panel["title"],
                ref=target.get("refId", ""),
                expr=substitute(target["expr"], variables),
                legend=target.get("legendFormat", ""),
                instant=target["instant"],
                points=panel.get("maxDataPoints", 0),
                empty=empty,
            )


def marks(document: Mapping[str, Any], variables: Mapping[str, str]) -> Iterator[Target]:
    """The queries of a dashboard's annotations."""
    for annotation in document["annotations"]["list"]:
        expr = substitute(annotation["expr"], variables)
        yield Target(
            annotation["name"], "annotation", expr, annotation["titleFormat"], False, MARK_POINTS, "nothing to mark"
        )
