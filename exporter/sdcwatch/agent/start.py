"""A rank starts the node's agent where none runs: a laptop's and the demo's road; in production it is a service.

Never raises, never waits longer than a few seconds, and never starts a second one: the lock in the spool decides, and
of several ranks that try at once all but one agent end again. Standard library only. Flow: monitor -> **start**.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from sdcwatch.agent.command import dies_with_job
from sdcwatch.agent.state import agent_is_alive, read_state
from sdcwatch.settings import Settings
from sdcwatch.spool.folders import prepare_user_root

LOG_FILE = "agent.log"
#: Long enough for the page rule, which looks back one hour, to see what a job's last minute wrote.
LINGER_SECONDS = 3600
_START_SECONDS = 5.0
_LOG_BYTES = 1 << 20

#: Kept so that nobody warns about a child that is meant to outlive us.
_children: list[subprocess.Popen[bytes]] = []


def ensure_agent(settings: Settings) -> str | None:
    """Starts an agent, detached, unless one holds this spool's lock.

    Args:
        settings: where the spool lies, what this node is called, and where the agent shall listen.

    Returns:
        None when an agent serves this node; else one sentence: why none does, or why this one will not last.
    """
    try:
        root = prepare_user_root(settings.spool_dir)
        if agent_is_alive(root):
            return None
        problem = _start(settings, root)
    except Exception as error:  # the border of the training loop: no agent is no reason not to train
        return f"the agent could not be started: {error}"
    if problem is None and dies_with_job():
        return "the agent was started inside this job and ends with it: run `sdcwatch agent` as a service on each node"
    return problem


def command_line(settings: Settings) -> list[str]:
    """What is started: the same interpreter, every setting given as an argument."""
    words = [sys.executable, "-m", "sdcwatch.cli", "agent", "--started-by-rank", "--linger", str(LINGER_SECONDS)]
    options = {
        "--spool-dir": str(Path(settings.spool_dir).absolute()),
        "--host": settings.agent_host,
        "--port": str(settings.agent_port),
        "--node": settings.node,
        "--instance": settings.instance,
        "--cluster": settings.cluster,
        "--events-token-file": settings.events_token_file and str(Path(settings.events_token_file).absolute()),
        "--latch-token-file": settings.latch_token_file and str(Path(settings.latch_token_file).absolute()),
    }
    for option, value in options.items():
        if value:
            words += [option, value]
    return words


def _start(settings: Settings, root: Path) -> str | None:
    path = root / LOG_FILE
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    log = os.open(path, flags, 0o600)
    try:
        if os.fstat(log).st_size > _LOG_BYTES:
            os.ftruncate(log, 0)
        size = os.fstat(log).st_size
        child = subprocess.Popen(
            command_line(settings),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",  # not the job's folder: a module of the user's there must not stand in for one of ours
            env=_environment(),
        )
    finally:
        os.close(log)
    _children.append(child)
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if child.poll() is not None:
            # Another rank's agent may have been faster; then the node is served all the same.
            return None if agent_is_alive(root) else f"the agent ended at once: {_last_line(path, size)}"
        state = read_state(root)  # written once the port is bound, so a lock alone proves nothing
        if state is not None and state.alive and state.pid == child.pid:
            return None
        time.sleep(0.02)
    return f"the agent did not come up within {_START_SECONDS:.0f} s; see {path}"


def _environment() -> dict[str, str]:
    # Relative places would mean others from "/"; and the file's settings are on the command line already.
    environment = {name: value for name, value in os.environ.items() if name != "SDCWATCH_CONFIG"}
    if paths := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths.split(os.pathsep) if path)
    return environment


def _last_line(path: Path, start: int) -> str:
    with contextlib.suppress(OSError), path.open("rb") as stream:
        stream.seek(start)
        lines = stream.read(_LOG_BYTES).decode(errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
    return f"see {path}"
