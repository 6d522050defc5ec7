"""The checkpoints of a running epoch: written or noted by one rank, trusted more as checks of later steps cover them.

It adds nothing to what `manifest` can do; it only knows which rank writes, what has been proven so far and which
checkpoints there are, so that a step on which none can rise reads no file. What somebody else writes (an asynchronous
upload, a folder behind a URL) is awaited and hashed on a thread of its own, never in the training loop. Never
collective. Flow: monitor, epoch -> **trust** -> manifest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sdcwatch.checkpoints import content
from sdcwatch.checkpoints import manifest as checkpoint
from sdcwatch.checkpoints.record import CheckpointRecord, StateDigests
from sdcwatch.errors import ConfigurationError, SdcwatchError
from sdcwatch.watch.report import Reporter, log


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
        self._proven: tuple[int | None, int | None] = (None, None)
        self._lock = threading.Lock()  # held by the training thread and by `_finish` while manifests change
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._pinning = threading.Lock()  # held by one thread that pins
        self._verified: tuple[int, float] | None = None  # step and time of the newest verified one, of any epoch
        self._pinned: tuple[int, float] | None = None  # the one for which pinning was last begun
        self._unpinned_said = False
        self.writes = reporter.rank == reporter.membership.reporters()[0]
        if self.writes and folder is not None:
            try:
                self._look(folder)
                self._export()
                self._pin()
            except (OSError, SdcwatchError) as error:
                reporter.swallow("checkpoint", error)

    def _look(self, folder: str) -> None:
        records = checkpoint.list_checkpoints(folder)
        loadable = checkpoint.loadable(folder)
        self._clean = max((r.step for r in loadable if r.trusted("checked")), default=None)
        self._verified = max(((r.step, r.time) for r in loadable if r.trusted("verified")), default=None)
        self._rising = {
            r.path.name: (r.step, r.trust)
            for r in records
            if r.epoch == self._epoch and not r.pending and not r.trusted("verified")
        }

    def _export(self) -> None:
        if self._clean is not None:
            self._reporter.metrics.set("sdc_last_clean_checkpoint_step", self._clean)

    def save(
        self, path: Path, save_fn: Callable[[Path], object], *, step: int, then: str, state: StateDigests | None = None
    ) -> None:
        """Writes a candidate checkpoint of the state after `step`; does nothing on ranks that do not write.

        Args:
            then: the phase to export again afterwards.
            state: fingerprints of the state that is being saved.

        Raises:
            CheckpointError: `save_fn` wrote nothing.
        """
        if not self.writes:
            return
        self._reporter.state("checkpointing")
        try:
            facts: dict[str, Any] = {"epoch": self._epoch, "job": self._reporter.identity.job, "state": state}
            checkpoint.save(path, save_fn, step=step, **facts)
        finally:
            self._reporter.state(then)
        if self._folder is not None and os.path.realpath(path.parent) == os.path.realpath(self._folder):
            with self._lock:
                self._rising[path.name] = (step, "candidate")

    def note(
        self, place: str | os.PathLike[str], *, step: int, when: Any = None, state: StateDigests | None = None
    ) -> None:
        """Notes a checkpoint that somebody else wrote, or is still writing; returns at once.

        Args:
            place: a path, or a URL that fsspec knows; its manifest then stands in `checkpoint_dir`.
            when: a future of the write (what `async_save` returned); None: it is whole already.
            state: fingerprints of the state of that step, None where it has moved on.

        Raises:
            ConfigurationError: a URL without `checkpoint_dir`, or `when` is no future.
        """
        text = os.fspath(place)
        done = getattr(when, "upload_completion", when)
        if done is not None and not callable(getattr(done, "result", None)):
            raise ConfigurationError(f"when= must be what async_save returned (a future), got {type(when).__name__}")
        location = None
        if content.is_url(text):
            if self._folder is None:
                raise ConfigurationError(f"the manifest of {text} needs a shared folder: set checkpoint_dir")
            location, path = text, Path(self._folder) / text.rstrip("/").rpartition("/")[2]
        else:
            path = Path(text)
        if not self.writes:
            return
        noted = checkpoint.announce(
            path, step=step, epoch=self._epoch, job=self._reporter.identity.job, state=state, location=location
        )
        # Not a daemon: a job that ends well waits for its last checkpoint, as it waits for the upload itself.
        thread = threading.Thread(target=self._finish, args=(noted, done), name=f"sdcwatch-{path.name}", daemon=False)
        self._start(thread)

    def _finish(self, noted: CheckpointRecord, done: Any) -> None:
        try:
            if done is not None:
                done.result()
            if checkpoint.complete(noted, self._stop.is_set) is None:
                checkpoint.follow_taint(noted)
                return
            with self._lock:
                if self._folder is not None:
                    checkpoint.promote(self._folder, *self._proven, epoch=self._epoch)
                    self._look(self._folder)
                    self._pin()
        except content.Cancelled:
            return
        except Exception as error:  # somebody else's write failed: it stays pending, and nothing loads it
            log.warning("sdcwatch: the checkpoint %s was not finished and will not be used: %r", noted.where, error)

    def promote(self, checked: int | None, verified: int | None) -> None:
        """Raises the trust of this epoch's checkpoints to what is proven up to these steps; never raises an error."""
        if not self.writes or self._folder is None:
            return
        with self._lock:
            self._proven = (checked, verified)
            self._export()
            if all(
                checkpoint.TRUST.index(checkpoint.earned(step, checked, verified)) <= checkpoint.TRUST.index(trust)
                for step, trust in self._rising.values()
            ):
                return
            try:
                checkpoint.promote(self._folder, checked, verified, epoch=self._epoch)
                self._look(self._folder)
                self._export()
                self._pin()
            except (OSError, SdcwatchError) as error:
                self._reporter.swallow("checkpoint", error)

    def _pin(self) -> None:
        """Starts pinning the newest verified checkpoint; a folder of many shards on a shared disk takes its time."""
        if self._folder is not None and self._verified not in (None, self._pinned):
            self._pinned = self._verified
            # Not a daemon: a job that ends well leaves its last verified checkpoint pinned.
            self._start(threading.Thread(target=self._hold, args=(self._folder,), name="sdcwatch-pin", daemon=False))

    def _hold(self, folder: str) -> None:
        with self._pinning:
            try:
                checkpoint.pin_newest(folder)
            except (OSError, SdcwatchError) as error:
                if not self._unpinned_said:
                    self._unpinned_said = True
                    log.warning(
                        "sdcwatch: the last verified checkpoint cannot be pinned, so a rotation of your own can remove "
                        "it; let `sdcwatch checkpoints prune` rotate instead: %s",
                        error,
                    )

    def _start(self, thread: threading.Thread) -> None:
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def settle(self, seconds: float | None = None) -> None:
        """Waits for pins and for noted checkpoints whose write has ended, at most so long; the rest goes on."""
        for thread in self._threads:
            thread.join(seconds)

    def halt(self) -> None:
        """Ends all hashing: what is pending stays so, and nothing loads it."""
        self._stop.set()
