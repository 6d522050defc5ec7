"""`Monitor`: the two lines that a training engineer adds to a loop.

It checks what it is given, finds its peers, prints what it will check, and hands steps to the running `Epoch`. It is
a no-op, said in one line, without a process group, with one process, or with `SDCWATCH_DISABLE=1`. It never writes to
parameters, gradients, buffers or RNG and registers no communication hook. Flow: training loop -> **monitor** ->
epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from sdcwatch import environment
from sdcwatch.agent.start import ensure_agent
from sdcwatch.checkpoints import resume, state
from sdcwatch.checkpoints.record import StateDigests
from sdcwatch.checkpoints.trust import CheckpointTrust
from sdcwatch.checks.replay import LossFunction
from sdcwatch.device_name import device_name
from sdcwatch.errors import CheckpointError, ConfigurationError, SdcwatchError
from sdcwatch.heal.healer import refuse_start as refuse_heal
from sdcwatch.identity import job_name, take
from sdcwatch.latch.files import refuse_start
from sdcwatch.run_report import ending
from sdcwatch.settings import Settings, disabled
from sdcwatch.spool.folders import job_root, user_root
from sdcwatch.spool.rank import Spool
from sdcwatch.verdict import Verdict
from sdcwatch.watch import coverage, self_test, start
from sdcwatch.watch.contain import Halt
from sdcwatch.watch.coverage import Sizes
from sdcwatch.watch.epoch import Epoch
from sdcwatch.watch.exchange import Exchange
from sdcwatch.watch.replication import Sets, Wrapper, replica_sets, replicated_parameters, unwrap
from sdcwatch.watch.report import Reporter, log
from sdcwatch.watch.row_fields import Watched
from sdcwatch.watch.same_step import former_halts

PHASES = ("training", "evaluating", "checkpointing")

#: Seconds that `close()` waits for the last rows of its peers.
CLOSE_SECONDS = 10.0

_live: list[Monitor] = []


class Step:
    """One training step, as `with monitor.step(n) as s` gives it."""

    def __init__(self, monitor: Monitor, step: int) -> None:
        self._monitor = monitor
        self.step = step
        self._begin = 0.0

    def __enter__(self) -> Step:
        self._begin = time.perf_counter()
        self._monitor._begin(self.step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._monitor._end(time.perf_counter() - self._begin)

    def loss(self, batch: Any) -> Any:
        """Calls `loss_fn(ddp_model, batch)` and returns its result; call it once per micro-batch.

        On audited steps the batch, RNG and autocast are kept as they are now, so that replay can run the same thing
        again.

        Raises:
            ConfigurationError: the monitor was made without `loss_fn`.
        """
        return self._monitor._loss(batch)


class Monitor:
    """Watches one DDP model and its optimizer. Create it on every rank, after DDP and the optimizer.

    Args:
        model: `DistributedDataParallel`, FSDP2's `fully_shard` over a mesh with a replicate dimension, or
            `torch.compile` of one. What `fully_shard` without replicas holds is not compared; `coverage()` says so.
        optimizer: the one that steps the model's parameters.
        loss_fn: `loss_fn(model, batch) -> scalar loss`; None turns replay off, visibly.
        scaler: the GradScaler, where one is used: scales that drift apart are then said to be software, not hardware.
        resumed_from: the checkpoint that model and optimizer were loaded from (what `resume_point` gave, or its path):
            every rank's state is then compared with it before the first step. See also `verify_resume`.
        **settings: fields of `Settings`; each may also stand in `SDCWATCH_*` or `sdcwatch.toml`.

    Raises:
        CheckpointError: some rank does not hold the state of `resumed_from`; the same error on all ranks.
        ConfigurationError: something cannot work; the same error on all ranks.
        SpoolError: the spool cannot be used.
        SystemExit: status 86, a latch or quarantine stands.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss_fn: LossFunction | None = None,
        scaler: torch.amp.GradScaler | None = None,
        resumed_from: resume.ResumedFrom = None,
        **settings: Any,
    ) -> None:
        self._model = model
        self._resumed_from = resumed_from
        self._loss_fn = loss_fn
        self._epoch: Epoch | None = None
        self._watched: Watched | None = None
        self._trust: CheckpointTrust | None = None
        self._coverage: tuple[coverage.CoverageLine, ...] = ()
        self._step: int | None = None
        self._phase = "training"
        self._closed = False
        self._optimizer_covered = False
        self._tested = self_test.SelfTest((), 0.0)
        self._settings = Settings()
        if not dist.is_available() or not dist.is_initialized():
            self._alone(loss_fn, settings)
            self._off("no process group is initialized")
            return
        if dist.get_world_size() < 2:
            self._alone(loss_fn, settings)
            self._off("one process has no peer to compare with")
            return
        ddp = unwrap(model)
        _refuse_second(ddp)
        group = ddp.process_group
        parameters, sets = replicated_parameters(ddp), replica_sets(ddp)
        device = parameters[0][1].device if parameters else torch.device("cpu")
        exchange = Exchange(group, device if "nccl" in str(dist.get_backend(group)) else torch.device("cpu"))
        mine, error = self._bring(optimizer, parameters, sets, device, settings)
        membership = start.join(exchange, mine, error, sets)
        if membership is None:
            self._off("SDCWATCH_DISABLE is set")
            return
        spool = self._open_spool(exchange, membership)
        watched = Watched(
            model,
            ddp,
            optimizer,
            loss_fn,
            [p for _, p in parameters],
            device,
            start.schema_digest(parameters, sets),
            scaler,
        )
        self._watch(watched, exchange, membership, spool)

    def _bring(
        self,
        optimizer: Any,
        parameters: list[tuple[str, torch.nn.Parameter]],
        sets: Sets,
        device: torch.device,
        arguments: dict[str, Any],
    ) -> tuple[start.Brought, Exception | None]:
        if disabled():
            return start.Brought(disabled=True), None
        try:
            self._settings = Settings.load(arguments)
            start.check_given(optimizer, parameters, self._loss_fn, self._settings)
            if self._settings.on_fault == "heal":
                refuse_heal(unwrap(self._model), optimizer, self._loss_fn)
            named = device_name(device)
            identity = take(
                self._settings,
                rank=dist.get_rank(),
                local_rank=int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))),
                device_uuid=named.uuid if named else None,
                device_parent=named.parent if named else "",
            )
            refuse_start(self._latch_places(), uid_root=user_root(self._settings.spool_dir), instance=identity.instance)
        except SystemExit:
            return start.Brought(halted=True), None
        except (SdcwatchError, ValueError, OSError) as error:
            return start.Brought(error=str(error)), error
        facts = environment.describe(device)
        brought = start.Brought(
            identity=identity,
            facts=facts,
            environment=environment.digest(facts),
            schema=start.schema_digest(parameters, sets),
            settings=start.shared(self._settings),
            blind=self._self_test(device).blind,
            epoch=start.new_epoch(),
            replays=self._loss_fn is not None,
            halts=former_halts(self._latch_places(), identity.job),
        )
        return brought, None

    def _self_test(self, device: torch.device) -> self_test.SelfTest:
        self._tested = self_test.run(device)
        return self._tested

    def _latch_places(self) -> list[Path]:
        places = [job_root(self._settings.spool_dir, job_name(self._settings, os.environ))]
        if self._settings.checkpoint_dir:
            places.append(Path(self._settings.checkpoint_dir))
        return places

    def _open_spool(self, exchange: Exchange, membership: start.Membership) -> Spool:
        identity = membership.identities[exchange.rank]
        spool, error = None, None
        try:
            spool = Spool.open(
                self._settings.spool_dir,
                identity.job,
                membership.epoch,
                identity.rank,
                identity.local_rank,
                identity.record(),
                quota_bytes=self._settings.spool_quota_mb << 20,
            )
        except (SdcwatchError, OSError) as caught:
            error = caught
        errors = [f"rank {r}: {text}" for r, text in enumerate(exchange.everyone(str(error or ""))) if text]
        if error is not None:
            raise error
        if errors:
            raise ConfigurationError("; ".join(errors[:4]))
        assert spool is not None
        return spool

    def _watch(self, watched: Watched, exchange: Exchange, membership: start.Membership, spool: Spool) -> None:
        settings = self._settings
        reporter = Reporter(
            membership,
            exchange.rank,
            spool,
            on_fault=settings.on_fault,
            kept=settings.verdicts_kept,
            interval=settings.metrics_interval,
            evidence=settings.evidence_mb > 0,
        )
        try:
            resume.require(exchange, reporter, self._resumed_from, named_parameters(watched), watched.optimizer)
        except CheckpointError:
            spool.close()
            raise
        halt = Halt(
            reporter,
            checkpoint_dir=Path(settings.checkpoint_dir) if settings.checkpoint_dir else None,
            scrapes=settings.halt_grace_scrapes if settings.agent == "auto" else 0,
            seconds=settings.halt_grace_seconds,
        )
        self._trust = CheckpointTrust(reporter, settings.checkpoint_dir)
        self._watched = watched
        self._epoch = Epoch(watched, settings, membership, exchange, reporter, halt, self._trust.promote)
        if off := coverage.replay_off(watched, membership):
            self._epoch.replay_off = off.partition(":")[0]
        self._export_self_test(reporter, membership.blind)
        sizes = self._cover()
        if exchange.rank == 0:
            seconds = coverage.predicted_seconds(
                watched.parameters, sizes, conservation_every=self._epoch.cadences.conservation
            )
            _say(coverage.table(self._coverage, sizes, seconds))
        if settings.agent == "auto" and membership.identities[exchange.rank].local_rank == 0:
            trouble = ensure_agent(settings)
            if trouble:
                log.warning("sdcwatch: %s", trouble)
        reporter.state("starting")
        _live.append(self)

    def _export_self_test(self, reporter: Reporter, blind: tuple[str, ...]) -> None:
        """Metrics of its own: what was injected at start never counts as a mismatch."""
        for check in self_test.CHECKS:
            reporter.metrics.set("sdc_self_test_passed", float(check not in blind), check=check)
        reporter.metrics.set("sdc_self_test_seconds", self._tested.seconds)
        if blind:
            log.error(
                "sdcwatch: the self-test at start failed on some rank: %s cannot be relied on in this run; run "
                "`sdcwatch preflight` on every node, and compare torch and driver versions",
                ", ".join(blind),
            )

    def _alone(self, loss_fn: Any, arguments: dict[str, Any]) -> None:
        """Nothing will be watched; a mistake should show on the laptop all the same, not on the first night."""
        if not disabled():
            start.check_settings(loss_fn, Settings.load(arguments))

    def _off(self, why: str) -> None:
        if int(os.environ.get("RANK", "0")) == 0:
            _say(f"sdcwatch is off: {why}")

    @property
    def enabled(self) -> bool:
        """False where the monitor is a no-op."""
        return self._epoch is not None

    @property
    def epoch(self) -> str | None:
        """Id of this membership, the same on all ranks; None where the monitor is off."""
        return self._epoch.membership.epoch if self._epoch else None

    @property
    def newest_step(self) -> int | None:
        """The number that the newest `step()` was given; None before the first, or where the monitor is off."""
        return self._step

    @property
    def checkpoint_dir(self) -> str | None:
        """The folder whose checkpoints are judged, from whichever source set it; None without one, or where the
        monitor is off."""
        return self._settings.checkpoint_dir if self._epoch else None

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The newest verdicts other than clean, oldest first (at most `verdicts_kept`)."""
        return tuple(self._epoch.reporter.verdicts) if self._epoch else ()

    def coverage(self) -> tuple[coverage.CoverageLine, ...]:
        """What each check covers, how often it runs, and why one is off; empty where the monitor is off."""
        if self._epoch is None:
            return ()
        every = self._epoch.cadences.by_check()  # as stretched by now
        return tuple(dataclasses.replace(line, every=every.get(line.check, line.every)) for line in self._coverage)

    def summary(self) -> dict[str, float]:
        """How this run stands, as a flat dict for W&B or TensorBoard; empty where the monitor is off."""
        return ending.summary(self._epoch.reporter.metrics, self.verdicts) if self._epoch else {}

    def step(self, step: int) -> Step:
        """The context of one training step.

        Args:
            step: the number of this step; it must rise.

        Raises:
            ConfigurationError: no whole number from 0 on, one that falls back (a new `Monitor` begins a new epoch), or
                the monitor is closed. Where the monitor is off, any number will do.
        """
        if self._closed:
            raise ConfigurationError("this Monitor is closed; create a new one to go on training")
        if self._epoch is None:
            return Step(self, step)
        step = _step_number(step)
        if self._step is not None and step <= self._step:
            raise ConfigurationError(
                f"step {step} after step {self._step}: step numbers must rise; after a rollback create a new Monitor"
            )
        self._step = step
        return Step(self, step)

    def _begin(self, step: int) -> None:
        if self._epoch is None:
            return
        self._epoch.begin_step(step)
        if self._phase != "training" or self._epoch.count == 0:
            self.phase("training")

    def _end(self, seconds: float) -> None:
        if self._epoch is None or self._closed:
            return
        if not self._optimizer_covered and self._epoch.optimizer_watch.calls:
            # Most optimizers make their state in their first step; until then there is nothing to count.
            self._optimizer_covered = True
            self._cover()
        self._epoch.end_step(seconds)

    def _cover(self) -> Sizes:
        """Counts what is covered now, for `coverage()` and the metrics."""
        assert self._epoch is not None
        watched, membership, metrics = self._epoch.watched, self._epoch.membership, self._epoch.reporter.metrics
        sizes, self._coverage = coverage.of_run(watched, membership, self._settings)
        for line in self._coverage:
            # Not defined under a comm hook is not switched off: no series, so that SDCCheckDisabled stays silent.
            if line.enabled or not line.reason.startswith(("comm_hook", "undefined")):
                metrics.set(
                    "sdc_detector_enabled", float(line.enabled and line.check not in membership.blind), check=line.check
                )
            metrics.set("sdc_coverage_bytes", line.covered_bytes, check=line.check, covered="yes")
            metrics.set("sdc_coverage_bytes", line.uncovered_bytes, check=line.check, covered="no")
        return sizes

    def _loss(self, batch: Any) -> Any:
        if self._loss_fn is None:
            raise ConfigurationError("s.loss(batch) needs Monitor(..., loss_fn=loss_fn)")
        if self._epoch is None or self._closed:
            return self._loss_fn(self._model, batch)
        return self._epoch.loss(self._loss_fn, batch)

    def phase(self, phase: str) -> None:
        """Says what the job does now, so that liveness alerts know: `training`, `evaluating` or `checkpointing`.

        Raises:
            ConfigurationError: another word.
        """
        if phase not in PHASES:
            raise ConfigurationError(f"phase {phase!r} is none of {', '.join(PHASES)}")
        self._phase = phase
        if self._epoch is not None:
            self._epoch.reporter.state(phase)

    def checkpoint(self, path: str | os.PathLike[str], save_fn: Callable[[Path], object]) -> None:
        """Writes a checkpoint of the state after the newest step, with a manifest; call it on every rank, after the
        step.

        Only the lowest rank writes. The checkpoint is a candidate until the checks of later steps have covered it. Not
        collective: add your own barrier where other ranks read the file at once.

        Args:
            path: final place, in `checkpoint_dir`.
            save_fn: called with a temporary path; saves there.

        Raises:
            CheckpointError: `save_fn` wrote nothing, or no step has run yet.
        """
        if self._epoch is None:
            if not dist.is_initialized() or dist.get_rank() == 0:
                save_fn(Path(path))
            return
        if self._step is None:
            raise CheckpointError("no step has run: there is no state to save yet")
        assert self._trust is not None
        self._trust.save(Path(path), save_fn, step=self._step, then=self._phase, state=self._state_of(self._step))

    def note_checkpoint(self, path_or_url: str | os.PathLike[str], step: int, *, when: Any = None) -> None:
        """Notes a checkpoint that somebody else wrote or is still writing; call it on every rank, returns at once.

        The lowest rank writes a manifest beside it (for a URL: into `checkpoint_dir`), which is completed once the data
        is whole and hashed, on a thread of its own. Until then nothing resumes from it. Not collective.

        Args:
            path_or_url: a file, a folder of shards, or either behind a URL that fsspec knows.
            step: the last completed step that it holds. Called in the same step, the state's fingerprints are kept too.
            when: what `torch.distributed.checkpoint.async_save` returned, or another future; None: it is whole.

        Raises:
            ConfigurationError: no step number, a URL without `checkpoint_dir`, or `when` is no future.
        """
        step = _step_number(step)
        if self._epoch is not None:
            assert self._trust is not None
            self._trust.note(path_or_url, step=step, when=when, state=self._state_of(step))

    def verify_resume(self, resumed_from: resume.ResumedFrom) -> None:
        """Compares every rank's parameters and optimizer state with the checkpoint that they were loaded from.

        For loops that load after the monitor was made; `Monitor(..., resumed_from=...)` does the same at start.
        Collective: call it on every rank, between two steps.

        Raises:
            CheckpointError: some rank does not hold that state; the same error on all ranks.
        """
        if self._epoch is not None:
            epoch = self._epoch
            watched = self._watched
            assert watched is not None
            parameters = named_parameters(watched)
            resume.require(epoch.exchange, epoch.reporter, resumed_from, parameters, watched.optimizer)

    def _state_of(self, step: int) -> StateDigests | None:
        """Fingerprints of the state as it is now, on the rank that writes; None where it moved on."""
        if self._watched is None or self._trust is None or not self._trust.writes or step != self._step:
            return None
        return state.measure(named_parameters(self._watched), self._watched.optimizer)

    def close(self) -> None:
        """Ends the epoch: swaps the last rows through the store (10 s at most), writes, removes all hooks.

        Afterwards the monitor watches nothing, and does not keep model and optimizer alive once its own scope is over.

        Raises:
            CorruptionDetected: with `on_fault="halt"`, when the last optimizer step turns out to be wrong on some rank.
        """
        epoch, before = self._epoch, self._closed
        self._closed = True
        if epoch is None or before:
            return
        with contextlib.suppress(ValueError):
            _live.remove(self)
        try:
            epoch.finish(timedelta(seconds=CLOSE_SECONDS))
        finally:
            epoch.close()
            if epoch.exchange.rank == 0 and epoch.reporter.spool is not None:
                _say(ending.lines(self.summary(), self.verdicts, spool=str(epoch.reporter.spool.job_directory)))
            if self._trust is not None and epoch.halt.standing:
                self._trust.halt()
            epoch.reporter.state("halted" if epoch.halt.standing else "finished")
            spool, epoch.reporter.spool = epoch.reporter.spool, None
            if spool is not None:
                spool.close()


def named_parameters(watched: Watched) -> list[tuple[str, torch.nn.Parameter]]:
    """The replicated parameters by name, as manifests have them."""
    return replicated_parameters(watched.ddp)


def _step_number(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number < 1 << 63:
        raise ConfigurationError(f"step {step!r} is no step number: monitor.step takes whole numbers from 0 on")
    return number


def _say(text: str) -> None:
    """Prints to the training log; a log that cannot be written is no reason not to train."""
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)


def _refuse_second(ddp: Wrapper) -> None:
    for other in _live:
        same = other._watched is not None and other._watched.ddp.module is ddp.module
        raise ConfigurationError(
            "this model already has a Monitor; close() it before making another"
            if same
            else "this process already has a Monitor on another model: one DDP model a process can be watched; "
            "close() the first"
        )
