"""Read an Alertmanager webhook body (version 4), leniently.

What it does: finds the list of alerts and, alert by alert, its status and labels.
What it never does: judge what a label says (that is `signals`), or refuse a batch because one alert in it is odd.
Its place: `app` hands it the raw body; `signals` receives what it returns.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sdcwatch_remediation.errors import NotAlertmanager


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert of a delivery, as sent; every field may be forged."""

    index: int
    status: str
    """`firing`, `resolved`, or whatever was sent."""
    labels: dict[str, str]
    problem: str
    """Why this alert cannot be read; empty when it can."""


def parse(body: bytes) -> tuple[Alert, ...]:
    """Return the alerts of one webhook body.

    Raises:
        NotAlertmanager: the body is not a JSON object with a list `alerts`.
    """
    try:
        tree = json.loads(body.decode("utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise NotAlertmanager("the body is not JSON in UTF-8; point an Alertmanager webhook_config here") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("alerts"), list):
        raise NotAlertmanager('the body has no list "alerts"; point an Alertmanager webhook_config here')
    return tuple(_alert(index, item) for index, item in enumerate(tree["alerts"]))


def _alert(index: int, item: Any) -> Alert:
    if not isinstance(item, dict):
        return Alert(index, "", {}, "the alert is not an object")
    labels, status = item.get("labels"), item.get("status")
    if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
        return Alert(index, "", {}, "labels are not an object of strings")
    if status not in ("firing", "resolved"):
        return Alert(index, "", labels, "status is neither firing nor resolved")
    return Alert(index, status, labels, "")
