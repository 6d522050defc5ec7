"""Events as the node agents report them, read strictly.

What it does: turns one element of `GET /events` into an `Event` with its canonical bytes, and keeps who said it
(`Copy`).
What it never does: decide whether it is true; `proof` compares copies.
Its place: `agents` produces copies, `store` keeps them, `proof` and `policy` read them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import Any

_EVENT_ID = re.compile(r"sdc-[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """One rank of an event: where it ran when the event happened."""

    rank: int
    node: str
    instance: str
    gpu_uuid: str
    cluster: str
    environment: str
    """Hash of the rank's software and settings; empty where it is not told."""


@dataclass(frozen=True, slots=True)
class Event:
    """One verdict, as reported; the fields that decisions need."""

    id: str
    job: str
    cluster: str
    epoch: str
    step: int
    check: str
    kind: str
    persistence: str | None
    time: float
    """Unix seconds."""
    action: str
    """What the job did: `observe` or `halt` (then a latch with this id stands)."""
    drill: bool
    suspects: tuple[int, ...]
    ranks: tuple[RankIdentity, ...]
    sentence: str
    canonical: str
    """The `event` object in canonical JSON: what copies are compared by."""

    @property
    def sha256(self) -> str:
        """SHA-256 of the canonical JSON, in hex."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()

    def suspect_ranks(self) -> tuple[RankIdentity, ...]:
        """Return the identities of the suspects."""
        return tuple(rank for rank in self.ranks if rank.rank in self.suspects)

    def blames(self, instance_id: str) -> bool:
        """Whether it attributes a real fault to an instance, which is more than naming it as one of the ranks."""
        named = any(rank.instance == instance_id for rank in self.suspect_ranks())
        return self.kind == "attributed" and not self.drill and named


@dataclass(frozen=True, slots=True)
class Copy:
    """One event as one agent gave it."""

    agent_instance: str
    """Instance id of the agent, as it reported it and as the inventory has it at the address that was asked."""
    agent_node: str
    address: str
    fetched_at: float
    """Unix seconds."""
    event: Event
    line: str
    """The whole journal line (event, reporter, detail) as JSON, kept as evidence."""


def canonical_json(value: Any) -> str:
    """Return canonical JSON: sorted keys, no spaces, text as it is."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def read_event(line: Any) -> Event:
    """Read one journal line.

    Raises:
        ValueError: the line is not an event of schema 1; the message names the field.
    """
    if not isinstance(line, dict) or line.get("schema") != 1 or not isinstance(line.get("event"), dict):
        raise ValueError("not an event line of schema 1")
    event = line["event"]
    persistence = event.get("persistence")
    if persistence not in ("persistent", "transient", None):
        raise ValueError("persistence is none of persistent, transient, null")
    event_id = _text(event, "id")
    if not _EVENT_ID.fullmatch(event_id):
        raise ValueError("id is not of the form sdc-<16 hex>")
    return Event(
        id=event_id,
        job=_text(event, "training_job"),
        cluster=_text(event, "training_cluster"),
        epoch=_text(event, "epoch"),
        step=_whole(event, "step"),
        check=_text(event, "check"),
        kind=_text(event, "kind"),
        persistence=persistence,
        time=_number(event, "time"),
        action=_text(event, "action"),
        # Anything but a plain false is a drill: a missing mark must never arm an action.
        drill=event.get("drill") is not False,
        suspects=tuple(_whole({"suspects": item}, "suspects") for item in _items(event, "suspects")),
        ranks=tuple(_rank(item) for item in _items(event, "ranks")),
        sentence=_text(event, "sentence"),
        canonical=canonical_json(event),
    )


def _rank(item: Any) -> RankIdentity:
    if not isinstance(item, dict):
        raise ValueError("ranks holds something that is not an object")
    return RankIdentity(
        rank=_whole(item, "rank"),
        node=_text(item, "node"),
        instance=_text(item, "instance"),
        gpu_uuid=_text(item, "gpu_uuid"),
        cluster=_text(item, "cluster"),
        environment=_text(item, "environment"),
    )


def _items(tree: dict[str, Any], key: str) -> list[Any]:
    value = tree.get(key)
    if not isinstance(value, list):
        raise ValueError(f"{key} is not a list")
    return value


def _text(tree: dict[str, Any], key: str) -> str:
    value = tree.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} is not a string")
    value.encode()  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
    return value


def _whole(tree: dict[str, Any], key: str) -> int:
    value = tree.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise ValueError(f"{key} is not a whole number from 0")
    return value


def _number(tree: dict[str, Any], key: str) -> float:
    value = tree.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{key} is not a finite number")
    return float(value)
