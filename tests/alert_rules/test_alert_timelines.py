"""Long stretches of time as promtool plays them: slow evaluations, deaths, gaps, and hours in which nobody is paged."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

RULES = Path(__file__).parents[2] / "alert_rules"
Require = Callable[[str], Path]
PAGE = 'ALERTS{alertname="SDCReplicaMismatch",alertstate="firing"}'
SUSPECT = {
    "training_job": "gpt", "training_cluster": "c1", "training_node": "n2", "training_instance": "i-2",
    "gpu_uuid": "GPU-2", "rank": "2", "check": "replay",
}  # fmt: skip
#: Evaluations are so many times slower than scrapes of 5 s.
RATIOS = (1, 2, 3, 4, 6, 12)


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inside = ",".join(f"{key}={json.dumps(value)}" for key, value in labels.items())
    return {"series": f"{name}{{{inside}}}", "values": values}


def page(values: str, **labels: str) -> dict[str, str]:
    return series("sdc_last_mismatch_timestamp_seconds", values, **(SUSPECT | labels))


def firing(time: str, count: int) -> dict[str, Any]:
    """The page fires so many times at that moment."""
    return {
        "expr": f"count({PAGE})",
        "eval_time": time,
        "exp_samples": [{"labels": "{}", "value": count}] if count else [],
    }


def unbroken(time: str, over: str) -> dict[str, Any]:
    """The page did not cease to fire in all that time."""
    return {"expr": f"count_over_time(absent({PAGE})[{over}:5s])", "eval_time": time, "exp_samples": []}


def play(promtool: Path, folder: Path, rules: Iterable[Path], tests: list[dict[str, Any]], evaluation: str) -> None:
    path = folder / "cases.yaml"
    path.write_text(
        yaml.safe_dump({"rule_files": [str(r) for r in rules], "evaluation_interval": evaluation, "tests": tests})
    )
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def only_the_page(tmp_path: Path) -> Path:
    """The page rule alone, as it ships: the others would only make long stretches slow."""
    tree = yaml.safe_load((RULES / "mismatch.rules.yaml").read_text())
    rules = [rule for group in tree["groups"] for rule in group["rules"] if rule.get("alert") == "SDCReplicaMismatch"]
    assert len(rules) == 1
    path = tmp_path / "page.rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "page", "rules": rules}]}))
    return path


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_page_comes_at_the_next_evaluation_however_slow(
    ratio: int, only_the_page: Path, tmp_path: Path, require: Require
) -> None:
    """Born with the event; dead after one scrape; an agent re-created after three hours; twelve minutes unscraped."""
    evaluation = 5 * ratio
    # The event is at 29 s and first scraped at 30 s; the evaluation after that is the first that can see it.
    first = -(-30 // evaluation) * evaluation
    before = [firing(f"{first - evaluation}s", 0)] if first > evaluation else []
    tests = [
        {
            "name": "born with the event, from two reporters",
            "interval": "5s",
            "input_series": [page("_x6 29x60", instance="a"), page("_x7 29x60", instance="b")],
            "promql_expr_test": [*before, firing(f"{first}s", 1), unbroken("300s", f"{300 - first}s")],
        },
        {
            "name": "incremented before its first scrape, dead after one scrape: an hour, and no longer",
            "interval": "5s",
            "input_series": [page("_x6 29 stale")],
            "promql_expr_test": [
                *before, firing(f"{first}s", 1), unbroken("3600s", f"{3600 - first}s"), firing("3700s", 0),
            ],
        },
        {
            "name": "an agent that is re-created three hours later with the same spool",
            "interval": "5s",
            "input_series": [page("_x6 29x60 stale", instance="a"), page("_x2160 29x240", instance="b")],
            "promql_expr_test": [
                firing(f"{first}s", 1), firing("3700s", 0), firing("3h1m", 0), firing("3h19m", 0),
                {"expr": f"count_over_time({PAGE}[2h])", "eval_time": "3h19m", "exp_samples": []},
            ],
        },
        {
            "name": "twelve minutes without a scrape: it goes on firing, as one alert",
            "interval": "5s",
            "input_series": [page("_x6 29x24 stale _x144 29x60")],
            "promql_expr_test": [firing(f"{first}s", 1), unbroken("18m", f"{18 * 60 - first}s")],
        },
    ]  # fmt: skip
    play(require("promtool"), tmp_path, [only_the_page], tests, f"{evaluation}s")


STATES = ("starting", "training", "evaluating", "checkpointing", "halted", "finished")


def ramp(start: float, step: float, times: int) -> str:
    return f"{start:g}+{step:g}x{times - 1}"


def job(name: str, *phases: tuple[str, int], begins: int = 0, ends: str = "stale") -> list[dict[str, str]]:
    """All that a healthy job of three ranks exports, a sample a minute, phase after phase of so many minutes."""
    void = f"_x{begins} " if begins else ""
    total = begins
    parts: dict[str, list[str]] = {key: [] for key in ("step", "time", "checks", "seconds", "one", "zero", *STATES)}
    step, last = 0.0, begins * 60.0
    for state, minutes in phases:
        moves = state == "training"
        parts["step"].append(ramp(step, 3 if moves else 0, minutes))
        parts["time"].append(ramp(total * 60 if moves else last, 60 if moves else 0, minutes))
        parts["checks"].append(ramp(step / 3, 1 if moves else 0, minutes))
        parts["seconds"].append(ramp(step * 20, 60 if moves else 0, minutes))
        parts["one"].append(ramp(1, 0, minutes))
        parts["zero"].append(ramp(0, 0, minutes))
        for each in STATES:
            parts[each].append(ramp(float(each == state), 0, minutes))
        total += minutes
        if moves:
            step, last = step + 3 * minutes, (total - 1) * 60.0
    text = {key: f"{void}{' '.join(values)} {ends}" for key, values in parts.items()}
    made = []
    whose = {"training_job": name, "training_cluster": "c1"}
    for rank in range(3):
        node = {"training_node": f"{name}-n{rank}", "training_instance": f"i-{name}-{rank}"}
        one = {**whose, **node, "gpu_uuid": f"GPU-{name}-{rank}", "rank": str(rank), "instance": f"{name}-n{rank}"}
        made += [
            series("sdc_training_step", text["step"], **one),
            series("sdc_last_step_timestamp_seconds", text["time"], **one),
            series("sdc_nonfinite_gradients_total", text["zero"], **one),
            series("sdc_gradient_norm_anomalies_total", text["zero"], **one),
            series("sdc_mismatches_total", text["zero"], check="replay", **one),
            series("sdc_step_seconds_total", text["seconds"], instance=one["instance"], **whose, **node),
            series(
                "sdc_check_seconds_total", text["checks"], check="replay", instance=one["instance"], **whose, **node
            ),
        ]
    for reporter in range(2):
        by = {**whose, "instance": f"{name}-n{reporter}"}
        made += [
            *(series("sdc_training_state", text[state], state=state, **by) for state in STATES),
            series("sdc_world_size", " ".join(text["one"].replace("1+0", "3+0").split()), **by),
            series("sdc_replica_groups", text["one"], check="weight_checksum", **by),
            series("sdc_detector_enabled", text["one"], check="replay", **by),
            series("sdc_checks_total", text["checks"], check="replay", **by),
            series("sdc_skips_total", text["zero"], check="replay", reason="oom", **by),
            series("sdc_checked_step", text["step"], **by),
            series("sdc_verified_step", text["step"], **by),
            series("sdc_last_clean_checkpoint_step", text["step"], **by),
        ]
    return made


QUIET = {
    "expr": 'count by (alertname) (count_over_time(ALERTS{alertname!="SDCWatchdog",alertstate="firing"}[70h]))',
    "exp_samples": [],
}


@pytest.mark.integration
def test_a_weekend_without_jobs_a_normal_end_an_evaluation_and_a_preemption_page_nobody(
    tmp_path: Path, require: Require
) -> None:
    """No alert of any kind but the watchdog fires from Friday's job, over sixty hours without one, to Monday's job."""
    agents = [series("up", "1x3900", job="sdcwatch", instance=f"fri-n{n}") for n in range(3)]
    agents += [series("up", "_x3760 1x100", job="sdcwatch", instance=f"mon-n{n}") for n in range(3)]
    # The preempted job's nodes go as a whole: first they do not answer, then discovery forgets them.
    agents += [series("up", "1x50 0x30 stale", job="sdcwatch", instance=f"pre-n{n}") for n in range(3)]
    service = [
        series("up", "1x3900", job="sdcwatch-remediation", instance="s"),
        series("sdc_remediation_last_round_timestamp_seconds", "0+60x3900", instance="s"),
        series("sdc_remediation_cases", "0x3900", state="frozen", instance="s"),
        series("sdc_remediation_stopped", "0x3900", instance="s"),
    ]
    friday = job("fri", ("starting", 3), ("training", 40), ("evaluating", 20), ("training", 40), ("finished", 61))
    monday = job("mon", ("starting", 3), ("training", 60), begins=3770)
    test = {
        "name": "friday to monday",
        "interval": "1m",
        "input_series": [*friday, *job("pre", ("training", 50)), *monday, *agents, *service],
        "promql_expr_test": [
            {**QUIET, "eval_time": "3820m"},
            # The same timeline is loud where it should be: the case would be worthless if nothing could fire in it.
            {"expr": 'count(ALERTS{alertname="SDCWatchdog"})', "eval_time": "3820m",
             "exp_samples": [{"labels": "{}", "value": 1}]},
            {"expr": "count(sdc_training_step)", "eval_time": "3820m", "exp_samples": [{"labels": "{}", "value": 3}]},
        ],
    }  # fmt: skip
    play(require("promtool"), tmp_path, sorted(RULES.glob("*.rules.yaml")), [test], "180s")


@pytest.mark.integration
@pytest.mark.parametrize("evaluation", ["5s", "60s"])
def test_an_evaluation_a_normal_end_and_a_preemption_are_quiet_at_both_speeds(
    evaluation: str, tmp_path: Path, require: Require
) -> None:
    """The short form of the weekend, at a fast and at a slow evaluation; the job before the preempted one goes on."""
    agents = [series("up", "1x200", job="sdcwatch", instance=f"fri-n{n}") for n in range(3)]
    agents += [series("up", "1x15 0x30 stale", job="sdcwatch", instance=f"pre-n{n}") for n in range(3)]
    friday = job("fri", ("starting", 2), ("training", 12), ("evaluating", 20), ("training", 6), ("finished", 10))
    test = {
        "name": "an afternoon",
        "interval": "1m",
        "input_series": [*friday, *job("pre", ("training", 15)), *agents],
        "promql_expr_test": [{**QUIET, "eval_time": "55m"}],
    }
    play(require("promtool"), tmp_path, sorted(RULES.glob("*.rules.yaml")), [test], evaluation)


def test_the_quiet_timeline_is_loud_when_its_job_hangs(tmp_path: Path, require: Require) -> None:
    """The same series, with the steps standing still in state `training`: the quiet cases could have been loud."""
    hung = [
        {**one, "values": one["values"].replace("+3x29", "+0x29").replace("+60x29", "+0x29").replace("+1x29", "+0x29")}
        for one in job("fri", ("training", 30))
    ]
    test = {
        "name": "a hang",
        "interval": "1m",
        "input_series": hung,
        "promql_expr_test": [
            {"expr": 'count by (alertname) (ALERTS{alertname!="SDCWatchdog",alertstate="firing"})', "eval_time": "20m",
             "exp_samples": [{"labels": '{alertname="SDCTrainingStalled"}', "value": 1}]},
        ],
    }  # fmt: skip
    play(require("promtool"), tmp_path, sorted(RULES.glob("*.rules.yaml")), [test], "60s")
