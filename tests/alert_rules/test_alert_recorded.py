"""The step in a page's text: recorded once an evaluation for all pages, or asked of the ranks themselves."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

RULES = Path(__file__).parents[2] / "alert_rules"
Require = Callable[[str], Path]
RECORDED = "training_job:sdc_training_step:max"
#: Added to what is recorded, so that a text shows where its step comes from.
MARK = 1000
JOB = 'training_job="gpt",training_cluster="c1"'
PAGE = f'sdc_last_mismatch_timestamp_seconds{{{JOB},rank="2",check="replay"}}'
UNNAMED = f'sdc_last_unattributed_timestamp_seconds{{{JOB},check="weight_checksum",verdict="inconclusive"}}'


def whole(recorded: dict[str, Any], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [recorded, *others]


def without(recorded: dict[str, Any], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return others


def too_late(recorded: dict[str, Any], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As in a ruler that evaluates it beside the alerts: they find only what an earlier evaluation left."""
    return [*others, recorded]


@pytest.mark.parametrize("evaluation", [5, 60])
@pytest.mark.parametrize("halted", [0, 1])
@pytest.mark.parametrize(("arranged", "added"), [(whole, MARK), (without, 0), (too_late, 0)])
def test_a_text_takes_the_step_recorded_in_its_own_evaluation_or_the_ranks_own(
    arranged: Callable[..., list[dict[str, Any]]],
    added: int,
    halted: int,
    evaluation: int,
    tmp_path: Path,
    require: Require,
) -> None:
    """One of a minute ago would be old; without any the text asks all ranks; another job's is never taken."""
    tree = yaml.safe_load((RULES / "mismatch.rules.yaml").read_text())
    group = tree["groups"][0]
    (recorded,) = (rule for rule in group["rules"] if "record" in rule)
    assert recorded["record"] == RECORDED
    assert group["rules"][0] is recorded, "rules of a group run in order, and texts need it"
    others = [rule for rule in group["rules"] if rule.get("alert")]
    for rule in others:
        rule["annotations"] = {"description": rule["annotations"]["description"]}
    group["rules"] = arranged({**recorded, "expr": f"{recorded['expr'].strip()} + {MARK}"}, others)
    (tmp_path / "page.rules.yaml").write_text(yaml.safe_dump({"groups": [group]}))
    inputs = [
        (PAGE, "30x40"), (UNNAMED, "30x40"), (f'sdc_training_state{{{JOB},state="halted"}}', f"{halted}x40"),
        (f'sdc_training_step{{{JOB},rank="0"}}', "0+1x40"), (f'sdc_training_step{{{JOB},rank="1"}}', "1+1x40"),
        ('sdc_training_step{training_job="bert",training_cluster="c1",rank="0"}', "5000x40"),
        ('sdc_training_step{training_job="gpt",training_cluster="c2",rank="0"}', "6000x40"),
    ]  # fmt: skip
    step = 120 // 5 + 1 + added
    said = f"The job is halted at step {step}." if halted else f"no longer reports; its newest step is {step}."
    case = {
        "rule_files": ["page.rules.yaml"],
        "evaluation_interval": f"{evaluation}s",
        "tests": [
            {
                "interval": "5s",
                "input_series": [{"series": name, "values": values} for name, values in inputs],
                "alert_rule_test": [
                    {"eval_time": "2m", "alertname": name, "exp_alerts": [{"exp_labels": {"never": "so"}}]}
                    for name in ("SDCReplicaMismatch", "SDCUnattributedMismatch")
                ],
            }
        ],
    }
    (tmp_path / "case.yaml").write_text(yaml.safe_dump(case))
    # promtool compares whole texts; the cases beside this file hold those. Here it is made to print what it got.
    command = [require("promtool"), "test", "rules", tmp_path / "case.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    texts = [" ".join(line.split()) for line in (done.stdout + done.stderr).split("alertname: ")[1:]]
    got = [text.partition("got:")[2] for text in texts]
    assert len(got) == 2, done.stdout + done.stderr
    for text in got:
        assert said in text
