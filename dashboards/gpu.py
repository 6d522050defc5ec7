"""The dashboard of one GPU, whatever job, node and rank it was: what we know of it, and what DCGM knows.

DCGM is joined by the GPU's UUID alone: dcgm-exporter's own `Hostname`, `gpu`, `instance` and `pod` differ between
versions and scrape configs, and no query reads them. The label that holds the UUID is a variable, because relabelling
may rename it. Without DCGM its panels say so. Flow: **gpu** -> build -> JSON.
"""

from __future__ import annotations

from annotations import annotations
from grafana_foundation_sdk.builders import dashboard as builder
from grafana_foundation_sdk.models import dashboard
from links import CASE_OF, GPU, JOB_OF
from panels import Panel, Query, frame, label_variable, place

_GPU = 'gpu_uuid="$gpu"'
_DCGM = '$dcgm_label="$gpu"'
_NO_DCGM = "no such DCGM series for this GPU: is dcgm-exporter scraped, with this field, and is its UUID label right?"


def _field(name: str) -> str:
    """One field of dcgm-exporter for this GPU, whichever host or pod reported it."""
    return f"max by ($dcgm_label) (DCGM_FI_DEV_{name}{{{_DCGM}}})"


def _rate(name: str) -> str:
    return f"max by ($dcgm_label) (rate(DCGM_FI_DEV_{name}{{{_DCGM}}}[$__rate_interval]))"


def _dcgm(title: str, question: str, unit: str, *queries: tuple[str, str], steps: bool = False) -> Panel:
    return Panel(
        title,
        question,
        unit,
        [Query(expr, legend) for expr, legend in queries],
        width=8,
        steps=steps,
        empty=_NO_DCGM,
    )


OURS = (
    Panel(
        "Where it ran",
        "In which job, node and rank was this GPU, and until when? One that follows a fault to a second job is the "
        "fault.",
        "dateTimeFromNow",
        [
            Query(
                "max by (training_job, training_node, training_instance, rank) "
                f"(max_over_time(sdc_last_step_timestamp_seconds{{{_GPU}}}[$__range])) * 1000",
                "Newest step",
            )
        ],
        kind="table",
        columns=(
            ("training_job", "Job"),
            ("training_node", "Node"),
            ("training_instance", "Instance"),
            ("rank", "Rank"),
        ),
        links=(JOB_OF, CASE_OF),
    ),
    Panel(
        "What it is",
        "Which model and driver is it, as the rank saw it?",
        "none",
        [
            Query(
                f"max by (gpu_model, driver, instance_type, host) (last_over_time(sdc_rank_info{{{_GPU}}}[$__range]))",
                "",
            )
        ],
        kind="table",
        columns=(("gpu_model", "Model"), ("driver", "Driver"), ("instance_type", "Instance type"), ("host", "Host")),
        width=6,
    ),
    Panel(
        "Was it named",
        "Did a proof name this GPU, when last, by which check?",
        "dateTimeFromNow",
        [
            Query(
                "max by (training_job, check) "
                f"(max_over_time(sdc_last_mismatch_timestamp_seconds{{{_GPU}}}[$__range])) * 1000",
                "{{check}} in {{training_job}}",
            )
        ],
        kind="stat",
        width=6,
        links=(JOB_OF,),
        empty="never named in this range",
    ),
    Panel(
        "Events that name it",
        "Once, or again and again? Events that name this GPU since its job began. Flat at 0 is healthy.",
        "none",
        [Query(f"max by (training_job, check) (sdc_mismatches_total{{{_GPU}}})", "{{training_job}} {{check}}")],
        minimum=0,
        steps=True,
        links=(JOB_OF,),
    ),
    Panel(
        "Gradient norm against its peers",
        "Does this GPU compute gradients unlike the others'? Its local norm, and the median over the ranks of its job.",
        "short",
        [
            Query(f"max by (training_job) (sdc_gradient_norm{{{_GPU}}})", "this GPU, {{training_job}}"),
            Query(
                'quantile by (training_job) (0.5, sdc_gradient_norm{training_job=~"$job"}) '
                f"and on (training_job) max by (training_job) (sdc_gradient_norm{{{_GPU}}})",
                "median of the ranks, {{training_job}}",
            ),
        ],
        log=True,
    ),
    Panel(
        "Deviation from its peers",
        "By how many robust deviations is its norm off its peers' median? A statistic: it hints and never accuses.",
        "none",
        [Query(f"max by (training_job) (sdc_gradient_norm_deviation{{{_GPU}}})", "{{training_job}}")],
    ),
    Panel(
        "Hints",
        "Is there anything short of a proof? Norms out of bounds, steps with NaN or Inf before the reduce, "
        "calibrations that only this node failed.",
        "none",
        [
            Query(f"max by (training_job) (sdc_gradient_norm_anomalies_total{{{_GPU}}})", "norm anomalies"),
            Query(f"max by (training_job) (sdc_nonfinite_gradients_total{{{_GPU}}})", "NaN or Inf"),
            Query(f"max by (training_job) (sdc_calibration_outliers_total{{{_GPU}}})", "calibration outlier"),
        ],
        minimum=0,
        steps=True,
    ),
    Panel(
        "Agrees with",
        "With how many ranks does it share its state? Fewer than the job has ranks: it, or others, differ.",
        "none",
        [
            Query(f"max by (training_job) (sdc_replica_group_size{{{_GPU}}})", "its group"),
            Query(
                'max by (training_job) (sdc_world_size{training_job=~"$job"}) '
                f"and on (training_job) max by (training_job) (sdc_training_step{{{_GPU}}})",
                "ranks of the job",
            ),
        ],
        minimum=0,
        steps=True,
    ),
    Panel(
        "Age of its newest step and oldest check",
        "Does it still train, and is it still checked? Both grow without end once the rank is gone.",
        "s",
        [
            Query(f"time() - max by (training_job) (sdc_last_step_timestamp_seconds{{{_GPU}}})", "newest step"),
            Query(f"time() - max by (training_job) (sdc_last_check_timestamp_seconds{{{_GPU}}})", "oldest check"),
        ],
        minimum=0,
    ),
    Panel(
        "Does DCGM see it",
        "Can the panels below say anything? Whether any DCGM temperature carries this UUID.",
        "none",
        [Query(f"count(DCGM_FI_DEV_GPU_TEMP{{{_DCGM}}}) > bool 0 or vector(0)", "DCGM")],
        kind="states",
        width=24,
        height=5,
        words=[("0", "no DCGM for this GPU", "orange"), ("1", "seen", "green")],
    ),
)

HARDWARE = (
    _dcgm(
        "Temperature",
        "Was it hot when it went wrong? Silent corruption tracks heat on some parts.",
        "celsius",
        (_field("GPU_TEMP"), "core"),
        (_field("MEMORY_TEMP"), "memory"),
    ),
    _dcgm(
        "Power",
        "Did power move with the fault? Compare with a healthy GPU under the same load.",
        "watt",
        (_field("POWER_USAGE"), "power"),
    ),
    _dcgm(
        "Clocks",
        "Was it throttled, or clocked unlike its peers?",
        "hertz",
        (_field("SM_CLOCK") + " * 1e6", "SM"),
        (_field("MEM_CLOCK") + " * 1e6", "memory"),
    ),
    _dcgm(
        "XID errors",
        "Did the driver report anything? The newest XID code, 0 for none. For a silent corruption this stays 0.",
        "none",
        (_field("XID_ERRORS"), "newest XID"),
        steps=True,
    ),
    _dcgm(
        "Memory errors",
        "Did ECC see anything? Double-bit errors and remapped rows; a corruption in logic leaves these flat.",
        "none",
        (_field("ECC_DBE_VOL_TOTAL"), "double-bit, since boot"),
        (_field("UNCORRECTABLE_REMAPPED_ROWS"), "rows remapped, uncorrectable"),
        (_field("CORRECTABLE_REMAPPED_ROWS"), "rows remapped, correctable"),
        (_field("ROW_REMAP_FAILURE"), "remap failed"),
        steps=True,
    ),
    _dcgm(
        "Links",
        "Is the way in and out of the GPU bad rather than the GPU? PCIe replays and NVLink CRC errors, per second.",
        "ops",
        (_rate("PCIE_REPLAY_COUNTER"), "PCIe replays"),
        (_rate("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"), "NVLink CRC"),
    ),
)


def gpu() -> builder.Dashboard:
    """The dashboard, not yet JSON."""
    chosen = dashboard.VariableOption(selected=True, text="UUID", value="UUID")
    built = (
        frame(GPU, "GPU forensics: silent data corruption", "One GPU, by UUID: what sdcwatch and DCGM know of it.")
        .with_variable(label_variable("job", "Job", "sdc_training_step", "training_job", everything=True))
        .with_variable(label_variable("gpu", "GPU", 'sdc_training_step{training_job=~"$job"}', "gpu_uuid"))
        .with_variable(
            builder.CustomVariable("dcgm_label").label("DCGM's UUID label").values("UUID,uuid,gpu_uuid").current(chosen)
        )
    )
    for mark in annotations(_GPU):
        built = built.annotation(mark)
    for panel in place((*OURS, *HARDWARE)):
        built = built.with_panel(panel)
    return built
