"""OpenMetrics for scrapers that ask for it: the same samples, with an exemplar on each counter of events.

An exemplar says which event last moved a counter: its id, step, and what of the evidence fits into 128 characters.
Names, labels and values are those of the text format; it reads no file and decides nothing. Standard library only.
Flow: collector -> **openmetrics** -> handler.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdcwatch.catalog import METRICS, MISMATCHES, Metric
from sdcwatch.exposition import escape, number, series

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
#: Most characters of an exemplar's label names and values together; the format's own limit.
EXEMPLAR_CHARACTERS = 128

_MEDIA_TYPE = "application/openmetrics-text"
_UNATTRIBUTED = "sdc_unattributed_total"
_TEXT_TYPES = ("text/plain", "text/*", "*/*")


@dataclass(frozen=True, slots=True)
class Exemplar:
    """What last moved a counter.

    Attributes:
        labels: (name, value), at most 128 characters together.
        time: unix seconds of the event.
    """

    labels: tuple[tuple[str, str], ...]
    time: float


def wanted(accept: str | None) -> bool:
    """True when an Accept header prefers OpenMetrics 1.0.0 to the text format; no header means the text format."""
    best = {"open": 0.0, "text": 0.0}
    for part in (accept or "").split(","):
        media, *parameters = [word.strip().lower() for word in part.split(";")]
        given = dict(word.partition("=")[::2] for word in parameters)
        with contextlib.suppress(ValueError):
            quality = float(given.get("q", "1"))
            if media == _MEDIA_TYPE and given.get("version", "1.0.0").strip('"') == "1.0.0":
                best["open"] = max(best["open"], quality)
            elif media in _TEXT_TYPES:
                best["text"] = max(best["text"], quality)
    return best["open"] > 0 and best["open"] >= best["text"]


def render(values: Iterable[tuple[str, str, float]], exemplars: Mapping[str, Exemplar]) -> str:
    """(family, series text, value) as OpenMetrics, families in the catalogue's order, `# EOF` last.

    Args:
        exemplars: by series text; those of series that are not served are left out.
    """
    families: dict[str, list[str]] = {}
    for name, text, value in values:
        exemplar = exemplars.get(text) if METRICS[name].kind == "counter" else None
        families.setdefault(name, []).append(f"{text} {number(value)}{_suffix(exemplar)}\n")
    parts = [_header(METRICS[name]) + "".join(sorted(families[name])) for name in METRICS if name in families]
    return "".join(parts) + "# EOF\n"


def exemplars_of(events: Iterable[Mapping[str, Any]], job: str) -> dict[str, Exemplar]:
    """The newest exemplar of each counter that these events moved, by series text.

    Args:
        events: `event` objects of one job's journals; whatever cannot be read is passed over.
        job: the job whose journals they are; an event that speaks of another one is passed over.
    """
    found: dict[str, Exemplar] = {}
    for event in events:
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            if event["training_job"] != job:
                continue
            exemplar = Exemplar(_labels(event), float(event["time"]))
            for text in list(_moved(event)):
                keep_newest(found, text, exemplar)
    return found


def keep_newest(found: dict[str, Exemplar], text: str, exemplar: Exemplar) -> None:
    """Keeps the younger one of a series' exemplars."""
    if math.isfinite(exemplar.time) and (text not in found or found[text].time < exemplar.time):
        found[text] = exemplar


def _header(metric: Metric) -> str:
    # The family of a counter is called without the suffix that its samples have.
    family = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
    text = escape(metric.help)
    unit = f"# UNIT {family} {metric.unit}\n" if metric.unit and family.endswith(f"_{metric.unit}") else ""
    return f"# HELP {family} {text}\n# TYPE {family} {metric.exposed_kind}\n{unit}"


def _suffix(exemplar: Exemplar | None) -> str:
    if exemplar is None:
        return ""
    body = ",".join(f'{name}="{escape(value)}"' for name, value in exemplar.labels)
    return f" # {{{body}}} 1 {exemplar.time:.3f}"


def _moved(event: Mapping[str, Any]) -> Iterator[str]:
    """The counters that an event moved, by series text."""
    if not event["suspects"]:
        values = (event["training_job"], event["training_cluster"], event["check"], event["kind"])
        yield series(_UNATTRIBUTED, zip(METRICS[_UNATTRIBUTED].all_labels, values, strict=True))
        return
    ranks = {identity["rank"]: identity for identity in event["ranks"]}
    for number_of_rank in event["suspects"]:
        suspect = ranks[number_of_rank]
        labels = (
            *(event["training_job"], event["training_cluster"], suspect["node"], suspect["instance"]),
            *(suspect["gpu_uuid"], str(number_of_rank), event["check"]),
        )
        yield series(MISMATCHES, zip(METRICS[MISMATCHES].all_labels, labels, strict=True))


def _labels(event: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The exemplar's labels, the most useful first; one that would pass the limit is left out."""
    evidence = event.get("evidence")
    facts: Mapping[str, Any] = evidence if isinstance(evidence, Mapping) else {}
    kept: list[tuple[str, str]] = []
    left = EXEMPLAR_CHARACTERS
    for name, value in (
        ("event", event["id"]),
        ("step", event["step"]),
        ("digest", _digest(facts)),
        ("bucket", facts.get("bucket")),
        ("parameter", facts.get("first_parameter")),
        ("drill", "true" if event.get("drill") is not False else None),
    ):
        text = "" if value is None else str(value)
        if text and len(name) + len(text) <= left:
            left -= len(name) + len(text)
            kept.append((name, text))
    return tuple(kept)


def _digest(evidence: Mapping[str, Any]) -> str | None:
    """The digest that is not the majority's: of the reduced gradient, of the state, or of the replayed gradient."""
    with contextlib.suppress(KeyError, TypeError, IndexError):
        return str(evidence["edges"][0]["self"])
    groups: list[Sequence[Any]] = [evidence.get("reduced", ())]
    values = evidence.get("values")
    groups += list(values.values()) if isinstance(values, Mapping) else []
    for spread in groups:
        with contextlib.suppress(KeyError, TypeError, IndexError):
            return str(spread[1]["value"])
    return None
