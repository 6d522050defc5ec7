"""Links from one dashboard to the next: fleet -> job -> GPU -> case, each carrying time range and data source along.

What it does: names the dashboards' uids and builds data links, and the row of links at the top of every dashboard.
What it never does: point outside Grafana, but for the case link, whose address is the `cases` variable.
Flow: **links** -> panels and the dashboard modules.
"""

from __future__ import annotations

from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard as builder
from grafana_foundation_sdk.models import dashboard

#: Every dashboard of ours has it, so that the row of links finds them all.
TAG = "sdcwatch"
FLEET = "sdcwatch-fleet"
TRAINING_JOB = "sdcwatch-training-job"
GPU = "sdcwatch-gpu"
HEALTH = "sdcwatch-health"

_ALONG = "var-datasource=${datasource}&var-cases=${cases}&${__url_time_range}"


@dataclass(frozen=True, slots=True)
class Link:
    """One link that a value of a panel offers.

    Attributes:
        title: what the menu says.
        url: with `{label}` where the value of a label of the clicked series goes.
        labels: the labels that `url` needs.
    """

    title: str
    url: str
    labels: tuple[str, ...]

    def of_series(self) -> dict[str, object]:
        """The link as it reads labels of a series."""
        return self._filled("${__field.labels.%s:percentencode}")

    def of_row(self) -> dict[str, object]:
        """The link as it reads columns of a table's row."""
        return self._filled("${__data.fields.%s:percentencode}")

    def _filled(self, pattern: str) -> dict[str, object]:
        url = self.url
        for label in self.labels:
            url = url.replace("{" + label + "}", pattern % label)
        return {"title": self.title, "url": url, "targetBlank": self.url.startswith("${cases}")}


JOB_OF = Link("Training job", f"/d/{TRAINING_JOB}?var-job={{training_job}}&{_ALONG}", ("training_job",))
GPU_OF = Link("GPU forensics", f"/d/{GPU}?var-gpu={{gpu_uuid}}&{_ALONG}", ("gpu_uuid",))
#: Metrics carry no case id, so the link names the instance; see docs/dashboards.md.
CASE_OF = Link("Remediation case", "${cases}?instance={training_instance}", ("training_instance",))


def navigation() -> builder.DashboardLink:
    """The row of links to the other dashboards, with the variables and the time range as they are."""
    return (
        builder.DashboardLink("sdcwatch")
        .icon("dashboard")
        .type(dashboard.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .include_vars(True)
        .keep_time(True)
    )
