"""What isolating a node takes of whoever schedules work onto it (Slurm, Kubernetes): one small act after another.

What it does: declares `Act`, `ActResult` and the protocol `Scheduler`. `next_act` reads the world and gives the next
thing to do, with its exact request, or None when the reading shows that all is done; `perform` does exactly that one
thing, once.
What it never does: touch anything itself.
Its place: `actions/slurm` and `actions/eks` implement it; `actions/acts` commits each
request before it is performed. A dry run is `next_act` without `perform`. Because the world is read before each act,
an act whose outcome is unknown is settled by looking, and a crash in the middle goes on where the world is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sdcwatch_remediation.errors import RemediationError
from sdcwatch_remediation.records import Member, Outcome

NODE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", re.ASCII)
"""One host name. No bracket, comma or blank, with which a scheduler would understand several nodes."""
EVERY_NODE = frozenset({"all", "default", "none", "null", "localhost"})
"""Words of this form that a scheduler takes for every node, or for one that nobody meant."""
CASE_ID = re.compile(r"case-[0-9a-f]{12}", re.ASCII)
MARK = "sdcwatch:"
"""What stands before the case id in everything that is written onto a node: by it we know what is ours."""


class SchedulerProblem(RemediationError):
    """The node cannot be isolated now, and nothing was done; the message says why. It is tried again."""


class NotOurs(SchedulerProblem):
    """Somebody else has taken the node out of service, or the name does not fit: it is left alone."""


@dataclass(frozen=True, slots=True)
class Act:
    """One thing to do to one node."""

    name: str
    """`stop_job`, `drain`, `cordon`, `evict`, ...: the audit log shows it."""
    target: str
    """What it is done to: the node, a job id, a pod."""
    request: dict[str, Any]
    """The exact request: an argument vector, or method, path and body."""


@dataclass(frozen=True, slots=True)
class ActResult:
    """What came of one act."""

    outcome: Outcome
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """An act that was requested before, as the audit log has it."""

    name: str
    target: str
    outcome: str
    """`accepted`, `refused`, `unknown`; empty where nothing was recorded (a crash)."""
    at: float = 0.0
    """When it was requested, in unix seconds."""
    message: str = ""
    """What the scheduler answered."""


class Scheduler(Protocol):
    """One way to keep work off a node. The name of a node comes from an inventory member and nowhere else."""

    name: str

    def next_act(self, member: Member, job: str, case_id: str, done: Sequence[Done]) -> Act | None:
        """Read the world and return the next act, or None when the node is isolated.

        Raises:
            SchedulerProblem: not now, or not by us; the message says why.
        """

    def next_restore(self, member: Member, case_id: str, done: Sequence[Done]) -> Act | None:
        """Return the next act that gives back what this case took, or None when there is nothing (more) of ours.

        Raises:
            SchedulerProblem: the world cannot be read.
        """

    def by_hand(self, member: Member) -> str:
        """Return the commands with which a person gives the node back; asks nobody."""

    def perform(self, act: Act) -> ActResult:
        """Do exactly this once; never raises for what the scheduler or the network does."""

    def plan(self, member: Member, job: str, case_id: str) -> list[dict[str, Any]]:
        """Return what `next_act` would come to in a quiet world, for the request that is approved; asks nobody."""

    def describe(self, member: Member) -> str:
        """Return the scheduler's own words about a node, kept as evidence; raises `SchedulerProblem`."""

    def logs(self, member: Member, job: str) -> dict[str, str]:
        """Return what the job's processes on the node wrote, by file name, bounded; raises `SchedulerProblem`."""


def checked_name(member: Member) -> str:
    """Return a member's node name where it can only mean that one node.

    Raises:
        NotOurs: it could mean another, or several.
    """
    name = member.node_name
    if NODE_NAME.fullmatch(name) is None or name.lower() in EVERY_NODE:
        raise NotOurs(f"{name[:80]!r} is not the name of one node; nothing was sent")
    return name


def mark(case_id: str) -> str:
    """Return the words that mark a node as this case's.

    Raises:
        NotOurs: the id is none of a case.
    """
    if CASE_ID.fullmatch(case_id) is None:
        raise NotOurs(f"{case_id[:80]!r} is no case id; nothing was sent")
    return f"{MARK}{case_id}"


def times(done: Sequence[Done], name: str, target: str, outcome: str | None = None) -> int:
    """Count earlier requests of one act (with one outcome)."""
    return sum(d.name == name and d.target == target and outcome in (None, d.outcome) for d in done)
