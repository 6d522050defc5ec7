"""The checkpoints of a running epoch: written by one rank, trusted more as the checks of later steps cover them.

It adds nothing to what `checkpoint` can do; it only knows which rank writes, what has been proven so far and which
checkpoints there are, so that a step on which none can rise reads no file. Never collective.
Flow: monitor, epoch -> **trust** -> manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from sdcwatch.checkpoints import manifest as checkpoint
from sdcwatch.errors import SdcwatchError
from sdcwatch.watch.report import Reporter


class CheckpointTrust:
    """One rank's part in the job's checkpoints; only the job's lowest rank writes.

    The folder is listed once here and again whenever a checkpoint of this epoch can rise; until then, what somebody
    else removed from it still counts as there.

    Args:
        reporter: whose metrics say which step is clean.
        folder: `checkpoint_dir`, or None: then nothing is promoted.
    """

    def __init__(self, reporter: Reporter, folder: str | None) -> None:
        self._reporter = reporter
        self._folder = folder
        self._epoch = reporter.membership.epoch
        self._clean: int | None = None  # newest step with a checkpoint that is at least checked, of any epoch
        self._rising: dict[str, tuple[int, str]] = {}  # name -> step, trust: this epoch's, not verified yet
        self.writes = reporter.rank == reporter.membership.reporters()[0]
        if self.writes and folder is not None:
            try:
                self._look(folder)
            except (OSError, SdcwatchError) as error:
                reporter.swallow("checkpoint", error)

    def _look(self, folder: str) -> None:
        records = checkpoint.list_checkpoints(folder)
        self._clean = max((r.step for r in records if r.trusted("checked")), default=None)
        self._rising = {
            r.path.name: (r.step, r.trust) for r in records if r.epoch == self._epoch and not r.trusted("verified")
        }
        if self._clean is not None:
            self._reporter.metrics.set("sdc_last_clean_checkpoint_step", self._clean)

    def save(self, path: Path, save_fn: Callable[[Path], object], *, step: int, then: str) -> None:
        """Writes a candidate checkpoint of the state after `step`; does nothing on ranks that do not write.

        Args:
            then: the phase to export again afterwards.

        Raises:
            CheckpointError: `save_fn` wrote nothing.
        """
        if not self.writes:
            return
        self._reporter.state("checkpointing")
        try:
            checkpoint.save(path, save_fn, step=step, epoch=self._epoch, job=self._reporter.identity.job)
        finally:
            self._reporter.state(then)
        if self._folder is not None and os.path.realpath(path.parent) == os.path.realpath(self._folder):
            self._rising[path.name] = (step, "candidate")

    def promote(self, checked: int | None, verified: int | None) -> None:
        """Raises the trust of this epoch's checkpoints to what is proven up to these steps; never raises an error."""
        if not self.writes or self._folder is None:
            return
        if all(
            checkpoint.TRUST.index(checkpoint.earned(step, checked, verified)) <= checkpoint.TRUST.index(trust)
            for step, trust in self._rising.values()
        ):
            return
        try:
            checkpoint.promote(self._folder, checked, verified, epoch=self._epoch)
            self._look(self._folder)
        except (OSError, SdcwatchError) as error:
            self._reporter.swallow("checkpoint", error)
