"""The dashboard of one training job: is it agreed, is it watched, how far is it safe, and what does watching cost.

Every query takes `max by`, because several agents report the same series. Flow: **training_job** -> build -> JSON.
"""

from __future__ import annotations

from annotations import annotations
from grafana_foundation_sdk.builders import dashboard as builder
from links import CASE_OF, GPU_OF, TRAINING_JOB
from panels import Panel, Query, frame, label_variable, place
from promql import END, newest, outliers

_JOB = 'training_job="$job"'
_DEVIATION = f"max by (rank) (max_over_time(sdc_gradient_norm_deviation{{{_JOB}}}[$__range] {END}))"
_IN_CHECKS = f"rate(sdc_check_seconds_total{{{_JOB}}}[$__rate_interval])"
_IN_STEPS = f"rate(sdc_step_seconds_total{{{_JOB}}}[$__rate_interval])"

PANELS = (
    Panel(
        "State",
        "Does it train, and if not, why? Halted means that it waits on a latch: see the newest verdict.",
        "none",
        [Query(f"max by (state) (sdc_training_state{{{_JOB}}}) == 1", "{{state}}")],
        kind="states",
        words=[("1", "now", "blue")],
    ),
    Panel(
        "Newest verdict that names a rank",
        "Which rank on which hardware did a proof name, when? Any row was a page. Click the GPU for its history, the "
        "instance for its case.",
        "dateTimeFromNow",
        [
            Query(
                newest(
                    f"sdc_last_mismatch_timestamp_seconds{{{_JOB}}}",
                    "training_node, training_instance, gpu_uuid, rank, check",
                ),
                "Event",
            )
        ],
        kind="table",
        columns=(
            ("rank", "Rank"),
            ("training_node", "Node"),
            ("training_instance", "Instance"),
            ("gpu_uuid", "GPU"),
            ("check", "Check"),
        ),
        links=(GPU_OF, CASE_OF),
        empty="no rank was named",
    ),
    Panel(
        "Newest verdict that names nobody",
        "Was there a corruption, or a difference, that could not be placed? Time of the newest inconclusive or "
        "software event. Nobody is isolated for these.",
        "dateTimeFromNow",
        [
            Query(
                "max by (check, verdict) "
                f"(max_over_time(sdc_last_unattributed_timestamp_seconds{{{_JOB}}}[$__range])) * 1000",
                "{{check}} {{verdict}}",
            )
        ],
        kind="stat",
        width=6,
        empty="no such event",
    ),
    Panel(
        "Verdicts",
        "Once, or again and again? Events since the job began: those that name a rank, and those that name nobody. "
        "Flat at 0 is healthy.",
        "none",
        [
            Query(
                f"sum(max by (rank, gpu_uuid, check) (sdc_mismatches_total{{{_JOB}}} > 0)) or vector(0)", "name a rank"
            ),
            Query(f"sum(max by (check, verdict) (sdc_unattributed_total{{{_JOB}}})) or vector(0)", "name nobody"),
        ],
        width=9,
        points=60,
        minimum=0,
        steps=True,
    ),
    Panel(
        "Replica groups",
        "Do all replicas agree? Distinct fingerprints at the last vote, by check; 1 means that they do.",
        "none",
        [Query(f"max by (check) (sdc_replica_groups{{{_JOB}}})", "{{check}}")],
        width=9,
        minimum=0,
        steps=True,
    ),
    Panel(
        "Gradient norm per rank",
        "Does one rank's gradient go its own way? L2 norm of the local gradient before the reduce: the ten ranks that "
        "deviated most in this range, and the median of all.",
        "short",
        [
            Query(
                outliers("rank", "rank, gpu_uuid", f"sdc_gradient_norm{{{_JOB}}}", _DEVIATION),
                "rank {{rank}} {{gpu_uuid}}",
            ),
            Query(f"quantile(0.5, sdc_gradient_norm{{{_JOB}}})", "median"),
        ],
        points=150,
        log=True,
        links=(GPU_OF,),
    ),
    Panel(
        "Deviation of the gradient norm",
        "How far off is it? Robust deviation of the norm from the median of the peers, for the ten ranks that deviated "
        "most. A statistic: it hints and never accuses.",
        "none",
        [
            Query(
                outliers("rank", "rank, gpu_uuid", f"sdc_gradient_norm_deviation{{{_JOB}}}", _DEVIATION),
                "rank {{rank}} {{gpu_uuid}}",
            )
        ],
        links=(GPU_OF,),
    ),
    Panel(
        "Checks",
        "Does every check run? Checks per second. A check whose line ends has stopped.",
        "ops",
        [Query(f"max by (check) (rate(sdc_checks_total{{{_JOB}}}[$__rate_interval]))", "{{check}}")],
        minimum=0,
    ),
    Panel(
        "Skips",
        "Where does watching have gaps, and why? Checks that did not run since the job began, by reason.",
        "none",
        [Query(f"max by (check, reason) (sdc_skips_total{{{_JOB}}})", "{{check}} {{reason}}")],
        minimum=0,
        steps=True,
        empty="no check was skipped",
    ),
    Panel(
        "Checks that are on",
        "What is watched at all? What is off is not; the run's first lines say why.",
        "none",
        [Query(f"max by (check) (sdc_detector_enabled{{{_JOB}}})", "{{check}}")],
        kind="states",
        words=[("0", "off", "orange"), ("1", "on", "green")],
    ),
    Panel(
        "Coverage",
        "How much of the state is watched? Bytes that each check fingerprints, and bytes that it does not reach.",
        "bytes",
        [
            Query(
                f"max by (check, covered) (sdc_coverage_bytes{{{_JOB}}})",
                "{{check}} covered={{covered}}",
            )
        ],
        minimum=0,
    ),
    Panel(
        "Steps and how far they are safe",
        "What would a corruption found now cost? Training step, and the newest step that is checked, verified, and "
        "saved clean: the gap to the lowest line is lost at worst.",
        "none",
        [
            Query(f"max(sdc_training_step{{{_JOB}}})", "training"),
            Query(f"max(sdc_checked_step{{{_JOB}}})", "checked"),
            Query(f"max(sdc_verified_step{{{_JOB}}})", "verified"),
            Query(f"max(sdc_last_clean_checkpoint_step{{{_JOB}}})", "clean checkpoint"),
        ],
        minimum=0,
        steps=True,
    ),
    Panel(
        "Overhead",
        "What does watching cost? Share of the step time that each check takes over all nodes, and that all checks "
        "take on the worst node. The budget is 5 % for all together.",
        "percentunit",
        [
            Query(f"sum by (check) ({_IN_CHECKS}) / scalar(sum({_IN_STEPS}))", "{{check}}"),
            Query(
                f"max(sum by (training_node) ({_IN_CHECKS}) / sum by (training_node) ({_IN_STEPS}))",
                "all checks, worst node",
            ),
        ],
        points=60,
        minimum=0,
    ),
    Panel(
        "Ranks",
        "Do all ranks report? Ranks that should, and ranks that are seen. A gap is a blind spot.",
        "none",
        [
            Query(f"max(sdc_world_size{{{_JOB}}})", "world size"),
            Query(f"count(count by (rank) (sdc_training_step{{{_JOB}}}))", "seen"),
        ],
        points=30,
        minimum=0,
        steps=True,
    ),
    Panel(
        "Heals",
        "Was state repaired in place, and with what result?",
        "none",
        [Query(f"max by (check, outcome) (sdc_heals_total{{{_JOB}}})", "{{check}} {{outcome}}")],
        minimum=0,
        steps=True,
        empty="nothing had to be healed",
    ),
)


def training_job() -> builder.Dashboard:
    """The dashboard, not yet JSON."""
    built = frame(
        TRAINING_JOB,
        "Training job: silent data corruption",
        "One training job: agreement of its replicas, checks, clean steps and the cost of watching.",
    ).with_variable(label_variable("job", "Job", "sdc_training_step", "training_job"))
    for mark in annotations(_JOB):
        built = built.annotation(mark)
    for panel in place(PANELS):
        built = built.with_panel(panel)
    return built
