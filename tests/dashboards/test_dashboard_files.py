"""The committed dashboards: generated, well formed, and every query one that Prometheus would take."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import promql_parser
import pytest
import yaml

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
FILES = sorted(DASHBOARDS.glob("*.json"))
VARIABLES = {"job": "gpt", "datasource": "prometheus", "__rate_interval": "30s", "__interval": "5s", "__range": "3600s"}


@pytest.fixture(scope="module")
def queries() -> Iterator[ModuleType]:
    sys.path.insert(0, str(DASHBOARDS))
    try:
        import queries

        yield queries
    finally:
        sys.path.remove(str(DASHBOARDS))


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
def test_a_committed_dashboard_has_nothing_to_complain_about(path: Path, queries: ModuleType) -> None:
    """Ids, titles, units, descriptions, refIds, places and data sources are all there."""
    assert queries.lint(queries.load(path)) == []


def _schema(d: dict[str, Any]) -> None:
    d["schemaVersion"] = 27


def _inputs(d: dict[str, Any]) -> None:
    d["panels"][2]["datasource"] = "${DS_PROMETHEUS}"


def _null(d: dict[str, Any]) -> None:
    d["panels"][2]["targets"][0]["datasource"] = None


def _fixed(d: dict[str, Any]) -> None:
    d["templating"]["list"][1]["datasource"] = {"type": "prometheus", "uid": "P1809F7CD0C75ACF3"}


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
    d["panels"][3]["description"] = ""


def _overlap(d: dict[str, Any]) -> None:
    d["panels"][3]["gridPos"] = d["panels"][4]["gridPos"]


def _canvas(d: dict[str, Any]) -> None:
    d["panels"][3]["type"] = "canvas"


def _variable(d: dict[str, Any]) -> None:
    d["panels"][3]["targets"][0]["expr"] = 'sdc_training_step{training_job="$jobb"}'


@pytest.mark.parametrize(
    "spoil",
    [
        _schema, _inputs, _null, _fixed, _no_variable, _opacity, _twin, _no_ref, _no_unit, _mute, _overlap, _canvas,
        _variable,
    ],
)  # fmt: skip
def test_lint_finds_what_the_sdk_lets_pass(spoil: Callable[[dict[str, Any]], None], queries: ModuleType) -> None:
    """Each of these would load in Grafana and show nothing, or the wrong thing."""
    document = copy.deepcopy(json.loads(FILES[0].read_text()))
    spoil(document)
    assert queries.lint(document)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_query_is_valid_promql(
    path: Path, queries: ModuleType, require: Callable[[str], Path], tmp_path: Path
) -> None:
    """With variables filled in, each query parses here and in promtool of the oldest Prometheus we support."""
    found = list(queries.targets(queries.load(path), VARIABLES))
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
