"""Marks that stand on every panel: faults, events that name nobody, heals, replacements, alerts.

What it does: builds annotation queries. Faults stand at the event's own time (the metric's value), not where it was
scraped; heals and replacements have no metric of their time, so the minute in which their counter grew is marked.
What it never does: mark single ranks beyond the newest few. Flow: **annotations** -> the dashboard modules.
"""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard
from panels import DATASOURCE
from promql import grew, newest


class _Annotation(Builder[dashboard.AnnotationQuery]):
    """The SDK has no builder for a Prometheus annotation."""

    def __init__(self, name: str, colour: str, expr: str, title: str, text: str, *, at_value: bool = False) -> None:
        self._query = dashboard.AnnotationQuery(
            name=name,
            datasource=DATASOURCE,
            icon_color=colour,
            expr=expr,
            step="10s",
            title_format=title,
            text_format=text,
            use_value_for_time=at_value or None,
        )

    def build(self) -> dashboard.AnnotationQuery:
        return self._query


def annotations(matchers: str, *, service: bool = True) -> Sequence[Builder[dashboard.AnnotationQuery]]:
    """All marks for the series that match.

    Args:
        matchers: label matchers without braces, such as `training_job="$job"`; empty for all.
        service: replacements too. The service's metrics name no job, so those of all jobs are marked.
    """
    identity = "training_job, training_node, gpu_uuid, rank, check"
    found: list[Builder[dashboard.AnnotationQuery]] = [
        _Annotation(
            "Faults",
            "red",
            newest(f"sdc_last_mismatch_timestamp_seconds{{{matchers}}}", identity),
            "{{check}} names rank {{rank}}",
            "{{training_job}} {{training_node}} {{gpu_uuid}}",
            at_value=True,
        )
    ]
    if "gpu_uuid" not in matchers:
        found += [
            _Annotation(
                "Events that name nobody",
                "orange",
                newest(f"sdc_last_unattributed_timestamp_seconds{{{matchers}}}", "training_job, check, verdict"),
                "{{check}}: {{verdict}}",
                "{{training_job}}",
                at_value=True,
            ),
            _Annotation(
                "Heals",
                "green",
                grew("sdc_heals_total", matchers, "check, outcome"),
                "{{check}} {{outcome}}",
                "state repaired in place",
            ),
        ]
    if service:
        found.append(
            _Annotation(
                "Replacements",
                "blue",
                grew("sdc_remediation_closed_cases", 'outcome="replaced"', "outcome"),
                "a node was replaced",
                "see the remediation dashboard",
            )
        )
    labels = f",{matchers}" if matchers else ""
    found.append(
        _Annotation(
            "Alerts",
            "purple",
            f'count by (alertname) (ALERTS{{alertname=~"SDC.*",alertname!="SDCWatchdog",alertstate="firing"{labels}}})',
            "{{alertname}}",
            "firing",
        )
    )
    return found
