"""The campaign itself, some dozen faults and every healthy loop once, as `make campaign` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.integration
@pytest.mark.timeout(1200)
def test_the_quick_campaign_holds_its_guarantees_and_goes_on_where_it_was() -> None:
    """No wrong blame, no false verdict, every place struck; a second run only reads what the first one did."""
    out = ROOT / "benchmarks" / "out" / "campaign-quick.json"
    (out.with_suffix(".jsonl")).unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.campaign", "--quick", "--no-peers"]
    paths = [str(ROOT), *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=900, check=False)
    result = json.loads(out.read_text())
    assert (done.returncode, [g for g in result["guarantees"] if not g["holds"]]) == (0, []), done.stdout[-3000:]
    assert {row["case"]["location"] for row in result["faults"]} >= {"forward", "ring_forward", "checkpoint"}
    assert len(result["healthy"]) >= 20
    assert {row["result"]["outcome"] for row in result["faults"]} >= {"named", "inconclusive"}
    lines = out.with_suffix(".jsonl").read_text()
    subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert out.with_suffix(".jsonl").read_text() == lines
