"""Keep what is known about a case in a folder of its own, before anything is done that could destroy it.

What it does: writes `<evidence_dir>/<case id>/` with the case, its timeline, every copy of the events as the agents
gave them, the GPUs by UUID and serial number, the node's own known-answer test, what each scheduler says about the
node, and the job's logs where it has them; `manifest.json` lists every file with its SHA-256 and every skip with its
reason.
What it never does: fail a case: what cannot be kept is a recorded skip. Nothing is fetched from the suspect any more;
what its agent said of its own test is on record, and marked as its own word.
Its place: `actions/isolate.contain` calls it, so that it stands on disk before quarantine and replacement.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from sdcwatch_remediation.actions.scheduler import SchedulerProblem
from sdcwatch_remediation.cases import Case
from sdcwatch_remediation.context import Context, find


def keep(ctx: Context, case: Case) -> dict[str, Any]:
    """Write the bundle; return its folder, how many files it has, and what was skipped and why."""
    folder = ctx.config.actions.evidence_dir
    if not folder:
        return {"folder": "", "files": 0, "skipped": {"bundle": "actions.evidence_dir is empty"}}
    files, skipped = _collect(ctx, case)
    target = Path(folder) / case.id
    try:
        _write(target, files, skipped)
    except OSError as error:
        return {"folder": str(target), "files": 0, "skipped": {**skipped, "bundle": f"{error.strerror or error}"}}
    return {"folder": str(target), "files": len(files), "skipped": skipped}


def _collect(ctx: Context, case: Case) -> tuple[dict[str, str], dict[str, str]]:
    copies = ctx.store.copies(case.id)
    files = {
        "case.json": _text(case.public()),
        "timeline.jsonl": "".join(json.dumps(line, sort_keys=True) + "\n" for line in ctx.store.timeline(case.id)),
        "inventory.json": case.before or "{}",
    }
    for number, copy in enumerate(copies):
        files[f"events/{number:03d}-{copy.event.id}.json"] = copy.line
    ranks = {rank.gpu_uuid: rank for copy in copies for rank in copy.event.ranks if rank.instance == case.instance_id}
    test = ctx.known_answer(case, case.event_id)
    devices = {device["uuid"]: device for device in (test.get("test") or {}).get("devices", ()) if device["uuid"]}
    files["gpus.json"] = _text(
        [
            {"uuid": uuid, "rank": rank.rank, "node": rank.node, "serial": devices.get(uuid, {}).get("serial", "")}
            for uuid, rank in ranks.items()
        ]
    )
    skipped = {}
    if not any(device["serial"] for device in devices.values()):
        skipped["gpu serial numbers"] = "the events carry UUIDs only, and no known-answer test of the node told serials"
    if test.get("test"):
        files["known-answer-test.json"] = _text(test["test"])
    else:
        skipped["known-answer test"] = test.get("problem") or "the job did not halt, or nobody asked"
    if not ctx.schedulers:
        skipped["logs of the job"] = "no road to them is configured"
    member = find(case.before_inventory(), case.instance_id)
    for scheduler in ctx.schedulers:
        try:
            if member is None:
                raise SchedulerProblem("the instance is not in the inventory of the proof")
            files[f"{scheduler.name}.txt"] = scheduler.describe(member)
        except SchedulerProblem as error:
            skipped[scheduler.name] = str(error)[:300]
        try:
            found = scheduler.logs(member, case.job) if member is not None else {}
            files |= {f"logs/{name}": text for name, text in found.items()}
            if not found:
                skipped["logs of the job"] = f"{scheduler.name} has none of this job on the node"
        except SchedulerProblem as error:
            skipped["logs of the job"] = str(error)[:300]
    return files, skipped


def _write(target: Path, files: dict[str, str], skipped: dict[str, str]) -> None:
    # Written beside and renamed: a bundle is whole or absent, also after a crash.
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if target.exists():
        return
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    listed = {}
    for name, text in files.items():
        path = beside / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = text.encode()
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        listed[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (beside / "manifest.json").write_text(_text({"schema": 1, "files": listed, "skipped": skipped}), encoding="utf-8")
    beside.rename(target)


def _text(tree: Any) -> str:
    return json.dumps(tree, indent=2, sort_keys=True) + "\n"
