"""Judge whether the copies of an event prove what a doorbell claimed; pure.

What it does: counts, per event id, how many agents of *other* nodes gave the same content, and says which events
two of them prove. An agent counts only if its own node ran a rank of the event and is not the suspect's.
What it never does: fetch anything (`agents` does), trust a label, or count one agent twice. An agent that gave
two different contents under one id counts for neither.
Its place: `casework` calls it with every copy kept so far; `policy` reads the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from sdcwatch_remediation.evidence import Copy, Event

WITNESSES = 2
"""Agents of nodes other than the suspect's that must give the same content."""


@dataclass(frozen=True, slots=True)
class ProvenEvent:
    """An event that enough agents attest."""

    event: Event
    witnesses: tuple[str, ...]
    """Instance ids of the agents that gave exactly this content, sorted."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What the copies of one case prove."""

    events: tuple[ProvenEvent, ...]
    """Proven attributed events that name the instance, newest first."""
    reason: str
    """One sentence: what proves it, or what is missing."""


def judge(copies: Iterable[Copy], *, instance_id: str, cluster: str) -> Proof:
    """Judge all copies of one case about one instance of one cluster."""
    given: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    contents: dict[str, Event] = {}
    usable = 0
    why_not: list[str] = []
    for copy in copies:
        if reason := _unusable(copy, instance_id, cluster):
            why_not.append(reason)
            continue
        usable += 1
        given[copy.event.id][copy.agent_instance].add(copy.event.sha256)
        contents[copy.event.sha256] = copy.event
    proven: list[ProvenEvent] = []
    disputed = False
    for by_agent in given.values():
        votes: dict[str, set[str]] = defaultdict(set)
        for agent, digests in by_agent.items():
            if len(digests) == 1:
                votes[next(iter(digests))].add(agent)
        enough = [digest for digest, agents in votes.items() if len(agents) >= WITNESSES]
        disputed = disputed or len(votes) > 1 or any(len(digests) > 1 for digests in by_agent.values())
        if len(enough) == 1:
            proven.append(ProvenEvent(contents[enough[0]], tuple(sorted(votes[enough[0]]))))
    proven.sort(key=lambda item: (item.event.time, item.event.id), reverse=True)
    if proven:
        newest = proven[0]
        also = "; other copies differ" if disputed else ""
        return Proof(tuple(proven), f"{newest.event.id} attested by {', '.join(newest.witnesses)}{also}")
    if disputed:
        return Proof((), "agents give different contents for the same event id")
    if usable:
        return Proof((), f"only one agent of another node attests it; {WITNESSES} must")
    return Proof((), why_not[0] if why_not else "no agent of another node knows such an event")


def _unusable(copy: Copy, instance_id: str, cluster: str) -> str:
    event = copy.event
    reporters = {(rank.instance, rank.node) for rank in event.ranks}
    suspects = event.suspect_ranks()
    if copy.agent_instance == instance_id:
        return "the suspect's own agent does not count"
    if (copy.agent_instance, copy.agent_node) not in reporters:
        return f"agent {copy.agent_instance} ran no rank of the event"
    if event.kind != "attributed":
        return f"the event is {event.kind}, not attributed"
    if event.drill:
        return "the event is a drill"
    if event.cluster != cluster or any(rank.cluster != cluster for rank in suspects):
        return "the event is of another cluster"
    if len(suspects) != len(event.suspects) or not any(rank.instance == instance_id for rank in suspects):
        return "the event does not name this instance"
    if len({rank.rank for rank in event.ranks}) != len(event.ranks):
        return "the event lists a rank twice"
    return ""
