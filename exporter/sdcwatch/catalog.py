"""Every metric that the exporter may export, and every value that an enumerated label may take.

This is the one place where names, kinds, help, units and labels stand: ranks, the agent, the documentation and the
tests read it. It measures and stores nothing, and holds no `sdc_remediation_*` (the service has a catalogue of its
own). Standard library only. Flow: **catalog** -> metrics (ranks) and agent (merge).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sdcwatch.observation import SkipReason

Kind = Literal["counter", "gauge", "info"]
Scope = Literal["rank", "node", "job", "agent"]
Merge = Literal["newest", "max"]

CHECKS = (
    "gradient_norm",
    "gradient_checksum",
    "allreduce_conservation",
    "weight_checksum",
    "replay",
    "checkpoint",
)
#: Checks that may name a rank (docs/contracts.md: `suspects`); only these have per-rank mismatch series.
ACCUSING_CHECKS = ("weight_checksum", "replay")
VERDICT_KINDS = ("clean", "attributed", "inconclusive", "software", "undefined")
EVENT_KINDS = ("attributed", "inconclusive", "software")
UNATTRIBUTED_KINDS = ("inconclusive", "software")
SKIP_REASONS = SkipReason.NAMES
TRAINING_STATES = ("starting", "training", "evaluating", "checkpointing", "halted", "finished")
HEAL_OUTCOMES = ("healed", "failed", "refused")
COVERED = ("yes", "no")
DROP_REASONS = ("unknown_family", "labels", "foreign_node", "foreign_job", "cap")
REFUSED_REASONS = ("token", "busy", "request")
PUSH_SIGNALS = ("metrics", "logs")
PUSH_RESULTS = ("taken", "refused", "failed")

#: Labels that scrape configurations own; exporting one would make Prometheus rename it or lose ours.
FORBIDDEN_LABELS = ("job", "instance", "node", "pod", "namespace")

#: Identity labels by scope, in the order in which they are rendered.
IDENTITY_LABELS: Mapping[Scope, tuple[str, ...]] = {
    "rank": ("training_job", "training_cluster", "training_node", "training_instance", "gpu_uuid", "rank"),
    "node": ("training_job", "training_cluster", "training_node", "training_instance"),
    "job": ("training_job", "training_cluster"),
    "agent": ("training_cluster", "training_node", "training_instance"),
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family.

    Attributes:
        name: full name, as a scrape shows it.
        kind: `info` is exported as a gauge that is always 1.
        help: one sentence, without a full stop.
        unit: base unit that the name ends in (before `_total`); empty for numbers without one.
        scope: which identity labels its series carry, and who writes it.
        labels: labels besides the identity, in the order in which they are rendered.
        enums: label -> the only values it may take; labels without an entry are free text.
        merge: what the agent does with one gauge from several epochs. `newest`: the newest epoch speaks. `max`: the
            newest *event* speaks, whichever epoch saw it; such a series also survives a restart of the rank.
    """

    name: str
    kind: Kind
    help: str
    unit: str = ""
    scope: Scope = "rank"
    labels: tuple[str, ...] = ()
    enums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    merge: Merge = "newest"

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Identity labels, then the metric's own."""
        return IDENTITY_LABELS[self.scope] + self.labels

    @property
    def exposed_kind(self) -> str:
        """The word of the TYPE line."""
        return "gauge" if self.kind == "info" else self.kind


_CHECK = {"check": CHECKS}
_ACCUSING = {"check": ACCUSING_CHECKS}
_UNATTRIBUTED = {"check": CHECKS, "verdict": UNATTRIBUTED_KINDS}

#: Series of a *suspect*: the only ones that a rank may write in another rank's name (see metrics.blame).
MISMATCHES = "sdc_mismatches_total"
LAST_MISMATCH = "sdc_last_mismatch_timestamp_seconds"
BLAME = frozenset((MISMATCHES, LAST_MISMATCH))

_METRICS = (
    Metric(MISMATCHES, "counter", "Events that name this rank as the suspect", "", "rank", ("check",), _ACCUSING),
    Metric(
        LAST_MISMATCH, "gauge", "Time of the newest event that names this rank; absent means never", "seconds",
        "rank", ("check",), _ACCUSING, "max",
    ),
    Metric("sdc_gradient_norm", "gauge", "L2 norm of the local gradient before the reduce"),
    Metric("sdc_gradient_norm_deviation", "gauge", "Robust deviation of the local norm from the median of its peers"),
    Metric("sdc_gradient_norm_anomalies_total", "counter", "Times the deviation of the local norm passed its bound"),
    Metric("sdc_nonfinite_gradients_total", "counter", "Steps whose local gradient held NaN or Inf before the reduce"),
    Metric("sdc_calibration_outliers_total", "counter", "Calibrations in which only this rank's node failed"),
    Metric("sdc_training_step", "gauge", "Newest training step of this rank"),
    Metric("sdc_last_step_timestamp_seconds", "gauge", "When this rank last finished a step", "seconds"),
    Metric("sdc_last_check_timestamp_seconds", "gauge", "When the check that ran longest ago last ran", "seconds"),
    Metric("sdc_checks_skipped_total", "counter", "Skips of any check on this rank"),
    Metric("sdc_replica_group_size", "gauge", "Ranks that shared this rank's fingerprint at the last vote"),
    Metric("sdc_series_dropped_total", "counter", "Series that this rank refused at its cap; absent means none"),
    Metric(
        "sdc_rank_info", "info", "What runs this rank; a join key", "", "rank",
        ("local_rank", "host", "instance_type", "gpu_model", "driver"),
    ),
    Metric("sdc_checks_total", "counter", "Checks that ran", "", "job", ("check",), _CHECK),
    Metric(
        "sdc_skips_total", "counter", "Checks that did not run, by reason", "", "job",
        ("check", "reason"), {"check": CHECKS, "reason": SKIP_REASONS},
    ),
    Metric(
        "sdc_unattributed_total", "counter", "Events that name no rank", "", "job", ("check", "verdict"), _UNATTRIBUTED
    ),
    Metric(
        "sdc_last_unattributed_timestamp_seconds", "gauge", "Time of the newest event that names no rank", "seconds",
        "job", ("check", "verdict"), _UNATTRIBUTED, "max",
    ),
    Metric(
        "sdc_replica_groups", "gauge", "Distinct fingerprints at the last vote; 1 means that all agree", "", "job",
        ("check",), _CHECK,
    ),
    Metric(
        "sdc_heals_total", "counter", "Heals, by outcome", "", "job",
        ("check", "outcome"), {"check": CHECKS, "outcome": HEAL_OUTCOMES},
    ),
    Metric("sdc_checked_step", "gauge", "Newest step up to which all checks were clean", "", "job"),
    Metric("sdc_verified_step", "gauge", "Newest checked step that a clean replay audit also covers", "", "job"),
    Metric("sdc_last_clean_checkpoint_step", "gauge", "Step of the newest checkpoint to resume from", "", "job"),
    Metric("sdc_world_size", "gauge", "Ranks that should report", "", "job"),
    Metric("sdc_detector_enabled", "gauge", "1 where the check is on, else 0", "", "job", ("check",), _CHECK),
    Metric(
        "sdc_check_every", "gauge", "Reducing backwards between two runs of a check, as stretched; 0 means off", "",
        "job", ("check",), _CHECK,
    ),
    Metric(
        "sdc_self_test_passed", "gauge", "1 where the injection at start was found on every rank, else 0", "",
        "job", ("check",), _CHECK,
    ),
    Metric("sdc_self_test_seconds", "gauge", "Time that the self-test at start took on one rank", "seconds", "job"),
    Metric(
        "sdc_coverage_bytes", "gauge", "State that a check fingerprints, and state that it does not reach", "bytes",
        "job", ("check", "covered"), {"check": CHECKS, "covered": COVERED},
    ),
    Metric(
        "sdc_training_state", "gauge",
        "1 for the state that the job is in, 0 for the others; all 0: its processes are gone", "", "job",
        ("state",), {"state": TRAINING_STATES},
    ),
    Metric("sdc_check_seconds_total", "counter", "Time spent in a check", "seconds", "node", ("check",), _CHECK),
    Metric("sdc_step_seconds_total", "counter", "Time spent in steps, checks included", "seconds", "node"),
    Metric(
        "sdc_drill_timestamp_seconds", "gauge", "When a drill of the alert path was sent from this node", "seconds",
        "node", ("drill",), merge="max",
    ),
    Metric("sdc_build_info", "info", "Version of the agent", "", "agent", ("version",)),
    Metric("sdc_agent_ranks_seen", "gauge", "Ranks of this node whose process is alive", "", "agent"),
    Metric("sdc_agent_events_pending", "gauge", "Events that no scrape has seen yet", "", "agent"),
    Metric(
        "sdc_agent_series_dropped_total", "counter", "Series of ranks that the agent refused, by reason", "", "agent",
        ("reason",), {"reason": DROP_REASONS},
    ),
    Metric(
        "sdc_agent_last_scrape_timestamp_seconds", "gauge", "When Prometheus last scraped; absent means never",
        "seconds", "agent",
    ),
    Metric("sdc_agent_parse_errors_total", "counter", "Lines of rank files that could not be read", "", "agent"),
    Metric("sdc_agent_files_expired_total", "counter", "Files of dead epochs that were removed", "", "agent"),
    Metric(
        "sdc_agent_requests_refused_total", "counter", "Requests that were refused, by reason", "", "agent",
        ("reason",), {"reason": REFUSED_REASONS},
    ),
    Metric(
        "sdc_agent_otlp_requests_total", "counter", "Requests to the OTLP collector, by what became of them", "",
        "agent", ("signal", "result"), {"signal": PUSH_SIGNALS, "result": PUSH_RESULTS},
    ),
)  # fmt: skip

#: name -> metric, in the order in which families are exported and documented.
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _METRICS}


def markdown_table() -> str:
    """The catalogue as the generated part of docs/metrics.md."""
    rows = ["| metric | type | scope | labels | meaning |", "|---|---|---|---|---|"]
    for metric in METRICS.values():
        labels = ", ".join(
            f"`{label}` ({', '.join(metric.enums[label])})" if label in metric.enums else f"`{label}`"
            for label in metric.labels
        )
        unit = f", in {metric.unit}" if metric.unit else ""
        rows.append(f"| `{metric.name}` | {metric.kind} | {metric.scope} | {labels} | {metric.help}{unit} |")
    return "\n".join(rows) + "\n"
