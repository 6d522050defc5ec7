"""Runs an example as one rank on a node of its own, flips a weight's bit where the environment asks for it, and leaves
the digest of the final weights and how many DDP models outlived the process group."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist
from sdcwatch.monitor import Monitor
from sdcwatch.shards import local
from torch.nn.parallel import DistributedDataParallel

rank = os.environ["RANK"]
os.environ |= {"SDCWATCH_NODE": f"n{rank}", "SDCWATCH_SPOOL_DIR": f"{os.environ['TEST_SPOOLS']}/{rank}"}
real, calls = Monitor.step, [0]


def step(self: Monitor, number: int):  # type: ignore[no-untyped-def]
    calls[0] += 1
    if os.environ.get("TEST_FAULT_RANK") == rank and calls[0] == 5:
        weight = local(next(self._model.parameters()))
        ctypes.c_uint8.from_address(weight.data_ptr() + 2).value ^= 0x10  # past every version counter, as memory does
    return real(self, number)


def close(self: Monitor) -> None:
    content = b"".join(local(p.detach()).numpy().tobytes() for p in self._model.parameters())
    Path(os.environ["TEST_SPOOLS"], f"final-{rank}").write_text(hashlib.sha256(content).hexdigest())
    shut(self)


def destroy(group: dist.ProcessGroup | None = None) -> None:
    alive = [x for x in gc.get_objects() if issubclass(type(x), DistributedDataParallel)]
    Path(os.environ["TEST_SPOOLS"], f"outlived-{rank}").write_text(str(len(alive)))
    alive.clear()
    end_group(group)


shut, end_group = Monitor.close, dist.destroy_process_group
Monitor.step, Monitor.close = step, close  # type: ignore[method-assign]
dist.destroy_process_group = destroy  # type: ignore[assignment]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
