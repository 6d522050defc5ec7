"""A drill between the parts: what a node writes, what the rule makes of it, and what the service answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from sdcwatch import catalog as exported
from sdcwatch.agent.node import Node
from sdcwatch.doctor import drill as drills
from sdcwatch.doctor.node_checks import NodeView
from sdcwatch.doctor.path_checks import NEEDED, SCRAPE_JOB, drill_labels
from sdcwatch.settings import Settings
from sdcwatch.spool.folders import prepare_user_root
from sdcwatch.spool.reader import read_events
from sdcwatch_remediation import catalog as service
from sdcwatch_remediation import signals
from sdcwatch_remediation.alertmanager import Alert
from sdcwatch_remediation.evidence import read_event

ROOT = Path(__file__).parents[2]
NODE = Node("blue", "hyperpod-i-0123456789abcdef0", "i-0123456789abcdef0", "host")


def rules() -> dict[str, dict[str, Any]]:
    return {
        rule["alert"]: rule
        for path in sorted((ROOT / "alert_rules").glob("*.rules.yaml"))
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }


def test_the_service_takes_the_rules_labels_for_a_drill_and_opens_nothing() -> None:
    """Exactly the labels that the rule keeps of the exported series, and a forged id is no drill."""
    rule = rules()[signals.DRILL]
    by = re.search(r"by \(([^)]*)\)", rule["expr"])
    assert by is not None
    kept = {label.strip() for label in by.group(1).split(",")}
    assert kept == set(exported.METRICS[drills.METRIC].all_labels)
    labels = {"alertname": rule["alert"], **rule["labels"]}
    labels |= {label: value for label, value in drill_labels(NODE).items() if label in kept}
    assert labels == drill_labels(NODE)
    answer = signals.derive(Alert(0, "firing", labels, ""), "blue")
    assert isinstance(answer, signals.NoSignal)
    assert (answer.result, answer.drill) == ("drill", "00000000")
    forged = signals.derive(Alert(0, "firing", {**labels, "drill": "0000000"}, ""), "blue")
    assert isinstance(forged, signals.NoSignal)
    assert forged.result == "rejected"


def test_names_of_both_sides_are_the_same() -> None:
    """Alert names, metric names and job names stand in two packages that never import each other."""
    assert signals.DRILL == drills.ALERT
    assert drills.ARRIVED in {metric.name for metric in service.CATALOG}
    assert set(NEEDED) <= rules().keys()
    assert f'agent_job = "{SCRAPE_JOB}"' in (ROOT / "alert_rules" / "settings.toml").read_text()


def test_the_service_reads_a_drills_event_and_sees_that_it_is_one(tmp_path: Path) -> None:
    """The event that the doctor wrote is whole, so what refuses it is the mark alone."""
    settings = Settings(spool_dir=str(tmp_path / "spool"))
    root = prepare_user_root(settings.spool_dir)
    sent = drills.send(settings, NodeView(root, NODE, None, None))
    (line,), _ = read_events(root)
    event = read_event(line)
    assert (event.id, event.drill) == (sent.event_id, True)
    assert line["detail"] == {"drill": sent.id}
    assert line["event"]["epoch"].endswith(f"-{sent.id}")
