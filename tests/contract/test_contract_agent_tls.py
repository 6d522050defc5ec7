"""The service fetches its proof from real agents over TLS, with authorities of its own and one name for all agents."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sdcwatch_remediation.agents import AgentClient
from sdcwatch_remediation.errors import ConfigError
from sdcwatch_remediation.records import Member
from sdcwatch_remediation.settings import Agents
from sdcwatch_remediation.testing import fleet

Require = Callable[[str], Path]


def certificate(folder: Path, openssl: Path, name: str) -> tuple[Path, Path]:
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=agents"]
    more = ["-addext", f"subjectAltName=DNS:{name}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([openssl, "req", "-x509", *kind, *more], check=True, capture_output=True, timeout=60)
    return cert, key


@pytest.fixture
def agent(tmp_path: Path, require: Require) -> Iterator[tuple[Member, Agents]]:
    """An agent behind TLS, and settings with which the service may ask it."""
    (member,) = fleet(1)
    member = replace(member, address="127.0.0.1")
    cert, key = certificate(tmp_path, require("openssl"), "sdcwatch-agent")
    (tmp_path / "events").write_text("events-token")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "sdcwatch.cli", "agent", "--spool-dir", str(tmp_path / "spool"), "--port", "0"),
            *("--node", member.node_name, "--instance", member.instance_id, "--cluster", "demo"),
            *("--events-token-file", str(tmp_path / "events"), "--tls-cert", str(cert), "--tls-key", str(key)),
        ],
        stdout=subprocess.PIPE, text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith(("SDCWATCH_", "SLURM", "KUBERNETES"))},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline() if select.select([process.stdout], [], [], 30)[0] else ""
        assert "https://" in line, line
        port = int(line.split("/metrics")[0].rsplit(":", 1)[1])
        yield member, Agents(
            port=port, scheme="https", ca_file=str(cert), server_name="sdcwatch-agent",
            events_token_file=str(tmp_path / "events"),
        )  # fmt: skip
    finally:
        process.kill()
        process.communicate(timeout=20)


def problem(member: Member, settings: Agents) -> str:
    client = AgentClient(settings, time.time)
    try:
        (answer,) = client.events([member], member.instance_id, 0.0)
    finally:
        client.close()
    return answer.problem


def test_one_name_and_ones_own_authorities_open_the_road_and_nothing_less_does(
    agent: tuple[Member, Agents], tmp_path: Path, require: Require
) -> None:
    """Without the authorities, with another's, or without the name, the agent at that address is not believed."""
    member, settings = agent
    assert problem(member, settings) == ""
    other, _ = certificate(tmp_path, require("openssl"), "other")
    for wrong in ({"ca_file": ""}, {"ca_file": str(other)}, {"server_name": ""}, {"server_name": "sdcwatch"}):
        assert "CERTIFICATE_VERIFY_FAILED" in problem(member, replace(settings, **wrong)), wrong


def test_authorities_that_cannot_be_read_stop_the_start(tmp_path: Path) -> None:
    """A typing error must not look like a fleet of agents that do not answer."""
    (tmp_path / "no.pem").write_text("nothing")
    for path in ("no.pem", "absent.pem"):
        with pytest.raises(ConfigError, match=r"agents\.ca_file"):
            AgentClient(Agents(ca_file=str(tmp_path / path)), time.time)
