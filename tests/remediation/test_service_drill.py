"""A drill's alert: recorded durably, shown on /metrics, and nothing else ever happens for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sdcwatch_remediation.testing import Rig, fleet, make_rig

MEMBERS = fleet(4)
METRIC = "sdc_remediation_drill_timestamp_seconds"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with make_rig(tmp_path, MEMBERS) as made:
        yield made


def drill(rig: Rig, drill_id: str = "0a1b2c3d", status: str = "firing", **labels: str) -> dict[str, Any]:
    """The alert as the rule SDCDrill fires it."""
    given = {
        "alertname": "SDCDrill", "category": "sdc", "severity": "none", "training_job": "sdcwatch-drill",
        "training_cluster": rig.config.cluster.name, "training_node": MEMBERS[1].node_name,
        "training_instance": MEMBERS[1].instance_id, "drill": drill_id, **labels,
    }  # fmt: skip
    return {"status": status, "labels": given, "annotations": {}}


def shown(rig: Rig) -> dict[str, float]:
    lines = rig.send("GET", "/metrics", token=None).text.splitlines()
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines if line.startswith(METRIC + "{")}


def test_a_drill_is_recorded_and_shown_and_opens_no_case(rig: Rig) -> None:
    """It comes back as a number on /metrics and a line in the audit log, also after a restart."""
    (result,) = rig.ring(drill(rig))
    assert (result["result"], result["case"]) == ("drill", None)
    assert shown(rig) == {"0a1b2c3d": rig.clock.now}
    assert rig.cases() == []
    assert [line["step"] for line in rig.audit] == ["drill_received"]
    rig.restart()
    assert shown(rig) == {"0a1b2c3d": rig.clock.now}


def test_the_first_arrival_counts_and_only_the_newest_drills_are_shown(rig: Rig) -> None:
    """A repeated delivery does not make a drill look slow, and a year of drills no year of series."""
    first = rig.clock.now
    rig.ring(drill(rig, "ffffffff"))
    rig.clock.now += 100
    rig.ring(drill(rig, "ffffffff"))
    assert shown(rig) == {"ffffffff": first}
    rig.ring(*(drill(rig, f"{number:08x}") for number in range(16)))
    assert set(shown(rig)) == {f"{number:08x}" for number in range(16)}


@pytest.mark.parametrize(
    ("change", "result"),
    [
        ({"drill_id": "0a1b2c3"}, "rejected"),
        ({"drill_id": 'x"} 1\nsdc_remediation_stopped 0'}, "rejected"),
        ({"training_cluster": "another"}, "rejected"),
        ({"status": "resolved"}, "resolved"),
        ({"category": "other"}, "ignored"),
    ],
)
def test_what_is_no_drill_of_this_cluster_is_not_shown(rig: Rig, change: dict[str, str], result: str) -> None:
    """Its id becomes a label, so only the strict form does."""
    assert rig.ring(drill(rig, **change))[0]["result"] == result
    assert shown(rig) == {}


def test_a_doorbell_rung_for_a_drills_event_ends_unproven(rig: Rig) -> None:
    """Even with the real alert's name and two agents that attest it, the mark in the event stops every action."""
    rig.fault(1, drill=True)
    rig.rounds(5, seconds=2)
    assert rig.case()["state"] == "unproven"
    assert "drill" in str(rig.case())
    assert rig.provider.calls == []
