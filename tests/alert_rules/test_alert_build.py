"""One settings file, one set of rules: what is committed is what build.py writes, and every importer gets the same."""

from __future__ import annotations

import copy
import importlib.util
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import promql_parser
import pytest
import tomllib
import yaml

RULES = Path(__file__).parents[2] / "alert_rules"
SETTINGS = tomllib.loads((RULES / "settings.toml").read_text())
Require = Callable[[str], Path]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("alert_rules_build", RULES / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = _load()


#: What the committed settings give; built once.
SHIPPED: dict[str, str] = build.build(SETTINGS)


def changed(section: str, name: str, value: Any) -> dict[str, Any]:
    settings = copy.deepcopy(SETTINGS)
    settings[section][name] = value
    return settings


def rules_of(text: str) -> list[dict[str, Any]]:
    tree = yaml.safe_load(text)
    groups = tree["spec"]["groups"] if "spec" in tree else tree["groups"]
    return [{"group": g["name"], "interval": g.get("interval"), **rule} for g in groups for rule in g["rules"]]


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_what_is_committed_is_what_the_settings_say(name: str) -> None:
    """A file edited by hand, or a setting without a build, would be lost at the next one."""
    assert (RULES / name).read_text() == SHIPPED[name], "run python alert_rules/build.py"


def test_the_check_fails_for_a_changed_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CI sees it by the exit status, and the message says what to run."""
    assert build.main(["--out", str(tmp_path)]) == 0
    assert build.main(["--out", str(tmp_path), "--check"]) == 0
    (tmp_path / "amp" / "rule-groups.yaml").write_text("groups: []\n")
    assert build.main(["--out", str(tmp_path), "--check"]) == 1
    assert "amp/rule-groups.yaml is out of date: run python alert_rules/build.py" in capsys.readouterr().err


def test_a_placeholder_for_the_runbooks_is_told_until_it_is_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page whose link leads nowhere is found when the rules are built, and the message names the setting."""
    assert build.main(["--out", str(tmp_path)]) == 0
    assert "names.runbook_base is the placeholder" in capsys.readouterr().err
    own = tmp_path / "own.toml"
    own.write_text((RULES / "settings.toml").read_text().replace("https://example.com/", "https://wiki.corp/"))
    assert build.main(["--settings", str(own), "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""
    assert "https://wiki.corp/sdcwatch/runbooks/SDCWatchdog.md" in (tmp_path / "path.rules.yaml").read_text()


def test_all_three_importers_get_the_same_rules() -> None:
    """Plain files, PrometheusRule and AMP differ in the static namespace label and in nothing else."""
    files = SHIPPED
    plain = [
        rule for name, text in sorted(files.items()) if "/" not in name and "rules" in name for rule in rules_of(text)
    ]
    amp = rules_of(files["amp/rule-groups.yaml"])
    operator = rules_of(files["kubernetes/prometheus-rule.yaml"])
    assert len(plain) > 20
    assert plain == amp
    namespaces = {rule["labels"].pop("namespace") for rule in operator if "alert" in rule}
    assert namespaces == {SETTINGS["kubernetes"]["namespace"]}
    assert plain == operator


def test_promtool_accepts_the_file_for_amp(require: Require) -> None:
    """And finds as many rules in it as in the plain files together."""

    def found(*paths: Path) -> int:
        done = subprocess.run(
            [require("promtool"), "check", "rules", *paths], check=True, capture_output=True, text=True, timeout=60
        )
        return sum(int(count) for count in re.findall(r"(\d+) rules found", done.stdout))

    assert found(RULES / "amp" / "rule-groups.yaml") == found(*RULES.glob("*.rules.yaml")) > 20


def test_no_range_is_shorter_than_four_scrapes() -> None:
    """A range of Prometheus 3 is left-open and holds one sample fewer; a lost scrape takes another."""
    slowest = build.seconds(SETTINGS["limits"]["slowest_scrape"])
    found = 0
    for path in RULES.glob("*.rules.yaml"):
        for length, step in re.findall(r"\[(\d+[smhd])(?::(\d+[smhd])?)?\]", path.read_text()):
            found += 1
            assert build.seconds(length) >= 4 * max(slowest, build.seconds(step) if step else 0), path.name
    assert found > 40


@pytest.mark.parametrize(
    ("section", "name", "value", "said"),
    [
        ("thresholds", "groups_apart", "3m", "holds fewer than four scrapes"),
        ("thresholds", "page_window", "2m", "the range [2m] holds"),
        ("limits", "slowest_scrape", "5m", "holds fewer than four scrapes"),
        ("thresholds", "page_window", "1 hour", "no duration"),
        ("thresholds", "page_widow", "1h", "used by no rule"),
        ("names", "cluster_label", "kube cluster", "no label name"),
    ],
)
def test_a_setting_that_would_blind_a_rule_is_refused(section: str, name: str, value: str, said: str) -> None:
    """With the rule or the setting that is meant."""
    with pytest.raises(build.SettingsError, match=re.escape(said)):
        build.build(changed(section, name, value))


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, v in SETTINGS["thresholds"].items() if isinstance(v, str) and n != "norm_window"]
)
def test_every_duration_moves_with_its_one_setting(name: str, value: str) -> None:
    """Half as long again: the rules change, and every expression still parses."""
    longer = f"{build.seconds(value) * 3 // 2}s"
    after = build.rule_files(changed("thresholds", name, longer))
    texts = [text for file, text in after.items() if text != SHIPPED[file]]
    assert texts, "no rule uses it"
    for text in texts:
        for rule in rules_of(text):
            promql_parser.parse(rule["expr"])


def test_a_cluster_label_of_ones_own_is_kept_by_every_rule_and_route(require: Require, tmp_path: Path) -> None:
    """Beside training_cluster, which remediation needs: in aggregations, joins, look-ups, groups and inhibitions."""
    files = build.build(changed("names", "cluster_label", "k8s_cluster"))
    for rule in rules_of(files["amp/rule-groups.yaml"]):
        if rule.get("alert") == "SDCWatchdog":
            continue
        for kind, labels in re.findall(r"\b(by|on) \(([^)]*)\)", rule["expr"]):
            parts = {label.strip() for label in labels.split(",")}
            # Joins on one target, one GPU or one reason are within one cluster already.
            assert "k8s_cluster" in parts or parts <= {"UUID", "gpu_uuid", "reason", "drill"}, (
                rule.get("alert") or rule["record"],
                kind,
                labels,
            )
        for text in rule.get("annotations", {}).values():
            for selector in re.findall(r"training_job=%q[^}]*", text):
                assert "k8s_cluster=%q" in selector, (rule["alert"], selector)
    for name, text in files.items():
        (tmp_path / Path(name).name).write_text(text)
    subprocess.run(
        [require("promtool"), "check", "rules", tmp_path / "rule-groups.yaml"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    tree = yaml.safe_load(files["alertmanager-branch.yaml"])
    assert all(
        ("training_cluster" in rule["equal"]) == ("k8s_cluster" in rule["equal"]) for rule in tree["inhibit_rules"]
    )
    page = next(r for r in tree["route"]["routes"][0]["routes"] if r["receiver"] == "sdcwatch-page")
    assert page["group_by"] == ["training_cluster", "k8s_cluster", "training_instance"]


def test_no_generated_text_keeps_a_placeholder() -> None:
    """A half-filled rule would page with our own syntax in it."""
    for name, text in SHIPPED.items():
        assert "<<" not in text, name


def test_the_operators_object_says_what_the_branch_says() -> None:
    """Same receivers, matchers and waiting times; the inhibition of others' alerts is left to the global file."""
    files = SHIPPED
    branch = yaml.safe_load(files["alertmanager-branch.yaml"])
    spec = yaml.safe_load(files["kubernetes/alertmanager-config.yaml"])["spec"]
    (top,) = branch["route"]["routes"]
    assert [r["name"] for r in spec["receivers"]] == [r["name"] for r in branch["receivers"]]
    for custom, plain in zip([spec["route"], *spec["route"]["routes"]], [top, *top["routes"]], strict=True):
        assert custom["receiver"] == plain["receiver"]
        assert custom.get("groupWait") == plain.get("group_wait")
        assert custom.get("continue", False) == plain.get("continue", False)
        told = [f'{m["name"]}{m["matchType"]}"{m["value"]}"' for m in custom["matchers"]]
        assert told == plain["matchers"]
    assert len(spec["inhibitRules"]) == len(branch["inhibit_rules"]) - 1
