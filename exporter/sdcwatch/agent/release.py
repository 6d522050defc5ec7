"""What `POST /latch/release` does: releases a latch on this node, or keeps this node out for good.

It acts only on latches that stand in this user's spool (and where such a latch itself says that its twin stands), never
on a path from the request, and decides nothing: the caller holds the latch token. Standard library only.
Flow: handler -> **release** -> latch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdcwatch.agent.node import Node
from sdcwatch.errors import SpoolError
from sdcwatch.latch import files as latch
from sdcwatch.spool.reader import iter_jobs

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_TEXT = 200


@dataclass(frozen=True, slots=True)
class Request:
    """A valid body of `POST /latch/release`."""

    latch_id: str
    decision: str
    instance: str
    case_id: str
    by: str


@dataclass(frozen=True, slots=True)
class Answer:
    """HTTP status and either `result` (200) or a sentence that says what is wrong."""

    status: int
    result: str = ""
    error: str = ""


def parse_request(body: Any) -> Request:
    """Checks a decoded body.

    Raises:
        ValueError: not a request of schema 1; the message names the field.
    """
    if not isinstance(body, Mapping):
        raise ValueError("the body must be a JSON object")
    values: dict[str, str] = {}
    for name in ("latch_id", "decision", "instance", "case_id", "by"):
        value = body.get(name)
        if not isinstance(value, str) or len(value) > _TEXT:
            raise ValueError(f"{name} must be text of at most {_TEXT} characters")
        values[name] = value
    if not is_latch_id(values["latch_id"]):
        raise ValueError("latch_id must be the id of a latch")
    if values["decision"] not in ("release", "leave"):
        raise ValueError("decision must be release or leave")
    if not values["by"]:
        raise ValueError("by must say who decided")
    return Request(**values)


def is_latch_id(text: str) -> bool:
    """Whether a text could be a latch's id, and so cannot leave a folder."""
    return _ID.fullmatch(text) is not None


def answer(request: Request, user_root: Path, node: Node) -> Answer:
    """Does what the request asks for."""
    if request.decision == "leave":
        return _leave(request, user_root, node)
    reason = f"case {request.case_id}" if request.case_id else "released through the agent"
    results: list[str] = []
    problems: list[str] = []
    for _, directory in iter_jobs(user_root):
        for place in (*_twin(directory, request.latch_id), directory):
            try:
                results.append(latch.release(place, request.latch_id, by=request.by, reason=reason))
            except SpoolError as error:
                problems.append(str(error))
    # A release counts for all folders of a job (latch.standing), so one that worked is a success.
    for result in ("released", "already_released"):
        if result in results:
            return Answer(200, result=result)
    if problems:
        return Answer(500, error="; ".join(problems))
    return Answer(404, error=f"no latch {request.latch_id} stands on this node")


def _leave(request: Request, user_root: Path, node: Node) -> Answer:
    if not node.instance or request.instance != node.instance:
        own = node.instance or "without an instance id (start the agent with --instance)"
        return Answer(409, error=f"this node is {own}, the request is for {request.instance!r}")
    try:
        latch.write_quarantine(user_root, request.instance, request.case_id, request.by)
    except (SpoolError, ValueError) as error:
        return Answer(500, error=str(error))
    return Answer(200, result="quarantined")


def _twin(directory: Path, latch_id: str) -> list[Path]:
    """The checkpoint folder in which the same latch stands, where the file there is this user's own."""
    try:
        found = latch.read_latch(directory)
    except SpoolError:
        return []
    if found is None or found.latch_id != latch_id or not found.checkpoint_dir:
        return []
    place = Path(found.checkpoint_dir)
    try:
        ours = (place / latch.LATCH_FILE).lstat().st_uid == os.geteuid()
    except OSError:
        return []
    return [place] if ours else []
