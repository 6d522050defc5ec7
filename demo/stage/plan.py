"""What the demo shows: the nodes, the ports, the faults, and what each fault must lead to.

Everything that a reader might want to change stands here; nothing here starts anything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

CLUSTER = "demo"
JOB = "bytegpt"
GROUP = "workers"
REGION = "us-west-2"
#: Addresses of the four nodes, and of the spare that a replacement gets. All on loopback; Linux answers on 127.0.0.0/8.
NODES = ("127.0.1.1", "127.0.1.2", "127.0.1.3", "127.0.1.4")
SPARE = "127.0.1.5"
#: The node that goes bad. Its rank is its place in address order, since torchrun numbers ranks by it.
BAD = 2
REPLAY_EVERY, SAVE_EVERY = 10, 5
#: Seconds for one fault, everything included; the rest of `make demo` is set-up.
MOST_SECONDS = 180.0


def instance_id(number: int) -> str:
    """Instance id of one of the first nodes (from 0)."""
    return f"i-0de30{number + 1:012d}"


@dataclass(frozen=True, slots=True)
class Ports:
    """Every port that the demo listens on; each has a flag `--NAME-port` and a variable `DEMO_NAME_PORT`."""

    agent: int = 9478  # on each node's own address
    remediation: int = 9479
    pager: int = 9480
    simulator: int = 9481
    prometheus: int = 9090
    alertmanager: int = 9093
    rendezvous: int = 29400  # on the first node's address


PORT_NAMES = tuple(f.name for f in fields(Ports))


@dataclass(frozen=True, slots=True)
class Expected:
    """What must hold at the end. None where nothing of the kind may happen."""

    check: str | None
    verdict: str | None
    named: bool
    fault_step: int | None
    detected_step: int | None
    resumed_from_step: int | None
    resumed_from_trust: str | None
    replace_calls: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """One fault: what is injected (fields of `sdcwatch.testing.Fault`) and what must come of it."""

    name: str
    title: str
    fault: dict[str, Any] | None
    expected: Expected

    def environment(self, out: Path) -> dict[str, str]:
        """The variable that the training script's fault plan reads; empty without a fault."""
        if self.fault is None:
            return {}
        fault = {**self.fault, "instance": instance_id(BAD)}
        if fault.get("mode") == "transient":
            fault["marker"] = str(out / "fault-has-struck")
        return {"SDCWATCH_TESTING_FAULT": json.dumps(fault)}


# Audits run at steps 1, 11, 21, ... and checkpoints are written after 5, 10, 15, ... The compute fault begins between
# two audits with two checkpoints in between, which must not be chosen; the others begin where the newest checked
# checkpoint (15) is newer than the newest verified one (10).
SCENARIOS = {
    "compute": Scenario(
        "compute",
        "a persistent error of 2^-10 in one layer's backward on one node",
        {"location": "backward", "step": 13, "pattern": "scale", "parameter": 4},
        Expected("replay", "attributed", True, 12, 21, 10, "verified", 1),
    ),
    "weight": Scenario(
        "weight",
        "the optimizer step of one node computes wrong parameters",
        {"location": "optimizer_weight", "step": 17, "pattern": "scale", "parameter": 4},
        Expected("weight_checksum", "attributed", True, 16, 18, 15, "checked", 1),
    ),
    "optimizer": Scenario(
        "optimizer",
        "the optimizer step of one node computes a wrong moment",
        {"location": "optimizer_state", "step": 17, "pattern": "scale", "parameter": 4},
        Expected("weight_checksum", "attributed", True, 16, 18, 15, "checked", 1),
    ),
    "gradient": Scenario(
        "gradient",
        "what the all-reduce hands back on one rank is wrong, once",
        {"location": "reduced_gradient", "step": 17, "mode": "transient", "pattern": "scale", "parameter": 4},
        Expected("gradient_checksum", "inconclusive", False, 16, 17, 15, "checked", 0),
    ),
    "none": Scenario("none", "no fault at all", None, Expected(None, None, False, None, None, None, None, 0)),
}
