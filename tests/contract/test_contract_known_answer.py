"""From a multiplier that errs to the policy's gate: real preflight, real wait, real agent, the service's own client."""

from __future__ import annotations

import re
import select
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sdcwatch.latch import files as latches
from sdcwatch.launch import halt_wait, launcher
from sdcwatch.spool.folders import job_root, prepare_user_root, user_root
from sdcwatch_remediation.agents import AgentClient
from sdcwatch_remediation.evidence import read_event
from sdcwatch_remediation.known_answer import judge
from sdcwatch_remediation.policy import gpus
from sdcwatch_remediation.settings import Agents
from sdcwatch_remediation.testing import event_line, fleet

pytest.importorskip("torch")

SUSPECT = replace(fleet(3)[0], address="127.0.0.1")
MEMBERS = (SUSPECT, *fleet(3)[1:])
#: `sdcwatch preflight` on a machine whose multiplier gets one bit of one entry wrong.
BAD = """
import json, sys, torch
from dataclasses import asdict
from sdcwatch.preflight import command
def bad(left, right):
    result = torch.matmul(left, right)
    result.view({4: torch.int32, 2: torch.int16, 8: torch.int64}[result.element_size()])[7, 11] ^= 1
    return result
report = command.judge(seconds=0.1, devices=["cpu"], matmul=bad)
print(json.dumps({"schema": 1, **asdict(report)}))
sys.exit(command.STATUS[report.outcome])
"""


def test_a_failing_preflight_reaches_the_policy_through_agent_and_client(tmp_path: Path) -> None:
    """The service reads what the wait kept, and it confirms the event about this very node, and no other."""
    event = read_event(event_line(MEMBERS, [0], time=time.time() - 5, persistence="transient"))
    root = tmp_path / "spool"
    prepare_user_root(root)
    spool = job_root(root, event.job)
    spool.mkdir(mode=0o700)
    latch = latches.Latch(
        event.id, event.job, event.epoch, event.step, event.check, event.kind, event.time,
        named=(), nodes=(latches.LatchNode(SUSPECT.node_name, SUSPECT.instance_id),), last_clean_step=None,
        trust_needed="verified", checkpoint_dir=None, sentence=event.sentence,
    )  # fmt: skip
    latches.write_latch([spool], latch)
    options = halt_wait.WaitOptions(
        SUSPECT.node_name, SUSPECT.instance_id, user_root(root), None, spool, 60.0, 0.05, (sys.executable, "-c", BAD)
    )
    said: list[str] = []
    waiting = threading.Thread(
        target=halt_wait.wait_until_free, args=((spool,), options, launcher.Signals(), said.append), daemon=True
    )
    waiting.start()
    (tmp_path / "token").write_text("secret\n")
    words = ["--spool-dir", root, "--port", "0", "--node", SUSPECT.node_name, "--instance", SUSPECT.instance_id]
    words += ["--cluster", "demo", "--events-token-file", tmp_path / "token"]
    agent = subprocess.Popen(
        [sys.executable, "-m", "sdcwatch.cli", "agent", *map(str, words)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert agent.stdout is not None
        assert select.select([agent.stdout], [], [], 30)[0]
        found = re.search(r":(\d+)/metrics", agent.stdout.readline())
        assert found is not None
        settings = Agents(port=int(found[1]), events_token_file=str(tmp_path / "token"))
        client = AgentClient(settings, time.time)
        deadline = time.monotonic() + 60
        while (answer := client.known_answer(SUSPECT, event.id)).test is None:
            assert answer.later, answer.problem
            assert time.monotonic() < deadline, said
            time.sleep(0.05)
        wrong = client.known_answer(replace(SUSPECT, instance_id=MEMBERS[1].instance_id), event.id)
        client.close()
    finally:
        agent.kill()
        agent.communicate(timeout=20)
        latches.release(spool, event.id, by="test", reason="judged")
        waiting.join(20)
    test = answer.test
    assert (test.result, test.latch_id, [d.outcome for d in test.devices]) == ("fail", event.id, ["fail"])
    confirmed, reason = judge(test, event, SUSPECT.instance_id, gpus(event, SUSPECT.instance_id), time.time())
    assert confirmed, reason
    assert (wrong.test, wrong.later) == (None, False)
    assert f"is not {MEMBERS[1].instance_id}" in wrong.problem
    assert not judge(test, event, MEMBERS[1].instance_id, gpus(event, MEMBERS[1].instance_id), time.time())[0]
