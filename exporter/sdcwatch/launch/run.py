"""`sdcwatch run -- LAUNCHER ARGS...`: stays the parent of a launcher, waits out a halt and starts it afresh.

Launchers turn the exit status of a halted rank into a plain failure and spend their restarts on a machine that must
not train. So this process reads the latch instead: while one stands it starts nothing, and once it is released it
starts the launcher again, with its full budget of restarts. It never releases a latch that names somebody and never
decides about a node. Flow: latch -> **run** -> launcher.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from sdcwatch.errors import ConfigurationError, SpoolError
from sdcwatch.identity import take
from sdcwatch.latch import files as latch
from sdcwatch.launch import first_check, halt_wait, launcher
from sdcwatch.settings import Settings
from sdcwatch.spool.folders import job_root, user_root


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `sdcwatch run` was asked. Seconds throughout.

    Attributes:
        command: the launcher and its words.
        places: folders in which a latch of this job may stand: its spool folder and the checkpoint folder.
        halt_grace: how long a launcher may go on after a latch appeared before it is ended.
        preflight_first: the machine is judged before the first life of the launcher.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    places: tuple[Path, ...]
    wait: halt_wait.WaitOptions
    poll: float
    halt_grace: float
    preflight_first: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options; everything after `--` is the launcher's."""
    parser.usage = "sdcwatch run [options] -- LAUNCHER [ARGS ...]"
    parser.add_argument("--job", help="name of the job (default: SDCWATCH_JOB, Slurm's, torchrun's --rdzv-id)")
    parser.add_argument("--spool-dir", help="root of this node's spool (default: SDCWATCH_SPOOL_DIR, /tmp/sdcwatch)")
    parser.add_argument("--checkpoint-dir", help="folder that all nodes share (default: SDCWATCH_CHECKPOINT_DIR)")
    parser.add_argument(
        "--latch-wait",
        type=float,
        default=86400.0,
        metavar="SECONDS",
        help="longest wait for a release (default: a day)",
    )
    parser.add_argument(
        "--halt-grace",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="how long the launcher may go on after a latch appeared before it is ended (default: 180)",
    )
    parser.add_argument("--poll", type=float, default=2.0, metavar="SECONDS", help="how often to look (default: 2)")
    parser.add_argument(
        "--preflight",
        metavar="COMMAND",
        help="own health check instead of `sdcwatch preflight`; exits 0: pass; 1 after the line "
        '{"outcome": "fail"}: fail; anything else: could not judge',
    )
    parser.add_argument(
        "--preflight-first",
        action="store_true",
        help="run the health check before the first start too (about 10 s); a machine that fails it ends with 86",
    )
    parser.add_argument("launcher", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def main(arguments: argparse.Namespace) -> int:
    """The launcher's own status; 86 when this node leaves the job; 2 for wrong use (see docs/contracts.md)."""
    options = options_from(arguments, dict(os.environ))
    with launcher.Signals().caught() as signals:
        return supervise(options, signals)


def options_from(arguments: argparse.Namespace, environ: dict[str, str]) -> RunOptions:
    """Reads options, settings and identity.

    Raises:
        ConfigurationError: no launcher, no job name, or a number that makes no sense.
        IdentityError: two sources name this node differently.
    """
    command = list(arguments.launcher)
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise ConfigurationError(
            "nothing to run: write the launcher after --, e.g. `sdcwatch run -- torchrun train.py`"
        )
    for name in ("latch_wait", "halt_grace"):
        if getattr(arguments, name) < 0:
            raise ConfigurationError(f"--{name.replace('_', '-')} must not be negative")
    if not arguments.poll > 0:
        raise ConfigurationError("--poll must be above 0")
    given = {"job": arguments.job, "spool_dir": arguments.spool_dir, "checkpoint_dir": arguments.checkpoint_dir}
    settings = Settings.load(given, environ)
    naming = {**environ, "TORCHELASTIC_RUN_ID": _rendezvous_id(command) or environ.get("TORCHELASTIC_RUN_ID", "")}
    me = take(settings, rank=0, local_rank=0, device_uuid=None, environ=naming)
    shared = Path(settings.checkpoint_dir) if settings.checkpoint_dir else None
    passed = {"SDCWATCH_JOB": me.job, "SDCWATCH_SPOOL_DIR": settings.spool_dir}
    if settings.checkpoint_dir:
        passed["SDCWATCH_CHECKPOINT_DIR"] = settings.checkpoint_dir
    spool = job_root(settings.spool_dir, me.job)
    return RunOptions(
        command=tuple(command),
        environment={**environ, **passed},
        places=(shared, spool) if shared else (spool,),
        wait=halt_wait.WaitOptions(
            node=me.node,
            instance=me.instance,
            uid_root=user_root(settings.spool_dir),
            checkpoint_dir=shared,
            spool=spool,
            latch_wait=arguments.latch_wait,
            poll=arguments.poll,
            preflight=halt_wait.preflight_command(arguments.preflight),
        ),
        poll=arguments.poll,
        halt_grace=arguments.halt_grace,
        preflight_first=arguments.preflight_first,
    )


def _rendezvous_id(command: list[str]) -> str | None:
    """torchrun's `--rdzv-id`, which becomes TORCHELASTIC_RUN_ID in the ranks and so names the job there."""
    for position, word in enumerate(command):
        name, _, value = word.partition("=")
        if name in ("--rdzv-id", "--rdzv_id"):
            return value or (command[position + 1] if position + 1 < len(command) else None)
    return None


def say(text: str) -> None:
    """One line (or block) of this command's own log, on stderr."""
    print(f"sdcwatch run: {text}", file=sys.stderr, flush=True)


def supervise(options: RunOptions, signals: launcher.Signals) -> int:
    """Runs the launcher, and again after each released latch, until it ends with none standing."""
    judge = options.preflight_first
    while True:
        outcome = halt_wait.wait_until_free(options.places, options.wait, signals, say)
        if outcome is None and judge and signals.ended_by is None:
            outcome = first_check.refusal(options.wait.preflight, signals, say)
        if outcome is not None:
            return outcome
        judge = False
        if signals.ended_by is not None:
            return 128 + signals.ended_by
        status, halted = run_once(options, signals)
        if not halted or signals.ended_by is not None:
            return status
        say(f"launcher ended with status {status} under a latch")


def run_once(options: RunOptions, signals: launcher.Signals) -> tuple[int, bool]:
    """One life of the launcher.

    Returns:
        Its exit status, and whether a latch ended it: one stands, or one appeared and was released while a launcher
        that failed was still busy with its own restarts.
    """
    known = _released_ids(options.places)
    child = launcher.start(options.command, options.environment)
    signals.follow(child)
    seen_at: float | None = None
    had_workers = False
    while True:
        try:
            child.wait(timeout=options.poll)
            break
        except subprocess.TimeoutExpired:
            had_workers = had_workers or bool(launcher.workers(child))
        if seen_at is None and (_stands(options.places) or _released_ids(options.places) - known):
            seen_at = time.monotonic()
            say(f"a latch appeared; the launcher has {options.halt_grace:g} s to end")
        if seen_at is not None and time.monotonic() - seen_at >= options.halt_grace:
            say("the launcher outstays the latch and is ended")
            launcher.end(child, had_workers=had_workers)
            break
    signals.follow(None)
    status = launcher.status_of(child)
    if _stands(options.places):
        return status, True
    return status, status != 0 and (seen_at is not None or bool(_released_ids(options.places) - known))


def _stands(places: tuple[Path, ...]) -> bool:
    try:
        return latch.standing(places) is not None
    except SpoolError:
        return True


def _released_ids(places: tuple[Path, ...]) -> set[str]:
    return {entry.latch.latch_id for place in latch.places(places) for entry in latch.released_latches(place)}
