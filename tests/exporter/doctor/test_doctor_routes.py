"""Alertmanager's configuration as the doctor reads it, held against a YAML library and against amtool."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from sdcwatch.doctor import config_text, routes

ROOT = Path(__file__).parents[3]
OURS = ROOT / "alert_rules" / "alertmanager.yaml"

#: A kube-prometheus tree with our branch's shape, other spellings of matchers, and a muted time.
THEIRS = """
route:
  receiver: Default
  group_by: [namespace]
  routes:
  - receiver: "null"
    matchers:
    - alertname=~"InfoInhibitor|Watchdog"
  - matchers: ['category = "sdc"']
    receiver: sdc
    routes:
    - receiver: automation
      match: {alertname: SDCReplicaMismatch}
      continue: true
    - match_re: {severity: crit.*}
      receiver: page
    - matchers: [severity!="critical", training_job=""]
      receiver: nobody
  - receiver: team
    matchers: [severity="critical", 'rank!~"[0-3]"']
    mute_time_intervals: [nights]
time_intervals:
- name: nights
  time_intervals:
  - times:
    - start_time: 00:00
      end_time: 06:00
receivers:
- name: Default
- name: "null"
- name: sdc
- name: automation
  webhook_configs:
  - url: http://127.0.0.1:9479/v1/alerts
- name: page
- name: nobody
- name: team
"""

LABELS = [
    {"alertname": "SDCReplicaMismatch", "category": "sdc", "severity": "critical", "training_job": "gpt"},
    {"alertname": "SDCDrill", "category": "sdc", "severity": "none", "training_job": "sdcwatch-drill"},
    {"alertname": "SDCWatchdog", "category": "sdc", "severity": "none"},
    {"alertname": "SDCTrainingStalled", "category": "sdc", "severity": "warning", "training_job": "gpt"},
    {"alertname": "Watchdog", "severity": "none"},
    {"alertname": "Other", "severity": "critical", "rank": "7"},
    {"alertname": "Other", "severity": "critical", "rank": "2"},
    {"alertname": "Other"},
]


def go_text(text: str) -> str:
    """The configuration as Go's encoder shows it: block style, lists at their key's own indent."""
    return yaml.safe_dump(yaml.load(text, yaml.BaseLoader), sort_keys=False, default_flow_style=False, width=80)


@pytest.mark.parametrize("name", ["ours", "theirs"])
@pytest.mark.parametrize("labels", LABELS, ids=lambda labels: "-".join(labels.values()))
def test_an_alert_lands_where_amtool_says(
    name: str, labels: dict[str, str], tmp_path: Path, require: Callable[[str], Path]
) -> None:
    """Both trees, every kind of matcher, `continue`, inherited receivers and the default route."""
    text = OURS.read_text() if name == "ours" else THEIRS
    file = tmp_path / "alertmanager.yaml"
    file.write_text(text)
    done = subprocess.run(
        [
            *(require("amtool"), "config", "routes", "test", f"--config.file={file}"),
            *(f"{label}={value}" for label, value in labels.items()),
        ],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    landed = routes.resolve(config_text.parse(go_text(text)), labels)
    assert ",".join(landing.receiver for landing in landed) == done.stdout.strip()


def test_a_muted_route_is_told() -> None:
    """A page that is muted at night is found before the night."""
    config = config_text.parse(go_text(THEIRS))
    assert [landing.timed for landing in routes.resolve(config, LABELS[5])] == [True]
    assert routes.webhooks(config, "automation") == ["http://127.0.0.1:9479/v1/alerts"]
    assert routes.webhooks(config, "page") == []


_TEXT = st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S", "Zs")), max_size=100)
_TREE = st.recursive(
    _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT.filter(bool), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,12}", fullmatch=True), _TREE, min_size=1, max_size=4))
def test_what_is_read_is_right_or_refused(tree: dict[str, Any]) -> None:
    """Never a wrong reading: whatever block YAML of one-line texts holds comes back as it was, or as a ValueError."""
    text = yaml.safe_dump(tree, default_flow_style=False, width=80, sort_keys=False)
    try:
        found = config_text.parse(text)
    except ValueError:
        return
    assert found == yaml.load(text, yaml.BaseLoader)


@pytest.mark.parametrize(
    "text",
    [
        "a: &x 1",
        "a: *x",
        "a: !!binary x",
        "a: {b: c}",
        "a: [b",
        "a: 1\na: 2",
        "a:\n  b: 1\n c: 2",
        "just text",
        "a: 'x",
    ],
)
def test_what_is_not_understood_is_an_error(text: str) -> None:
    """Anchors, tags, flow mappings and broken indents are never guessed at."""
    with pytest.raises(ValueError, match=r"not understood|twice"):
        config_text.parse(text)


@pytest.mark.parametrize("config", [None, {}, {"route": []}, {"route": {"matchers": ["???"]}}])
def test_a_configuration_without_a_route_is_an_error(config: Any) -> None:
    """The doctor then says unknown, not passed."""
    with pytest.raises(ValueError, match=r"route|matcher"):
        routes.resolve(config, {})
