"""A few cases of `make campaign-heal`: runs that halt or are killed start again and reach a clean run's weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "heal" / "campaign.py"


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("size", "only"),
    [
        (3, "optimizer_weight persistent heal"),
        (3, "backward persistent heal"),
        (4, "kill -9 of a node during a heal"),
        (4, "kill -9 of all ranks during a halt"),
        (4, "kill -9 of the writing rank during a checkpoint"),
    ],
)
def test_a_case_of_the_campaign_ends_with_a_clean_runs_weights(tmp_path: Path, size: int, only: str) -> None:
    """Two lives at least, the second from a trusted checkpoint; parameters and optimizer state equal to the bit."""
    command = [sys.executable, str(CAMPAIGN), "--sizes", str(size), "--only", only, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads((tmp_path / "heal.json").read_text())
    assert result["equal"]
    assert result["lives"] >= 2
