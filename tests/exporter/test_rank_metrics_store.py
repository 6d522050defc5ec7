"""A rank's metrics: what a scrape of its file would show."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sdcwatch.catalog import CHECKS, METRICS, TRAINING_STATES
from sdcwatch.exposition import Sample, parse, render, series
from sdcwatch.metrics import CAPS, RankMetrics

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
IDENTITY = {
    "training_job": "gpt",
    "training_cluster": "blue",
    "training_node": "hyperpod-i-0a",
    "training_instance": "i-0a",
    "gpu_uuid": "GPU-1",
    "rank": "3",
}
OTHER = {**IDENTITY, "training_node": "hyperpod-i-0b", "training_instance": "i-0b", "gpu_uuid": "GPU-9", "rank": "5"}


def fill(metrics: RankMetrics) -> None:
    """What a default rank writes in a run without a fault."""
    for name in (
        "sdc_gradient_norm",
        "sdc_gradient_norm_deviation",
        "sdc_training_step",
        "sdc_last_step_timestamp_seconds",
        "sdc_last_check_timestamp_seconds",
        "sdc_replica_group_size",
        "sdc_checked_step",
        "sdc_verified_step",
        "sdc_world_size",
    ):
        metrics.set(name, 7)
    for name in ("sdc_gradient_norm_anomalies_total", "sdc_nonfinite_gradients_total", "sdc_checks_skipped_total"):
        metrics.inc(name, 0)
    metrics.set("sdc_rank_info", 1, local_rank=0, host='h"\\\n', instance_type="p5", gpu_model="H100", driver="570")
    for check in CHECKS:
        metrics.inc("sdc_checks_total", 2, check=check)
        metrics.inc("sdc_check_seconds_total", 0.125, check=check)
    for state in TRAINING_STATES:
        metrics.set("sdc_training_state", state == "training", state=state)
    metrics.inc("sdc_step_seconds_total", 1.5)


@pytest.fixture
def metrics() -> RankMetrics:
    return RankMetrics(IDENTITY, writes_node=True, writes_job=True)


def samples(text: str) -> Iterator[Sample]:
    for found in parse(text):
        assert isinstance(found, Sample), found
        yield found


def test_the_exposition_is_what_it_was(metrics: RankMetrics) -> None:
    """The whole text of a default rank, byte for byte (UPDATE_GOLDEN=1 writes it afresh)."""
    fill(metrics)
    metrics.blame(OTHER, "replay", 1764600000.125)
    path = GOLDEN / "rank.prom"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(metrics.lines(), encoding="utf-8")
    assert metrics.lines() == path.read_text(encoding="utf-8")


def test_other_readers_of_the_format_see_the_same_series(metrics: RankMetrics) -> None:
    """prometheus_client's parser and ours find equal names, labels and values, odd characters included."""
    fill(metrics)
    text = metrics.lines()
    theirs = {
        (s.name, frozenset(s.labels.items()), s.value) for f in text_string_to_metric_families(text) for s in f.samples
    }
    assert theirs == {(s.name, frozenset(s.labels), s.value) for s in samples(text)}
    assert not any(name.endswith("_created") for name, _, _ in theirs)


def test_promtool_has_nothing_to_say(metrics: RankMetrics) -> None:
    """`promtool check metrics` lints names, types and help, as the agent renders them of a rank's lines."""
    promtool = shutil.which("promtool") or ROOT / ".tools/bin/promtool"
    if not Path(promtool).exists():
        pytest.fail("promtool is missing") if os.environ.get("CI") else pytest.skip("promtool is not here")
    fill(metrics)
    text = render((s.name, series(s.name, s.labels), s.value) for s in samples(metrics.lines()))
    assert text.count("# HELP") == len({s.name for s in samples(metrics.lines())})
    done = subprocess.run([promtool, "check", "metrics"], input=text.encode(), timeout=60)
    assert done.returncode == 0


def test_a_default_rank_has_at_most_15_series_of_its_own(metrics: RankMetrics) -> None:
    """16,384 ranks must stay within one Prometheus."""
    fill(metrics)
    own = [s for s in samples(metrics.lines()) if METRICS[s.name].scope == "rank"]
    assert len(own) <= 15


def test_own_mismatch_counters_exist_at_0_and_no_time_is_claimed(metrics: RankMetrics) -> None:
    """A counter born at 1 is invisible to increase(); a time of 0 would look like an event of 1970."""
    found = {(s.name, dict(s.labels)["check"]): s.value for s in samples(metrics.lines())}
    assert found == {("sdc_mismatches_total", check): 0 for check in ("weight_checksum", "replay")}
    assert metrics.get("sdc_last_mismatch_timestamp_seconds", check="replay") is None


def test_an_event_names_the_suspect_whoever_writes(metrics: RankMetrics) -> None:
    """A reporter's series carry the suspect's identity, its own counters stay, and time never goes back."""
    metrics.blame(OTHER, "replay", 20.5)
    metrics.blame(OTHER, "replay", 10.0)
    metrics.blame(IDENTITY, "weight_checksum", 30.0)
    rows = {(s.name, dict(s.labels)["rank"], dict(s.labels)["check"]): s.value for s in samples(metrics.lines())}
    assert rows["sdc_mismatches_total", "5", "replay"] == 2
    assert rows["sdc_last_mismatch_timestamp_seconds", "5", "replay"] == 20.5
    assert rows["sdc_mismatches_total", "3", "replay"] == 0
    assert metrics.get("sdc_mismatches_total", check="weight_checksum") == 1
    assert all("i-0b" in dict(s.labels).values() for s in samples(metrics.lines()) if dict(s.labels)["rank"] == "5")


def test_scopes_that_are_not_ours_are_not_written() -> None:
    """Only local rank 0 writes node series and only two ranks write job series; the others' calls do nothing."""
    quiet = RankMetrics(IDENTITY, writes_node=False, writes_job=False)
    fill(quiet)
    assert {METRICS[s.name].scope for s in samples(quiet.lines())} == {"rank"}
    assert quiet.get("sdc_world_size") is None


def test_job_and_node_series_carry_only_their_scope(metrics: RankMetrics) -> None:
    """A job series with a rank in it would exist once for each writer."""
    fill(metrics)
    for sample in samples(metrics.lines()):
        assert tuple(dict(sample.labels)) == METRICS[sample.name].all_labels


@pytest.mark.parametrize(
    "wrong",
    [
        lambda m: m.set("sdc_no_such", 1),
        lambda m: m.set("sdc_agent_ranks_seen", 1),
        lambda m: m.set("sdc_mismatches_total", 1, check="replay"),
        lambda m: m.inc("sdc_gradient_norm"),
        lambda m: m.inc("sdc_checks_skipped_total", -1),
        lambda m: m.inc("sdc_checks_skipped_total", float("nan")),
        lambda m: m.inc("sdc_checks_total", check="vibes"),
        lambda m: m.inc("sdc_checks_total"),
        lambda m: m.inc("sdc_checks_total", check="replay", step=3),
        lambda m: m.inc("sdc_checks_total", reason="oom"),
        lambda m: m.blame(OTHER, "gradient_norm", 1.0),
        lambda m: m.blame({"rank": "5"}, "replay", 1.0),
        lambda m: RankMetrics({}, writes_node=True, writes_job=True),
    ],
)
def test_a_name_or_label_outside_the_catalogue_is_an_error(
    metrics: RankMetrics, wrong: Callable[[RankMetrics], object]
) -> None:
    """A typo must fail in tests, not make a series that no rule looks at."""
    before = metrics.lines()
    with pytest.raises(ValueError, match=r"\w"):
        wrong(metrics)
    assert metrics.lines() == before


def test_an_info_is_replaced_never_doubled(metrics: RankMetrics) -> None:
    """After a driver change a join on rank_info must find one row."""
    for driver in ("570", "575"):
        metrics.set("sdc_rank_info", 1, local_rank=0, host="h", instance_type="p5", gpu_model="H100", driver=driver)
    drivers = [dict(s.labels)["driver"] for s in samples(metrics.lines()) if s.name == "sdc_rank_info"]
    assert drivers == ["575"]


def test_counters_go_on_after_a_restart_and_gauges_do_not(metrics: RankMetrics) -> None:
    """The next process of the same identity adds to counters, keeps times of events, and forgets the rest."""
    fill(metrics)
    metrics.blame(IDENTITY, "replay", 50.0)
    metrics.blame(OTHER, "replay", 40.0)
    metrics.inc("sdc_unattributed_total", check="replay", verdict="inconclusive")
    after = RankMetrics(IDENTITY, writes_node=True, writes_job=True)
    after.restore(metrics.lines() + "garbage {\n")
    assert after.get("sdc_checks_total", check="replay") == 2
    assert after.get("sdc_mismatches_total", check="replay") == 1
    assert after.get("sdc_last_mismatch_timestamp_seconds", check="replay") == 50.0
    assert after.get("sdc_training_step") is None
    assert after.get("sdc_training_state", state="training") is None
    after.blame(OTHER, "replay", 60.0)
    assert {s.value for s in samples(after.lines()) if dict(s.labels).get("rank") == "5"} == {2, 60.0}


def test_another_identitys_file_is_not_taken_over(metrics: RankMetrics) -> None:
    """A rank that moved to other hardware must not inherit that hardware's counters as its own."""
    fill(metrics)
    metrics.inc("sdc_mismatches_total", check="replay")
    moved = RankMetrics({**IDENTITY, "training_job": "other"}, writes_node=True, writes_job=True)
    assert moved.restore(metrics.lines()) == 0
    other_gpu = RankMetrics({**IDENTITY, "gpu_uuid": "GPU-2"}, writes_node=False, writes_job=False)
    other_gpu.restore(metrics.lines())
    assert other_gpu.get("sdc_mismatches_total", check="replay") == 0


def test_series_stop_at_their_cap_and_the_refused_are_counted(metrics: RankMetrics) -> None:
    """A detector gone mad over 1,024 ranks must not take Prometheus down; what was refused is exported."""
    for rank in range(1024):
        metrics.blame({**OTHER, "rank": str(rank + 10)}, "replay", 1.0)
    found = list(samples(metrics.lines()))
    blamed = [s for s in found if s.name != "sdc_series_dropped_total" and dict(s.labels)["rank"] != "3"]
    assert len(blamed) == CAPS["blame"]
    assert metrics.dropped == 2 * 1024 - CAPS["blame"]
    assert [s.value for s in found if s.name == "sdc_series_dropped_total"] == [metrics.dropped]
    metrics.inc("sdc_checks_skipped_total")
    assert metrics.get("sdc_checks_skipped_total") == 1


def test_every_series_of_the_catalogue_fits_under_the_caps(metrics: RankMetrics) -> None:
    """Caps are for faults: a rank that writes all enumerated series drops none."""
    sizes = {"rank": 0, "node": 0, "job": 0}
    for metric in METRICS.values():
        if metric.scope != "agent" and metric.name != "sdc_series_dropped_total":  # stands where one did not fit
            count = 1
            for values in metric.enums.values():
                count *= len(values)
            sizes[metric.scope] += count
    assert all(size <= CAPS[scope] for scope, size in sizes.items()), sizes
