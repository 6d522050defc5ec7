"""Turn one alert into one signal, or say why it is none.

What it does: keeps only our own labels (`training_*`, `gpu_uuid`, `rank`, `check`), each against a strict pattern.
What it never does: believe them. A signal is a doorbell: it says whose evidence to fetch, and proves nothing.
`instance`, `node` and `pod` are not even read, for a scrape configuration writes those.
Its place: between `alertmanager` and `store`. No text that fails here reaches a URL, a path or a command.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sdcwatch_remediation.alertmanager import Alert

DOORBELL = "SDCReplicaMismatch"
"""The one alert name that opens cases."""

DRILL = "SDCDrill"
"""The alert name of a drill: recorded, shown as received, and acted on by nothing."""

INSTANCE = re.compile(r"i-[0-9a-f]{17}", re.ASCII)
NODE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", re.ASCII)
CLUSTER = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?", re.ASCII)
JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@=+-]{0,127}", re.ASCII)
GPU = re.compile(r"(?:GPU|MIG|CPU)-[A-Za-z0-9.-]{1,280}", re.ASCII)
RANK = re.compile(r"[0-9]{1,6}", re.ASCII)
CHECK = re.compile(r"[a-z_]{1,64}", re.ASCII)
DRILL_ID = re.compile(r"[0-9a-f]{8}", re.ASCII)

_PATTERNS = {
    "training_instance": INSTANCE,
    "training_node": NODE,
    "training_cluster": CLUSTER,
    "training_job": JOB,
    "gpu_uuid": GPU,
    "rank": RANK,
    "check": CHECK,
}
# Words that some tools expand to every node; no node may be called so.
_RESERVED_NODES = frozenset({"all"})


@dataclass(frozen=True, slots=True)
class Signal:
    """What a well-formed firing doorbell says; unproven, but safe to store, compare and print."""

    index: int
    cluster: str
    instance_id: str
    node_name: str
    job: str
    gpu_uuid: str
    rank: int
    check: str


@dataclass(frozen=True, slots=True)
class NoSignal:
    """An alert that opens nothing: recorded, counted, answered with 200."""

    index: int
    result: str
    """`ignored` (not ours to act on), `resolved`, `drill`, or `rejected` (ours by name, but not well-formed)."""
    reason: str
    drill: str = ""
    """Id of the drill whose alert this is; empty for every other alert."""


def derive(alert: Alert, cluster: str) -> Signal | NoSignal:
    """Judge one alert; `cluster` is the cluster that this service looks after."""
    if alert.labels.get("alertname") == DRILL and alert.labels.get("category") == "sdc":
        return _drill(alert, cluster)
    if alert.labels.get("alertname") != DOORBELL or alert.labels.get("category") != "sdc":
        return NoSignal(alert.index, "ignored" if not alert.problem else "rejected", alert.problem or "not a doorbell")
    if alert.problem:
        return NoSignal(alert.index, "rejected", alert.problem)
    if alert.status == "resolved":
        return NoSignal(alert.index, "resolved", "resolved is not healthy: recorded, not acted on")
    for name, pattern in _PATTERNS.items():
        value = alert.labels.get(name)
        if not value:
            return NoSignal(alert.index, "rejected", f"label {name} is absent")
        if not pattern.fullmatch(value):
            return NoSignal(alert.index, "rejected", f"label {name} is not of the form {pattern.pattern}")
    labels = alert.labels
    if labels["training_node"].casefold() in _RESERVED_NODES:
        return NoSignal(alert.index, "rejected", "label training_node is a reserved word")
    if labels["training_cluster"] != cluster:
        return NoSignal(alert.index, "rejected", f"another cluster; this service looks after {cluster}")
    return Signal(
        index=alert.index,
        cluster=labels["training_cluster"],
        instance_id=labels["training_instance"],
        node_name=labels["training_node"],
        job=labels["training_job"],
        gpu_uuid=labels["gpu_uuid"],
        rank=int(labels["rank"]),
        check=labels["check"],
    )


def _drill(alert: Alert, cluster: str) -> NoSignal:
    drill = alert.labels.get("drill", "")
    if alert.problem:
        return NoSignal(alert.index, "rejected", alert.problem)
    if alert.status == "resolved":
        return NoSignal(alert.index, "resolved", "the end of a drill's alert")
    if not DRILL_ID.fullmatch(drill):
        return NoSignal(alert.index, "rejected", f"label drill is not of the form {DRILL_ID.pattern}")
    if alert.labels.get("training_cluster") != cluster:
        return NoSignal(alert.index, "rejected", f"another cluster; this service looks after {cluster}")
    return NoSignal(alert.index, "drill", f"{drill}: a drill arrived; no action is taken on one", drill)
