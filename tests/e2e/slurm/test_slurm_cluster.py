"""The Slurm of these tests is a real one, is alone on loopback, and ends without a trace."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from sdcwatch_remediation.testing.slurm import SlurmCluster

pytestmark = [pytest.mark.integration, pytest.mark.needs("slurmctld")]


def test_a_batch_job_runs_and_can_be_requeued(slurm: SlurmCluster) -> None:
    """A job writes its output, and after a requeue starts once more under the same id, with a higher restart count."""
    job = slurm.submit('echo "run $SLURM_RESTART_COUNT on $SLURMD_NODENAME"\nsleep 600\n', "--requeue", "-w", "n2")
    slurm.wait(lambda: slurm.job_state(job) == "RUNNING", "the job runs")
    slurm.run("scontrol", "requeue", job)
    slurm.wait(lambda: slurm.job_state(job) == "PENDING", "the job waits again")
    slurm.start_soon(job)
    slurm.wait(lambda: slurm.job_state(job) == "RUNNING", "the job runs again")
    out = slurm.folder / f"job-{job}.out"
    slurm.wait(lambda: "run 1 on n2" in out.read_text(), "its second start wrote a line")


def test_it_listens_on_loopback_only_and_leaves_nothing_behind(require: Callable[[str], Path]) -> None:
    """No socket of its processes is bound beyond 127.0.0.0/8, and none of its processes and jobs outlives `close`."""
    with SlurmCluster(require("slurmctld"), nodes=("n1",)) as slurm:
        job = slurm.submit("trap '' TERM\nwhile true; do sleep 1; done\n")
        slurm.wait(lambda: slurm.job_state(job) == "RUNNING", "the job runs")
        pids = _of(slurm.folder)
        assert len(pids) >= 4  # munged, slurmctld, slurmd, the job
        addresses = _listening(pids)
        assert len(addresses) >= 2
        assert all(address.startswith("127.") for address in addresses)
    assert _of(slurm.folder) == []
    assert not slurm.folder.exists()


def _of(folder: Path) -> list[int]:
    wanted, found = f"SLURM_CONF={folder}/slurm.conf".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _listening(pids: list[int]) -> list[str]:
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(link).removeprefix("socket:[").rstrip("]"))
            except OSError:
                continue
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows6 = [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    assert not [row for row in rows6 if row[3] == "0A" and row[9] in inodes]
    mine = [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]
    return [".".join(str(byte) for byte in reversed(bytes.fromhex(address))) for address in mine]
