"""Real gloo ranks as forked processes, bounded in time; what became of each, also of those that were killed.

They are forked from a process that has imported torch and the product. Flow: lived -> **ranks** -> life.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.campaign.pool import free_port

TIMEOUT_SECONDS = 60.0
#: In a life that is killed: those that are left notice a closed connection at once, or this late.
KILLED_SECONDS = 20.0
LIMIT_SECONDS = 150.0
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """This process is killed when the one that forked it is gone (Linux; elsewhere it ends by its own limit)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run(
    function: Callable[..., Any], size: int, *arguments: Any, log: Path, timeout: float = TIMEOUT_SECONDS
) -> list[tuple[str, Any]]:
    """Runs `function(rank, size, *arguments)` on `size` ranks.

    Args:
        log: what each rank prints goes to this file with `-<rank>` added.
        timeout: seconds, of the process group.

    Returns:
        By rank: ("value", what it returned), ("error", text), ("exit", status), ("died", exit code) or ("hung", limit).
    """
    context = multiprocessing.get_context("fork")
    port = free_port()
    processes: list[Any] = []
    pipes: dict[Any, int] = {}
    for rank in range(size):
        # A pipe each: a rank that is killed while it holds a shared queue's lock would silence the others.
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(function, rank, size, port, theirs, arguments, log, timeout))
        process.start()
        theirs.close()
        processes.append(process)
        pipes[ours] = rank
    found: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + LIMIT_SECONDS
    while pipes and time.monotonic() < deadline:
        for ready in wait(list(pipes), timeout=1.0):
            rank = pipes.pop(ready)
            with contextlib.suppress(EOFError):
                found[rank] = ready.recv()  # type: ignore[union-attr]
    for rank, process in enumerate(processes):
        process.join(timeout=2)
        if process.is_alive():
            process.kill()
            process.join()
            found.setdefault(rank, ("hung", LIMIT_SECONDS))
        found.setdefault(rank, ("died", process.exitcode))
    return [found[rank] for rank in range(size)]


def _rank(
    function: Callable[..., Any],
    rank: int,
    size: int,
    port: int,
    out: Connection,
    arguments: tuple[Any, ...],
    log: Path,
    timeout: float,
) -> None:
    die_with_parent()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0",
        SDCWATCH_JOB="campaign-heal", SDCWATCH_AGENT="off", SDCWATCH_MAX_OVERHEAD="0",
    )  # fmt: skip
    file = os.open(f"{log}-{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    try:
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=limit)
        answer: tuple[str, Any] = ("value", function(rank, size, *arguments))
    except SystemExit as stop:
        answer = ("exit", stop.code)
    except BaseException as error:
        answer = ("error", f"{type(error).__name__}: {error}"[:300])
    with contextlib.suppress(OSError):
        out.send(answer)
    os._exit(0)
