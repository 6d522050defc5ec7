"""Runs an example as one rank on a node of its own, and flips a weight's bit where the environment asks for it."""

from __future__ import annotations

import ctypes
import os
import runpy
import sys

from sdcwatch.monitor import Monitor

rank = os.environ["RANK"]
os.environ |= {"SDCWATCH_NODE": f"n{rank}", "SDCWATCH_SPOOL_DIR": f"{os.environ['TEST_SPOOLS']}/{rank}"}
real, calls = Monitor.step, [0]


def step(self: Monitor, number: int):  # type: ignore[no-untyped-def]
    calls[0] += 1
    if os.environ.get("TEST_FAULT_RANK") == rank and calls[0] == 5:
        weight = next(self._model.parameters())
        ctypes.c_uint8.from_address(weight.data_ptr() + 2).value ^= 0x10  # past every version counter, as memory does
    return real(self, number)


Monitor.step = step  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
