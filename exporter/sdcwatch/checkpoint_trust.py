"""The checkpoints of a running epoch: written by one rank, trusted more as the checks of later steps cover them.

It adds nothing to what `checkpoint` can do; it only knows which rank writes and what has been proven so far. Never
collective. Flow: monitor, epoch -> **checkpoint_trust** -> checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sdcwatch import checkpoint
from sdcwatch.errors import SdcwatchError
from sdcwatch.report import Reporter


class CheckpointTrust:
    """One rank's part in the job's checkpoints; only the job's lowest rank writes.

    Args:
        reporter: whose metrics say which step is clean.
        folder: `checkpoint_dir`, or None: then nothing is promoted.
    """

    def __init__(self, reporter: Reporter, folder: str | None) -> None:
        self._reporter = reporter
        self._folder = folder
        self._epoch = reporter.membership.epoch
        self.writes = reporter.rank == reporter.membership.reporters()[0]

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

    def promote(self, checked: int | None, verified: int | None) -> None:
        """Raises the trust of this epoch's checkpoints to what is proven up to these steps; never raises an error."""
        if not self.writes or self._folder is None:
            return
        try:
            checkpoint.promote(self._folder, checked, verified, epoch=self._epoch)
            trusted = [r.step for r in checkpoint.list_checkpoints(self._folder) if r.trusted("checked")]
        except (OSError, SdcwatchError) as error:
            self._reporter.swallow("checkpoint", error)
            return
        if trusted:
            self._reporter.metrics.set("sdc_last_clean_checkpoint_step", max(trusted))
