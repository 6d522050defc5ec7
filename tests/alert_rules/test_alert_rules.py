"""The alert rules as promtool sees them, every case at two evaluation intervals, and what each alert must carry."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import tomllib
import yaml
from sdcwatch.cli import COMMANDS
from sdcwatch_remediation import cli as remediation

HERE = Path(__file__).parent
RULES = HERE.parents[1] / "alert_rules"
RULE_FILES = sorted(RULES.glob("*.rules.yaml"))
CASE_FILES = sorted(HERE.glob("*.test.yaml"))
RUNBOOK_BASE = tomllib.loads((RULES / "settings.toml").read_text())["names"]["runbook_base"]
SECTIONS = ["Meaning", "Impact", "Diagnosis", "Mitigation", "What remediation does"]
#: Alerts whose value is, or whose annotation looks up, the time of what happened.
WITH_EVENT_TIME = {
    "SDCReplicaMismatch",
    "SDCRepeatOffender",
    "SDCUnattributedMismatch",
    "SDCTrainingStalled",
    "SDCCorrelatedHardwareError",
}
#: What Prometheus 2.42 does not have.
TOO_NEW = re.compile(r"\b(info|limitk|limit_ratio|mad_over_time|double_exponential_smoothing|sort_by_label)\s*\(")


def alerts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in RULE_FILES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            found += [rule for rule in group["rules"] if "alert" in rule]
    return found


NAMES = sorted({rule["alert"] for rule in alerts()})


def test_promtool_accepts_every_rule_file(require: Callable[[str], Path]) -> None:
    """Prometheus would load all rule files."""
    subprocess.run([require("promtool"), "check", "rules", *RULE_FILES], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("interval", ["5s", "60s"])
@pytest.mark.parametrize("cases", CASE_FILES, ids=lambda path: path.name.removesuffix(".test.yaml"))
def test_cases_hold_at_both_evaluation_intervals(
    cases: Path, interval: str, require: Callable[[str], Path], tmp_path: Path
) -> None:
    """promtool ignores a group's own interval, so each case runs as a fast and as a slow Prometheus would see it."""
    text, changed = re.subn(r"(?m)^evaluation_interval: \S+$", f"evaluation_interval: {interval}", cases.read_text())
    assert changed == 1
    text = text.replace("../../alert_rules/", f"{RULES}/")
    copy = tmp_path / cases.name
    copy.write_text(text)
    done = subprocess.run([require("promtool"), "test", "rules", copy], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_has_a_silent_and_a_firing_case(name: str) -> None:
    """An alert without both kinds of case could fire always, or never, and nobody would know."""
    counts = [
        len(case["exp_alerts"])
        for path in CASE_FILES
        for test in yaml.safe_load(path.read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["alertname"] == name
    ]
    assert any(counts), "no case in which it fires"
    assert not all(counts) or name == "SDCWatchdog", "no case in which it is silent"


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: f"{rule['alert']}-{rule['labels']['severity']}")
def test_every_alert_carries_what_a_page_needs(rule: dict[str, Any]) -> None:
    """Labels and annotations of the contract, and a runbook link that follows from the alert's name."""
    assert rule["alert"].startswith("SDC")
    assert rule["labels"]["category"] == "sdc"
    assert rule["labels"]["severity"] in {"critical", "warning", "info", "none"}
    expected = {"summary", "description", "runbook_url"}
    if rule["alert"] in WITH_EVENT_TIME:
        expected.add("event_time")
    assert set(rule["annotations"]) == expected
    assert rule["annotations"]["runbook_url"] == f"{RUNBOOK_BASE}/{rule['alert']}.md"
    assert not TOO_NEW.search(rule["expr"]), "needs a Prometheus newer than 2.42"
    assert not re.search(r"\b(job|instance|node|pod|namespace)=(?!\"sdcwatch)", rule["expr"]), "a scrape config's label"


def test_clocks_are_looked_at_four_times_a_minute_however_slow_other_rules_are() -> None:
    """One age a minute may lie between two nodes' scrapes of the same step, which looks like a clock that is behind."""
    groups = [group for path in RULE_FILES for group in yaml.safe_load(path.read_text())["groups"]]
    (clock,) = (group for group in groups if any(rule.get("alert") == "SDCClockSkew" for rule in group["rules"]))
    assert clock["interval"] == "15s"


def test_only_the_page_names_no_waiting_time() -> None:
    """A `for:` on the rules that carry an event's own time would be pure latency."""
    for rule in alerts():
        if rule["alert"] in {"SDCReplicaMismatch", "SDCUnattributedMismatch", "SDCRepeatOffender"}:
            assert "for" not in rule


def test_each_alert_has_one_runbook_and_each_runbook_an_alert() -> None:
    """No page leads nowhere, and no runbook outlives its alert."""
    assert sorted(path.stem for path in (RULES / "runbooks").glob("*.md")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_runbook_has_its_five_sections_in_order(name: str) -> None:
    """Whoever is woken finds the same five headings everywhere, and something under each."""
    text = (RULES / "runbooks" / f"{name}.md").read_text()
    assert text.startswith(f"# {name}\n")
    parts = re.split(r"(?m)^## (.+)$", text)
    assert parts[1::2] == SECTIONS
    for section, body in zip(parts[1::2], parts[2::2], strict=True):
        assert len(body.split()) >= 8, f"{section} says nothing"


#: Programs of a runbook, and what it may ask of other machines.
PROGRAMS = {"sdcwatch", "sdcwatch-remediation", "promtool", "amtool", "curl"}
ELSEWHERE = {"chronyc", "timedatectl", "nvidia-smi", "py-spy"}


def runbook_commands() -> list[tuple[str, list[str]]]:
    """(runbook, words) of every code span that is a command."""
    return [
        (path.stem, shlex.split(span))
        for path in sorted((RULES / "runbooks").glob("*.md"))
        for span in re.findall(r"`([^`\n]+)`", path.read_text())
        if span.split()[0] in PROGRAMS | ELSEWHERE
    ]


def test_every_span_of_several_words_is_a_command_or_code() -> None:
    """A program that the live test does not know would never be tried."""
    for path in sorted((RULES / "runbooks").glob("*.md")):
        for span in re.findall(r"`([^`\n]+)`", path.read_text()):
            first = span.split()[0]
            known = first in PROGRAMS | ELSEWHERE or " " not in span or re.match(r"\w+ = \w+$", span)
            assert known, f"{path.name}: {span}"


@pytest.mark.parametrize(("name", "words"), runbook_commands(), ids=lambda value: " ".join(value)[:60])
def test_runbook_commands_have_real_words_and_options(name: str, words: list[str]) -> None:
    """A command or option that was renamed, or a query with a slip, is found here and not at three in the morning."""
    if words[0] == "sdcwatch":
        parser = argparse.ArgumentParser(exit_on_error=False)
        importlib.import_module(COMMANDS[words[1]][0]).add_arguments(parser)
        parser.parse_args(words[2:])
    elif words[0] == "sdcwatch-remediation":
        remediation._parser().parse_args(words[1:])
    elif words[:2] == ["promtool", "query"]:
        promql_parser.parse(words[4])


def test_every_placeholder_of_a_runbook_is_explained() -> None:
    """Words in capitals stand for something that whoever is woken must look up; the table says where."""
    used = {
        word
        for name, words in runbook_commands()
        for word in re.findall(r"(?<![\w$])[A-Z]{2,}(?:_[A-Z]+)*(?![\w{(])", " ".join(words))
        if word not in {"ALERTS", "DCGM_FI_DEV_XID_ERRORS"}
    }
    section = (HERE.parents[1] / "docs" / "alerting.md").read_text().split("## The commands of the runbooks")[1]
    explained = set(re.findall(r"`([A-Z_]+)`", section.split("\n## ")[0]))
    assert used == explained
