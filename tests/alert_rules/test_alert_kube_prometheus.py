"""The package in a configuration as kube-prometheus ships it: what changes without our branch, and with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

HERE = Path(__file__).parent
RULES = HERE.parents[1] / "alert_rules"
VANILLA = HERE / "kube_prometheus" / "alertmanager.yaml"
Require = Callable[[str], Path]
NAMESPACE = "namespace=sdcwatch"


@cache
def merged() -> str:
    done = subprocess.run(
        [sys.executable, RULES / "build.py", "--into", VANILLA], check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout


def route(amtool: Path, config: Path, *labels: str) -> str:
    done = subprocess.run(
        [amtool, "config", "routes", "test", f"--config.file={config}", *labels],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "merged.yaml"
    path.write_text(merged())
    return path


def alerts() -> list[tuple[str, str]]:
    tree = yaml.safe_load((RULES / "kubernetes" / "prometheus-rule.yaml").read_text())
    rules = [rule for group in tree["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    return [(rule["alert"], rule["labels"]["severity"]) for rule in rules]


def ours(name: str, severity: str) -> list[str]:
    return ["category=sdc", NAMESPACE, f"alertname={name}", f"severity={severity}", "training_job=gpt"]


def test_without_the_branch_a_page_is_late_and_automation_hears_nothing(require: Require) -> None:
    """Critical alerts go to Critical after half a minute, grouped by namespace; everything else to Default."""
    amtool = require("amtool")
    assert route(amtool, VANILLA, *ours("SDCReplicaMismatch", "critical")) == "Critical"
    assert route(amtool, VANILLA, *ours("SDCWatchdog", "none")) == "Default"
    assert route(amtool, VANILLA, *ours("SDCChecksSkipped", "warning")) == "Default"
    tree = yaml.safe_load(VANILLA.read_text())["route"]
    assert (tree["group_wait"], tree["group_by"], tree["group_interval"]) == ("30s", ["namespace"], "5m")


def test_the_merged_configuration_loads(config: Path, require: Require) -> None:
    """Alertmanager would take it."""
    subprocess.run([require("amtool"), "check-config", config], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(("name", "severity"), alerts(), ids=str)
def test_with_the_branch_each_of_our_alerts_reaches_our_receivers(
    name: str, severity: str, config: Path, require: Require
) -> None:
    """The same receivers as in the configuration that ships, under our prefix, and no receiver of theirs."""
    amtool = require("amtool")
    shipped = route(amtool, RULES / "alertmanager.yaml", *ours(name, severity))
    expected = ",".join(f"sdcwatch-{receiver}" for receiver in shipped.split(","))
    assert route(amtool, config, *ours(name, severity)) == expected


@pytest.mark.parametrize(
    "labels",
    [
        ["alertname=Watchdog", "severity=none"],
        ["alertname=InfoInhibitor", "severity=none", "namespace=training"],
        ["alertname=KubeNodeNotReady", "severity=warning"],
        ["alertname=etcdNoLeader", "severity=critical"],
        ["alertname=TrainingLossSpike", "severity=critical", "training_job=gpt"],
    ],
    ids=lambda labels: labels[0].partition("=")[2],
)
def test_with_the_branch_their_alerts_go_where_they_went(labels: list[str], config: Path, require: Require) -> None:
    """An import must not move anybody's page."""
    amtool = require("amtool")
    before = route(amtool, VANILLA, *labels)
    assert before
    assert route(amtool, config, *labels) == before


def test_the_merge_adds_and_rewrites_only_what_it_says() -> None:
    """Their routes, receivers and settings are still there, in order; two inhibitions compare more labels."""
    before, after = yaml.safe_load(VANILLA.read_text()), yaml.safe_load(merged())
    assert after["global"] == before["global"]
    assert after["route"]["routes"][1:] == before["route"]["routes"]
    assert {k: v for k, v in after["route"].items() if k != "routes"} == {
        k: v for k, v in before["route"].items() if k != "routes"
    }
    assert after["receivers"][: len(before["receivers"])] == before["receivers"]
    for old, new in zip(before["inhibit_rules"], after["inhibit_rules"], strict=False):
        assert new["equal"][: len(old["equal"])] == old["equal"]
        assert ("training_job" in new["equal"]) == ("alertname" in old["equal"])


def test_a_second_merge_is_refused(config: Path) -> None:
    """The branch twice would deliver every alert twice."""
    command = [sys.executable, RULES / "build.py", "--into", config]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "already" in done.stderr


def test_their_scrape_labels_neither_split_the_page_nor_reach_it(tmp_path: Path, require: Require) -> None:
    """Two pods report one event with namespace, pod and container: one alert, at 30 s and 30 s."""
    manifest = yaml.safe_load((RULES / "kubernetes" / "prometheus-rule.yaml").read_text())
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump({"groups": manifest["spec"]["groups"]}))
    own = (
        'training_job="gpt",training_cluster="c1",training_node="n2",training_instance="i-2",gpu_uuid="GPU-2",'
        'rank="2",check="replay"'
    )
    theirs = 'job="sdcwatch",namespace="training",pod="agent-{0}",container="agent",instance="10.0.0.{0}:9478"'
    series: list[dict[str, Any]] = [
        {
            "series": f"sdc_last_mismatch_timestamp_seconds{{{own},{theirs.format(pod)}}}",
            "values": "_ _ 55 stale" if pod == 2 else "_ _ 55x20",
        }
        for pod in (2, 3)
    ]
    path = tmp_path / "cases.yaml"
    static = (
        'alertname="SDCReplicaMismatch",alertstate="firing",category="sdc",namespace="sdcwatch",severity="critical"'
    )
    labels = f"ALERTS{{{static},{own}}}"
    test = {
        "interval": "30s",
        "input_series": series,
        "promql_expr_test": [
            {"expr": 'ALERTS{alertname="SDCReplicaMismatch"}', "eval_time": "30s", "exp_samples": []},
            {"expr": 'ALERTS{alertname="SDCReplicaMismatch"}', "eval_time": "60s",
             "exp_samples": [{"labels": labels, "value": 1}]},
        ],
    }  # fmt: skip
    path.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "30s", "tests": [test]}))
    done = subprocess.run([require("promtool"), "test", "rules", path], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pod_monitor_gives_the_job_name_that_the_rules_read() -> None:
    """A PodMonitor names its job `namespace/name` unless it is relabelled, and `up` is read by the job's name."""
    settings = tomllib.loads((RULES / "settings.toml").read_text())
    monitor = yaml.safe_load((HERE.parents[1] / "deploy" / "kubernetes" / "pod-monitor.yaml").read_text())
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        names = [r["replacement"] for r in endpoint["relabelings"] if r["targetLabel"] == "job"]
        assert names == [settings["names"]["agent_job"]]
