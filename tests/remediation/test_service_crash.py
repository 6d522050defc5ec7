"""kill -9 in a real process around the one replace call: the next process reads the world and never calls again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from sdcwatch_remediation.actions.replace import ANSWER_SECONDS
from sdcwatch_remediation.testing import FakeAgents, event_line, fleet
from sdcwatch_remediation.testing.agents import EVENTS_TOKEN, LATCH_TOKEN

# One process of the service: its provider reads the world from a file, logs calls durably, and dies where it is told.
CHILD = """
import json, os, signal, sys, time
from pathlib import Path
from sdcwatch_remediation.config import load
from sdcwatch_remediation.ledger import Ledger
from sdcwatch_remediation.records import Member
from sdcwatch_remediation.service import Service
from sdcwatch_remediation.signals import Signal
from sdcwatch_remediation.testing import FakeProvider

folder, die, rounds, later = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])

def end():
    os.kill(os.getpid(), signal.SIGKILL)

class World(FakeProvider):
    def inventory(self):
        self.members = tuple(Member(**item) for item in json.loads((folder / "world.json").read_text()))
        return super().inventory()

    def replace(self, instance_id):
        if die == "before the call":
            end()
        with open(folder / "calls.log", "a") as file:
            file.write(instance_id + "\\n")
            file.flush()
            os.fsync(file.fileno())
        if die == "after the call":
            end()
        return super().replace(instance_id)

if die == "after the intent":
    reserve = Ledger.reserve
    Ledger.reserve = lambda *a, **k: (reserve(*a, **k), end())
if die == "after the record":
    record = Ledger.record
    Ledger.record = lambda *a, **k: (record(*a, **k), end())

service = Service(load(folder / "service.toml"), provider=World(()), clock=lambda: time.time() + later)
if not service.store.cases():
    signal_ = json.loads((folder / "signal.json").read_text())
    service.store.record_delivery(b"{}", [Signal(**signal_)])
for _ in range(rounds):
    service.worker.round()
(case,) = service.store.cases()
print(json.dumps({"state": case.state, "outcome": case.outcome}))
service.close()
"""

MEMBERS = fleet(4, subnet=3)
SUSPECT = MEMBERS[2]
LATER = ANSWER_SECONDS + 30


def run(folder: Path, *, die: str = "", rounds: int = 3, later: float = 0.0) -> tuple[int, dict[str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), die, str(rounds), str(later)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = done.stdout.splitlines()
    return done.returncode, json.loads(lines[-1]) if done.returncode == 0 else {"err": done.stderr}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    now = time.time()
    with FakeAgents(MEMBERS) as agents:
        agents.say(event_line(MEMBERS, [2], time=now))
        for name, token in (("alerts", "a-token"), ("events", EVENTS_TOKEN), ("latch", LATCH_TOKEN)):
            (tmp_path / name).write_text(token)
        (tmp_path / "service.toml").write_text(
            '[cluster]\nname = "demo"\n[server]\nalerts_token_file = "alerts"\n'
            f'[agents]\nport = {agents.port}\nevents_token_file = "events"\nlatch_token_file = "latch"\n'
            '[policy]\nmode = "auto"\nconfirm = "first"\ngroups = ["workers"]\nsettle_seconds = 0\n'
            "[worker]\npoll_seconds = 0.01\n"
        )
        write_world(tmp_path, replaced=False)
        signal_ = {
            "index": 0,
            "cluster": "demo",
            "instance_id": SUSPECT.instance_id,
            "node_name": SUSPECT.node_name,
            "job": "bytegpt",
            "gpu_uuid": "CPU-x-0",
            "rank": 2,
            "check": "replay",
        }
        (tmp_path / "signal.json").write_text(json.dumps(signal_))
        yield tmp_path


def write_world(folder: Path, *, replaced: bool) -> None:
    heir = replace(SUSPECT, instance_id="i-0000000000000beef", launch_time=time.time())
    members = [heir if replaced and m is SUSPECT else m for m in MEMBERS]
    (folder / "world.json").write_text(json.dumps([asdict(m) for m in members]))


def calls(folder: Path) -> list[str]:
    path = folder / "calls.log"
    return path.read_text().split() if path.exists() else []


@pytest.mark.parametrize(
    ("die", "called"),
    [("after the intent", 0), ("before the call", 0), ("after the call", 1), ("after the record", 1)],
)
def test_no_second_call_whatever_the_moment_of_the_kill(folder: Path, die: str, called: int) -> None:
    """Killed around the call, the next processes only read; the case ends when the inventory shows the new node."""
    assert run(folder, die=die)[0] == -signal.SIGKILL
    assert len(calls(folder)) == called
    # Without a record the call may be under way in another process, for as long as one call can take.
    assert run(folder)[1]["state"] == ("proving_replacement" if die == "after the record" else "replacing")
    assert run(folder, later=LATER) == (0, {"state": "proving_replacement", "outcome": ""})
    assert len(calls(folder)) == called
    write_world(folder, replaced=True)
    assert run(folder, later=LATER) == (0, {"state": "closed", "outcome": "replaced"})
    assert len(calls(folder)) == called


def test_two_services_on_one_file_are_refused(folder: Path) -> None:
    """The second process says what to do; it does not wait and does not act."""
    from sdcwatch_remediation.config import load
    from sdcwatch_remediation.service import Service
    from sdcwatch_remediation.testing import FakeProvider

    service = Service(load(folder / "service.toml"), provider=FakeProvider(MEMBERS), sink=lambda line: None)
    try:
        status, answer = run(folder)
        assert status == 1
        assert "another service uses" in answer["err"]
    finally:
        service.close()
    assert run(folder)[0] == 0
