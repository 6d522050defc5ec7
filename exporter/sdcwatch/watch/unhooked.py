"""Steps that went past the monitor's hooks: told, so that nobody takes silence for health.

`ddp.module(batch)` and `ddp.forward(batch)` run no forward hook, and an optimizer made in mid-run runs none of ours:
training goes on, and nothing of it is looked at. Two comparisons of numbers that are there anyway tell: an optimizer
step without a reducing backward before it, and weights that moved although the watched optimizer did not step. It
accuses nobody and is never collective. Flow: optimizer, epoch -> **unhooked** -> report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from sdcwatch.verdict.records import REPLAY, ROW_CHECKS, WEIGHT_CHECKSUM
from sdcwatch.watch.report import Reporter, log

#: Misses in a row before the log says so: one may be meant (a dry step that makes optimizer state, a load in mid-run).
SAID_AFTER = 2

_NO_BACKWARD = (
    "optimizer.step ran without a reducing backward that the monitor saw, so these steps are not checked: call the "
    "model itself, model(batch), not model.module(batch) or model.forward(batch), and the one that Monitor was given "
    "(torch.compile(ddp), not the ddp inside)"
)
_OTHER_OPTIMIZER = (
    "the weights move, but the optimizer that Monitor was given does not step, so optimizer steps and optimizer state "
    "are not checked: after making a new optimizer, monitor.close() and make a new Monitor with it"
)


class Unhooked:
    """Counts what the hooks did not see, as skips with `reason="unhooked"`.

    Args:
        optimizer: the watched one.
        reporter: counts and says it.
        reductions: how many reducing backwards the epoch saw so far.
        excused: whether a step without one is meant now (`join`), or cannot be compared anyway.
        replays: whether audits are due in this run.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        reporter: Reporter,
        *,
        reductions: Callable[[], int],
        excused: Callable[[], bool],
        replays: Callable[[], bool],
    ) -> None:
        self._reporter = reporter
        self._reductions = reductions
        self._excused = excused
        self._replays = replays
        self._at_last_step = 0
        self._steps = 0
        self._stepping = False
        self._row: tuple[int, int] | None = None  # weights and optimizer steps, as the last checked backward ended
        self._in_a_row = dict.fromkeys((_NO_BACKWARD, _OTHER_OPTIMIZER), 0)
        self._said: set[str] = set()
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def begin_step(self) -> None:
        """A new training step: no optimizer step is running, not even one that raised."""
        self._stepping = False

    def _before(self, *_: Any) -> None:
        self._stepping = True

    def _after(self, *_: Any) -> None:
        self._stepping = False
        self._steps += 1
        reductions, before = self._reductions(), self._at_last_step
        self._at_last_step = reductions
        if reductions != before:  # inside the step counts, too: LBFGS runs its own backwards
            self._in_a_row[_NO_BACKWARD] = 0
        elif not self._excused():
            self._missed(_NO_BACKWARD, (*ROW_CHECKS, REPLAY) if self._replays() else ROW_CHECKS)

    def row(self, weights_now: int | None) -> None:
        """A checked backward has ended.

        Args:
            weights_now: fingerprint of the parameters then; None where it could not be taken.
        """
        before, self._row = self._row, None if weights_now is None else (weights_now, self._steps)
        if before is None or self._row is None or self._stepping:
            return
        if before[1] != self._row[1]:
            self._in_a_row[_OTHER_OPTIMIZER] = 0
        elif before[0] != self._row[0]:
            self._missed(_OTHER_OPTIMIZER, (WEIGHT_CHECKSUM,))

    def _missed(self, why: str, checks: Sequence[str]) -> None:
        for check in checks:
            self._reporter.skipped(check, "unhooked")
        self._in_a_row[why] += 1
        if self._in_a_row[why] >= SAID_AFTER and why not in self._said:
            self._said.add(why)
            log.warning("sdcwatch: %s; further ones are only counted (sdc_skips_total, reason unhooked)", why)

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
