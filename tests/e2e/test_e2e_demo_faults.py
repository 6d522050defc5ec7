"""The whole path, once for each fault: real ranks, Prometheus, Alertmanager and the service; one node is replaced."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PORTS = ("agent", "remediation", "pager", "simulator", "prometheus", "alertmanager", "rendezvous")


@pytest.mark.integration
@pytest.mark.timeout(660)
@pytest.mark.needs("prometheus", "alertmanager", "module:torch")
@pytest.mark.parametrize("fault", ["compute", "weight", "optimizer", "gradient", "none"])
def test_fault_ends_as_it_must(fault: str, tmp_path: Path) -> None:
    """The demo's own expectations hold for this fault, and the model equals that of a run that never had it."""
    probes = {name: socket.create_server(("127.0.0.1", 0)) for name in PORTS}
    ports = {f"DEMO_{name.upper()}_PORT": str(probe.getsockname()[1]) for name, probe in probes.items()}
    for probe in probes.values():
        probe.close()
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, str(ROOT / "demo" / "main.py"), "--fault", fault, "--out", str(out), "--timeout", "540"],
        env={**os.environ, **ports},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    report = json.loads((out / "report.json").read_text())
    assert report["weights_equal_clean_run"] is True
    assert report["replace_calls"] == (1 if fault in ("compute", "weight", "optimizer") else 0)
    assert report["false_verdicts"] == report["steps_on_bad_node_after_halt"] == 0
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
