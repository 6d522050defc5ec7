"""A GPU that left with a replaced instance and is back in another one is noticed, and its next fault is acted on."""

from __future__ import annotations

from pathlib import Path

from sdcwatch_remediation.testing import alert, event_line, fleet, make_rig

MEMBERS = fleet(4)
GPU = f"CPU-{MEMBERS[2].instance_id}-0"


def test_hardware_that_comes_back_is_noticed_and_not_trusted(tmp_path: Path) -> None:
    """A first transient fault would only be remembered; of a GPU on the list it is acted on, and it is on record."""
    with make_rig(tmp_path, MEMBERS, confirm="persistent", per_day=5) as rig:
        rig.fault(2)
        rig.rounds(3, seconds=2.0)
        rig.provider.come_up(MEMBERS[2].instance_id, launched=rig.clock())
        rig.rounds(3, seconds=2.0)
        assert rig.case()["outcome"] == "replaced"
        rig.clock.now += 3600.0
        line = event_line(rig.provider.members, [1], time=rig.clock(), persistence="transient", step=900)
        line["event"]["ranks"][1]["gpu_uuid"] = GPU
        rig.agents[MEMBERS[2].instance_id].instance = rig.provider.members[2].instance_id
        rig.agents.say(line)
        rig.ring(alert(MEMBERS[1], 1, gpu_uuid=GPU))
        rig.rounds(3, seconds=2.0)
        case = rig.case(MEMBERS[1])
        (noticed,) = [entry["detail"] for entry in case["timeline"] if entry["step"] == "returned_hardware"]
        assert noticed == {"gpu": GPU, "instance": MEMBERS[1].instance_id}
        assert rig.service.telemetry.registry.get_sample_value("sdc_remediation_returned_gpus_total") == 1
        (confirmed,) = [gate for gate in case["gates"] if (gate["name"], gate["action"]) == ("confirmed", "quarantine")]
        assert "left with a replaced instance and is back" in confirmed["reason"]
        assert rig.provider.calls == [MEMBERS[2].instance_id, MEMBERS[1].instance_id]


def test_a_gpu_that_stays_in_its_own_instance_is_no_return(tmp_path: Path) -> None:
    """The list is asked about other instances only; a healthy stranger's GPU is not on it."""
    with make_rig(tmp_path, MEMBERS, confirm="persistent") as rig:
        rig.fault(2, persistence="transient")
        rig.rounds(3, seconds=2.0)
        assert rig.case()["outcome"] == "suspected"
        assert rig.service.telemetry.registry.get_sample_value("sdc_remediation_returned_gpus_total") == 0
