"""The dashboard of all jobs: which one needs me, which hardware was named, and is everything watched.

Every panel leads on: a job's name to its dashboard, a GPU's UUID to its history, an instance to its case.
Flow: **fleet** -> build -> JSON.
"""

from __future__ import annotations

from annotations import annotations
from grafana_foundation_sdk.builders import dashboard as builder
from links import CASE_OF, FLEET, GPU_OF, JOB_OF
from panels import Panel, Query, frame, label_variable, place
from promql import END, newest, worst

_C = 'training_cluster=~"$cluster"'
_JOB = "training_job, training_cluster"
_NO_SERVICE = "no remediation service is scraped, or it has no case"


def _overhead(at: str) -> str:
    """Share of step time that checks take on the worst node of each job."""
    node = "training_job, training_cluster, training_node"
    spent = f"sum by ({node}) (rate(sdc_check_seconds_total{{{_C}}}[$__rate_interval]{at}))"
    whole = f"sum by ({node}) (rate(sdc_step_seconds_total{{{_C}}}[$__rate_interval]{at}))"
    return f"max by (training_job) ({spent} / {whole})"


def _skips(at: str) -> str:
    """Skips per second of each job; two agents report the same series, so the larger one counts."""
    rate = f"rate(sdc_skips_total{{{_C}}}[$__rate_interval]{at})"
    return f"sum by (training_job) (max by (training_job, check, reason) ({rate}))"


PANELS = (
    Panel(
        "GPUs named in this range",
        "How many GPUs did a proof name in the shown range? Any number but 0 was a page.",
        "none",
        [
            Query(
                "count(max by (gpu_uuid) "
                f"(max_over_time(sdc_last_mismatch_timestamp_seconds{{{_C}}}[$__range])) > time() - $__range_s) "
                "or vector(0)",
                "GPUs named",
            )
        ],
        kind="stat",
        width=6,
        height=4,
    ),
    Panel(
        "Jobs halted",
        "Does a job wait on a latch now? Then somebody, or the remediation service, has to decide.",
        "none",
        [Query(f'sum(max by ({_JOB}) (sdc_training_state{{{_C},state="halted"}}))', "halted")],
        kind="stat",
        width=6,
        height=4,
    ),
    Panel(
        "Ranks",
        "Do all ranks that should report report? Fewer seen than expected is a blind spot; finished jobs count for an "
        "hour.",
        "none",
        [
            Query(f"sum(max by ({_JOB}) (sdc_world_size{{{_C}}}))", "expected"),
            Query(f"count(count by ({_JOB}, rank) (sdc_training_step{{{_C}}}))", "seen"),
        ],
        kind="stat",
        width=6,
        height=4,
    ),
    Panel(
        "Open cases",
        "Is a node being handled right now?",
        "none",
        [Query("sum(sdc_remediation_cases)", "open cases")],
        kind="stat",
        width=6,
        height=4,
        empty=_NO_SERVICE,
    ),
    Panel(
        "Jobs",
        "Which job needs me? Its state, its step, how many groups its replicas fall into (1: all agree), and the "
        "newest step that an audit covers. Click a job. At most 50.",
        "none",
        [
            Query(f"topk(50, max by ({_JOB}, state) (sdc_training_state{{{_C}}} == 1))", ""),
            Query(f"topk(50, max by ({_JOB}) (sdc_training_step{{{_C}}}))", "Step"),
            Query(f"topk(50, max by ({_JOB}) (sdc_verified_step{{{_C}}}))", "Verified step"),
            Query(f"topk(50, max by ({_JOB}) (sdc_replica_groups{{{_C}}}))", "Replica groups"),
            Query(f"topk(50, max by ({_JOB}) (sdc_world_size{{{_C}}}))", "Ranks"),
        ],
        kind="table",
        columns=(("training_job", "Job"), ("training_cluster", "Cluster"), ("state", "State")),
        links=(JOB_OF,),
    ),
    Panel(
        "Newest proofs that name a GPU",
        "Which hardware was named, by which check, when? Click the GPU for its history, the instance for its case.",
        "dateTimeFromNow",
        [
            Query(
                newest(
                    f"sdc_last_mismatch_timestamp_seconds{{{_C}}}",
                    "training_job, training_node, training_instance, gpu_uuid, check",
                ),
                "Event",
            )
        ],
        kind="table",
        columns=(
            ("training_job", "Job"),
            ("training_node", "Node"),
            ("training_instance", "Instance"),
            ("gpu_uuid", "GPU"),
            ("check", "Check"),
        ),
        links=(JOB_OF, GPU_OF, CASE_OF),
        empty="no GPU was named",
    ),
    Panel(
        "Jobs by state",
        "How many jobs train, and how many wait? A job that is halted for long waits for a person.",
        "none",
        [Query(f"count by (state) (max by ({_JOB}, state) (sdc_training_state{{{_C}}}) == 1)", "{{state}}")],
        minimum=0,
        steps=True,
    ),
    Panel(
        "Firing alerts",
        "What would the pager say? Alerts of sdcwatch that fire, by name; the watchdog is left out.",
        "none",
        [
            Query(
                'count by (alertname) (ALERTS{alertname=~"SDC.*",alertname!="SDCWatchdog",alertstate="firing"})',
                "{{alertname}}",
            )
        ],
        minimum=0,
        steps=True,
        empty="no alert fired",
    ),
    Panel(
        "Events by job",
        "Is one job in trouble, or all of them? Events that name a rank and events that name nobody, since each job "
        "began. Many jobs at once point at a build or a checkpoint, not at hardware.",
        "none",
        [
            Query(
                worst(
                    "training_job",
                    f"sum by (training_job) (max by (training_job, rank, check) (sdc_mismatches_total{{{_C}}} > 0))",
                    "sum by (training_job) (max by (training_job, rank, check) "
                    f"(max_over_time(sdc_mismatches_total{{{_C}}}[$__range] {END}) > 0))",
                ),
                "{{training_job}} names a rank",
            ),
            Query(
                worst(
                    "training_job",
                    "sum by (training_job) (max by (training_job, check, verdict) "
                    f"(sdc_unattributed_total{{{_C}}})) > 0",
                    "sum by (training_job) (max by (training_job, check, verdict) "
                    f"(max_over_time(sdc_unattributed_total{{{_C}}}[$__range] {END})))",
                ),
                "{{training_job}} names nobody",
            ),
        ],
        points=60,
        minimum=0,
        steps=True,
        links=(JOB_OF,),
        empty="no event in any job",
    ),
    Panel(
        "Steps without an audit",
        "What would a corruption found now cost at worst? Steps since the newest one that an audit covers, in the jobs "
        "with most.",
        "none",
        [
            Query(
                worst(
                    "training_job",
                    f"max by (training_job) (sdc_training_step{{{_C}}}) "
                    f"- max by (training_job) (sdc_verified_step{{{_C}}})",
                    f"max by (training_job) (sdc_training_step{{{_C}}} {END}) "
                    f"- max by (training_job) (sdc_verified_step{{{_C}}} {END})",
                ),
                "{{training_job}}",
            )
        ],
        minimum=0,
        steps=True,
        links=(JOB_OF,),
    ),
    Panel(
        "Overhead of the costliest jobs",
        "Does watching cost more than the 5 % that it may? Time in checks over time in steps, on each job's worst "
        "node.",
        "percentunit",
        [
            Query(worst("training_job", _overhead(""), _overhead(f" {END}")), "{{training_job}}"),
        ],
        minimum=0,
        links=(JOB_OF,),
    ),
    Panel(
        "Checks skipped",
        "Where does watching have gaps? Skips per second of all checks, in the jobs with most; the job's dashboard "
        "says why.",
        "ops",
        [Query(worst("training_job", _skips(""), _skips(f" {END}")), "{{training_job}}")],
        minimum=0,
        links=(JOB_OF,),
        empty="no check was skipped",
    ),
    Panel(
        "Cases by state",
        "How far is each replacement? Open cases by state; empty while none is open.",
        "none",
        [Query("sum by (state) (sdc_remediation_cases) > 0", "{{state}}")],
        minimum=0,
        steps=True,
        empty=_NO_SERVICE,
    ),
    Panel(
        "Closed cases",
        "What became of the nodes that were named? Closed cases by outcome, all jobs together.",
        "none",
        [Query("sum by (outcome) (sdc_remediation_closed_cases)", "{{outcome}}")],
        minimum=0,
        steps=True,
        empty=_NO_SERVICE,
    ),
)


def fleet() -> builder.Dashboard:
    """The dashboard, not yet JSON."""
    built = frame(
        FLEET,
        "Fleet: silent data corruption",
        "All training jobs: which one needs attention, which hardware was named, and whether everything is watched.",
    )
    built = built.with_variable(
        label_variable("cluster", "Cluster", "sdc_training_step", "training_cluster", everything=True)
    )
    for mark in annotations(_C):
        built = built.annotation(mark)
    for panel in place(PANELS):
        built = built.with_panel(panel)
    return built
