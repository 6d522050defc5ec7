"""`sdcwatch report SPOOL...`: what happened in a run, as one HTML file.

Spools of several nodes may be named; they are put together. Reads only. Flow: spool -> facts -> page -> **command**.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from sdcwatch.run_report import facts, page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("spools", type=Path, nargs="+", metavar="SPOOL", help="spool folders, or folders inside them")
    parser.add_argument("--job", help="which one, where there are several (default: the newest)")
    parser.add_argument("--checkpoints", type=Path, help="the job's checkpoint folder")
    parser.add_argument("--output", type=Path, default=Path("sdcwatch-report.html"), help="default: %(default)s")


def main(arguments: argparse.Namespace) -> int:
    """0: written; 1: there is no such run; 2: wrong use."""
    for folder in [*arguments.spools, *([arguments.checkpoints] if arguments.checkpoints else [])]:
        if not folder.is_dir():
            print(f"sdcwatch report: no such folder: {folder}", file=sys.stderr)
            return 2
    found = facts.jobs(arguments.spools)
    job = arguments.job or max(found, key=lambda name: found[name][-1].name, default=None)
    if job not in found:
        known = ", ".join(sorted(found)) or "none"
        what = "holds no run" if job is None else f"holds no job {job}"
        print(f"sdcwatch report: {arguments.spools[0]} {what}; jobs here: {known}", file=sys.stderr)
        return 1
    run = facts.read(job, found[job], arguments.checkpoints)
    try:
        arguments.output.write_text(page.html(run, now=time.time()), encoding="utf-8")
    except OSError as error:
        print(f"sdcwatch report: cannot write {arguments.output}: {error.strerror or error}", file=sys.stderr)
        return 2
    print(f"{arguments.output}: job {job}, {len(run.epochs)} epochs, {len(run.events)} events")
    return 0
