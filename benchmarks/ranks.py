"""Real gloo ranks for a measurement: spawned processes, one thread each, results by rank."""

from __future__ import annotations

import datetime
import os
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _run(
    rank: int, size: int, port: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0",
        SDCWATCH_JOB="bench", SDCWATCH_AGENT="off", SDCWATCH_NODE=f"n{rank}", SDCWATCH_INSTANCE=f"i{rank}",
        SDCWATCH_SPOOL_DIR=f"{folder}/spool",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=120))
    torch.save(function(rank, size, *arguments), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def on_ranks(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """What `function(rank, size, *arguments)` returned on each of `size` ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="sdcwatch-bench-") as folder:
        mp.spawn(_run, (size, port, folder, function, arguments), nprocs=size)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(size)]
