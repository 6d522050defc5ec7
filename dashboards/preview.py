"""Draws a dashboard without a Grafana: runs each of its queries against a Prometheus over a time range, one PNG a file.

    python dashboards/preview.py http://127.0.0.1:9090 --start 1764630000 --end 1764630600 --out demo/out

Prints each panel that got no data; with --strict that is exit status 1 (panels that rightly may be empty do not count).
What it never does: write to Prometheus or look anywhere but at the address it is given.
Flow: *.json -> queries -> **preview** -> PNG.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from queries import load, targets

FOLDER = Path(__file__).parent
#: Panels that rightly show nothing in a job without a fault, by the dashboard's file.
MAY_BE_EMPTY = {
    "training-job.json": {"Newest verdict that names a rank", "Newest verdict that names nobody", "Heals", "Skips"}
}
POINTS = 240
SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a panel: its legend, and its samples as unix seconds and values."""

    legend: str
    times: tuple[float, ...]
    values: tuple[float, ...]


class PreviewError(Exception):
    """Prometheus cannot be reached, or refused a query; the message says which and what to do."""


def ask(prometheus: str, path: str, parameters: Mapping[str, object]) -> Any:
    """The `data` of one answer of Prometheus's HTTP API."""
    url = f"{prometheus.rstrip('/')}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise PreviewError(f"Prometheus refused {parameters}: {error.read().decode(errors='replace')}") from error
    except OSError as error:
        raise PreviewError(f"no answer from {prometheus}: {error}; is Prometheus running there?") from error


def lines(prometheus: str, expr: str, legend: str, start: float, end: float) -> list[Line]:
    """Runs one query over the range, at most `POINTS` samples a series."""
    step = max((end - start) / POINTS, 1.0)
    data = ask(prometheus, "query_range", {"query": expr, "start": start, "end": end, "step": step})
    found = []
    for series in data["result"]:
        name = legend
        for key, value in series["metric"].items():
            name = name.replace("{{" + key + "}}", value)
        samples = [(float(time), float(value)) for time, value in series["values"]]
        found.append(Line(name, tuple(t for t, _ in samples), tuple(v for _, v in samples)))
    return found


def fetch(
    document: Mapping[str, Any], prometheus: str, variables: Mapping[str, str], start: float, end: float
) -> dict[str, list[Line]]:
    """Panel title -> its lines."""
    found: dict[str, list[Line]] = {panel["title"]: [] for panel in document["panels"]}
    for target in targets(document, variables):
        found[target.panel] += lines(prometheus, target.expr, target.legend, start, end)
    return found


def choose(document: Mapping[str, Any], prometheus: str, given: Mapping[str, str], start: float, end: float) -> str:
    """The job to show: the one given, else the first that Prometheus has in the range.

    Raises:
        PreviewError: there is none.
    """
    if "job" in given:
        return given["job"]
    values = ask(prometheus, "label/training_job/values", {"start": start, "end": end})
    if not values:
        raise PreviewError("no training_job in that range; choose --start and --end within the run, or --var job=NAME")
    return str(values[0])


def draw(document: Mapping[str, Any], data: Mapping[str, list[Line]], path: Path, start: float) -> None:
    """Draws the grid of panels as Grafana would lay it out, times in seconds since the start."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in document["panels"])
    figure = Figure(figsize=(18, rows * 0.36))
    for panel in document["panels"]:
        place = panel["gridPos"]
        # Fractions of the figure: the grid counts from the top, matplotlib from the bottom; margins hold the labels.
        left, bottom = (place["x"] + 1.2) / 24, 1 - (place["y"] + place["h"] - 1.2) / rows
        axes = figure.add_axes((left, bottom, (place["w"] - 1.6) / 24, (place["h"] - 2.4) / rows))
        axes.set_title(panel["title"], fontsize=9, loc="left")
        axes.tick_params(labelsize=7)
        _draw_panel(axes, panel, data[panel["title"]], start)
    figure.savefig(path, dpi=80)


def _draw_panel(axes: Any, panel: Mapping[str, Any], found: Sequence[Line], start: float) -> None:
    if not found:
        axes.text(0.5, 0.5, "no data", ha="center", va="center", transform=axes.transAxes, color="grey")
        axes.set_xticks([])
        axes.set_yticks([])
        return
    defaults = panel["fieldConfig"]["defaults"]
    if panel["type"] == "stat":
        words = "\n".join(f"{line.legend}: {_newest(line, defaults.get('unit'), start)}" for line in found)
        axes.text(0.5, 0.5, words, ha="center", va="center", transform=axes.transAxes, fontsize=8)
        axes.set_axis_off()
        return
    if panel["type"] == "state-timeline":
        for row, line in enumerate(found):
            on = [time - start for time, value in zip(line.times, line.values, strict=True) if value]
            axes.plot(on, [row] * len(on), "s", markersize=4)
            axes.text(0.01, row + 0.2, line.legend, fontsize=7, transform=axes.get_yaxis_transform())
        axes.set_yticks([])
        axes.set_ylim(-0.5, len(found))
        return
    step = defaults.get("custom", {}).get("lineInterpolation") == "stepAfter"
    for line in found:
        times = [time - start for time in line.times]
        axes.plot(times, line.values, drawstyle="steps-post" if step else "default", linewidth=1, label=line.legend)
    if defaults.get("custom", {}).get("scaleDistribution", {}).get("type") == "log":
        axes.set_yscale("log")
    axes.legend(fontsize=6, loc="upper left", ncols=2)


def _newest(line: Line, unit: str | None, start: float) -> str:
    value = line.values[-1]
    return f"{value / 1000 - start:.1f} s after the start" if unit == "dateTimeFromNow" else f"{value:g}"


def preview(
    path: Path, prometheus: str, out: Path, *, start: float, end: float, given: Mapping[str, str]
) -> tuple[Path, list[str]]:
    """Draws one dashboard.

    Returns:
        The PNG, and the titles of panels that got no data though they should have.
    """
    document = load(path)
    rate = given.get("__rate_interval", "30s")
    variables = {"datasource": "prometheus", "__rate_interval": rate, "__interval": "5s", **given}
    variables["job"] = choose(document, prometheus, given, start, end)
    variables["__range"] = f"{max(int(end - start), 1)}s"
    data = fetch(document, prometheus, variables, start, end)
    out.mkdir(parents=True, exist_ok=True)
    picture = out / f"{path.stem}.png"
    draw(document, data, picture, start)
    allowed = MAY_BE_EMPTY.get(path.name, set())
    return picture, [title for title, found in data.items() if not found and title not in allowed]


def main(argv: Sequence[str] | None = None) -> int:
    """0: drawn; 1: with --strict a panel is empty, or Prometheus did not answer."""
    parser = argparse.ArgumentParser(description="Draw the dashboards from a Prometheus, without a Grafana.")
    parser.add_argument("prometheus", help="URL, such as http://127.0.0.1:9090")
    parser.add_argument("--start", type=float, required=True, help="unix seconds")
    parser.add_argument("--end", type=float, required=True, help="unix seconds")
    parser.add_argument("--out", type=Path, required=True, help="folder for the PNG files")
    parser.add_argument("--var", action="append", default=[], metavar="NAME=VALUE", help="value of a variable")
    parser.add_argument("--strict", action="store_true", help="exit 1 where a panel is empty")
    arguments = parser.parse_args(argv)
    if arguments.end <= arguments.start or any("=" not in pair for pair in arguments.var):
        parser.error("--end must be after --start, and each --var must be NAME=VALUE")
    given = dict(pair.split("=", 1) for pair in arguments.var)
    missing = False
    for path in sorted(FOLDER.glob("*.json")):
        try:
            picture, empty = preview(
                path, arguments.prometheus, arguments.out, start=arguments.start, end=arguments.end, given=given
            )
        except PreviewError as error:
            print(f"preview: {error}", file=sys.stderr)
            return 1
        print(f"{picture}: {len(empty)} panels without data")
        for title in empty:
            print(f"  no data: {title}", file=sys.stderr)
        missing = missing or bool(empty)
    return 1 if missing and arguments.strict else 0


if __name__ == "__main__":
    sys.exit(main())
