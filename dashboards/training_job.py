"""The dashboard of one training job: is it agreed, is it watched, how far is it safe, and what does watching cost.

Every query takes `max by`, because several agents report the same series. Flow: **training_job** -> build -> JSON.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builder
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard
from panels import DATASOURCE, Panel, Query, datasource_variable, label_variable, place

UID = "sdcwatch-training-job"
_JOB = 'training_job="$job"'

PANELS = (
    Panel(
        "State",
        "What the job says it does. Halted means that it waits on a latch: see the newest verdict below.",
        "none",
        [Query(f"max by (state) (sdc_training_state{{{_JOB}}}) == 1", "{{state}}")],
        kind="states",
        words=[("1", "now", "blue")],
    ),
    Panel(
        "Newest verdict that names a rank",
        "Time of the newest event that names a rank, by rank and check. Any value is a page.",
        "dateTimeFromNow",
        [
            Query(
                "max by (training_node, gpu_uuid, rank, check) "
                f"(max_over_time(sdc_last_mismatch_timestamp_seconds{{{_JOB}}}[1h])) * 1000",
                "rank {{rank}} {{training_node}} {{check}}",
            )
        ],
        kind="stat",
        width=6,
    ),
    Panel(
        "Newest verdict that names nobody",
        "Time of the newest inconclusive or software event. Nobody is isolated for these.",
        "dateTimeFromNow",
        [
            Query(
                "max by (check, verdict) "
                f"(max_over_time(sdc_last_unattributed_timestamp_seconds{{{_JOB}}}[1h])) * 1000",
                "{{check}} {{verdict}}",
            )
        ],
        kind="stat",
        width=6,
    ),
    Panel(
        "Verdicts and mismatches",
        "Events since the job began: those that name a rank, and those that name nobody. Flat at 0 is healthy.",
        "none",
        [
            Query(
                f"max by (rank, training_node, check) (sdc_mismatches_total{{{_JOB}}})",
                "rank {{rank}} {{training_node}} {{check}}",
            ),
            Query(f"max by (check, verdict) (sdc_unattributed_total{{{_JOB}}})", "{{check}} {{verdict}}"),
        ],
        minimum=0,
        steps=True,
    ),
    Panel(
        "Replica groups",
        "Distinct fingerprints at the last vote, by check. 1 means that all replicas agree.",
        "none",
        [Query(f"max by (check) (sdc_replica_groups{{{_JOB}}})", "{{check}}")],
        minimum=0,
        steps=True,
    ),
    Panel(
        "Gradient norm per rank",
        "L2 norm of each rank's local gradient before the reduce. Ranks move together; one that does not is a hint.",
        "short",
        [Query(f"max by (rank) (sdc_gradient_norm{{{_JOB}}})", "rank {{rank}}")],
        log=True,
    ),
    Panel(
        "Deviation of the gradient norm",
        "Robust deviation of each rank's norm from its peers' median. A statistic: it hints and never accuses.",
        "none",
        [Query(f"max by (rank) (sdc_gradient_norm_deviation{{{_JOB}}})", "rank {{rank}}")],
        minimum=0,
    ),
    Panel(
        "Checks",
        "Checks that ran, per second. A check whose line ends has stopped.",
        "ops",
        [Query(f"max by (check) (rate(sdc_checks_total{{{_JOB}}}[$__rate_interval]))", "{{check}}")],
        minimum=0,
    ),
    Panel(
        "Skips",
        "Checks that did not run since the job began, by reason.",
        "none",
        [Query(f"max by (check, reason) (sdc_skips_total{{{_JOB}}})", "{{check}} {{reason}}")],
        minimum=0,
        steps=True,
    ),
    Panel(
        "Checks that are on",
        "1 where a check is on. What is off is not watched; the run's first lines say why.",
        "none",
        [Query(f"max by (check) (sdc_detector_enabled{{{_JOB}}})", "{{check}}")],
        kind="states",
        words=[("0", "off", "orange"), ("1", "on", "green")],
    ),
    Panel(
        "Coverage",
        "Bytes of state that each check fingerprints, and bytes that it does not reach.",
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
        "Training step, and the newest step that is checked, verified, and saved clean. The gap to the lowest line is "
        "what a corruption found now would cost.",
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
        "Share of the step time that checks take, by node and check. The budget is 5 %.",
        "percentunit",
        [
            Query(
                "max by (training_node, check) "
                f"(rate(sdc_check_seconds_total{{{_JOB}}}[$__rate_interval])) "
                "/ on (training_node) group_left () "
                f"max by (training_node) (rate(sdc_step_seconds_total{{{_JOB}}}[$__rate_interval]))",
                "{{training_node}} {{check}}",
            )
        ],
        minimum=0,
    ),
    Panel(
        "Ranks",
        "Ranks that should report, and ranks that are seen. A gap is a blind spot.",
        "none",
        [
            Query(f"max(sdc_world_size{{{_JOB}}})", "world size"),
            Query(f"count(count by (rank) (sdc_training_step{{{_JOB}}}))", "seen"),
        ],
        minimum=0,
        steps=True,
    ),
    Panel(
        "Heals",
        "State that was repaired in place, by outcome; empty where nothing had to be healed.",
        "none",
        [Query(f"max by (check, outcome) (sdc_heals_total{{{_JOB}}})", "{{check}} {{outcome}}")],
        minimum=0,
        steps=True,
    ),
)


def training_job() -> builder.Dashboard:
    """The dashboard, not yet JSON."""
    built = (
        builder.Dashboard("Training job: silent data corruption")
        .uid(UID)
        .description("One training job: agreement of its replicas, checks, clean steps and the cost of watching.")
        .tags(["sdcwatch"])
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .with_variable(datasource_variable())
        .with_variable(label_variable("job", "Job", "sdc_training_step", "training_job"))
        .annotation(_Alerts())
    )
    for panel in place(PANELS):
        built = built.with_panel(panel)
    return built


class _Alerts(Builder[dashboard.AnnotationQuery]):
    """Firing alerts of the job as marks on every panel; the SDK has no builder for a Prometheus annotation."""

    def build(self) -> dashboard.AnnotationQuery:
        return dashboard.AnnotationQuery(
            name="Alerts",
            datasource=DATASOURCE,
            icon_color="red",
            expr=f'ALERTS{{alertname=~"SDC.*",alertstate="firing",{_JOB}}}',
            step="10s",
            title_format="{{alertname}}",
            text_format="{{check}} {{training_node}}",
        )
