"""The Prometheus text format, written and read cheaply: what ranks put into files and the agent serves.

Only the subset that sdcwatch itself writes: no timestamps, no exemplars, no `_created`. It knows nothing of which
names are allowed (catalog does) and never raises on a bad line: it reports it. A rank writes bare samples; the text
that is scraped (families with their help, in order) is rendered by the agent. Standard library only.
Flow: metrics (rank) -> **exposition** -> spool file -> **exposition** -> agent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sdcwatch.catalog import METRICS, Metric

_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)\Z")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"(?:,|\Z)')
_UNESCAPE = re.compile(r'\\([\\"n])')


@dataclass(frozen=True, slots=True)
class Sample:
    """One series and its value. `labels` keep the order of the text; values are unescaped."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


def escape(value: str) -> str:
    """A label value as the text format wants it."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def series(name: str, labels: Iterable[tuple[str, str]]) -> str:
    """`name{label="value",...}`; the text that identifies a series."""
    body = ",".join(f'{label}="{escape(value)}"' for label, value in labels)
    return f"{name}{{{body}}}" if body else name


def number(value: float) -> str:
    """A sample value: whole numbers without a point, the shortest exact form otherwise."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def header(metric: Metric) -> str:
    """HELP and TYPE lines of a family."""
    text = metric.help.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {metric.name} {text}\n# TYPE {metric.name} {metric.exposed_kind}\n"


def lines(values: Iterable[tuple[str, float]]) -> str:
    """One line for each (series text, value), in the order given: what a training process writes."""
    return "".join(f"{text} {number(value)}\n" for text, value in values)


def render(values: Iterable[tuple[str, str, float]]) -> str:
    """Groups (family, series text, value) by family, in the catalogue's order, series sorted within.

    Families outside the catalogue are an error of the caller (KeyError).
    """
    families: dict[str, list[str]] = {}
    for name, text, value in values:
        families.setdefault(name, []).append(f"{text} {number(value)}\n")
    unknown = families.keys() - METRICS.keys()
    if unknown:
        raise KeyError(f"not in the catalogue: {sorted(unknown)}")
    return "".join(header(METRICS[name]) + "".join(sorted(families[name])) for name in METRICS if name in families)


def parse(text: str) -> Iterator[Sample | str]:
    """Reads samples; a line that is none comes back as the line itself, so that the caller can count it."""
    # Not splitlines(): label values may hold characters such as U+2028 that it takes for line ends.
    for line in text.split("\n"):
        if not line or line.startswith("#"):
            continue
        sample = _sample(line)
        yield line if sample is None else sample


def _sample(line: str) -> Sample | None:
    match = _LINE.match(line)
    if match is None:
        return None
    name, body, raw = match.groups()
    labels: list[tuple[str, str]] = []
    position = 0
    while body and position < len(body):
        label = _LABEL.match(body, position)
        if label is None:
            return None
        value = label.group(2)
        labels.append((label.group(1), _UNESCAPE.sub(_unescape, value) if "\\" in value else value))
        position = label.end()
    try:
        return Sample(name, tuple(labels), float(raw))
    except ValueError:
        return None


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match.group(1) == "n" else match.group(1)
