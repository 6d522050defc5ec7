"""`sdcwatch-remediation simulate` as a process."""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from sdcwatch_remediation.simulator import command

RUN = (
    "import argparse, sys\n"
    "from sdcwatch_remediation.simulator import command\n"
    "parser = argparse.ArgumentParser()\n"
    "command.add_arguments(parser)\n"
    "sys.exit(command.main(parser.parse_args()))\n"
)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


def test_serves_until_sigterm_and_ends_cleanly() -> None:
    """The process prints its URL and a ready line, serves there, and ends with status 0 on SIGTERM."""
    arguments = ["--cluster", "demo", "--nodes", "2", "--spares", "1", "--orchestrator", "eks", "--boot-seconds", "1"]
    with subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert process.stdout.readline() == "simulator ready\n"
            assert first.endswith("cluster=demo orchestrator=eks nodes=2 spares=1\n")
            state = httpx.get(first.split()[0] + "/_simulator/state").json()
            assert state["nodes"][0]["node_name"].startswith("hyperpod-i-")
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=20)
        finally:
            if process.poll() is None:
                process.kill()
    assert (process.returncode, out, err) == (0, "simulator stopped\n", "")


def test_busy_port_is_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A port in use ends the command with status 2 and the advice to choose another."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status = command.main(parsed("--cluster", "demo", "--port", str(taken.getsockname()[1])))
    assert status == 2
    assert "choose --port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "give --config FILE"),
        (["--cluster", "demo", "--nodes", "0"], "--nodes must be 1 or more"),
        (["--cluster", "demo", "--host", "0.0.0.0"], "--beyond-loopback"),
        (["--cluster", "demo", "--host", "localhost"], "not an IP address"),
        (["--cluster", "demo", "--boot-seconds", "-1"], "boot_seconds"),
        (["--cluster", "demo", "--port", "70000"], "port"),
        (["--config", "nowhere.json"], "nowhere.json"),
        (["--config", "nowhere.json", "--nodes", "3"], "leave those arguments out"),
    ],
)
def test_wrong_arguments_end_with_status_2(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong use is said on stderr with what to do, and nothing listens."""
    assert command.main(parsed(*arguments)) == 2
    assert part in capsys.readouterr().err


def test_arguments_override_the_file(tmp_path: Path) -> None:
    """A duration on the command line wins over the one in the configuration file."""
    path = tmp_path / "c.toml"
    path.write_text('cluster = "demo"\nboot_seconds = 5\nshutdown_seconds = 6\n[[groups]]\nname = "g"\ncount = 1\n')
    config = command._config(parsed("--config", str(path), "--boot-seconds", "1"))
    assert (config.boot_seconds, config.shutdown_seconds) == (1, 6)
