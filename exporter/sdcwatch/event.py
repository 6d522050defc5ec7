"""The event: one transition from agreement to a verdict other than clean, as every reporter writes it.

It turns a judged fault into the exact bytes of docs/contracts.md (Event, schema 1), reads them back with checks, and
says the same in words for the training log. It decides nothing and writes no file. Standard library only.
Flow: verdict -> **event** -> spool (journal line) -> agent (`/events`) and stderr.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from sdcwatch.catalog import CHECKS, EVENT_KINDS

SCHEMA = 1
PERSISTENCES = ("persistent", "transient", None)
PATHS = (
    "reduce",
    "optimizer compute",
    "weights at rest",
    "optimizer state at rest",
    "backward compute",
    "code",
    "transport",
)
ACTIONS = ("observe", "halt", "heal")
TRUSTS = ("verified", "checked")

#: What log pipelines look for on stderr; the journal line follows on the same line.
VERDICT_PREFIX = "SDCWATCH_VERDICT"

_ID = re.compile(r"sdc-[0-9a-f]{16}\Z")


class EventError(ValueError):
    """A line that is no event of this schema; the message names the field."""


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Where one rank of the job ran when the event was seen. Text fields may be empty where unknown."""

    rank: int
    local_rank: int
    node: str
    instance: str
    host: str
    gpu_uuid: str
    cluster: str
    environment: str  # digest of the rank's environment, as text


@dataclass(frozen=True, slots=True)
class Reporter:
    """Which rank wrote a copy of the event."""

    rank: int
    node: str
    instance: str
    gpu_uuid: str


@dataclass(frozen=True, slots=True)
class Event:
    """One event; equal, byte for byte, from every reporter (docs/contracts.md says what each field holds).

    Attributes:
        id: `event_id(...)` of the fields it is made of.
        step: training step of the exchange that showed it.
        time: unix seconds, the median of the ranks' clocks in that exchange.
        evidence: JSON of the verdict (digests as text); nobody outside compares parts of it.
        last_clean_step: newest step whose state this event leaves clean; None: no such step is known.
    """

    id: str
    training_job: str
    training_cluster: str
    epoch: str
    step: int
    check: str
    kind: str
    persistence: str | None
    time: float
    suspects: tuple[int, ...]
    differing: tuple[int, ...]
    candidates: tuple[int, ...]
    path: str
    sentence: str
    evidence: Mapping[str, Any]
    action: str
    drill: bool
    world_size: int
    last_clean_step: int | None
    trust_needed: str
    ranks: tuple[RankIdentity, ...]

    def identity_of(self, rank: int) -> RankIdentity | None:
        """The identity of one of the job's ranks, or None for a number that is none of them."""
        return next((identity for identity in self.ranks if identity.rank == rank), None)


def event_id(
    training_job: str,
    epoch: str,
    step: int,
    check: str,
    kind: str,
    suspects: Sequence[int],
    differing: Sequence[int],
) -> str:
    """The id that every reporter of one event computes: `sdc-` and 16 hex digits."""
    parts = [training_job, epoch, int(step), check, kind, sorted(suspects), sorted(differing)]
    return "sdc-" + hashlib.sha256(_json(parts)).hexdigest()[:16]


def as_dict(event: Event) -> dict[str, Any]:
    """The `event` object of a journal line; rank numbers sorted, so that reporters cannot differ in their order."""
    data: dict[str, Any] = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    for name in ("suspects", "differing", "candidates"):
        data[name] = sorted(data[name])
    data["ranks"] = [dataclasses.asdict(identity) for identity in sorted(event.ranks, key=lambda one: one.rank)]
    data["time"] = float(event.time)
    data["evidence"] = dict(event.evidence)
    return data


def canonical(event: Event) -> bytes:
    """The bytes that copies of an event are compared by.

    Raises:
        EventError: the evidence holds something that is not JSON (NaN included).
    """
    try:
        return _json(as_dict(event))
    except (TypeError, ValueError) as error:
        raise EventError(f"event {event.id} cannot be written as JSON: {error}") from error


def journal_line(event: Event, reporter: Reporter, detail: Mapping[str, Any]) -> dict[str, Any]:
    """One journal line. `detail` is this reporter's own view and is compared with nobody's."""
    return {
        "schema": SCHEMA,
        "event": as_dict(event),
        "reporter": dataclasses.asdict(reporter),
        "detail": dict(detail),
    }


def verdict_line(line: Mapping[str, Any]) -> str:
    """The one line for stderr, without a line end: whatever log pipeline exists can find and parse it."""
    return f"{VERDICT_PREFIX} {_json(line).decode()}"


def parse_line(line: str | bytes | Mapping[str, Any]) -> tuple[Event, Reporter, dict[str, Any]]:
    """Reads a journal line back. Unknown fields are passed over: a newer writer may add some.

    Raises:
        EventError: not JSON, another schema, a field missing or of the wrong kind, an id that is not the fields' own.
    """
    if not isinstance(line, Mapping):
        try:
            line = json.loads(line)
        except ValueError as error:
            raise EventError(f"journal line is not JSON: {error}") from error
        if not isinstance(line, Mapping):
            raise EventError("journal line is not a JSON object")
    if line.get("schema") != SCHEMA:
        raise EventError(f"journal line of schema {line.get('schema')!r}, this build reads {SCHEMA}")
    detail = line.get("detail", {})
    if not isinstance(detail, Mapping):
        raise EventError("detail is not a JSON object")
    return _event(line.get("event")), _record(Reporter, line.get("reporter"), "reporter"), dict(detail)


def _event(data: Any) -> Event:
    if not isinstance(data, Mapping):
        raise EventError("event is not a JSON object")
    ranks = data.get("ranks")
    if not isinstance(ranks, list):
        raise EventError("event.ranks is not a list")
    plain = {**data, "ranks": tuple(_record(RankIdentity, rank, "event.ranks") for rank in ranks)}
    for name in ("suspects", "differing", "candidates"):
        numbers = data.get(name)
        if not isinstance(numbers, list) or not all(_is_number(number) and number >= 0 for number in numbers):
            raise EventError(f"event.{name} is not a list of rank numbers")
        plain[name] = tuple(numbers)
    event: Event = _record(Event, plain, "event")
    for name, allowed in (
        ("check", CHECKS),
        ("kind", EVENT_KINDS),
        ("persistence", PERSISTENCES),
        ("path", PATHS),
        ("action", ACTIONS),
        ("trust_needed", TRUSTS),
    ):
        if getattr(event, name) not in allowed:
            raise EventError(f"event.{name} is {getattr(event, name)!r}, not one of {allowed}")
    if not math.isfinite(event.time):
        raise EventError("event.time is not a time")
    if event.suspects and event.kind != "attributed":
        raise EventError(f"event of kind {event.kind} names suspects")
    own = event_id(
        event.training_job, event.epoch, event.step, event.check, event.kind, event.suspects, event.differing
    )
    if not _ID.match(event.id) or event.id != own:
        raise EventError(f"event.id is {event.id!r}, its fields give {own}")
    return event


def _record(kind: type[Any], data: Any, where: str) -> Any:
    """Builds a dataclass from an object by the fields' annotations; the one place that checks types."""
    if not isinstance(data, Mapping):
        raise EventError(f"{where} is not a JSON object")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name not in data:
            raise EventError(f"{where}.{field.name} is missing")
        value = data[field.name]
        if not _FITS.get(str(field.type), lambda _: True)(value):
            raise EventError(f"{where}.{field.name} is {value!r}, not {field.type}")
        values[field.name] = float(value) if field.type == "float" else value
    return kind(**values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_FITS: Mapping[str, Any] = {
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "int": _is_number,
    "int | None": lambda value: value is None or _is_number(value),
    "float": lambda value: _is_number(value) or isinstance(value, float),
    "bool": lambda value: isinstance(value, bool),
    "Mapping[str, Any]": lambda value: isinstance(value, Mapping),
}


def _json(data: Any) -> bytes:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def training_log_block(event: Event, *, what_now: str, look_further: str) -> str:
    """The readable block for the training log.

    Args:
        what_now: what happens to this job now, one sentence.
        look_further: the command that shows more.
    """
    when = datetime.fromtimestamp(event.time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    rows = [
        ("event", f"{event.id}{' (a drill)' if event.drill else ''}"),
        ("when", f"step {event.step}, {when}, job {event.training_job}"),
        ("check", f"{event.check}: {event.kind}{f', {event.persistence}' if event.persistence else ''}; {event.path}"),
        ("suspect", _ranks(event, event.suspects) or "nobody can be named"),
        ("differing", "" if event.differing == event.suspects else _ranks(event, event.differing)),
        ("candidates", "" if event.suspects else _ranks(event, event.candidates)),
        ("proof", event.sentence),
        ("clean up to", "unknown" if event.last_clean_step is None else f"step {event.last_clean_step}"),
        ("now", what_now),
        ("look", look_further),
    ]
    title = "drill" if event.drill else "silent data corruption" if event.kind != "software" else "replicas differ"
    lines = [f"==== sdcwatch: {title} ".ljust(100, "=")]
    for name, text in rows:
        if text:
            lines += textwrap.wrap(text, 86, initial_indent=f"{name:>12}  ", subsequent_indent=" " * 14) or []
    return "\n".join([*lines, "=" * 100])


def _ranks(event: Event, numbers: Sequence[int]) -> str:
    """`rank 3 on node n2 (i-0abc, GPU-...)`; a long list is cut, the journal has it whole."""
    shown = []
    for number in sorted(numbers)[:8]:
        identity = event.identity_of(number)
        where = (
            "" if identity is None else f" on node {identity.node} ({identity.instance or '-'}, {identity.gpu_uuid})"
        )
        shown.append(f"rank {number}{where}")
    more = len(numbers) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")
