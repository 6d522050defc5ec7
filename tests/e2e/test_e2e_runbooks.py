"""Every command of every runbook, typed against the demo's stack after a fault; and every dashboard over that run."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAY = Path(__file__).with_name("runbook_play.py")
PORTS = ("agent", "remediation", "pager", "simulator", "prometheus", "alertmanager", "rendezvous")


@pytest.mark.integration
@pytest.mark.timeout(900)
@pytest.mark.needs(
    "prometheus", "alertmanager", "promtool", "amtool", "curl", "openssl", "module:torch", "module:matplotlib"
)
def test_every_command_of_every_runbook_works_against_the_demo(tmp_path: Path) -> None:
    """Real agents (one with TLS), Prometheus, Alertmanager, service and simulator answer; dashboards show the run."""
    probes = {name: socket.create_server(("127.0.0.1", 0)) for name in PORTS}
    ports = {f"DEMO_{name.upper()}_PORT": str(probe.getsockname()[1]) for name, probe in probes.items()}
    for probe in probes.values():
        probe.close()
    out = tmp_path / "out"
    command = [sys.executable, ROOT / "demo" / "main.py", "--out", out, "--timeout", "540"]
    done = subprocess.run(
        [*command, "--then", f"{sys.executable} {PLAY}"],
        env={**os.environ, **ports}, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    given = json.loads((out / "runbooks.json").read_text())
    assert all(one["ok"] for one in given)
    books = {path.stem: path.read_text() for path in (ROOT / "alert_rules" / "runbooks").glob("*.md")}
    tried = {(one["runbook"], one["command"]) for one in given}
    for name, text in books.items():
        for span in re.findall(r"`((?:sdcwatch|sdcwatch-remediation|promtool|amtool|curl) [^`\n]+)`", text):
            assert (name, span) in tried, f"{name}: {span} was not tried"
    assert len(tried) > 80

    preview = [sys.executable, ROOT / "dashboards" / "preview.py", "--demo", out / "prometheus", "--strict"]
    drawn = subprocess.run([*preview, "--out", tmp_path / "png"], capture_output=True, text=True, timeout=200)
    print(drawn.stdout)
    assert drawn.returncode == 0, drawn.stdout + drawn.stderr
