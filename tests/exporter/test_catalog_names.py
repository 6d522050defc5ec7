"""The catalogue: names, labels and enums that Prometheus, the rules and the docs can rely on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from sdcwatch.catalog import ACCUSING_CHECKS, CHECKS, FORBIDDEN_LABELS, METRICS, SKIP_REASONS, Metric
from sdcwatch.observation import SkipReason

ROOT = Path(__file__).parents[2]
METRICS_LIST = list(METRICS.values())


@pytest.mark.parametrize("metric", METRICS_LIST, ids=lambda m: m.name)
def test_a_name_follows_the_conventions_of_its_kind(metric: Metric) -> None:
    """Counters end in _total, infos in _info, and a unit stands last but for _total."""
    assert re.fullmatch(r"sdc_[a-z][a-z0-9_]*", metric.name)
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert (metric.kind == "info") == metric.name.endswith("_info")
    assert not metric.name.endswith(("_created", "_count", "_sum", "_bucket"))
    for unit in ("seconds", "bytes"):
        assert (metric.unit == unit) == metric.name.removesuffix("_total").endswith("_" + unit)
    assert metric.help
    assert not metric.help.endswith(".")


@pytest.mark.parametrize("metric", METRICS_LIST, ids=lambda m: m.name)
def test_no_metric_exports_a_label_that_scrape_configs_own(metric: Metric) -> None:
    """A label called job, instance, node, pod or namespace would be renamed by Prometheus or lose ours."""
    assert not set(metric.all_labels) & set(FORBIDDEN_LABELS)
    assert len(set(metric.all_labels)) == len(metric.all_labels)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in metric.all_labels)
    assert not any(label.startswith("sdc_") for label in metric.all_labels)
    assert metric.enums.keys() <= set(metric.labels)


def test_step_and_digest_are_never_labels() -> None:
    """Values without bound would make a new series every step."""
    labels = {label for metric in METRICS_LIST for label in metric.all_labels}
    assert not labels & {"step", "epoch", "digest", "parameter", "bucket", "event_id"}


def test_enumerations_come_from_one_place() -> None:
    """Skip reasons are the row's own, and checks that accuse are checks."""
    assert SKIP_REASONS == SkipReason.NAMES
    assert set(ACCUSING_CHECKS) < set(CHECKS)
    assert METRICS["sdc_mismatches_total"].enums["check"] == ACCUSING_CHECKS


def test_the_metrics_page_is_generated_from_the_catalogue() -> None:
    """docs/metrics.md says exactly what the catalogue says."""
    done = subprocess.run(
        [sys.executable, ROOT / "docs/build_metrics.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_export_imports_without_torch_and_without_prometheus_client() -> None:
    """The agent's image has neither; both are blocked here and every module of this side still imports."""
    code = (
        "import sys\n"
        "for name in ('torch', 'prometheus_client', 'numpy'): sys.modules[name] = None\n"
        "import sdcwatch.catalog, sdcwatch.metrics, sdcwatch.event, sdcwatch.spool\n"
        "import sdcwatch.agent.command, sdcwatch.agent.start\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
