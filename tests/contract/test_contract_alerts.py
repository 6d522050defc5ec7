"""What rules, routes, dashboards, runbooks and documents say about metrics and alerts, held against the catalogues."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from sdcwatch import catalog as exported
from sdcwatch_remediation import catalog as service
from sdcwatch_remediation.states import STATES

ROOT = Path(__file__).parents[2]
METRIC = re.compile(r"(?<![\w./-])sdc_[a-z0-9_]+")
SELECTOR = re.compile(r"(?<![\w./-])(sdc_[a-z0-9_]+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r"(\w+)\s*(=~|!~|!=|=)\s*\\?\"([^\"\\]*)\\?\"|(\w+)=%q")
RECORDED = re.compile(r"[a-z_]+:sdc_[a-z0-9_]+:[a-z0-9_]+")
#: Labels that a scrape adds, and that rules may use on `up` and on the service's metrics.
SCRAPED = {"job", "instance"}
SERVICE = {metric.name: metric for metric in service.CATALOG}
KNOWN = set(exported.METRICS) | set(SERVICE)


def places() -> Iterator[Path]:
    for pattern in (
        "alert_rules/*.yaml", "alert_rules/*/**/*.yaml", "alert_rules/runbooks/*.md", "dashboards/*.json",
        "dashboards/*.py", "docs/**/*.md", "*.md", "*/README.md", "compose.yaml",
    ):  # fmt: skip
        yield from sorted(ROOT.glob(pattern))


def every_rule() -> list[dict[str, Any]]:
    return [
        rule
        for path in sorted((ROOT / "alert_rules").glob("*.rules.yaml"))
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]


def rules() -> list[dict[str, Any]]:
    """Those that alert."""
    return [rule for rule in every_rule() if "alert" in rule]


def recorded() -> dict[str, str]:
    """Expression by name of what is recorded."""
    return {rule["record"]: rule["expr"] for rule in every_rule() if "record" in rule}


def contract() -> str:
    return (ROOT / "docs" / "contracts.md").read_text().split("## Alert labels")[1].split("\n## ")[0]


@pytest.mark.parametrize("path", list(places()), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_metric_that_is_named_is_exported(path: Path) -> None:
    """A name that no catalogue has is a panel without data or a rule that never fires."""
    # A trailing underscore speaks of a family of names, as in `sdc_remediation_*`.
    names = {name for name in METRIC.findall(path.read_text()) if not name.endswith("_")}
    unknown = names - KNOWN
    assert not unknown


def test_what_is_recorded_is_named_by_level_metric_and_operation_and_is_asked_for() -> None:
    """A name that nothing records is a rule that never fires, or a text that goes to all ranks for every page."""
    texts = (text for rule in rules() for text in (rule["expr"], *rule["annotations"].values()))
    assert {name for text in texts for name in RECORDED.findall(text)} == set(recorded())
    for name, expr in recorded().items():
        level, metric, operation = name.split(":")
        assert metric in exported.METRICS
        assert metric in expr
        if level == "training_job":
            assert expr == f"{operation} by (training_job, training_cluster) ({metric})"
        else:
            assert level in {"training_node", "rank"}
        assert f"`{name}`" in (ROOT / "docs" / "alerting.md").read_text()


def test_an_expression_asks_only_for_what_its_own_group_has_recorded_before() -> None:
    """Groups are loaded one by one, and rules of a group run in order: another group's series may not be there."""
    for path in sorted((ROOT / "alert_rules").glob("*.rules.yaml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            before: set[str] = set()
            for rule in group["rules"]:
                asked = set(RECORDED.findall(rule["expr"]))
                assert asked <= before, f"{rule.get('alert') or rule['record']} asks for {sorted(asked - before)}"
                if "record" in rule:
                    before.add(rule["record"])


#: Families that have a series only where something was found.
ONLY_FOUND = {"sdc_last_mismatch_timestamp_seconds", "sdc_mismatches_total"}


def ranged(expr: str) -> Iterator[str]:
    """What each range of an expression ranges over: a selector, or all of a subquery."""
    for match in re.finditer(r"\[[^\]]+\]", expr):
        before = expr[: match.start()].rstrip()
        if before.endswith("}"):
            before = before[: before.rindex("{")]
        if not before.endswith(")"):
            yield re.findall(r"[\w:]+$", before)[0]
            continue
        depth, begin = 0, len(before)
        while depth or begin == len(before):
            begin -= 1
            depth += {")": 1, "(": -1}.get(before[begin], 0)
        yield before[begin:]


@pytest.mark.parametrize("rule", every_rule(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_no_rule_ranges_over_a_series_of_every_rank(rule: dict[str, Any]) -> None:
    """16,384 ranks by an hour of samples are seconds an evaluation: the group would be late, for all its rules.

    What is recorded may look back for some minutes.
    """
    if "record" in rule:
        assert set(re.findall(r"\[([^\]]*)\]", rule["expr"])) <= {"6m"}
        return
    of_every_rank = {name for name, metric in exported.METRICS.items() if metric.scope == "rank"} - ONLY_FOUND
    for inside in ranged(rule["expr"]):
        assert not of_every_rank & set(re.findall(r"[\w:]+", inside)), inside


def test_ranges_are_found_in_selectors_and_in_subqueries() -> None:
    """So that the test above can fail."""
    expr = 'increase(a{b="c"}[5m]) > max_over_time((max by (x) (d) > 0)[10m:15s]) + e:f:g[1h] offset 2m'
    assert list(ranged(expr)) == ["a", "(max by (x) (d) > 0)", "e:f:g"]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: f"{rule['alert']}-{rule['labels']['severity']}")
def test_every_selector_uses_labels_and_values_that_exist(rule: dict[str, Any]) -> None:
    """A misspelt label or state selects nothing, and the rule stays silent for ever."""
    text = rule["expr"] + " ".join(rule["annotations"].values())
    for name, inside in SELECTOR.findall(text):
        if name in exported.METRICS:
            metric = exported.METRICS[name]
            labels, enums = set(metric.all_labels), dict(metric.enums)
        else:
            labels, enums = set(SERVICE[name].labels), {}
        for label, _, values, templated in MATCHER.findall(inside):
            assert (label or templated) in labels | SCRAPED, f"{name} has no label {label or templated}"
            if label in enums:
                assert set(values.split("|")) <= set(enums[label]), f"{name}{{{label}}} is never {values}"


def test_the_page_carries_the_labels_of_the_contract() -> None:
    """Remediation refuses a doorbell without its identity labels, so the rule must aggregate by exactly those."""
    page = next(rule for rule in rules() if rule["alert"] == "SDCReplicaMismatch")
    by = re.search(r"by \(([^)]*)\)", page["expr"])
    assert by is not None
    carried = {label.strip() for label in by.group(1).split(",")} | {"alertname", *page["labels"]}
    promised = set(re.findall(r"`([a-z_]+)(?:=\"sdc\")?`", contract().split("annotations")[0]))
    assert carried == promised
    assert set(page["annotations"]) == set(re.findall(r"`([a-z_]+)`", contract().split("annotations")[1].split(".")[0]))
    assert carried - {"alertname", "category", "severity"} == set(
        exported.METRICS["sdc_last_mismatch_timestamp_seconds"].all_labels
    )


def test_automation_hears_only_of_alerts_that_name_a_rank_and_of_drills() -> None:
    """The routes' alerts are the ones whose labels the contract describes."""
    routes = yaml.safe_load((ROOT / "alert_rules" / "alertmanager.yaml").read_text())["route"]["routes"]
    automation = [route for route in routes if route["receiver"] == "automation"]
    assert [route["matchers"] for route in automation] == [
        ['category="sdc"', f'alertname="{name}"'] for name in ("SDCReplicaMismatch", "SDCDrill")
    ]
    assert ["continue" in route for route in automation] == [True, False], "a drill must go nowhere else"


def test_state_deadlines_of_the_stuck_alert_cover_every_open_state() -> None:
    """A state that the rule forgets can hold a case for ever unseen; `frozen` has an alert of its own."""
    stuck = next(rule for rule in rules() if rule["alert"] == "SDCRemediationStuck")
    named = {
        state for _, states in re.findall(r"state(=~|=)\"([^\"]+)\"", stuck["expr"]) for state in states.split("|")
    }
    open_states = {name for name, state in STATES.items() if state.kind != "terminal"}
    assert open_states - named <= {"frozen", "observed"}
    assert named <= open_states
