"""A few cases of `make campaign-heal`: runs that halt or are killed start again and reach a clean run's weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def begin(out: Path, *arguments: str) -> subprocess.Popen[str]:
    """The campaign, as `make campaign-heal` starts it."""
    paths = [str(ROOT), *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.heal", "--out", str(out), *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("size", "only"),
    [
        (3, "optimizer_weight persistent heal"),
        (3, "begins backward at step 6, audits every 4"),
        (4, "kill -9 of a node during a heal heal"),
        (4, "kill -9 of all ranks during a halt, before its latch"),
        (4, "kill -9 of the writing rank during a checkpoint write"),
    ],
)
def test_a_case_of_the_campaign_ends_with_a_clean_runs_weights(tmp_path: Path, size: int, only: str) -> None:
    """Two lives at least, the second from a trusted checkpoint; parameters and optimizer state equal to the bit."""
    said, _ = (campaign := begin(tmp_path, "--sizes", str(size), "--only", only)).communicate(timeout=580)
    assert campaign.returncode == 0, said
    (result,) = json.loads((tmp_path / "heal.json").read_text())
    assert result["equal"]
    assert result["lives"] >= 2
    assert result["resumed"] == [3]


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_a_killed_campaign_goes_on_where_it_was(tmp_path: Path) -> None:
    """SIGKILL after the first of three cases: the second run keeps its line as it is and adds the other two."""
    arguments = ("--sizes", "3", "--workers", "1", "--only", "during a check heal")
    journal = tmp_path / "heal.jsonl"
    campaign = begin(tmp_path, *arguments)
    deadline = time.monotonic() + 240
    while not journal.exists() or len(journal.read_text().splitlines()) < 2:
        assert campaign.poll() is None, campaign.communicate()[0]
        assert time.monotonic() < deadline, "no case ended"
        time.sleep(0.05)
    campaign.kill()
    campaign.communicate(timeout=60)  # its ranks hold the same pipe: it ends with the last of them
    kept = journal.read_text()
    said, _ = (campaign := begin(tmp_path, *arguments)).communicate(timeout=300)
    assert campaign.returncode == 0, said
    assert journal.read_text().startswith(kept)
    keys = [json.loads(line)["key"] for line in journal.read_text().splitlines()[1:]]
    assert len(keys) == len(set(keys)) == 3
