"""The parts that dashboards are made of: targets, panels and variables with everything set that the SDK leaves open.

What it does: builds panels of the classic schema that always have an id, a title, a unit, a description, a place in the
grid and targets with a refId, all bound to the `${datasource}` variable.
What it never does: write files or talk to Grafana. Flow: **panels** -> a dashboard module -> build -> *.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import common as common_builder
from grafana_foundation_sdk.builders import dashboard as builder
from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from links import TAG, Link, navigation

#: The only data source a target may name: chosen by whoever looks, so a provisioned file works in any Grafana.
DATASOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
#: Columns of Grafana's grid.
WIDTH = 24
HEIGHT = 8
#: Samples a line at most: keeps the memory of a query over all ranks of a large job far under Prometheus's limit.
POINTS = 300
#: Where the case link leads unless the `cases` variable says otherwise: the service's own list.
CASES = "http://127.0.0.1:9479/v1/cases"

Built = timeseries.Panel | stat.Panel | statetimeline.Panel | table.Panel


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel.

    Attributes:
        expr: PromQL, with `$job` and `$__rate_interval` where Grafana fills them in.
        legend: legend template, such as `rank {{rank}}`; in a table, the title of the value's column (empty: hidden).
        unit: of this column of a table, where it differs from the panel's.
    """

    expr: str
    legend: str
    unit: str | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel, before it has its place.

    Attributes:
        title: what it shows.
        description: what to read from it, and when to worry.
        unit: Grafana unit id; `none` for plain numbers.
        queries: at least one.
        width: columns, of 24.
        height: rows of the grid; a row of panels is as high as its highest.
        kind: `lines`, `stat` (newest value, large), `states` (a value in words over time) or `table` (labels and
            values at the end of the range, one row a set of labels).
        words: for `states` and `stat`: value -> (text, colour).
        log: logarithmic axis, base 10.
        minimum: lowest value of the axis.
        steps: values are held until the next one (counts and steps) instead of drawn as slopes.
        links: where a click on a value leads.
        columns: for `table`: label -> title, in order.
        points: samples a line at most; fewer where each costs a look at every rank.
        empty: why it may rightly show nothing; Grafana shows this text instead of "No data". Without one, an empty
            panel is a fault, and the preview and verify.sh say so.
    """

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    width: int = 12
    height: int = HEIGHT
    kind: str = "lines"
    words: Sequence[tuple[str, str, str]] = ()
    log: bool = False
    minimum: float | None = None
    steps: bool = False
    links: Sequence[Link] = ()
    columns: Sequence[tuple[str, str]] = ()
    points: int = POINTS
    empty: str = ""


def datasource_variable() -> builder.DatasourceVariable:
    """The choice of a Prometheus; every target binds through it."""
    return builder.DatasourceVariable("datasource").label("Data source").type("prometheus")


def label_variable(name: str, label: str, metric: str, key: str, *, everything: bool = False) -> builder.QueryVariable:
    """A choice among the values that label `key` has on `metric`; one value, or with `everything` also all of them."""
    variable = (
        builder.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": f"label_values({metric}, {key})", "refId": f"variable-{name}"})
        .definition(f"label_values({metric}, {key})")
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    )
    if everything:
        option = dashboard.VariableOption(selected=True, text="All", value="$__all")
        variable = variable.include_all(True).all_value(".*").current(option)
    return variable


def text_variable(name: str, label: str, value: str) -> builder.TextBoxVariable:
    """A text that whoever looks may change, and that a link may carry."""
    option = dashboard.VariableOption(selected=True, text=value, value=value)
    return builder.TextBoxVariable(name).label(label).default_value(value).current(option)


def frame(uid: str, title: str, description: str) -> builder.Dashboard:
    """A dashboard without panels: time range, links, and the variables that all have."""
    return (
        builder.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .link(navigation())
        .with_variable(datasource_variable())
        .with_variable(text_variable("cases", "Cases at", CASES))
    )


def place(panels: Sequence[Panel]) -> list[Built]:
    """Gives each panel its id and its place, left to right and row by row."""
    placed: list[Built] = []
    x = y = highest = 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > WIDTH:
            x, y, highest = 0, y + highest, 0
        position = dashboard.GridPos(h=panel.height, w=panel.width, x=x, y=y)
        placed.append(_build(panel).id(number).grid_pos(position))
        x, highest = x + panel.width, max(highest, panel.height)
    return placed


def _build(panel: Panel) -> Built:
    built: Built
    if panel.kind == "stat":
        built = _stat()
    elif panel.kind == "states":
        built = _states()
    elif panel.kind == "table":
        built = _table(panel)
    else:
        built = _lines(panel)
    built = built.title(panel.title).description(panel.description).unit(panel.unit).datasource(DATASOURCE)
    built = built.max_data_points(panel.points)
    if panel.empty:
        built = built.no_value(panel.empty)
    if panel.links and panel.kind != "table":
        built = built.data_links([_Given(link) for link in panel.links])
    if panel.words:
        built = built.mappings([_mapping(panel.words)])
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(letter)
        # A query without steps is cheaper, and right where only the end of the range is shown.
        target = target.instant() if panel.kind in ("stat", "table") else target.range()
        if panel.kind == "table":
            target = target.format(PromQueryFormat.TABLE)
        built = built.with_target(target.datasource(DATASOURCE))
    return built


class _Given(Builder[dashboard.DashboardLink]):
    """A data link, which the SDK's builder types as a dashboard link."""

    def __init__(self, link: Link) -> None:
        self._link = link.of_series()

    def build(self) -> Any:
        return self._link


def _mapping(words: Sequence[tuple[str, str, str]]) -> dashboard.ValueMap:
    return dashboard.ValueMap(
        options={
            value: dashboard.ValueMappingResult(text=text, color=colour, index=index)
            for index, (value, text, colour) in enumerate(words)
        }
    )


def _lines(panel: Panel) -> timeseries.Panel:
    legend = (
        common_builder.VizLegendOptions()
        .show_legend(True)
        .display_mode(common.LegendDisplayMode.LIST)
        .placement(common.LegendPlacement.BOTTOM)
        .calcs([])
    )
    tooltip = common_builder.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    built = timeseries.Panel().legend(legend).tooltip(tooltip).line_width(1).fill_opacity(0)
    built = built.show_points(common.VisibilityMode.AUTO)
    if panel.steps:
        built = built.line_interpolation(common.LineInterpolation.STEP_AFTER)
    if panel.minimum is not None:
        built = built.min(panel.minimum)
    if panel.log:
        scale = common_builder.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10)
        built = built.scale_distribution(scale)
    return built


def _stat() -> stat.Panel:
    newest = common_builder.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields("")
    return (
        stat.Panel()
        .reduce_options(newest)
        .graph_mode(common.BigValueGraphMode.NONE)
        .color_mode(common.BigValueColorMode.VALUE)
        .text_mode(common.BigValueTextMode.VALUE_AND_NAME)
    )


def _states() -> statetimeline.Panel:
    return statetimeline.Panel().show_value(common.VisibilityMode.AUTO).row_height(0.8).fill_opacity(70).line_width(0)


def _table(panel: Panel) -> table.Panel:
    """Rows of all queries with the same labels become one; hidden are the time and labels that nobody asked for."""
    values = [f"Value #{letter}" for letter, _ in zip("ABCDEFGH", panel.queries, strict=False)]
    if len(values) == 1:
        values = ["Value"]
    order = [*dict(panel.columns), *values]
    hidden = ["Time", *(name for name, query in zip(values, panel.queries, strict=True) if not query.legend)]
    arranged: dict[str, object] = {
        "excludeByName": dict.fromkeys(hidden, True),
        "indexByName": {name: index for index, name in enumerate(order)},
        "renameByName": {},
    }
    built = table.Panel()
    for name, options in (("merge", {}), ("organize", arranged)):
        built = built.with_transformation(dashboard.DataTransformerConfig(name, options=options))
    for label, title in panel.columns:
        properties = [dashboard.DynamicConfigValue("displayName", title)]
        reached = [link.of_row() for link in panel.links if label in link.labels]
        if reached:
            properties.append(dashboard.DynamicConfigValue("links", reached))
        built = built.override_by_name(label, properties)
    for name, query in zip(values, panel.queries, strict=True):
        if not query.legend:
            continue
        properties = [dashboard.DynamicConfigValue("displayName", query.legend)]
        if query.unit:
            properties.append(dashboard.DynamicConfigValue("unit", query.unit))
        built = built.override_by_name(name, properties)
    return built
