"""Every state that is not an end has a deadline, and the worker keeps it."""

from __future__ import annotations

from pathlib import Path

from sdcwatch_remediation import schema
from sdcwatch_remediation.states import STATES
from sdcwatch_remediation.testing import alert, fleet, make_rig
from sqlalchemy import update

OPEN = [state for state in STATES.values() if state.kind != "terminal"]


def test_no_state_outlives_its_deadline(tmp_path: Path) -> None:
    """One case in each state, in a world that cannot be read: a second before, all stay; then each goes its way."""
    members = fleet(len(OPEN))
    with make_rig(tmp_path, members) as rig:
        rig.provider.readable = False
        table = schema.cases
        for member, state in zip(members, OPEN, strict=True):
            rig.ring(alert(member, 0))
            with rig.service.database.write() as connection:
                # Far enough ahead that no step is due before the deadline.
                values = {"state": state.name, "deadline": rig.clock() + 100.0, "next_at": rig.clock() + 1000.0}
                of_member = update(table).where(table.c.instance_id == member.instance_id)
                connection.execute(of_member.values(event_id="sdc-" + "0" * 16, **values))
        rig.rounds(1, seconds=99.0)
        assert {case["instance_id"]: case["state"] for case in rig.cases()} == {
            member.instance_id: state.name for member, state in zip(members, OPEN, strict=True)
        }
        rig.rounds(1, seconds=2.0)
        after = {case["instance_id"]: case["state"] for case in rig.cases()}
        assert {state.name: after[m.instance_id] for m, state in zip(members, OPEN, strict=True)} == {
            state.name: state.overdue for state in OPEN
        }
        assert rig.provider.calls == []
        assert not any(agent.posts for agent in rig.agents.agents.values())


def test_a_deadline_leads_to_an_end_and_never_to_an_act() -> None:
    """No state in which something is done is reached because time ran out; a person who is asked may not answer."""
    assert {STATES[state.overdue].kind for state in OPEN} == {"terminal", "waiting"}
    asked = {state.overdue for state in OPEN if STATES[state.overdue].kind == "waiting"}
    assert {STATES[STATES[name].overdue].kind for name in asked} == {"terminal"}
