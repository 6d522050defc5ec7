"""Which micro-batch of an audit is kept, and by whom: decided from the event alone, so that every rank knows it.

For each of at most two failing edges, both of its ranks keep the owner's micro-batch: one of them may be the machine
that lies, or dies. A rank keeps one. Standard library only. Flow: event -> **plan** -> report (names the files), keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdcwatch.event import Event
from sdcwatch.evidence.form import SUFFIX

#: Failing edges whose micro-batch is kept.
MAX_EDGES = 2


@dataclass(frozen=True, slots=True)
class Holder:
    """One file that one rank writes.

    Attributes:
        rank: who writes it.
        owner: whose micro-batch it holds.
        server: the rank on the next node that ran it too; None where nobody did.
    """

    rank: int
    owner: int
    server: int | None


def holders(event: Event) -> tuple[Holder, ...]:
    """The files of an event, by rank; none for an event that no audit gave."""
    if event.check != "replay" or event.drill:
        return ()
    edges = _edges(event.evidence)
    suspects = set(event.suspects)
    edges.sort(key=lambda edge: (edge[0] not in suspects, edge[1] not in suspects, edge[0]))
    found: dict[int, Holder] = {}
    for owner, server in edges[:MAX_EDGES]:
        for rank in (owner, server):
            if rank is not None:
                found.setdefault(rank, Holder(rank, owner, server))
    return tuple(found[rank] for rank in sorted(found))


def _edges(evidence: Mapping[str, Any]) -> list[tuple[int, int | None]]:
    listed = evidence.get("edges")
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        return []
    return [(edge["owner"], edge.get("server")) for edge in listed if isinstance(edge, Mapping) and "owner" in edge]


def file_name(event: Event, rank: int) -> str:
    """The name of a rank's file, in the folder of its epoch in the spool."""
    return f"{event.id}.rank-{rank}{SUFFIX}"


def named(event: Event) -> list[dict[str, Any]]:
    """The files of an event as a journal line names them; each is written after that line, or the log says why not."""
    return [
        {
            "rank": holder.rank,
            "node": identity.node if (identity := event.identity_of(holder.rank)) else "",
            "owner": holder.owner,
            "file": file_name(event, holder.rank),
        }
        for holder in holders(event)
    ]
