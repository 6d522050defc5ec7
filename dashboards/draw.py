"""Draws a dashboard's grid of panels to a PNG with matplotlib, close enough to Grafana to judge it.

What it never does: ask anybody; it draws the answers that it is given. Flow: ask -> **draw** -> PNG, by preview.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from ask import Answer, Line, Mark, Source

_COLUMNS = 24
_UNIT_HEIGHT = 0.34
_GREY, _EDGE, _PAPER = "#6e7681", "#d0d7de", "#f6f8fa"
_COLOURS = {"green": "#56a64b", "red": "#e02f44", "orange": "#ff9830", "blue": "#3274d9", "purple": "#8f3bb8"}
_ROWS = 4


def draw(
    document: Mapping[str, Any],
    answers: Mapping[str, Sequence[Answer]],
    marks: Sequence[Mark],
    source: Source,
    path: Path,
) -> None:
    """Draws the whole dashboard; times are seconds since the start of the range."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from PIL import Image

    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in document["panels"])
    height = rows * _UNIT_HEIGHT + 0.5
    figure = Figure(figsize=(16, height), facecolor=_PAPER)
    top = 1 - 0.4 / height
    figure.text(0.006, 1 - 0.26 / height, document["title"], fontsize=12, weight="bold")
    unit = top / rows
    for panel in document["panels"]:
        place = panel["gridPos"]
        # Fractions of the figure: the grid counts from the top, matplotlib from the bottom; margins hold the labels.
        x, y, w, h = place["x"] / _COLUMNS, top - (place["y"] + place["h"]) * unit, place["w"] / _COLUMNS, place["h"]
        frame = Rectangle(
            (x + 0.003, y + 0.1 * unit), w - 0.006, (h - 0.2) * unit, facecolor="white", edgecolor=_EDGE, zorder=-1
        )
        figure.add_artist(frame)
        figure.text(x + 0.009, y + (h - 0.9) * unit, panel["title"], fontsize=9, weight="bold")
        if panel["type"] in ("timeseries", "state-timeline"):  # room for axis and legend
            axes = figure.add_axes((x + 0.04, y + 2.2 * unit, w - 0.055, (h - 3.6) * unit))
        else:
            axes = figure.add_axes((x + 0.009, y + 0.4 * unit, w - 0.018, (h - 1.7) * unit))
        _draw_panel(axes, panel, answers[panel["title"]], marks, source)
    # Few colours make a picture small enough to be kept in a repository.
    drawn = BytesIO()
    figure.savefig(drawn, dpi=72, facecolor=_PAPER)
    with Image.open(drawn) as picture:
        picture.convert("RGB").quantize(128).save(path, optimize=True)


def _draw_panel(
    axes: Any, panel: Mapping[str, Any], answers: Sequence[Answer], marks: Sequence[Mark], source: Source
) -> None:
    if not any(answer.lines for answer in answers):
        _say(axes, panel["fieldConfig"]["defaults"].get("noValue") or "No data", width=panel["gridPos"]["w"] * 5)
    elif panel["type"] == "table":
        _table(axes, panel, answers, source)
    elif panel["type"] == "stat":
        _stat(axes, panel, answers, source)
    else:
        _over_time(axes, panel, [line for answer in answers for line in answer.lines], marks, source)


def _say(axes: Any, words: str, *, width: int) -> None:
    wrapped = "\n".join(textwrap.wrap(words, width))
    axes.text(0.5, 0.5, wrapped, ha="center", va="center", transform=axes.transAxes, color=_GREY, fontsize=9)
    axes.set_axis_off()


def _stat(axes: Any, panel: Mapping[str, Any], answers: Sequence[Answer], source: Source) -> None:
    words = _writer(panel["fieldConfig"]["defaults"].get("unit"), source)
    lines = [line for answer in answers for line in answer.lines]
    for number, line in enumerate(lines):
        x = (number + 0.5) / len(lines)
        axes.text(x, 0.55, words(line.values[-1]), ha="center", va="center", fontsize=17, transform=axes.transAxes)
        axes.text(x, 0.1, line.legend, ha="center", color=_GREY, fontsize=8, transform=axes.transAxes)
    axes.set_axis_off()


def _table(axes: Any, panel: Mapping[str, Any], answers: Sequence[Answer], source: Source) -> None:
    """Rows with the same labels become one, as Grafana's `merge` does; a query with more labels fills into others."""
    names = {
        override["matcher"]["options"]: {p["id"]: p["value"] for p in override["properties"]}
        for override in panel["fieldConfig"]["overrides"]
    }
    labels = [name for name in names if not name.startswith("Value")]
    rows: list[dict[str, str]] = []
    for answer in answers:
        column = "Value" if len(answers) == 1 else f"Value #{answer.target.ref}"
        words = _writer(names.get(column, {}).get("unit", panel["fieldConfig"]["defaults"].get("unit")), source)
        for line in answer.lines:
            own = {label: line.labels.get(label, "") for label in labels if label in line.labels}
            for row in [r for r in rows if all(r.get(k, v) == v for k, v in own.items())] or [{}]:
                if not row:
                    rows.append(row)
                row |= own
                row[column] = words(line.values[-1])
    heads = [properties["displayName"] for properties in names.values()]
    cells = [[row.get(name, "") for name in names] for row in rows[:8]]
    longest = [max(len(str(row[i])) for row in [heads, *cells]) + 2 for i in range(len(heads))]
    drawn = axes.table(
        cellText=cells, colLabels=heads, colWidths=[n / sum(longest) for n in longest], loc="upper center",
        cellLoc="left", colLoc="left",
    )  # fmt: skip
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(7)
    drawn.scale(1.0, 1.1)
    for (row, column), cell in drawn.get_celld().items():
        cell.set_edgecolor(_EDGE)
        if row == 0:
            cell.set_text_props(weight="bold")
        elif "links" in list(names.values())[column]:
            cell.set_text_props(color=_COLOURS["blue"])
    axes.set_axis_off()


def _over_time(
    axes: Any, panel: Mapping[str, Any], lines: Sequence[Line], marks: Sequence[Mark], source: Source
) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.set_xlim(0, source.end - source.start)
    axes.tick_params(labelsize=7, colors=_GREY, length=2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(_EDGE)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} s"))
    for mark in marks:
        colour = _COLOURS.get(mark.colour, mark.colour)
        axes.axvline(mark.time - source.start, color=colour, linewidth=0.9, linestyle=(0, (3, 2)), zorder=1)
    if panel["type"] == "state-timeline":
        _states(axes, panel, lines, source)
    else:
        _lines(axes, panel["fieldConfig"]["defaults"], lines, source)


def _states(axes: Any, panel: Mapping[str, Any], lines: Sequence[Line], source: Source) -> None:
    options = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
    step = max((source.end - source.start) / 300, 1.0)
    for row, line in enumerate(lines):
        for time, value in zip(line.times, line.values, strict=True):
            colour = options.get(f"{value:g}", {}).get("color", "grey")
            axes.barh(row, step * 1.05, left=time - source.start, height=0.7, color=_COLOURS.get(colour, colour))
        # With one word a bar says that the series is there, and its name is enough.
        text = options.get(f"{line.values[-1]:g}", {}).get("text", "") if len(options) > 1 else ""
        axes.text(
            0.01,
            row,
            f"{line.legend}: {text}".rstrip(": "),
            fontsize=7,
            va="center",
            transform=axes.get_yaxis_transform(),
        )
    axes.set_yticks([])
    axes.set_ylim(-0.6, max(len(lines), 2) - 0.4)
    axes.invert_yaxis()


def _lines(axes: Any, defaults: Mapping[str, Any], lines: Sequence[Line], source: Source) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, MultipleLocator

    custom = defaults.get("custom", {})
    style = "steps-post" if custom.get("lineInterpolation") == "stepAfter" else "default"
    for line in lines:
        times = [time - source.start for time in line.times]
        marker = "." if len(times) < 3 else None  # a line through one sample cannot be seen
        axes.plot(times, line.values, drawstyle=style, linewidth=1.1, marker=marker, label=line.legend, zorder=2)
    words = _writer(defaults.get("unit"), source)
    # 0 / 0 is no number: a gap, as in Grafana.
    shown = [value for line in lines for value in line.values if math.isfinite(value)] or [0.0]
    low, high = min(shown), max(shown)
    if custom.get("scaleDistribution", {}).get("type") == "log" and low > 0:
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.yaxis.set_major_locator(MaxNLocator(4) if high < 10 * low else LogLocator(numticks=5))
    else:
        low = min(low, defaults.get("min", low))
        high = high if high > low else low + 1.0
        # A little room, so that a line along the lowest value is seen.
        axes.set_ylim(low - 0.04 * (high - low), high + 0.08 * (high - low))
        whole = defaults.get("unit") == "none" and all(value == int(value) for value in shown)
        even = defaults.get("unit") == "bytes" and high > 8  # ticks at round numbers of KiB, MiB, ...
        step = 2.0 ** math.ceil(math.log2(high / 4)) if even else 1.0
        axes.yaxis.set_major_locator(MultipleLocator(step) if even else MaxNLocator(5, integer=whole))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: words(value)))
    axes.grid(axis="y", color="#eaeef2", linewidth=0.7)
    axes.set_axisbelow(True)
    longest = max(len(line.legend) for line in lines[: 4 * _ROWS])
    columns = max(1, min(len(lines), 4, int(axes.get_position().width * 230 / (longest + 6))))
    drawn = axes.lines[-len(lines) :]
    if len(lines) > columns * _ROWS:  # more would run out of the panel
        drawn[columns * _ROWS - 1].set_label(f"and {len(lines) - columns * _ROWS + 1} more")
    axes.legend(
        handles=drawn[: columns * _ROWS], fontsize=6, ncols=columns, frameon=False, loc="upper center",
        bbox_to_anchor=(0.5, -0.1), borderaxespad=0.2, columnspacing=1.0, handlelength=1.2,
    )  # fmt: skip


def _writer(unit: str | None, source: Source) -> Callable[[float], str]:
    """How a value of this unit is written, roughly as Grafana writes it."""

    def since(value: float) -> str:
        return f"{source.end - value / 1000:.0f} s before the end"

    def scaled(value: float, base: float, suffix: str) -> str:
        for prefix in ("", "k", "M", "G"):
            binary = "i" if prefix and base == 1024.0 else ""
            if abs(value) < base:
                return f"{value:.3g} {prefix.upper() if binary else prefix}{binary}{suffix}"
            value /= base
        return f"{value:.3g} T{'i' if base == 1024.0 else ''}{suffix}"

    writers: dict[str | None, Callable[[float], str]] = {
        "dateTimeFromNow": since,
        "percentunit": lambda value: f"{value * 100:.3g} %",
        "s": lambda value: f"{value:.3g} s",
        "bytes": lambda value: scaled(value, 1024.0, "B"),
        "hertz": lambda value: scaled(value, 1000.0, "Hz"),
        "ops": lambda value: f"{value:.3g}/s",
        "celsius": lambda value: f"{value:.3g} °C",
        "watt": lambda value: f"{value:.3g} W",
    }
    return writers.get(unit, lambda value: f"{value:g}")
