"""Two users who train on one node: a spool, a quota and an agent each, and no way into the other's."""

from __future__ import annotations

import json
import os
import select
import shutil
import stat
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

USERS = (64001, 64002)
#: Everything is imported first: the interpreter may lie where only root can read.
BECOME = """
import json, os, sys
import encodings.idna, http.server, urllib.parse
import sdcwatch.agent.command
from sdcwatch.cli import main
from sdcwatch.metrics import RankMetrics
from sdcwatch.spool.rank import Spool
user = int(sys.argv.pop(1))
os.setgroups([])
os.setgid(user)
os.setuid(user)
"""
AGENT = (
    BECOME
    + """
sys.exit(main(sys.argv[1:]))
"""
)
RANK = (
    BECOME
    + """
root, epoch = sys.argv[1:]
identity = dict(training_job="gpt", training_cluster="blue", training_node="n0", training_instance="i-0",
                gpu_uuid=f"GPU-{os.getuid()}", rank="0")
spool = Spool.open(root, "gpt", epoch, 0, 0, identity, quota_bytes=20_000)
metrics = RankMetrics(identity, writes_node=True, writes_job=True)
metrics.set("sdc_training_step", os.getuid())
assert spool.write_metrics(metrics.lines()), spool.last_refusal
written = 0
while spool.append_event({"schema": 1, "event": {"time": 1.0, "pad": "x" * 1000}}):
    written += 1
print(json.dumps({"written": written, "why": spool.last_refusal}))
spool.close()
"""
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of two other users")


@pytest.fixture
def root() -> Iterator[Path]:
    """A spool's root that both users can reach; pytest's own folders are closed to them."""
    folder = Path(tempfile.mkdtemp(prefix="sdcwatch-two-users-"))
    folder.chmod(0o755)
    spool = folder / "spool"
    spool.mkdir()
    spool.chmod(0o1777)
    yield spool
    shutil.rmtree(folder)


def words(code: str, user: int, *given: object) -> dict[str, Any]:
    """A process that becomes this user and then runs `code`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SDCWATCH_", "SLURM", "KUBERNETES"))}
    return {"args": [sys.executable, "-c", code, *map(str, (user, *given))], "env": environment, "text": True}


def run(code: str, user: int, *given: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**words(code, user, *given), capture_output=True, timeout=60)


def test_each_has_a_closed_folder_a_quota_and_an_agent_of_its_own(root: Path) -> None:
    """One user's full spool refuses nothing of the other's, and each agent serves its own user's ranks alone."""
    agents: list[subprocess.Popen[str]] = []
    identity = ("--node", "n0", "--instance", "i-0", "--cluster", "blue")
    try:
        for number, user in enumerate(USERS):
            done = run(RANK, user, root, f"e{1764600000000 + number}-0000000a")
            assert done.returncode == 0, done.stderr
            answer = json.loads(done.stdout)
            assert 0 < answer["written"] < 20, "the second user has a whole quota too"
            assert "SDCWATCH_SPOOL_QUOTA_MB" in answer["why"]
            facts = (root / str(user)).stat()
            assert (facts.st_uid, stat.S_IMODE(facts.st_mode)) == (user, 0o700)
            agents.append(
                subprocess.Popen(
                    **words(AGENT, user, "agent", "--spool-dir", root, "--port", 0, *identity),
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
            )  # fmt: skip
        for user, agent in zip(USERS, agents, strict=True):
            assert agent.stdout is not None
            line = agent.stdout.readline() if select.select([agent.stdout], [], [], 30)[0] else ""
            assert str(root / str(user)) in line, (line, agent.poll())
            with urllib.request.urlopen(line.split()[2], timeout=10) as stream:
                text = stream.read().decode()
            steps = [row.split()[-1] for row in text.splitlines() if row.startswith("sdc_training_step{")]
            assert steps == [str(user)]
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate(timeout=20)


def test_nobody_enters_the_others_folder_or_takes_its_place(root: Path) -> None:
    """Not by reading it, and not by making it first."""
    first, second = USERS
    assert run(RANK, first, root, "e1764600000000-0000000a").returncode == 0
    assert "PermissionError" in run(BECOME + f"os.listdir({str(root / str(first))!r})", second).stderr
    os.mkdir(root / str(second), 0o777)
    os.chown(root / str(second), first, first)
    assert f"belongs to user {first}" in run(RANK, second, root, "e1764600000000-0000000a").stderr
