"""Reads dashboard JSON back: its targets, with variables filled in as Grafana would, and what is wrong with it.

What it never does: import the SDK; it judges the committed file, whoever wrote it. Flow: *.json -> **queries** ->
preview and the tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA = 42
#: Panel types that a Grafana without plugins has and that we know how to preview.
TYPES = {"timeseries", "stat", "state-timeline"}
#: Units in use; Grafana shows an unknown id as a suffix, without any error.
UNITS = {"none", "short", "s", "bytes", "ops", "percentunit", "dateTimeFromNow"}
VARIABLE = re.compile(r"\$\{?(\w+)(?::\w+)?\}?")


@dataclass(frozen=True, slots=True)
class Target:
    """One query of one panel, variables filled in."""

    panel: str
    ref: str
    expr: str
    legend: str


def load(path: Path) -> dict[str, Any]:
    """The dashboard in a file."""
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def substitute(expr: str, variables: Mapping[str, str]) -> str:
    """Fills in variables; `$__rate_interval` and the like are among them.

    Raises:
        KeyError: a variable that nobody gave a value.
    """
    return VARIABLE.sub(lambda match: variables[match.group(1)], expr)


def targets(document: Mapping[str, Any], variables: Mapping[str, str]) -> Iterator[Target]:
    """All targets of a dashboard, in the order of its panels."""
    for panel in document["panels"]:
        for target in panel["targets"]:
            yield Target(
                panel["title"], target["refId"], substitute(target["expr"], variables), target.get("legendFormat", "")
            )


def lint(document: Mapping[str, Any]) -> list[str]:
    """What is wrong with a dashboard that the SDK does not refuse; empty: nothing."""
    found = []
    if document.get("schemaVersion") != SCHEMA:
        found.append(f"schemaVersion is {document.get('schemaVersion')}, not {SCHEMA}")
    if "__inputs" in document or "${DS_" in json.dumps(document):
        found.append("has ${DS_*} inputs, which provisioning never fills in")
    names = {variable["name"] for variable in document["templating"]["list"]}
    if "datasource" not in names:
        found.append("has no `datasource` variable")
    for place, reference in _datasources(document):
        if reference != DATASOURCE:
            found.append(f"{place}: data source {reference} is not ${{datasource}}")
    panels = document["panels"]
    for key in ("id", "title"):
        values = [panel.get(key) for panel in panels]
        if None in values or len(set(values)) != len(values):
            found.append(f"panel {key}s are missing or not unique")
    found += [problem for panel in panels for problem in _lint_panel(panel, names)]
    return found + _overlaps(panels)


def _datasources(document: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for panel in document["panels"]:
        yield panel["title"], panel.get("datasource")
        for target in panel["targets"]:
            yield f"{panel['title']} {target.get('refId')}", target.get("datasource")
    for variable in document["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable.get("datasource")
    for annotation in document["annotations"].get("list", []):
        yield f"annotation {annotation['name']}", annotation.get("datasource")


def _lint_panel(panel: Mapping[str, Any], variables: set[str]) -> Iterator[str]:
    title = panel.get("title")
    if panel["type"] not in TYPES:
        yield f"{title}: type {panel['type']} is not one of {', '.join(sorted(TYPES))}"
    defaults = panel["fieldConfig"]["defaults"]
    if defaults.get("unit") not in UNITS:
        yield f"{title}: unit {defaults.get('unit')!r} is not one of {', '.join(sorted(UNITS))}"
    if not panel.get("description"):
        yield f"{title}: no description"
    opacity = defaults.get("custom", {}).get("fillOpacity", 0)
    if not 0 <= opacity <= 100:
        yield f"{title}: fillOpacity {opacity} is not a percentage"
    references = [target.get("refId") for target in panel["targets"]]
    if not references or None in references or len(set(references)) != len(references):
        yield f"{title}: refIds are missing or not unique"
    for target in panel["targets"]:
        unknown = set(VARIABLE.findall(target["expr"])) - variables - {"__rate_interval", "__interval", "__range"}
        if unknown:
            yield f"{title}: unknown variables {', '.join(sorted(unknown))}"


def _overlaps(panels: list[Mapping[str, Any]]) -> list[str]:
    taken: dict[tuple[int, int], str] = {}
    found = []
    for panel in panels:
        place = panel["gridPos"]
        if place["x"] + place["w"] > 24:
            found.append(f"{panel['title']}: wider than the grid")
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                other = taken.setdefault((x, y), panel["title"])
                if other != panel["title"] and f"{panel['title']} lies over {other}" not in found:
                    found.append(f"{panel['title']} lies over {other}")
    return found
