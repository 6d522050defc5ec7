"""The committed dashboards: generated, well formed, and every query one that Prometheus would take."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import promql_parser
import pytest
import yaml

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
FILES = sorted(DASHBOARDS.glob("*.json"))
VARIABLES = {
    "job": "gpt", "gpu": "GPU-1", "cluster": ".*", "agents": "sdcwatch", "dcgm_label": "UUID", "cases": "http://cases",
    "datasource": "prometheus", "__rate_interval": "30s", "__interval": "5s", "__range": "3600s", "__range_s": "3600",
}  # fmt: skip
JOB = DASHBOARDS / "training-job.json"


def build(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, folder / "build.py", *arguments], capture_output=True, text=True, timeout=60)


def test_the_committed_files_are_what_the_code_builds(require: Callable[[str], Path]) -> None:
    """A hand-edited file would be lost at the next build."""
    require("module:grafana_foundation_sdk")
    done = build(DASHBOARDS, "--check")
    assert done.returncode == 0, done.stderr


def test_check_notices_a_file_that_was_edited_by_hand(require: Callable[[str], Path], tmp_path: Path) -> None:
    """`build.py --check` says which file differs and what to run."""
    require("module:grafana_foundation_sdk")
    for path in [*DASHBOARDS.glob("*.py"), *FILES]:
        shutil.copy(path, tmp_path)
    edited = tmp_path / "training-job.json"
    edited.write_text(edited.read_text().replace("Overhead", "Overheads"))
    done = build(tmp_path, "--check")
    assert done.returncode == 1
    assert "training-job.json" in done.stderr
    assert "build.py" in done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_committed_dashboard_has_nothing_to_complain_about(path: Path, queries: ModuleType, lint: ModuleType) -> None:
    """Ids, titles, units, questions, refIds, places, data sources, links and bounded queries are all there."""
    assert lint.lint(queries.load(path)) == []


def test_every_link_leads_to_a_dashboard_that_exists() -> None:
    """Fleet, job and GPU lead on to each other by uid, and each carries range and data source along."""
    uids = {json.loads(path.read_text())["uid"] for path in FILES}
    urls = {url for path in FILES for url in re.findall(r'"url": "([^"]+)"', path.read_text())}
    inner = {url for url in urls if url.startswith("/d/")}
    assert {url.split("/")[2].split("?")[0] for url in inner} == {"sdcwatch-training-job", "sdcwatch-gpu"} <= uids
    assert all("${__url_time_range}" in url and "${datasource}" in url for url in inner)
    assert urls - inner == {"${cases}?instance=${__data.fields.training_instance:percentencode}"}


def test_dcgm_is_joined_by_uuid_alone() -> None:
    """dcgm-exporter's host labels are renamed by versions and scrape configs; no query may read or group by them."""
    document = json.loads((DASHBOARDS / "gpu.json").read_text())
    expressions = [t["expr"] for panel in document["panels"] for t in panel["targets"] if "DCGM" in t["expr"]]
    assert len(expressions) >= 12
    for expr in expressions:
        assert '{$dcgm_label="$gpu"}' in expr
        assert not re.search("hostname|instance|pod|namespace|node", expr, re.IGNORECASE)


def _schema(d: dict[str, Any]) -> None:
    d["schemaVersion"] = 27


def _inputs(d: dict[str, Any]) -> None:
    d["panels"][2]["datasource"] = "${DS_PROMETHEUS}"


def _null(d: dict[str, Any]) -> None:
    d["panels"][2]["targets"][0]["datasource"] = None


def _fixed(d: dict[str, Any]) -> None:
    variable = next(v for v in d["templating"]["list"] if v["type"] == "query")
    variable["datasource"] = {"type": "prometheus", "uid": "P1809F7CD0C75ACF3"}


def _no_variable(d: dict[str, Any]) -> None:
    del d["templating"]["list"][0]


def _opacity(d: dict[str, Any]) -> None:
    d["panels"][3]["fieldConfig"]["defaults"]["custom"]["fillOpacity"] = 900


def _twin(d: dict[str, Any]) -> None:
    d["panels"][3]["id"] = d["panels"][4]["id"]


def _no_ref(d: dict[str, Any]) -> None:
    del d["panels"][3]["targets"][0]["refId"]


def _no_unit(d: dict[str, Any]) -> None:
    d["panels"][3]["fieldConfig"]["defaults"]["unit"] = "furlongs"


def _mute(d: dict[str, Any]) -> None:
    d["panels"][3]["description"] = "A number."


def _overlap(d: dict[str, Any]) -> None:
    d["panels"][3]["gridPos"] = d["panels"][4]["gridPos"]


def _canvas(d: dict[str, Any]) -> None:
    d["panels"][3]["type"] = "canvas"


def _variable(d: dict[str, Any]) -> None:
    d["panels"][3]["targets"][0]["expr"] = 'sdc_training_step{training_job="$jobb"}'


def _unbounded(d: dict[str, Any]) -> None:
    d["panels"][3]["targets"][0]["expr"] = 'max by (rank) (sdc_training_step{training_job="$job"})'


def _unbounded_mark(d: dict[str, Any]) -> None:
    d["annotations"]["list"][0]["expr"] = "sdc_last_mismatch_timestamp_seconds"


def _many_points(d: dict[str, Any]) -> None:
    del d["panels"][3]["maxDataPoints"]


def _no_links(d: dict[str, Any]) -> None:
    d["links"] = []


@pytest.mark.parametrize(
    "spoil",
    [
        _schema, _inputs, _null, _fixed, _no_variable, _opacity, _twin, _no_ref, _no_unit, _mute, _overlap, _canvas,
        _variable, _unbounded, _unbounded_mark, _many_points, _no_links,
    ],
)  # fmt: skip
def test_lint_finds_what_the_sdk_lets_pass(spoil: Callable[[dict[str, Any]], None], lint: ModuleType) -> None:
    """Each of these would load in Grafana and show nothing, the wrong thing, or far too much."""
    document = copy.deepcopy(json.loads(JOB.read_text()))
    spoil(document)
    assert lint.lint(document)


@pytest.mark.parametrize(
    ("expr", "reason"),
    [
        ("sdc_gradient_norm", "rank"),
        ("max by (rank) (sdc_gradient_norm)", "one series for each rank"),
        ("max by (training_node) (sdc_step_seconds_total)", "training_node"),
        ("sum by (training_job) (sdc_world_size)", "training_job"),
        ("sum by (Hostname) (DCGM_FI_DEV_GPU_TEMP)", "Hostname"),
        ("up == 0", "aggregate it"),
        ("topk(10, max by (rank) (sdc_gradient_norm))", "@ end()"),
        ("topk(9999, max by (rank) (sdc_gradient_norm @ end()))", "more than anybody reads"),
        ("max by (rank) (sdc_gradient_norm) and on (rank) max by (rank) (sdc_training_step)", "rank"),
        ("time() - max by (rank) (sdc_last_step_timestamp_seconds)", "rank"),
        ('label_replace(max(sdc_world_size) by (training_job), "x", "$1", "training_job", "(.*)")', "training_job, x"),
        ("sum without (check) (sdc_mismatches_total)", "gpu_uuid"),
    ],
)
def test_a_query_that_grows_with_the_fleet_is_refused(expr: str, reason: str, bounds: ModuleType) -> None:
    """At 16,384 ranks such a panel would be a wall of lines, or a browser that hangs."""
    problems = bounds.unbounded(expr, instant=False)
    assert problems
    assert reason in " ".join(problems)


@pytest.mark.parametrize(
    "expr",
    [
        "max(sdc_gradient_norm)",
        "quantile by (check) (0.5, rate(sdc_check_seconds_total[5m]))",
        "max by (rank) (sdc_gradient_norm) and on (rank) topk(10, max by (rank) (sdc_gradient_norm @ end()))",
        'sdc_training_step{gpu_uuid="GPU-1"}',
        'max by (UUID) (DCGM_FI_DEV_GPU_TEMP{UUID="GPU-1"})',
        "sum by (outcome) (sdc_remediation_closed_cases)",
        "count by (alertname) (ALERTS)",
    ],
)
def test_a_query_that_stays_small_passes(expr: str, bounds: ModuleType) -> None:
    """Aggregated, pinned to one device, or limited by a pinned topk."""
    assert bounds.unbounded(expr, instant=False) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_query_is_valid_promql(
    path: Path, queries: ModuleType, require: Callable[[str], Path], tmp_path: Path
) -> None:
    """With variables filled in, each query parses here and in promtool of the oldest Prometheus we support."""
    document = queries.load(path)
    found = [*queries.targets(document, VARIABLES), *queries.marks(document, VARIABLES)]
    for target in found:
        promql_parser.parse(target.expr)
    rules = [{"record": f"panel:target{number}", "expr": target.expr} for number, target in enumerate(found)]
    file = tmp_path / "panels.rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": path.stem, "rules": rules}]}))
    done = subprocess.run(
        [require("promtool"), "check", "rules", "--lint=none", file], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_provisioning_names_no_fixed_data_source() -> None:
    """The data source has no uid that a dashboard could depend on, and the provider reads the mounted folder."""
    source = yaml.safe_load((DASHBOARDS / "provisioning" / "datasources" / "prometheus.yaml").read_text())
    assert all("uid" not in entry for entry in source["datasources"])
    provider = yaml.safe_load((DASHBOARDS / "provisioning" / "dashboards" / "sdcwatch.yaml").read_text())
    assert provider["providers"][0]["options"]["path"] == "/etc/sdcwatch/dashboards"
