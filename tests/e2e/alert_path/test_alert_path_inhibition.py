"""A real Alertmanager decides: which alert hides which, and which it must leave alone."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from alertpath.programs import ROOT, RULES, fetch, wait

pytestmark = [pytest.mark.integration, pytest.mark.needs("alertmanager")]
VANILLA = ROOT / "tests" / "alert_rules" / "kube_prometheus" / "alertmanager.yaml"
CRITICAL = {"alertname": "SDCReplicaMismatch", "category": "sdc", "severity": "critical", "training_cluster": "c1"}


def merged() -> Any:
    command = [sys.executable, str(RULES / "build.py"), "--into", str(VANILLA)]
    return yaml.safe_load(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


def states(url: str, *alerts: dict[str, str]) -> list[str]:
    """`active` or `suppressed` for each of these alerts, fired in the given order."""
    for labels in alerts:
        assert fetch(f"{url}/api/v2/alerts", [{"labels": labels, "annotations": {}}]) is not None

    def known() -> Any:
        found = {tuple(sorted(a["labels"].items())): a["status"]["state"] for a in fetch(f"{url}/api/v2/alerts") or ()}
        told = [found.get(tuple(sorted(labels.items()))) for labels in alerts]
        return told if None not in told and "unprocessed" not in told else None

    first: list[str] = wait("Alertmanager has judged all alerts", known, 20)
    assert known() == first
    return first


def generic(**labels: str) -> dict[str, str]:
    return {"alertname": "TrainingLossSpike", "severity": "warning", **labels}


@pytest.mark.parametrize("tree", ["shipped", "merged into kube-prometheus"])
def test_a_proven_corruption_hides_loss_alerts_of_its_own_job_alone(
    tree: str, routed: Callable[[Any], tuple[str, Any]]
) -> None:
    """Same job: hidden. Another job, no job on either side, another kind of alert: not hidden."""
    config = merged() if tree.startswith("merged") else yaml.safe_load((RULES / "alertmanager.yaml").read_text())
    url, _ = routed(config)
    found = states(
        url,
        {**CRITICAL, "training_job": "gpt", "training_instance": "i-2"},
        generic(training_job="gpt"),
        {"alertname": "GradientNaN", "severity": "critical", "training_job": "gpt"},
        generic(training_job="bert"),
        generic(),
        {"alertname": "SDCRemediationDown", "category": "sdc", "severity": "critical", "instance": "s"},
        {"alertname": "PodRestarts", "severity": "warning", "training_job": "gpt"},
        {"alertname": "SDCGradientNormOutlier", "category": "sdc", "severity": "warning", "training_cluster": "c1",
         "training_job": "gpt", "rank": "2"},
        {"alertname": "SDCGradientNormOutlier", "category": "sdc", "severity": "warning", "training_cluster": "c1",
         "training_job": "bert", "rank": "2"},
    )  # fmt: skip
    assert found == [
        "active", "suppressed", "suppressed", "active", "active", "active", "active", "suppressed", "active",
    ]  # fmt: skip


def test_a_loss_alert_never_hides_the_page(routed: Callable[[Any], tuple[str, Any]]) -> None:
    """Whatever fired first and however critical it is."""
    url, _ = routed(yaml.safe_load((RULES / "alertmanager.yaml").read_text()))
    loss = {**generic(training_job="gpt"), "severity": "critical"}
    assert states(url, loss) == ["active"]
    page = {**CRITICAL, "training_job": "gpt", "training_instance": "i-2"}
    assert states(url, page, loss) == ["active", "suppressed"]


def unattributed(job: str, severity: str) -> dict[str, str]:
    return {
        "alertname": "SDCUnattributedMismatch", "category": "sdc", "severity": severity, "namespace": "sdcwatch",
        "training_job": job, "training_cluster": "c1", "check": "gradient_checksum", "verdict": "inconclusive",
    }  # fmt: skip


def test_what_kube_prometheus_changes_and_the_merge_puts_right(routed: Callable[[Any], tuple[str, Any]]) -> None:
    """Its inhibition hides job B's warning behind job A's critical alert; merged, only A's own. Its own pairs stay."""
    alerts = [unattributed("a", "critical"), unattributed("a", "warning"), unattributed("b", "warning")]
    theirs = [
        {"alertname": "NodeClock", "severity": severity, "namespace": "monitoring"}
        for severity in ("critical", "warning")
    ]
    url, _ = routed(yaml.safe_load(VANILLA.read_text()))
    assert states(url, *alerts, *theirs) == ["active", "suppressed", "suppressed", "active", "suppressed"]
    url, _ = routed(merged())
    assert states(url, *alerts, *theirs) == ["active", "suppressed", "active", "active", "suppressed"]


def test_its_info_inhibitor_goes_on_hiding_our_info_alerts(routed: Callable[[Any], tuple[str, Any]]) -> None:
    """As it does with everybody's: an info alert alone in its namespace is not worth a notification there."""
    url, _ = routed(merged())
    info = {"alertname": "SDCOverheadHigh", "category": "sdc", "severity": "info", "namespace": "sdcwatch"}
    inhibitor = {"alertname": "InfoInhibitor", "severity": "none", "namespace": "sdcwatch"}
    assert states(url, inhibitor, info) == ["active", "suppressed"]


def test_a_hidden_alert_is_never_delivered_and_the_page_is(routed: Callable[[Any], tuple[str, Any]]) -> None:
    """Hints wait longer than the alert that explains them, so the first thing anybody hears of is the proof."""
    tree = yaml.safe_load((RULES / "alertmanager.yaml").read_text())
    url, pager = routed(tree)
    hint = {
        "alertname": "SDCNonFiniteLocalGradient", "category": "sdc", "severity": "warning", "training_cluster": "c1",
        "training_job": "gpt", "rank": "2",
    }  # fmt: skip
    states(url, hint, generic(training_job="gpt"), generic(training_job="bert"))
    page = {**CRITICAL, "training_job": "gpt", "training_instance": "i-2"}
    began = time.time()
    states(url, page)
    wait("the page arrives", lambda: pager.firing("page"), 20)
    wait("the other job's alert arrives", lambda: pager.firing("tickets", "TrainingLossSpike"), 40)
    wait("the hints' time is over", lambda: time.time() > began + 18, 40)
    assert [a.labels["training_job"] for a in pager.firing("tickets", "TrainingLossSpike")] == ["bert"]
    assert pager.firing("tickets", "SDCNonFiniteLocalGradient") == []
