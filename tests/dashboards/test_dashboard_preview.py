"""The preview says in a sentence what is missing."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

PREVIEW = Path(__file__).parents[2] / "dashboards" / "preview.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, PREVIEW, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_a_prometheus_that_is_not_there_is_said_in_a_sentence(tmp_path: Path) -> None:
    """No traceback: the address, and what to look at."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        done = run(f"http://127.0.0.1:{probe.getsockname()[1]}", "--out", tmp_path)
    assert done.returncode == 1
    assert "is Prometheus running there?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_demo_that_has_not_run_is_said_in_a_sentence(tmp_path: Path) -> None:
    """`make dashboards-preview` before `make demo` says what to run first."""
    done = run("--demo", tmp_path)
    assert done.returncode == 1
    assert "run `make demo` first" in done.stderr


@pytest.mark.parametrize("arguments", [(), ("http://x", "--demo"), ("http://x", "--start", "1")])
def test_wrong_use_is_refused(arguments: tuple[str, ...]) -> None:
    """Neither a Prometheus nor a demo, or both, or half of a range."""
    assert run(*arguments).returncode == 2
