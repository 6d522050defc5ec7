"""The parts that dashboards are made of: targets, panels and variables with everything set that the SDK leaves open.

What it does: builds panels of the classic schema that always have an id, a title, a unit, a description, a place in the
grid and targets with a refId, all bound to the `${datasource}` variable.
What it never does: write files or talk to Grafana. Flow: **panels** -> a dashboard module -> build -> *.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common as common_builder
from grafana_foundation_sdk.builders import dashboard as builder
from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.models import common, dashboard

#: The only data source a target may name: chosen by whoever looks, so a provisioned file works in any Grafana.
DATASOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
#: Columns of Grafana's grid.
WIDTH = 24
HEIGHT = 8

Built = timeseries.Panel | stat.Panel | statetimeline.Panel


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel.

    Attributes:
        expr: PromQL, with `$job` and `$__rate_interval` where Grafana fills them in.
        legend: legend template, such as `rank {{rank}}`.
    """

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel, before it has its place.

    Attributes:
        title: what it shows.
        description: what to read from it, and when to worry.
        unit: Grafana unit id; `none` for plain numbers.
        queries: at least one.
        width: columns, of 24.
        kind: `lines`, `stat` (newest value, large) or `states` (a value in words over time).
        words: for `states` and `stat`: value -> (text, colour).
        log: logarithmic axis, base 10.
        minimum: lowest value of the axis.
        steps: values are held until the next one (counts and steps) instead of drawn as slopes.
    """

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    width: int = 12
    kind: str = "lines"
    words: Sequence[tuple[str, str, str]] = ()
    log: bool = False
    minimum: float | None = None
    steps: bool = False


def datasource_variable() -> builder.DatasourceVariable:
    """The choice of a Prometheus; every target binds through it."""
    return builder.DatasourceVariable("datasource").label("Data source").type("prometheus")


def label_variable(name: str, label: str, metric: str, key: str) -> builder.QueryVariable:
    """A choice among the values that label `key` has on `metric`; one value at a time."""
    return (
        builder.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": f"label_values({metric}, {key})", "refId": f"variable-{name}"})
        .definition(f"label_values({metric}, {key})")
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    )


def place(panels: Sequence[Panel]) -> list[Built]:
    """Gives each panel its id and its place, left to right and row by row."""
    placed: list[Built] = []
    x = y = 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > WIDTH:
            x, y = 0, y + HEIGHT
        position = dashboard.GridPos(h=HEIGHT, w=panel.width, x=x, y=y)
        placed.append(_build(panel).id(number).grid_pos(position))
        x += panel.width
    return placed


def _build(panel: Panel) -> Built:
    built: Built
    if panel.kind == "stat":
        built = _stat()
    elif panel.kind == "states":
        built = _states()
    else:
        built = _lines(panel)
    built = built.title(panel.title).description(panel.description).unit(panel.unit).datasource(DATASOURCE)
    if panel.words:
        built = built.mappings([_mapping(panel.words)])
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(letter)
        built = built.with_target(target.range().datasource(DATASOURCE))
    return built


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
        .no_value("none")
    )


def _states() -> statetimeline.Panel:
    return statetimeline.Panel().show_value(common.VisibilityMode.AUTO).row_height(0.8).fill_opacity(70).line_width(0)
