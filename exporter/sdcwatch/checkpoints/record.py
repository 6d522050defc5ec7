"""The manifest of a checkpoint as a record and as JSON: what it holds, how far it was checked, and its own digest.

Reads and writes manifests only; the checkpoint's data is `content.py`, what is done with both is `manifest.py`. A
manifest whose own digest does not fit is no manifest: a flipped bit in its step or trust would be believed otherwise.
Standard library only. Flow: **record** -> manifest -> trust, command, resume.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sdcwatch import durable
from sdcwatch.errors import CheckpointError, SpoolError

SCHEMA = 1
MANIFEST_SUFFIX = ".manifest.json"
TAINTED_SUFFIX = ".tainted"
#: From least to most: candidate (nothing known yet), checked, verified. See docs/contracts.md.
TRUST = ("candidate", "checked", "verified")


@dataclass(frozen=True, slots=True)
class FileDigest:
    """One file of a checkpoint: its name inside it (posix, relative), size in bytes, SHA-256 in hex."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StateDigests:
    """Fingerprints of the state that a checkpoint holds, by parameter name; 16 hex digits each.

    Attributes:
        form: says how they were taken; digests of two forms cannot be compared.
        parameters: each parameter that DDP replicates.
        optimizer: the optimizer's state for each of them; empty where it had none yet.
    """

    form: str
    parameters: Mapping[str, str]
    optimizer: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """One checkpoint as its manifest has it. `step` is the last completed step; training resumes at `step + 1`.

    Attributes:
        path: where the data stands; for data behind a URL, the place whose manifest this is.
        files: empty while they are still being written or hashed (`pending`).
        location: URL of the data where it is not a local path.
        state: fingerprints of the state as it was saved, None where it had moved on before it was noted.
    """

    path: Path
    step: int
    trust: str
    epoch: str
    training_job: str
    time: float
    files: tuple[FileDigest, ...]
    location: str | None = None
    state: StateDigests | None = None

    @property
    def pending(self) -> bool:
        """Whether its digests are not known yet: an upload that runs, or one that a crash cut off."""
        return not self.files

    @property
    def where(self) -> str:
        """What to load: the URL, else the path."""
        return self.location or str(self.path)

    def trusted(self, trust: str) -> bool:
        """Whether this checkpoint has at least this trust."""
        return TRUST.index(self.trust) >= TRUST.index(trust)


def manifest_path(path: Path | str) -> Path:
    """Where the manifest of this checkpoint stands: beside it."""
    path = Path(path)
    return path.with_name(path.name + MANIFEST_SUFFIX)


def as_dict(record: CheckpointRecord) -> dict[str, Any]:
    """The manifest's JSON object without its own digest."""
    state = record.state
    return {
        "schema": SCHEMA,
        "step": record.step,
        "files": {f.name: {"bytes": f.bytes, "sha256": f.sha256} for f in record.files},
        "trust": record.trust,
        "epoch": record.epoch,
        "training_job": record.training_job,
        "time": record.time,
        "location": record.location,
        "state": state
        and {"form": state.form, "parameters": dict(state.parameters), "optimizer": dict(state.optimizer)},
    }


def write(
    record: CheckpointRecord,
    at: Path | None = None,
    *,
    previous: CheckpointRecord | None = None,
    tainted: Mapping[str, Any] | None = None,
) -> None:
    """Writes a manifest whole, durably, with its own digest.

    Args:
        at: another place than beside the data.
        previous: what stood there before, kept until the new data has taken its place.
        tainted: reason and time, in the manifest of a tainted one.

    Raises:
        SpoolError: the folder cannot be written.
    """
    content = as_dict(record)
    if previous is not None:
        content["previous"] = as_dict(previous)
    if tainted is not None:
        content["tainted"] = dict(tainted)
    durable.replace_json(at or manifest_path(record.path), {**content, "sha256": _own_digest(content)})


def read(manifest: Path, path: Path) -> tuple[CheckpointRecord, CheckpointRecord | None] | None:
    """The record of `path` in this manifest, and the one that it was about to replace; None where no manifest is.

    Raises:
        CheckpointError: it cannot be read, or its own digest does not fit.
    """
    try:
        content = durable.read_json(manifest)
        if content is None:
            return None
        digest = content.pop("sha256", None)
        if digest != _own_digest(content):
            raise ValueError("its content does not fit its own digest")
        previous = content.get("previous")
        return _record(content, path), None if previous is None else _record(previous, path)
    except (SpoolError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{manifest} is no manifest this build can read: {error}; do not load {path}") from error


def scan(directory: Path) -> list[tuple[Path, Path]]:
    """Pairs of (manifest, checkpoint) in one folder; neither has to be readable."""
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [
        (directory / n, directory / n[: -len(MANIFEST_SUFFIX)])
        for n in names
        if n.endswith(MANIFEST_SUFFIX) and not n.startswith(".")
    ]


def _own_digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def _record(content: Mapping[str, Any], path: Path) -> CheckpointRecord:
    if content["schema"] != SCHEMA or content["trust"] not in TRUST:
        raise ValueError(f"schema {content['schema']!r}, trust {content['trust']!r}")
    files = tuple(
        FileDigest(str(name), int(facts["bytes"]), str(facts["sha256"])) for name, facts in content["files"].items()
    )
    if any(PurePosixPath(f.name).is_absolute() or ".." in PurePosixPath(f.name).parts for f in files):
        raise ValueError("a file name leaves the checkpoint")
    state, location = content["state"], content["location"]
    return CheckpointRecord(
        path=path,
        step=int(content["step"]),
        trust=content["trust"],
        epoch=str(content["epoch"]),
        training_job=str(content["training_job"]),
        time=float(content["time"]),
        files=files,
        location=None if location is None else str(location),
        state=None
        if state is None
        else StateDigests(str(state["form"]), dict(state["parameters"]), dict(state["optimizer"])),
    )
