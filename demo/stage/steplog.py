"""The trainer's own record of what it did: one JSON line for each thing that a rank begins or ends.

It is the witness against which the demo's claims are counted ("not one step on the bad node"), so it is written by the
training script itself and owes nothing to the monitor. Lines: `start`, `begin` and `step` (each step), `done`.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch


class StepLog:
    """One rank's log; also measures the local gradient's norm, before the reduce, for the picture."""

    def __init__(self, folder: Path, *, rank: int, model: torch.nn.Module) -> None:
        self._who = {
            "rank": rank,
            "node": os.environ.get("SDCWATCH_NODE", ""),
            "instance": os.environ.get("SDCWATCH_INSTANCE", ""),
            "pid": os.getpid(),
        }
        folder.mkdir(parents=True, exist_ok=True)
        self._stream = open(folder / f"rank-{rank}-{os.getpid()}.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self._squares = 0.0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._add)

    def _add(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._squares += float(parameter.grad.detach().double().pow(2).sum())

    def write(self, kind: str, **facts: Any) -> None:
        """Appends one line; a crash loses at most the one being written."""
        self._stream.write(json.dumps({"kind": kind, **self._who, "time": time.time(), **facts}) + "\n")
        self._stream.flush()

    def begin(self, step: int) -> None:
        """This rank begins a step: from here on the node computes for the job."""
        self._squares = 0.0
        self.write("begin", step=step)

    def end(self, step: int, loss: float) -> None:
        """The step is complete, the optimizer included."""
        self.write("step", step=step, loss=loss, gradient_norm=math.sqrt(self._squares))


def read(folder: Path) -> list[dict[str, Any]]:
    """All lines of all ranks, in order of time; a partial last line is left out."""
    found: list[dict[str, Any]] = []
    for path in folder.glob("rank-*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return sorted(found, key=lambda entry: float(entry["time"]))
