"""`sdcwatch latch show|release`: what a person does with a halted job.

Prints the latch of a folder, or releases it under a name and a reason. Never touches a quarantine: that belongs to a
case. Flow: latch -> **latch command** <- person.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timezone
from pathlib import Path

from sdcwatch.errors import SpoolError
from sdcwatch.latch import files as latches

_UNREADABLE = (
    "no job starts while that file stands. Use its owner's account; or restore the file; or, once you know that the "
    "job may train, move it away"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `show` and `release`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print the latch that stands, and released ones")
    free = actions.add_parser("release", help="release one latch, so that the job may start again")
    for sub in (show, free):
        sub.add_argument(
            "--dir",
            dest="directories",
            action="append",
            required=True,
            metavar="FOLDER",
            help="the job's checkpoint folder or its folder in the spool; may be given more than once",
        )
    show.add_argument("--json", action="store_true", help="print one JSON object")
    free.add_argument("--latch-id", required=True, help="id as `latch show` prints it")
    free.add_argument("--by", required=True, metavar="NAME", help="who releases it; kept in the released latch")
    free.add_argument("--reason", required=True, help="why; kept in the released latch")


def main(arguments: argparse.Namespace) -> int:
    """0: done (show: nothing stands); 1: a latch stands or cannot be read, or none has that id; 2: wrong use."""
    directories = [Path(d) for d in arguments.directories]
    missing = [str(d) for d in directories if not d.is_dir()]
    if missing:
        print(f"sdcwatch latch: no such folder: {', '.join(missing)}", file=sys.stderr)
        return 2
    if arguments.action == "release":
        return _release(directories, arguments)
    try:
        return _show(directories, arguments.json)
    except SpoolError as error:
        print(f"sdcwatch latch: a latch stands that cannot be read: {error}; {_UNREADABLE}", file=sys.stderr)
        return 1


def _show(directories: list[Path], as_json: bool) -> int:
    latch = latches.standing(directories)
    history = [entry for d in directories for entry in latches.released_latches(d)]
    if as_json:
        released = [
            {"latch_id": e.latch.latch_id, "by": e.release.by, "reason": e.release.reason, "time": e.release.time}
            for e in history
        ]
        record = None if latch is None else latches.latch_record(latch)
        print(json.dumps({"schema": latches.SCHEMA, "standing": record, "released": released}))
        return 0 if latch is None else 1
    print("no latch stands" if latch is None else latches.explain(latch, directories))
    for entry in history:
        when = datetime.fromtimestamp(entry.release.time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        print(f"released: {entry.latch.latch_id} by {entry.release.by} at {when}: {entry.release.reason}")
    return 0 if latch is None else 1


def _release(directories: list[Path], arguments: argparse.Namespace) -> int:
    if not arguments.by.strip() or not arguments.reason.strip():
        print("sdcwatch latch: --by and --reason must not be empty; they are kept as the record", file=sys.stderr)
        return 2
    if not arguments.latch_id.strip():
        print("sdcwatch latch: --latch-id is empty; `sdcwatch latch show` prints the id that stands", file=sys.stderr)
        return 2
    results, unreadable = [], False
    for directory in latches.places(directories):
        try:
            result = latches.release(directory, arguments.latch_id, by=arguments.by, reason=arguments.reason)
            latches.read_latch(directory)  # one of another schema is "absent" to release, and stands all the same
        except (SpoolError, OSError) as error:
            unreadable = True
            print(f"sdcwatch latch: {directory}: not released: {error}; {_UNREADABLE}", file=sys.stderr)
            continue
        results.append(result)
        print(f"{directory}: {result.replace('_', ' ')}")
    if unreadable:
        return 1
    if all(result == "absent" for result in results):
        print(f"sdcwatch latch: no latch {arguments.latch_id} there; see `sdcwatch latch show`", file=sys.stderr)
        return 1
    return 0
