"""A batch job on a real Slurm halts, is requeued by its own script, and resumes from the last clean checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sdcwatch.latch import files as latches
from sdcwatch_remediation.testing.slurm import SlurmCluster

pytestmark = [pytest.mark.integration, pytest.mark.needs("slurmctld"), pytest.mark.timeout(280)]

TRAIN = Path(__file__).parents[2] / "exporter" / "restart_train.py"
#: What docs/deploying.md has: the status 86 gives the nodes back to Slurm, and the job its place in the queue.
SCRIPT = """\
export SDCWATCH_JOB=train SDCWATCH_AGENT=off SDCWATCH_NODE=$SLURMD_NODENAME SDCWATCH_MAX_OVERHEAD=0
export SDCWATCH_SPOOL_DIR={folder}/spool-$SLURMD_NODENAME SDCWATCH_CHECKPOINT_DIR={folder}/checkpoints OMP_NUM_THREADS=1
{python} -c 'import sys; from sdcwatch.cli import main; sys.exit(main())' run --poll 0.1 --latch-wait 0 \\
    --preflight false -- {python} -m torch.distributed.run --standalone --nproc-per-node=2 {train} {folder} swallow
status=$?
echo "life ${{SLURM_RESTART_COUNT:-0}} on $SLURMD_NODENAME ended with $status"
test $status -eq 86 && scontrol requeue $SLURM_JOB_ID
exit $status
"""


def test_halted_batch_job_is_requeued_and_resumes_from_the_last_clean_checkpoint(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """86 goes through torchrun and `sdcwatch run` to the script, which requeues. Under the standing latch no life
    trains a step; after the release the next one resumes, on another node, from what the halt left clean."""
    (tmp_path / "checkpoints").mkdir()
    script = SCRIPT.format(folder=tmp_path, python=sys.executable, train=TRAIN)
    job = slurm.submit(script, "--requeue", "-w", "n1", "-n", "2")
    out = slurm.folder / f"job-{job}.out"
    slurm.wait(lambda: out.exists() and "life 0 on n1 ended with 86" in out.read_text(), "the first life halts", 150)
    slurm.wait(lambda: slurm.job_state(job) == "PENDING", "the job waits in the queue again")
    halted = latches.read_latch(tmp_path / "checkpoints")
    assert halted is not None
    steps = (tmp_path / "steps-0").read_text()
    assert steps.split() == ["0", "1", "2", "3", "4"]

    slurm.start_soon(job, "reqnodelist=n2")
    slurm.wait(lambda: "life 1 on n2 ended with 86" in out.read_text(), "the latch meets the second life")
    assert (tmp_path / "steps-0").read_text() == steps
    slurm.wait(lambda: slurm.job_state(job) == "PENDING", "the job waits in the queue again")

    latches.release(tmp_path / "checkpoints", halted.latch_id, by="ada", reason="the cable was replaced")
    slurm.start_soon(job, "reqnodelist=n3")
    slurm.wait(lambda: slurm.job_state(job) == "COMPLETED", "the job ends well", 90)
    assert "life 2 on n3 ended with 0" in out.read_text()
    lives = [line.split() for line in (tmp_path / "lives-0").read_text().splitlines()]
    assert [life[3] for life in lives] == ["0", "4"]  # the checkpoint of step 3 is the last clean one
    assert (tmp_path / "final-0").read_text() == (tmp_path / "final-1").read_text()
