"""What is wrong with a dashboard that the SDK does not refuse: what loads in Grafana and shows nothing, or too much.

What it never does: import the SDK or change a file; it judges what is committed, whoever wrote it.
Flow: *.json -> queries, bounds -> **lint** -> the tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from bounds import unbounded
from queries import BUILT_IN, marks, targets, used

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA = 42
TAG = "sdcwatch"
#: Panel types that a Grafana without plugins has and that we know how to preview.
TYPES = {"timeseries", "stat", "state-timeline", "table"}
#: Units in use; Grafana shows an unknown id as a suffix, without any error.
UNITS = {"none", "short", "s", "bytes", "ops", "percentunit", "dateTimeFromNow", "celsius", "watt", "hertz"}
#: Most samples of a series; at 16,384 ranks a query over all of them then stays under a tenth of Prometheus's limit.
POINTS = 300
#: A value for a variable that stands where PromQL wants a label's name.
LABEL_NAMES = {"dcgm_label": "UUID"}


def lint(document: Mapping[str, Any]) -> list[str]:
    """Everything wrong with a dashboard; empty: nothing."""
    found = []
    if document.get("schemaVersion") != SCHEMA:
        found.append(f"schemaVersion is {document.get('schemaVersion')}, not {SCHEMA}")
    if "__inputs" in document or "${DS_" in json.dumps(document):
        found.append("has ${DS_*} inputs, which provisioning never fills in")
    if TAG not in document.get("tags", []) or not document.get("links"):
        found.append(f"has no tag {TAG} or no links, so the other dashboards do not find it, or it not them")
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
    problems = [problem for panel in panels for problem in _lint_panel(panel, names)]
    return found + problems + _overlaps(panels) + list(_sizes(document, names))


def _sizes(document: Mapping[str, Any], names: set[str]) -> Iterator[str]:
    """Queries whose answer grows with the fleet. Unknown variables were told already."""
    named = used(json.dumps([panel["targets"] for panel in document["panels"]]))
    variables = dict.fromkeys(named | names, "x") | BUILT_IN | LABEL_NAMES
    for target in (*targets(document, variables), *marks(document, variables)):
        for problem in unbounded(target.expr, instant=target.instant):
            yield f"{target.panel} {target.ref}: {problem}"


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
    if "?" not in panel.get("description", ""):
        yield f"{title}: the description does not say which question it answers"
    if not 0 < panel.get("maxDataPoints", 0) <= POINTS:
        yield f"{title}: maxDataPoints is not within {POINTS}"
    opacity = defaults.get("custom", {}).get("fillOpacity", 0)
    if not 0 <= opacity <= 100:
        yield f"{title}: fillOpacity {opacity} is not a percentage"
    references = [target.get("refId") for target in panel["targets"]]
    if not references or None in references or len(set(references)) != len(references):
        yield f"{title}: refIds are missing or not unique"
    for target in panel["targets"]:
        unknown = used(target["expr"]) - variables - set(BUILT_IN)
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
