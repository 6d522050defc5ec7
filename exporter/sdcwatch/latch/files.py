"""The latch of a halted job: a file that keeps every launcher from starting it again until somebody released it.

A halt writes `HALTED.json` into the checkpoint folder and into each node's spool; launchers lose exit statuses,
files do not. Released = renamed to `HALTED-<latch id>.released.json`; a release in any of a job's folders counts for
all of them. A second file, `QUARANTINE.json`, keeps one instance out for good. Nothing here decides a release or
restarts anything: that is `sdcwatch run`, the agent, or a person. Standard library only.
Flow: contain -> **latch** -> run, agent.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from sdcwatch import durable
from sdcwatch.errors import EXIT_HALTED, SpoolError

LATCH_FILE = "HALTED.json"
QUARANTINE_FILE = "QUARANTINE.json"
SCHEMA = 1

#: Latch ids become part of file names, and may come from a request body.
_LATCH_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_RELEASED = re.compile(r"HALTED-([A-Za-z0-9][A-Za-z0-9_-]{0,127})\.released\.json")

ReleaseResult = Literal["released", "already_released", "absent"]


@dataclass(frozen=True, slots=True)
class NamedRank:
    """One rank that the verdict behind a latch names."""

    rank: int
    node: str
    instance: str
    gpu_uuid: str


@dataclass(frozen=True, slots=True)
class LatchNode:
    """One node that took part in the halted epoch, and so must pass preflight before the job releases itself."""

    node: str
    instance: str


@dataclass(frozen=True, slots=True)
class Latch:
    """Why a job is halted. `latch_id` is the event's id; `time` unix seconds; the rest as in docs/contracts.md."""

    latch_id: str
    training_job: str
    epoch: str
    step: int
    check: str
    kind: str
    time: float
    named: tuple[NamedRank, ...]
    nodes: tuple[LatchNode, ...]
    last_clean_step: int | None
    trust_needed: str
    checkpoint_dir: str | None
    sentence: str
    same_step_as: str = ""  # id of a former halt at these steps on other hardware: then a person must release


@dataclass(frozen=True, slots=True)
class Release:
    """Who released a latch, why, and when (unix seconds)."""

    by: str
    reason: str
    time: float


@dataclass(frozen=True, slots=True)
class ReleasedLatch:
    """A latch with its release."""

    latch: Latch
    release: Release


@dataclass(frozen=True, slots=True)
class Quarantine:
    """This instance must not train. `time` is unix seconds."""

    instance: str
    case_id: str
    by: str
    time: float


def latch_record(latch: Latch) -> dict[str, Any]:
    """The latch as the JSON object of docs/contracts.md."""
    return {"schema": SCHEMA, **asdict(latch)}


def parse_latch(record: dict[str, Any], origin: str) -> Latch:
    """Reads a latch from its JSON object.

    Raises:
        SpoolError: another schema, or a field is missing; the message names `origin`.
    """
    try:
        if record["schema"] != SCHEMA:
            raise SpoolError(f"{origin} has schema {record['schema']!r}, this build reads {SCHEMA}; upgrade sdcwatch")
        fields = {name: record[name] for name in Latch.__slots__ if name not in ("named", "nodes", "same_step_as")}
        fields["same_step_as"] = str(record.get("same_step_as", ""))
        fields["step"], fields["time"] = int(record["step"]), float(record["time"])
        named = tuple(NamedRank(**{name: entry[name] for name in NamedRank.__slots__}) for entry in record["named"])
        nodes = tuple(LatchNode(**{name: entry[name] for name in LatchNode.__slots__}) for entry in record["nodes"])
    except (KeyError, TypeError, ValueError) as error:
        raise SpoolError(f"{origin} is no latch: {type(error).__name__} {error}") from error
    if not _LATCH_ID.fullmatch(str(fields["latch_id"])):
        raise SpoolError(f"{origin} has an impossible latch id {fields['latch_id']!r}")
    return Latch(named=named, nodes=nodes, **fields)


def _released_path(directory: Path, latch_id: str) -> Path:
    return directory / f"HALTED-{latch_id}.released.json"


def write_latch(directories: Iterable[Path | str], latch: Latch) -> None:
    """Writes the latch into every folder, durably. Where one stands already, the first one stays.

    A latch that was released in a folder is not written there again, so a late writer cannot halt a job twice.

    Raises:
        ValueError: the latch id cannot be part of a file name.
        SpoolError: at least one folder could not be written; the others were.
    """
    if not _LATCH_ID.fullmatch(latch.latch_id):
        raise ValueError(f"latch id {latch.latch_id!r} cannot be part of a file name")
    problems: list[str] = []
    for directory in map(Path, directories):
        try:
            _write_one(directory, latch)
        except (SpoolError, OSError) as error:
            problems.append(str(error))
    if problems:
        raise SpoolError("; ".join(problems))


def _write_one(directory: Path, latch: Latch) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path, released = directory / LATCH_FILE, _released_path(directory, latch.latch_id)
    if released.exists():
        return
    if not durable.create_json(path, latch_record(latch)):
        # The file may be the leftover of a release that was killed between its two steps: it stands for nothing.
        with contextlib.suppress(SpoolError):
            record = durable.read_json(path)
            if record is not None and _released_path(directory, str(record.get("latch_id"))).exists():
                durable.replace_json(path, latch_record(latch))
    if released.exists():
        path.unlink(missing_ok=True)


def read_latch(directory: Path | str) -> Latch | None:
    """The latch that stands in one folder, or None.

    Raises:
        SpoolError: `HALTED.json` is there but cannot be read. Treat it as standing.
    """
    directory = Path(directory)
    record = durable.read_json(directory / LATCH_FILE)
    if record is None:
        return None
    latch = parse_latch(record, str(directory / LATCH_FILE))
    return None if _released_path(directory, latch.latch_id).exists() else latch


def read_release(directory: Path | str, latch_id: str) -> Release | None:
    """How a latch was released in this folder, or None when it was not."""
    if not _LATCH_ID.fullmatch(latch_id):
        return None
    record = durable.read_json(_released_path(Path(directory), latch_id))
    return None if record is None else _parse_release(record)


def _parse_release(record: dict[str, Any]) -> Release:
    released = record.get("released")
    if not isinstance(released, dict):
        return Release(by="unknown", reason="", time=0.0)
    when = released.get("time")
    return Release(
        by=str(released.get("by", "unknown")),
        reason=str(released.get("reason", "")),
        time=float(when) if isinstance(when, int | float) else 0.0,
    )


def release(directory: Path | str, latch_id: str, *, by: str, reason: str) -> ReleaseResult:
    """Releases the latch with this id in one folder.

    Of several callers exactly one gets `released`; the rest get `already_released`. A latch with another id is left
    alone (`absent`).

    Raises:
        SpoolError: the folder cannot be read or written.
    """
    if not _LATCH_ID.fullmatch(latch_id):
        return "absent"
    directory = Path(directory)
    path, released = directory / LATCH_FILE, _released_path(directory, latch_id)
    if released.exists():
        return "already_released"
    record = durable.read_json(path)
    if record is None or record.get("latch_id") != latch_id:
        return "already_released" if released.exists() else "absent"
    record["released"] = {"by": by, "reason": reason, "time": time.time()}
    if not durable.create_json(released, record):
        return "already_released"
    # Only the winner removes the latch: a loser might remove a newer one that was written in between.
    path.unlink(missing_ok=True)
    durable.sync_directory(directory)
    return "released"


def places(directories: Iterable[Path | str]) -> tuple[Path, ...]:
    """These folders, and the checkpoint folders that latches in them point to, each once."""
    found: dict[Path, None] = {}
    for directory in map(Path, directories):
        found[directory] = None
        with contextlib.suppress(SpoolError):
            latch = read_latch(directory)
            if latch is not None and latch.checkpoint_dir:
                found[Path(latch.checkpoint_dir)] = None
    return tuple(found)


def standing(directories: Iterable[Path | str]) -> Latch | None:
    """The first latch in these folders that nobody released in any of them (or in its own checkpoint folder).

    Raises:
        SpoolError: a latch stands that cannot be read. Treat it as standing.
    """
    everywhere = places(directories)
    for directory in everywhere:
        latch = read_latch(directory)
        if latch is not None and all(read_release(place, latch.latch_id) is None for place in everywhere):
            return latch
    return None


def spread_release(directories: Iterable[Path | str], latch_id: str) -> bool:
    """Repeats a release that was made in one of the folders in all of them.

    Returns:
        Whether the latch was released anywhere.
    """
    everywhere = places(directories)
    found = next((r for r in (read_release(place, latch_id) for place in everywhere) if r is not None), None)
    if found is None:
        return False
    for place in everywhere:
        release(place, latch_id, by=found.by, reason=found.reason)
    return True


def released_latches(directory: Path | str) -> tuple[ReleasedLatch, ...]:
    """All released latches of one folder, the newest halt last. Files that cannot be read are left out."""
    found: list[ReleasedLatch] = []
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return ()
    for name in names:
        if _RELEASED.fullmatch(name):
            with contextlib.suppress(SpoolError):
                record = durable.read_json(Path(directory) / name)
                if record is not None:
                    found.append(ReleasedLatch(parse_latch(record, name), _parse_release(record)))
    return tuple(sorted(found, key=lambda entry: (entry.latch.time, entry.latch.latch_id)))


def recent_unnamed(directory: Path | str, within_seconds: float) -> tuple[ReleasedLatch, ...]:
    """Released latches that named nobody and whose halt is at most `within_seconds` old, the newest last."""
    oldest = time.time() - within_seconds
    return tuple(e for e in released_latches(directory) if not e.latch.named and e.latch.time >= oldest)


def write_quarantine(uid_root: Path | str, instance: str, case_id: str, by: str) -> None:
    """Marks this node's instance as one that must not train; a repeated call replaces the mark.

    Raises:
        ValueError: the instance id is empty; an empty id would mean every machine without one.
        SpoolError: the spool cannot be written.
    """
    if not instance:
        raise ValueError("a quarantine needs the instance id that it is meant for")
    root = Path(uid_root)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    record = {"schema": SCHEMA, "instance": instance, "case_id": case_id, "by": by, "time": time.time()}
    durable.replace_json(root / QUARANTINE_FILE, record)


def read_quarantine(uid_root: Path | str) -> Quarantine | None:
    """The quarantine mark of this spool, whichever instance it means; None where there is none.

    Raises:
        SpoolError: the mark is there but cannot be read.
    """
    path = Path(uid_root) / QUARANTINE_FILE
    record = durable.read_json(path)
    if record is None:
        return None
    try:
        return Quarantine(str(record["instance"]), str(record["case_id"]), str(record["by"]), float(record["time"]))
    except (KeyError, TypeError, ValueError) as error:
        raise SpoolError(f"{path} is no quarantine mark: {type(error).__name__} {error}") from error


def quarantined(uid_root: Path | str, instance: str) -> Quarantine | None:
    """The mark when it means this instance; one for another instance (a re-used disk) is ignored."""
    mark = read_quarantine(uid_root)
    return mark if mark is not None and mark.instance == instance and instance else None


def _next(latch: Latch) -> list[str]:
    if latch.same_step_as:
        return [
            f"  next      these steps failed before on other hardware (latch {latch.same_step_as}): no more nodes are",
            "            blamed, and only a person releases this, after a look at checkpoint, data and build:",
        ]
    return [
        "  next      no step runs until the latch is released: by the remediation service, by the job itself when",
        "            nobody is named and every node passes preflight, or by a person:",
    ]


def explain(latch: Latch, directories: Sequence[Path | str]) -> str:
    """The block that a person meets where a job does not start: what stands, why, and the command to look further."""
    who = ", ".join(f"rank {n.rank} on {n.node} {n.instance}".rstrip() for n in latch.named) or "nobody"
    clean = "unknown" if latch.last_clean_step is None else str(latch.last_clean_step)
    where = str(directories[0]) if directories else latch.checkpoint_dir or "."
    return "\n".join(
        [
            f"sdcwatch: job {latch.training_job} is halted by latch {latch.latch_id}",
            f"  what      {latch.sentence}",
            f"  named     {who}; {latch.check} at step {latch.step} ({latch.kind})",
            f"  state     clean through step {clean}; a resume needs a {latch.trust_needed} checkpoint",
            *_next(latch),
            f"            sdcwatch latch release --dir {where} --latch-id {latch.latch_id} --by NAME --reason TEXT",
        ]
    )


def refuse_start(
    directories: Sequence[Path | str], *, uid_root: Path | str, instance: str, stream: TextIO | None = None
) -> None:
    """Ends this process with status 86 when a latch stands or this instance is quarantined; else returns.

    It raises `SystemExit`, which a wrapper's `except Exception` does not catch. A latch or mark that cannot be read
    counts as standing.
    """
    out = sys.stderr if stream is None else stream
    try:
        mark = quarantined(uid_root, instance)
        latch = standing(directories)
    except SpoolError as error:
        message = (
            f"sdcwatch: a latch or quarantine mark cannot be read, so nothing starts: {error}\n"
            "  next      repair or remove that file"
        )
    else:
        if mark is not None:
            message = (
                f"sdcwatch: {mark.instance} is quarantined (case {mark.case_id}, by {mark.by}): it must not train\n"
                "  next      this machine is being replaced; to overrule that, close the case, then remove\n"
                f"            {Path(uid_root) / QUARANTINE_FILE}"
            )
        elif latch is not None:
            message = explain(latch, directories)
        else:
            return
    print(message, file=out, flush=True)
    raise SystemExit(EXIT_HALTED)
