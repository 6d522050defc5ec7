"""What the ranks exchanged, as JSON for the file; and, read back, which gradients agree with which.

Digests become 16 hex digits (JSON numbers lose bits above 2^53), numbers that are not finite become text. Standard
library only. Flow: keep -> **facts** -> form; form -> **facts** -> explain, replay.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdcwatch.observation import AuditRow, Row, RowError
from sdcwatch.verdict.history import History

#: Rows kept: those of the ranks that matter first. More would say little and weigh much.
MAX_ROWS = 64


def hex_text(value: int | None) -> str | None:
    """A uint64 as 16 hex digits."""
    return None if value is None else f"{value:016x}"


def row_record(row: Row | AuditRow | RowError | None) -> dict[str, Any]:
    """One row, without the fields that were not measured."""
    if not isinstance(row, (Row, AuditRow)):
        return {"unreadable": str(row or "never came")}
    found: dict[str, Any] = {}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if value is None:
            continue
        if field.metadata["code"] == "Q":
            value = hex_text(value)
        elif isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        found[field.name] = value
    return found


def rows_record(rows: Sequence[Row | AuditRow | RowError | None], first: Iterable[int]) -> dict[str, Any]:
    """Rows by slot, those of the ranks in `first` before others; and how many there were."""
    order = [*dict.fromkeys([r for r in first if r < len(rows)]), *range(len(rows))]
    kept = sorted(list(dict.fromkeys(order))[:MAX_ROWS])
    return {"num_rows": len(rows), "rows": [{"slot": slot, **row_record(rows[slot])} for slot in kept]}


def calibration_record(history: History, owner: int, server: int | None) -> dict[str, Any]:
    """What replay had shown before this audit, of the whole group and of one edge."""
    known = history.calibration
    return {
        "audited": history.audited,
        "checked": history.checked,
        "num_edges": len(known.edges),
        "num_originals": len(known.originals),
        "num_nondeterministic": len(known.nondeterministic),
        "edge_shown": any(key[:2] == (owner, server) for key in known.edges),
        "original_shown": any(key[0] == owner for key in known.originals),
    }


def gradient_records(
    audit: Sequence[AuditRow | RowError], tie: Sequence[AuditRow | RowError], nodes: Sequence[str], owner: int
) -> list[dict[str, Any]]:
    """Each gradient of one micro-batch: `original` and `self` by its owner, `served` and `third` by other nodes."""
    found = []
    for row in audit[: len(nodes)]:
        if isinstance(row, AuditRow) and row.rank == owner:
            found += [("original", owner, row.original), ("self", owner, row.self_digest)]
    for name, rows in (("served", audit), ("third", tie)):
        for row in rows:
            if isinstance(row, AuditRow) and row.served_rank == owner and row.rank is not None:
                found.append((name, row.rank, row.served_digest))
    return [
        {"run": name, "rank": rank, "node": nodes[rank], "digest": hex_text(digest)}
        for name, rank, digest in found
        if digest is not None
    ]


@dataclass(frozen=True, slots=True)
class Side:
    """Runs of one micro-batch that gave the same gradient.

    Attributes:
        digest: 16 hex digits.
        ranks, nodes: who computed it; ranks of one node are one witness.
        role: `majority`, `suspect`, or empty where the file has no majority.
    """

    digest: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    role: str = ""


def sides(manifest: Mapping[str, Any]) -> tuple[Side, ...]:
    """Who agrees with whom; the majority is by nodes, or of those that the verdict did not name.

    An original counts only where calibration had shown that replays reproduce it.
    """
    suspects = set(manifest["event"]["suspects"])
    comparable = bool(manifest["calibration"]["original_shown"])
    by_digest: dict[str, list[Mapping[str, Any]]] = {}
    for run in manifest["gradients"]:
        if run["run"] != "original" or comparable:
            by_digest.setdefault(run["digest"], []).append(run)
    found = [
        Side(digest, tuple(sorted({r["rank"] for r in runs})), tuple(sorted({r["node"] for r in runs})))
        for digest, runs in by_digest.items()
    ]
    if suspects:
        honest = [side for side in found if not suspects.intersection(side.ranks)]
        leading = honest if len(honest) == 1 else []
    else:
        most = max((len(side.nodes) for side in found), default=0)
        leading = [side for side in found if len(side.nodes) == most and most > 1]
    if len(leading) != 1 or len(found) < 2:
        return tuple(found)
    return tuple(dataclasses.replace(s, role="majority" if s is leading[0] else "suspect") for s in found)
