"""Real gloo ranks as forked processes, bounded in time; what became of each, also of those that were killed."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import queue
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # DDP's constructor imports it: seconds that every rank would pay again
import torch.distributed as dist

TIMEOUT_SECONDS = 60.0
LIMIT_SECONDS = 150.0


def run(function: Callable[..., Any], size: int, *arguments: Any) -> list[tuple[str, Any]]:
    """Runs `function(rank, size, *arguments)` on `size` ranks.

    Returns:
        By rank: ("value", what it returned), ("error", text), ("exit", status), ("died", exit code) or ("hung", limit).
    """
    context = multiprocessing.get_context("fork")
    out: Any = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    sys.stdout.flush()
    sys.stderr.flush()
    processes = [context.Process(target=_rank, args=(function, r, size, port, out, arguments)) for r in range(size)]
    for process in processes:
        process.start()
    found: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + LIMIT_SECONDS
    while len(found) < size and time.monotonic() < deadline:
        try:
            rank, kind, value = out.get(timeout=0.1)
            found[rank] = (kind, value)
        except queue.Empty:
            if not any(p.is_alive() for p in processes) and out.empty():
                break
    for rank, process in enumerate(processes):
        process.join(timeout=2)
        if process.is_alive():
            process.kill()
            process.join()
            found.setdefault(rank, ("hung", LIMIT_SECONDS))
        found.setdefault(rank, ("died", process.exitcode))
    return [found[rank] for rank in range(size)]


def _rank(function: Callable[..., Any], rank: int, size: int, port: int, out: Any, arguments: tuple[Any, ...]) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0",
        SDCWATCH_JOB="campaign-heal", SDCWATCH_AGENT="off", SDCWATCH_MAX_OVERHEAD="0",
    )  # fmt: skip
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timeout)
        out.put((rank, "value", function(rank, size, *arguments)))
    except SystemExit as stop:
        out.put((rank, "exit", stop.code))
    except BaseException as error:
        out.put((rank, "error", f"{type(error).__name__}: {error}"[:300]))
    out.close()
    out.join_thread()
    os._exit(0)
