"""Becomes one node of the cluster: waits until the inventory has a running instance at an address, then runs a command.

    python node.py ADDRESS COMMAND...     with SDCWATCH_NODE, SDCWATCH_INSTANCE and SDCWATCH_SPOOL_DIR of that instance
    python node.py ADDRESS --training     0 while the instance's ranks wrote something in the last two minutes

So the spare's containers wait for the replacement, and a node's spool never holds another instance's files. It decides
nothing and watches nothing afterwards.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, NoReturn

INVENTORY = os.environ.get("INVENTORY_URL", "http://127.0.0.1:9481/_simulator/state")
SPOOLS = Path(os.environ.get("SPOOLS", "/state/spool"))
FRESH_SECONDS = 120.0


def find(address: str) -> dict[str, Any] | None:
    """The running instance at an address, or None where there is none or the inventory does not answer."""
    try:
        with urllib.request.urlopen(INVENTORY, timeout=5) as answer:
            nodes = json.load(answer)["nodes"]
    except OSError:
        return None
    return next((n for n in nodes if n["address"] == address and n["status"] == "Running"), None)


def environment(node: dict[str, Any]) -> dict[str, str]:
    """What the node's programs are told about it."""
    spool = SPOOLS / node["instance_id"]
    spool.mkdir(mode=0o700, exist_ok=True)
    identity = {"SDCWATCH_NODE": node["node_name"], "SDCWATCH_INSTANCE": node["instance_id"]}
    return {**os.environ, **identity, "SDCWATCH_SPOOL_DIR": str(spool)}


def is_training(address: str) -> bool:
    """Whether a rank of the instance wrote to its spool lately."""
    node = find(address)
    if node is None:
        return False
    written = [path.stat().st_mtime for path in (SPOOLS / node["instance_id"]).rglob("rank-*.prom")]
    return bool(written) and time.time() - max(written) < FRESH_SECONDS


def become(address: str, command: list[str]) -> NoReturn:
    """Waits for the instance and replaces this process by the command."""
    while (node := find(address)) is None:
        time.sleep(1.0)
    os.execvpe(command[0], command, environment(node))


def main(words: list[str]) -> int:
    """Replaces itself by the command; returns only for `--training` and wrong use."""
    if len(words) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    address, *command = words
    if command == ["--training"]:
        return 0 if is_training(address) else 1
    return become(address, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
