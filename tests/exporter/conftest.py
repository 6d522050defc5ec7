"""Real ranks for tests: forked processes on one gloo group, each bounded in time, results by rank."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import queue
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ranks = Callable[..., list[Any]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(
    function: Callable[..., Any], rank: int, size: int, port: int, out: Any, arguments: tuple[Any, ...], timeout: float
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0"
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=timeout))
    try:
        out.put((rank, "value", function(rank, size, *arguments)))
    except SystemExit as stop:
        out.put((rank, "exit", stop.code))
    except BaseException as error:
        out.put((rank, "error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    out.close()
    out.join_thread()
    sys.stdout.flush()
    os._exit(0)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """`ranks(function, size, *arguments)` runs `function(rank, size, *arguments)` on real gloo ranks.

    Returns what each rank returned, in rank order. A rank that raised gives an `AssertionError`, unless `raw=True`
    asks for ("value" | "error" | "exit" | "hung" | "died", what) pairs.
    """
    monkeypatch.setenv("SDCWATCH_JOB", "test-job")
    monkeypatch.setenv("SDCWATCH_AGENT", "off")
    monkeypatch.setenv("SDCWATCH_MAX_OVERHEAD", "0")  # steps of microseconds would be checked ever more rarely
    import sdcwatch.monitor  # noqa: F401
    import torch
    import torch._dynamo  # DDP's constructor imports it: seconds that every forked rank would pay again

    torch.set_num_threads(1)

    def run(
        function: Callable[..., Any],
        size: int,
        *arguments: Any,
        raw: bool = False,
        timeout: float = 40,
        limit: float = 110,
    ) -> list[Any]:
        context = multiprocessing.get_context("fork")
        out: Any = context.Queue()
        port = _free_port()
        processes = [
            context.Process(target=_rank, args=(function, rank, size, port, out, arguments, timeout))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        found: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + limit
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
                found.setdefault(rank, ("hung", limit))
            found.setdefault(rank, ("died", process.exitcode))
        results = [found[rank] for rank in range(size)]
        if raw:
            return results
        bad = {rank: result for rank, result in enumerate(results) if result[0] != "value"}
        assert not bad, "\n".join(f"rank {rank} {kind}: {value}" for rank, (kind, value) in bad.items())
        return [value for _, value in results]

    return run
