"""`sdcwatch checkpoints list|verify|last-clean|taint|prune`: what is on disk, and which one may be loaded.

Never loads a checkpoint; reads its bytes only to compare them with the manifest. Flow: checkpoint -> **command**.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timezone
from pathlib import Path

from sdcwatch.checkpoints import manifest as checkpoint
from sdcwatch.checkpoints import pin
from sdcwatch.errors import CheckpointError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the actions."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="all checkpoints of a folder with step and trust")
    verify = actions.add_parser("verify", help="compare bytes on disk with manifests")
    clean = actions.add_parser("last-clean", help="print the path of the newest checkpoint that may be loaded")
    taint = actions.add_parser("taint", help="rename checkpoints newer than a step, so that nothing loads them")
    prune = actions.add_parser("prune", help="remove all but the newest; the newest verified one stays")
    for sub in (listing, clean, taint, prune):
        sub.add_argument("directory", type=Path, help="the checkpoint folder")
    for sub in (listing, clean):
        sub.add_argument("--json", action="store_true", help="print JSON")
    verify.add_argument("paths", type=Path, nargs="+", help="checkpoints, or folders of checkpoints")
    clean.add_argument(
        "--trust", choices=("checked", "verified"), default="checked", help="least trust (default: checked)"
    )
    which = taint.add_mutually_exclusive_group(required=True)
    which.add_argument("--newer-than", type=int, metavar="STEP", help="rename those with a larger step")
    which.add_argument("--all", action="store_true", help="rename all")
    taint.add_argument("--reason", required=True, help="kept in the renamed manifest")
    prune.add_argument("--keep", type=int, required=True, help="how many of the newest stay")


def main(arguments: argparse.Namespace) -> int:
    """0: done; 1: a checkpoint that must not be loaded, or none that may; 2: wrong use."""
    if arguments.action == "verify":
        return _verify(arguments.paths)
    if not arguments.directory.is_dir():
        print(f"sdcwatch checkpoints: no such folder: {arguments.directory}", file=sys.stderr)
        return 2
    if arguments.action == "list":
        return _list(arguments.directory, arguments.json)
    if arguments.action == "last-clean":
        return _last_clean(arguments)
    if arguments.action == "taint":
        newer_than = None if arguments.all else arguments.newer_than
        for path in checkpoint.taint(arguments.directory, newer_than, arguments.reason):
            print(f"tainted: {path}")
        return 0
    if arguments.keep < 1:
        print("sdcwatch checkpoints: --keep must be at least 1", file=sys.stderr)
        return 2
    for path in checkpoint.prune(arguments.directory, arguments.keep):
        print(f"removed: {path}")
    return 0


def _record(record: checkpoint.CheckpointRecord) -> dict[str, object]:
    return {
        "path": str(record.path),
        "step": record.step,
        "trust": record.trust,
        "epoch": record.epoch,
        "training_job": record.training_job,
        "time": record.time,
        "bytes": sum(f.bytes for f in record.files),
        "location": record.location,
        "pending": record.pending,
        "pinned": pin.is_pin(record),
    }


def _list(directory: Path, as_json: bool) -> int:
    records, problems = checkpoint.loadable(directory), checkpoint.unreadable(directory)
    if as_json:
        print(json.dumps({"schema": 1, "checkpoints": [_record(r) for r in records], "unreadable": list(problems)}))
    else:
        for r in records:
            when = datetime.fromtimestamp(r.time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
            trust = "pending" if r.pending else r.trust
            name = r.location or r.path.relative_to(directory)
            print(f"{r.step:>9}  {trust:<9}  {sum(f.bytes for f in r.files):>14} bytes  {when}  {name}")
    for problem in problems:
        print(f"sdcwatch checkpoints: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _last_clean(arguments: argparse.Namespace) -> int:
    record = checkpoint.last_clean(arguments.directory, arguments.trust)
    if record is None:
        print(
            f"sdcwatch checkpoints: none in {arguments.directory} is {arguments.trust} with intact bytes; "
            "see `sdcwatch checkpoints list`",
            file=sys.stderr,
        )
        return 1
    if arguments.json:
        print(json.dumps(_record(record)))
        return 0
    # The path alone on stdout, for $(...); what it may be trusted for beside it, for the person.
    print(record.where)
    print(f"sdcwatch checkpoints: step {record.step}, {record.trust}, bytes intact", file=sys.stderr)
    return 0


def _verify(paths: list[Path]) -> int:
    bad = False
    for given in paths:
        inside = given.is_dir() and not checkpoint.manifest_path(given).exists()
        targets = [r.path for r in checkpoint.loadable(given)] if inside else [given]
        problems = list(checkpoint.unreadable(given)) if inside else []
        if inside and not targets and not problems:
            problems.append(f"{given} holds no checkpoint with a manifest")
        for target in targets:
            try:
                record = checkpoint.verify(target)
                print(f"intact: {record.where} (step {record.step}, {record.trust})")
            except CheckpointError as error:
                problems.append(str(error))
        for problem in problems:
            print(f"sdcwatch checkpoints: {problem}", file=sys.stderr)
        bad = bad or bool(problems)
    return 1 if bad else 0
