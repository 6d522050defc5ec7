r"""The file: a first line, one JSON manifest, raw sections, and a SHA-256 over all of it. No pickle, no code.

    SDCWATCH-EVIDENCE 1\n | length of the manifest (8 bytes) | manifest | sections, one behind another | SHA-256 (32)

The manifest lists every section with its length and SHA-256. A reader that meets a byte too many, too few or another
one refuses the whole file. Standard library only. Flow: keep -> **form** -> show, replay.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdcwatch.errors import SdcwatchError

MAGIC = b"SDCWATCH-EVIDENCE 1\n"
SUFFIX = ".evidence"
SCHEMA = 1
#: Larger manifests are not ours: the largest, of a model of 100,000 parameters, has about 20 MB.
MAX_MANIFEST = 64 << 20
#: Larger files are not read. The setting `evidence_mb` bounds what is written, far below it.
MAX_FILE = 64 << 30
_LENGTH = struct.Struct("<Q")
_DIGEST = 32

Section = bytes | bytearray | memoryview


class EvidenceError(SdcwatchError):
    """A file that is no evidence, or not what was written; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class EvidenceFile:
    """One file, read whole and checked.

    Attributes:
        manifest: what stands in it (docs/contracts.md, Evidence).
        sections: the raw bytes that the manifest's values refer to by number.
    """

    path: Path
    manifest: Mapping[str, Any]
    sections: Sequence[memoryview]


def encode(manifest: Mapping[str, Any], sections: Sequence[Section] = ()) -> list[Section]:
    """The parts of a file, in order; `manifest` gets `schema` and the list of sections.

    Raises:
        ValueError: the manifest holds something that is not JSON (NaN included).
    """
    listed = [{"bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()} for part in sections]
    whole = {"schema": SCHEMA, **manifest, "sections": listed}
    head = json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    parts: list[Section] = [MAGIC, _LENGTH.pack(len(head)), head, *sections]
    whole_digest = hashlib.sha256()
    for part in parts:
        whole_digest.update(part)
    return [*parts, whole_digest.digest()]


def size(parts: Iterable[Section]) -> int:
    """Bytes of all parts together."""
    return sum(len(part) for part in parts)


def read(path: Path | str) -> EvidenceFile:
    """Reads a file and checks every byte of it. Runs nothing that it holds.

    Raises:
        EvidenceError: it cannot be read, is no evidence, or differs from what was written.
    """
    path = Path(path)
    data = _bytes(path)
    if data[: len(MAGIC)] != MAGIC:
        raise EvidenceError(f"{path} is no evidence file of sdcwatch: its first line is another one")
    body = memoryview(data)
    if len(body) < len(MAGIC) + _LENGTH.size + _DIGEST:
        raise EvidenceError(f"{path} is cut short: copy it again from the node that wrote it")
    if hashlib.sha256(body[:-_DIGEST]).digest() != bytes(body[-_DIGEST:]):
        raise EvidenceError(
            f"{path} is not what was written: its SHA-256 does not fit. It was cut short or changed; copy it again "
            "from the node that wrote it"
        )
    manifest, start = _manifest(path, body)
    return EvidenceFile(path, manifest, _sections(path, manifest, body[start:-_DIGEST]))


def _bytes(path: Path) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise EvidenceError(f"cannot read {path}: {error.strerror or error}") from error
    with os.fdopen(handle, "rb") as stream:
        facts = os.fstat(stream.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_FILE:
            raise EvidenceError(f"{path} is not a regular file of at most {MAX_FILE >> 30} GiB")
        try:
            return stream.read(facts.st_size)
        except (OSError, MemoryError) as error:
            raise EvidenceError(f"cannot read {path}: {error or type(error).__name__}") from error


def _manifest(path: Path, body: memoryview) -> tuple[dict[str, Any], int]:
    start = len(MAGIC) + _LENGTH.size
    (length,) = _LENGTH.unpack(body[len(MAGIC) : start])
    if length > MAX_MANIFEST or start + length + _DIGEST > len(body):
        raise EvidenceError(f"{path} says that its manifest has {length} bytes: it is no evidence of this build")
    try:
        manifest = json.loads(bytes(body[start : start + length]))
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"the manifest of {path} is not JSON: {type(error).__name__}") from error
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        found = manifest.get("schema") if isinstance(manifest, dict) else type(manifest).__name__
        raise EvidenceError(f"{path} is of schema {found!r}, this build reads {SCHEMA}: use the sdcwatch that wrote it")
    return manifest, start + length


def _sections(path: Path, manifest: Mapping[str, Any], body: memoryview) -> list[memoryview]:
    listed = manifest.get("sections")
    if not isinstance(listed, list):
        raise EvidenceError(f"the manifest of {path} lists no sections")
    found, start = [], 0
    for number, entry in enumerate(listed):
        length = entry.get("bytes") if isinstance(entry, dict) else None
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= len(body) - start:
            raise EvidenceError(f"section {number} of {path} lies outside of the file")
        part = body[start : start + length]
        if hashlib.sha256(part).hexdigest() != entry.get("sha256"):
            raise EvidenceError(f"section {number} of {path} is not what its manifest says")
        found.append(part)
        start += length
    if start != len(body):
        raise EvidenceError(f"{path} holds {len(body) - start} bytes that its manifest does not list")
    return found
