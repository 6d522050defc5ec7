"""The result of one node's preflight under one latch, as a file: who writes it, where, and how it is read again.

Written by the node that judged itself, into the folder that all nodes share and into its own spool, from which its
agent serves it. Decides nothing: a failure accuses only the machine that reports it, and a pass clears nobody. Standard
library only. Flow: launch.halt_wait -> **result** -> launch.halt_wait of other nodes, agent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sdcwatch.spool.folders import read_regular
from sdcwatch.spool.reader import iter_jobs

SCHEMA = 1
FOLDER = "preflight"
#: Most devices of one machine that are told, and most characters of one of their fields.
MOST_DEVICES, TEXT = 64, 200
_FILE_BYTES = 1 << 20
_TOLD = ("latch_id", "node", "instance", "result", "detail", "time", "devices")


def path_in(place: Path, latch_id: str, node: str) -> Path:
    """Where a node's result stands below `place`; a name that could leave the folder is encoded."""
    return place / FOLDER / latch_id / (quote(node, safe="").replace("..", "%2E%2E") + ".json")


def record(
    latch_id: str,
    node: str,
    instance: str,
    *,
    result: str,
    detail: str,
    output: str,
    report: Mapping[str, Any],
    at: float,
) -> dict[str, Any]:
    """The file's content.

    Args:
        output: the end of what the preflight printed.
        report: the JSON line of it; its devices are kept beside the judgement, so that nobody has to parse the output.
        at: unix seconds.
    """
    return {
        "schema": SCHEMA,
        "latch_id": latch_id,
        "node": node,
        "instance": instance,
        "result": result,
        "detail": detail,
        "devices": _devices(report),
        "output": output,
        "time": at,
    }


def own_results(user_root: Path, *, latch_id: str, node: str, instance: str) -> list[dict[str, Any]]:
    """This node's results under one latch, one a job at most, without the output; nothing that names another node."""
    found = []
    for _, directory in iter_jobs(user_root):
        raw = read_regular(path_in(directory, latch_id, node), _FILE_BYTES)
        try:
            kept = json.loads(raw) if raw is not None else None
        except (ValueError, RecursionError):
            continue
        if not isinstance(kept, dict) or kept.get("schema") != SCHEMA:
            continue
        if (kept.get("latch_id"), kept.get("node"), kept.get("instance")) == (latch_id, node, instance):
            found.append({key: kept.get(key, []) for key in _TOLD})
    return found


def _devices(report: Mapping[str, Any]) -> list[dict[str, str]]:
    devices = report.get("devices")
    names = ("device", "name", "uuid", "serial", "outcome")
    return [
        {name: str(device.get(name) or "")[:TEXT] for name in names}
        for device in (devices if isinstance(devices, list) else [])[:MOST_DEVICES]
        if isinstance(device, dict)
    ]
