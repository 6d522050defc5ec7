"""Events and alerts as the training side and Alertmanager write them, for tests.

What it does: builds one journal line of `docs/contracts.md`, and one Alertmanager delivery with our labels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from sdcwatch_remediation.records import Member


def event_line(members: Sequence[Member], suspects: Iterable[int], *, time: float, **changes: Any) -> dict[str, Any]:
    """Return one journal line in which rank `n` runs on `members[n]` and `suspects` are named.

    Args:
        members: one member a rank.
        suspects: rank numbers.
        time: unix seconds.
        changes: other values for fields of `event`.
    """
    named = list(suspects)
    step = changes.get("step", 57)
    event = {
        "id": "sdc-" + hashlib.sha256(f"{named}{time}{step}".encode()).hexdigest()[:16],
        "training_job": "bytegpt",
        "training_cluster": "demo",
        "epoch": "e1700000000000-0a1b2c3d",
        "step": step,
        "check": "replay",
        "kind": "attributed",
        "persistence": "persistent",
        "time": time,
        "suspects": named,
        "differing": named,
        "candidates": named,
        "path": "backward compute",
        "sentence": f"rank {named} computes gradients that differ",
        "evidence": {},
        "action": "halt",
        "drill": False,
        "world_size": len(members),
        "last_clean_step": step - 1,
        "trust_needed": "verified",
        "ranks": [
            {
                "rank": rank,
                "local_rank": 0,
                "node": member.node_name,
                "instance": member.instance_id,
                "host": member.node_name,
                "gpu_uuid": f"CPU-{member.instance_id}-0",
                "cluster": "demo",
                "environment": "same",
            }
            for rank, member in enumerate(members)
        ],
        **changes,
    }
    return {"schema": 1, "event": event, "reporter": {"rank": 0}, "detail": {}}


def alert(member: Member, rank: int, /, **labels: str) -> dict[str, Any]:
    """Return one firing `SDCReplicaMismatch` about a member; `labels` overrides or adds labels."""
    return {
        "status": "firing",
        "labels": {
            "alertname": "SDCReplicaMismatch",
            "severity": "critical",
            "category": "sdc",
            "training_job": "bytegpt",
            "training_cluster": "demo",
            "training_node": member.node_name,
            "training_instance": member.instance_id,
            "gpu_uuid": f"CPU-{member.instance_id}-0",
            "rank": str(rank),
            "check": "replay",
            "instance": "10.0.0.9:9478",
            **labels,
        },
        "annotations": {"summary": "a rank computes other gradients"},
        "startsAt": "2026-01-01T00:00:00Z",
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": "http://127.0.0.1/",
        "fingerprint": "0",
    }


def delivery(*alerts: Any) -> bytes:
    """Return the body of one Alertmanager webhook, version 4."""
    return json.dumps({"version": "4", "status": "firing", "receiver": "remediation", "alerts": list(alerts)}).encode()
