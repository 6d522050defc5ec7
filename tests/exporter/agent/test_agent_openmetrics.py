"""OpenMetrics on /metrics: asked for by the scraper, read by the format's own parser, with exemplars that fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as text_families
from sdcwatch.agent import openmetrics
from sdcwatch.exposition import series

Make = Callable[..., Any]
#: What Prometheus 2.42 sends, and what 3.x sends.
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


def event(**changes: Any) -> dict[str, Any]:
    """An attributed event of job gpt that names rank 0 of node n0."""
    rank = {"rank": 0, "node": "n0", "instance": "i-0", "gpu_uuid": "GPU-0"}
    base = {
        "id": "sdc-0123456789abcdef", "training_job": "gpt", "training_cluster": "blue", "step": 1200,
        "check": "replay", "kind": "attributed", "time": 1764600000.25, "suspects": [0], "drill": False,
        "evidence": {"edges": [{"self": "00ff00ff00ff00ff"}], "first_parameter": 3}, "ranks": [rank],
    }  # fmt: skip
    return {**base, **changes}


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        (PROMETHEUS_2, True),
        (PROMETHEUS_3, True),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=0.0.1", False),
        ("application/openmetrics-text;version=1.0.0;q=0.2, text/plain;q=0.9", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=x", False),
    ],
)
def test_only_a_scraper_that_prefers_it_gets_openmetrics(accept: str | None, wanted: bool) -> None:
    """Both generations of Prometheus ask for it; a curl, a browser and old scrapers do not."""
    assert openmetrics.wanted(accept) is wanted


def test_the_same_samples_on_both_roads_and_the_event_as_exemplar(rank: Make, agent: Make) -> None:
    """The format's own parser reads it, every sample is in both, and the counter names its newest event."""
    one = rank(0)
    identity = {**one.identity}
    one.metrics.blame(identity, "replay", 1764600000.25)
    one.write()
    for each in (event(time=1764599000.0, step=7), event()):
        assert one.spool.append_event({"schema": 1, "event": each, "reporter": {}, "detail": {}})
    served = agent()
    plain = {s for f in text_families(served.metrics()) for s in map(_key, f.samples)}
    families = list(text_string_to_metric_families(served.metrics(Accept=PROMETHEUS_2)))
    samples = [sample for family in families for sample in family.samples]
    assert {_key(sample) for sample in samples} == plain
    (moved,) = [s for s in samples if s.exemplar is not None]
    assert (moved.name, moved.labels["rank"], moved.labels["check"]) == ("sdc_mismatches_total", "0", "replay")
    assert moved.exemplar.labels == {
        "event": "sdc-0123456789abcdef",
        "step": "1200",
        "digest": "00ff00ff00ff00ff",
        "parameter": "3",
    }
    assert float(moved.exemplar.timestamp) == pytest.approx(1764600000.25)
    assert "# {" not in served.metrics()


def _key(sample: Any) -> tuple[Any, ...]:
    # What the agent says of itself moves between two scrapes.
    value = 0 if sample.name.startswith("sdc_agent_") else sample.value
    return sample.name, tuple(sorted(sample.labels.items())), value


def test_an_event_that_names_nobody_marks_the_jobs_counter() -> None:
    """Inconclusive events are counted per job, so there the exemplar stands."""
    spread = [{"value": "aa" * 8, "num_ranks": 3}, {"value": "bb" * 8, "num_ranks": 1}]
    found = openmetrics.exemplars_of(
        [event(suspects=[], kind="inconclusive", check="gradient_checksum", evidence={"reduced": spread})], "gpt"
    )
    labels = ("training_job", "gpt"), ("training_cluster", "blue"), ("check", "gradient_checksum")
    text = series("sdc_unattributed_total", (*labels, ("verdict", "inconclusive")))
    assert dict(found[text].labels)["digest"] == "bb" * 8


@pytest.mark.parametrize("long", ["x" * 500, "é" * 120, '"' * 125, "\n\\"])
def test_no_exemplar_passes_the_formats_limit(long: str) -> None:
    """What does not fit is left out, and what remains is read back by the parser."""
    found = openmetrics.exemplars_of([event(id="sdc-1", evidence={"edges": [{"self": long}], "bucket": 4})], "gpt")
    ((text, exemplar),) = found.items()
    assert sum(len(name) + len(value) for name, value in exemplar.labels) <= openmetrics.EXEMPLAR_CHARACTERS
    rendered = openmetrics.render([("sdc_mismatches_total", text, 1.0)], found)
    (family,) = text_string_to_metric_families(rendered)
    assert family.samples[0].exemplar.labels["bucket"] == "4"


@pytest.mark.parametrize(
    "change",
    [
        {"training_job": "other"},
        {"time": "soon"},
        {"time": float("nan")},
        {"suspects": [9]},
        {"ranks": 3},
        {"suspects": None, "training_cluster": None, "check": None, "id": None, "ranks": None, "step": None},
    ],
)
def test_an_event_that_cannot_be_read_or_is_foreign_leaves_no_exemplar(change: dict[str, Any]) -> None:
    """A journal is somebody's file: what is odd in it must not end a scrape."""
    found = openmetrics.exemplars_of([event(**change)], "gpt")
    assert "replay" not in "".join(found)
