"""`sdcwatch evidence show|replay`: what a person does with the evidence of a replay verdict.

`show` weighs the rival explanations, without torch; `replay` runs the micro-batch again here. Both only read. Flow:
form -> explain, again -> **evidence command** <- person.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import socket
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sdcwatch.errors import SdcwatchError
from sdcwatch.evidence import explain, form
from sdcwatch.evidence.facts import Side, sides

#: Exit statuses of `replay` by outcome; wrong use is 2.
STATUS = {"majority": 0, "suspect": 1, "unknown": 3, "neither": 4, "side": 5}
_SCHEMA = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `show` and `replay`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="weigh the rival explanations, with what speaks for and against each")
    again = actions.add_parser("replay", help="run the kept micro-batch again on this machine")
    for sub in (show, again):
        sub.add_argument("file", type=Path, metavar="FILE", help="a file <event id>.rank-<rank>.evidence of a spool")
        sub.add_argument("--json", action="store_true", help="print one JSON object")
    show.add_argument(
        "--replayed",
        type=Path,
        action="append",
        default=[],
        metavar="RESULT",
        help="what `evidence replay --json` printed on another machine; may be given more than once",
    )
    again.add_argument(
        "--model", required=True, metavar="MODULE:FUNCTION", help="your code: FUNCTION() gives (module, loss_fn)"
    )
    again.add_argument("--device", help="a torch device; default: the kind on record")
    again.add_argument(
        "--weights", type=Path, metavar="CHECKPOINT", help="a torch.save file with the weights of the step on record"
    )
    again.add_argument(
        "--times", type=int, default=2, help="runs that must agree with each other (default: %(default)s)"
    )


def main(arguments: argparse.Namespace) -> int:
    """show: 0 done, 1 the file cannot be used. replay: 0 the majority's gradient, 1 the suspect's, 3 could not judge,
    4 none on record, 5 one of a record without a majority. 2: wrong use.
    """
    try:
        file = form.read(arguments.file)
        return _show(file, arguments) if arguments.action == "show" else _replay(file, arguments)
    except form.EvidenceError as error:
        print(f"sdcwatch evidence: {error}", file=sys.stderr)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        print(
            f"sdcwatch evidence: {arguments.file} is whole, but not what a rank of this build writes ({error!r}): use "
            "the sdcwatch that wrote it",
            file=sys.stderr,
        )
    return 1 if arguments.action == "show" else STATUS["unknown"]


def _show(file: form.EvidenceFile, arguments: argparse.Namespace) -> int:
    weighed = explain.weigh(file.manifest, [_result(path, file) for path in arguments.replayed])
    if arguments.json:
        print(json.dumps(_as_json(file.manifest, weighed), ensure_ascii=False))
    else:
        _table(file.manifest, weighed)
    return 0


def _result(path: Path, file: form.EvidenceFile) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise form.EvidenceError(f"--replayed {path} is no result of `evidence replay --json`: {error}") from error
    if not isinstance(found, dict) or found.get("outcome") not in STATUS:
        raise form.EvidenceError(f"--replayed {path} is no result of `evidence replay --json`")
    if found.get("event") != file.manifest["event"]["id"] or found.get("owner") != file.manifest["owner"]:
        raise form.EvidenceError(f"--replayed {path} is of another micro-batch than {file.path}")
    return found


def _as_json(manifest: Mapping[str, Any], weighed: explain.Weighed) -> dict[str, Any]:
    event = manifest["event"]
    return {
        "schema": _SCHEMA,
        "event": {k: event[k] for k in ("id", "training_job", "step", "kind", "persistence", "suspects", "sentence")},
        "holder": manifest["holder"],
        "owner": manifest["owner"],
        "sides": [dataclasses.asdict(side) for side in sides(manifest)],
        "explanations": [
            {
                "name": one.name,
                "meaning": one.meaning,
                "weight": one.weight,
                "for": [{"weight": n, "fact": text} for n, text in one.supports],
                "against": [{"weight": n, "fact": text} for n, text in one.opposes],
            }
            for one in weighed.explanations
        ],
        "unproven": list(weighed.unproven),
        "replayable": manifest["batch"] is not None,
    }


def _table(manifest: Mapping[str, Any], weighed: explain.Weighed) -> None:
    event = manifest["event"]
    when = datetime.fromtimestamp(event["time"], timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    print(f"event {event['id']}: {event['kind']}, step {event['step']}, job {event['training_job']}, {when}")
    print(event["sentence"])
    print(f"written by rank {manifest['holder']['rank']} on node {manifest['holder']['node']}")
    print(
        f"micro-batch of rank {manifest['owner']}:", "; ".join(map(_side, sides(manifest))) or "no gradient on record"
    )
    _rivals(weighed)
    print("Why this is no proof:")
    for text in weighed.unproven:
        print(f"  - {text}")


def _side(side: Side) -> str:
    role = f" ({side.role})" if side.role else ""
    return f"{side.digest} by rank {', '.join(map(str, side.ranks))} on {', '.join(side.nodes)}{role}"


def _rivals(weighed: explain.Weighed) -> None:
    """The table; in plain lines where rich is not installed."""
    rows = [
        (
            f"{one.weight:+d}",
            one.name,
            one.meaning,
            [f"+{n} {text}" for n, text in one.supports] + [f"-{n} {text}" for n, text in one.opposes],
        )
        for one in weighed.explanations
    ]
    try:
        table = importlib.import_module("rich.table")
        console = importlib.import_module("rich.console")
    except ImportError:
        for weight, name, meaning, texts in rows:
            print(f"{weight:>4}  {name}: {meaning}")
            print("".join(f"        {text}\n" for text in texts), end="")
        return
    drawn = table.Table("weight", "explanation", "what speaks for (+) and against it (-)", show_lines=True)
    for weight, name, meaning, texts in rows:
        drawn.add_row(weight, f"{name}\n{meaning}", "\n".join(texts), style="bold" if name == rows[0][1] else None)
    console.Console(width=None if sys.stdout.isatty() else 140, markup=False, highlight=False).print(drawn)


def _replay(file: form.EvidenceFile, arguments: argparse.Namespace) -> int:
    try:
        again = importlib.import_module("sdcwatch.evidence.again")
    except ImportError as error:
        print(f"sdcwatch evidence: torch is needed to replay and cannot be imported ({error})", file=sys.stderr)
        return STATUS["unknown"]
    try:
        found = again.run(
            file,
            model=arguments.model,
            device=arguments.device,
            weights=arguments.weights,
            times=arguments.times,
        )
    except SdcwatchError:
        raise
    except Exception as error:  # the model's own code; Python's status for a crash is 1, and means something here
        found = again.Result("unknown", f"the micro-batch cannot be run here: {type(error).__name__}: {error}")
    event = file.manifest["event"]
    if arguments.json:
        facts = {"schema": _SCHEMA, "event": event["id"], "owner": file.manifest["owner"], "host": socket.gethostname()}
        print(json.dumps({**facts, **dataclasses.asdict(found)}, ensure_ascii=False))
    else:
        print(f"event {event['id']}, micro-batch of rank {file.manifest['owner']}: {found.outcome}: {found.detail}")
        for fact in found.environment:
            print(f"  environment differs: {fact}")
        if found.first_parameter is not None:
            print(
                f"  first parameter that differs from rank {file.manifest['holder']['rank']}'s: {found.first_parameter}"
            )
    return STATUS[found.outcome]
