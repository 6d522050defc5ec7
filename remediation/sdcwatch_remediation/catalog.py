"""The catalogue of what the service exports: every `sdc_remediation_*` name, kind, label and help text, in one place.

What it does: lists the metrics; `telemetry` makes them, tests and documentation read them here.
What it never does: import anything but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported family; counters are listed with their exported name, `_total` included."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    help: str


CATALOG: tuple[Metric, ...] = (
    Metric("sdc_remediation_build_info", "gauge", ("version",), "Always 1; the version of the service."),
    Metric("sdc_remediation_cases", "gauge", ("state",), "Cases that are not over, by state."),
    Metric("sdc_remediation_closed_cases", "gauge", ("outcome",), "Cases that are over, by outcome."),
    Metric(
        "sdc_remediation_state_seconds", "gauge", ("state",), "Longest time that an open case has been in its state."
    ),
    Metric("sdc_remediation_overdue_cases", "gauge", (), "Open cases past the deadline of their state."),
    Metric("sdc_remediation_gates_total", "counter", ("gate", "result"), "Gates asked, by result (pass, fail)."),
    Metric("sdc_remediation_provider_calls_total", "counter", ("call", "code"), "Calls to the provider, by answer."),
    Metric("sdc_remediation_unknown_outcomes_total", "counter", (), "Replace requests whose outcome was unknown."),
    Metric("sdc_remediation_budget_left", "gauge", ("budget",), "Replacements still allowed (concurrent, per_day)."),
    Metric("sdc_remediation_stopped", "gauge", (), "1 while a pause or the kill switch stops every action."),
    Metric("sdc_remediation_frozen", "gauge", (), "1 while the database is not the one that was meant."),
    Metric("sdc_remediation_mode", "gauge", ("action", "mode"), "1 for the default mode of each action."),
    Metric("sdc_remediation_settle_seconds", "gauge", (), "Wait after the newest signal before any act."),
    Metric("sdc_remediation_deliveries_total", "counter", ("code",), "Webhook deliveries, by the status answered."),
    Metric("sdc_remediation_alerts_total", "counter", ("result",), "Alerts in them, by what became of them."),
    Metric("sdc_remediation_auth_failures_total", "counter", ("reason",), "Requests refused for their credential."),
    Metric(
        "sdc_remediation_agent_answers_total", "counter", ("result",), "Answers of agents that were asked for proof."
    ),
    Metric(
        "sdc_remediation_drill_timestamp_seconds", "gauge", ("drill",), "When a drill's alert arrived; the newest 16."
    ),
    Metric(
        "sdc_remediation_errors_total",
        "counter",
        ("where",),
        "Unexpected errors (case, round); traces and notices not sent.",
    ),
    Metric("sdc_remediation_returned_gpus_total", "counter", (), "GPUs seen again after their instance was replaced."),
    Metric("sdc_remediation_last_round_timestamp_seconds", "gauge", (), "When the worker last ended a round."),
)
