"""Where each alert goes: alertmanager.yaml and prometheus.yaml as amtool and promtool read them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

RULES = Path(__file__).parents[2] / "alert_rules"
CONFIG = RULES / "alertmanager.yaml"
Require = Callable[[str], Path]


def load() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    return document


def rule_labels() -> list[tuple[str, str]]:
    """(alert name, severity) of every rule that alerts."""
    return [
        (rule["alert"], rule["labels"]["severity"])
        for path in sorted(RULES.glob("*.rules.yaml"))
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]


def expected_receivers(name: str, severity: str) -> str:
    if name == "SDCReplicaMismatch":
        return "automation,page"
    if name == "SDCDrill":
        return "automation"
    if name == "SDCWatchdog":
        return "watchdog"
    if name in {"SDCUnattributedMismatch", "SDCTrainingStalled"}:
        return "job-owner"
    return "page" if severity == "critical" else "tickets"


def test_amtool_accepts_the_configuration(require: Require) -> None:
    """Alertmanager would load the file."""
    subprocess.run([require("amtool"), "check-config", CONFIG], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(("name", "severity"), rule_labels(), ids=str)
def test_each_alert_reaches_its_receivers_and_no_other(name: str, severity: str, require: Require) -> None:
    """Only an attributed mismatch rings automation's doorbell; what names nobody goes to the job's owner."""
    labels = ["category=sdc", f"alertname={name}", f"severity={severity}", "training_job=gpt"]
    done = subprocess.run(
        [
            require("amtool"), "config", "routes", "test", f"--config.file={CONFIG}",
            f"--verify.receivers={expected_receivers(name, severity)}", *labels,
        ],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_alert_that_only_borrows_our_name_does_not_reach_automation(require: Require) -> None:
    """A rule of somebody else's without our category is a ticket."""
    done = subprocess.run(
        [
            require("amtool"), "config", "routes", "test", f"--config.file={CONFIG}", "--verify.receivers=tickets",
            "alertname=SDCReplicaMismatch", "severity=critical",
        ],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_automation_gets_each_alert_at_once_and_hears_when_it_resolves() -> None:
    """Grouping would hide the second node of a job behind the first one's interval."""
    route = next(route for route in load()["route"]["routes"] if route["receiver"] == "automation")
    assert (route["group_by"], route["group_wait"], route["continue"]) == (["..."], "0s", True)
    hook = next(r for r in load()["receivers"] if r["name"] == "automation")["webhook_configs"][0]
    assert hook["send_resolved"] is True
    assert hook["http_config"]["authorization"] == {"type": "Bearer", "credentials_file": "secrets/webhook.token"}


def test_the_page_is_one_a_node() -> None:
    """Eight GPUs of one node are one page, two nodes are two."""
    route = next(route for route in load()["route"]["routes"] if route["receiver"] == "page")
    assert route["group_by"] == ["training_cluster", "training_instance"]


def seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


def test_hints_wait_long_enough_to_be_inhibited() -> None:
    """An inhibited alert that had already been sent would be noise: its route waits ten seconds or more."""
    root = load()["route"]
    tickets = [route for route in root["routes"] if route["receiver"] == "tickets"]
    assert all(seconds(route["group_wait"]) >= 10 for route in [root, *tickets])


def test_inhibition_never_matches_on_a_label_that_both_sides_lack() -> None:
    """A label missing on both sides counts as equal, so both sides must have the job."""
    for rule in load()["inhibit_rules"]:
        assert 'training_job!=""' in rule["source_matchers"]
        assert 'training_job!=""' in rule["target_matchers"]
        assert "training_job" in rule["equal"]


def test_prometheus_finds_the_rules_and_the_agents(require: Require) -> None:
    """promtool loads the configuration with its rule and target files, from the folder it lies in."""
    done = subprocess.run(
        [require("promtool"), "check", "config", RULES / "prometheus.yaml"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("rules found") == len(list(RULES.glob("*.rules.yaml")))


def test_an_event_reaches_the_webhook_in_ten_seconds_at_worst() -> None:
    """Scrape and evaluation of five seconds each leave two seconds for the rest of the path."""
    settings = yaml.safe_load((RULES / "prometheus.yaml").read_text())["global"]
    assert seconds(settings["scrape_interval"]) + seconds(settings["evaluation_interval"]) <= 10
