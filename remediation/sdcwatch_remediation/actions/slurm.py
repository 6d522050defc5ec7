"""Isolate a node under Slurm, and have it replaced by HyperPod's own agent there: scontrol, by argument vectors only.

What it does: `Slurm` stops the training job first (requeued and held, or cancelled), drains the node with the case id
in Comment, and lets the job go again, without the node. `SlurmReplace` is a `records.Provider` that asks for the
replacement with `state=fail reason="Action:Replace"` instead of an API call; that leaves a running job running,
clears DRAIN and overwrites Reason, so it is refused while a job runs there and where Comment does not say that the
drain was ours.
What it never does: go through a shell, take a node's name from anything but the inventory, name more than one node
(`nodename=all` is one of the words that scontrol accepts), resume a node that it did not drain, or stop another job
than the case's.
Its place: `actions/acts` calls `Slurm`; `actions/replace` calls `SlurmReplace` behind the ledger's intents, like any
other provider.
"""

from __future__ import annotations

import ipaddress
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdcwatch_remediation.actions.scheduler import (
    MARK,
    Act,
    ActResult,
    Done,
    NotOurs,
    SchedulerProblem,
    checked_name,
    mark,
    times,
)
from sdcwatch_remediation.errors import RemediationError
from sdcwatch_remediation.records import Inventory, Member, NodeView, Outcome, Provider, ReplaceResult

ACTION_REPLACE = "Action:Replace"
"""The Reason on which HyperPod's agent replaces a failed node."""
OUT_OF_SERVICE = frozenset({"DRAIN", "DRAINING", "DRAINED", "FAIL", "FAILING", "DOWN", "MAINT"})
DRAINS = frozenset({"DRAIN", "DRAINING", "DRAINED"})
BUSY = "RUNNING,COMPLETING,SUSPENDED,CONFIGURING,STOPPED,SIGNALING,STAGE_OUT,RESIZING"

_JOB_ID = re.compile(r"[0-9]+(?:[_+][0-9]+)?", re.ASCII)
_STILL = frozenset({"RUNNING", "SUSPENDED", "CONFIGURING", "STOPPED", "SIGNALING", "RESIZING"})
_REFUSED = (
    "Invalid node name",
    "Invalid node state",
    "Invalid job id",
    "Access/permission denied",
    "Invalid user id",
    "Requested operation is presently disabled",
    "Job/step already completing",
    "Job is pending execution",
    "Job is in held state",
    "Unable to contact slurm controller",
    "No such file",
)
"""scontrol's words when the controller said no, or was never reached."""

Run = Callable[[Sequence[str], float], "Answer"]


@dataclass(frozen=True, slots=True)
class Answer:
    """How one command ended."""

    status: int | None
    """Exit status; None: it was not over in time, and may have had its effect."""
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class _Node:
    states: frozenset[str]
    reason: str
    comment: str
    line: str


@dataclass(frozen=True, slots=True)
class _Job:
    id: str
    state: str
    user: str
    name: str


def run(argv: Sequence[str], seconds: float, environment: Mapping[str, str] = os.environ) -> Answer:
    """Run one program without a shell and without input, in the C locale so that its words are known."""
    env = {**environment, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False, env=env
        )
    except subprocess.TimeoutExpired:
        return Answer(None, "", f"no answer within {seconds:.0f} s")
    except OSError as error:
        return Answer(127, "", f"{argv[0]}: {error.strerror}")
    return Answer(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace").strip())


class Slurm:
    """Slurm as a `Scheduler` and as the policy's `Orchestrator`."""

    name = "slurm"

    def __init__(
        self,
        *,
        bin_dir: str = "",
        stop: str = "requeue",
        timeout_seconds: float = 30.0,
        run: Run = run,
    ) -> None:
        """Remember the programs; nothing is asked yet.

        Args:
            bin_dir: folder that holds scontrol, squeue and scancel; empty: they are looked up on PATH.
            stop: what is done to the training job: `requeue` or `cancel`.
            timeout_seconds: after so long an act's outcome is unknown.
            run: runs an argument vector.
        """
        self._scontrol, self._squeue, self._scancel = (
            os.path.join(bin_dir, name) for name in ("scontrol", "squeue", "scancel")
        )
        self._stop = stop
        self._seconds, self._run = timeout_seconds, run

    def look(self, member: Member, job: str, case_id: str) -> NodeView | None:
        """Say who else works on the node, and who but this case took it out of service."""
        name = checked_name(member)
        node = self._node(member)
        others = tuple(sorted(f"job {j.id} of {j.user}" for j in self._jobs(name) if j.name != job))
        out = node.states & OUT_OF_SERVICE
        ours = node.comment == mark(case_id)
        return NodeView(others_work=others, cordoned_by=(node.reason or "Slurm")[:200] if out and not ours else "")

    def next_act(self, member: Member, job: str, case_id: str, done: Sequence[Done]) -> Act | None:
        """Stop the job, drain, release the job again: the first of these that the world still lacks."""
        name, ours, node = checked_name(member), mark(case_id), self._node(member)
        drained = bool(node.states & OUT_OF_SERVICE)
        if drained and node.comment != ours:
            state = f"{'+'.join(sorted(node.states))}, {node.reason or 'no reason given'}"
            raise NotOurs(f"{name} is {state}: left to whoever did it")
        running = [j for j in self._jobs(name) if j.name == job and j.state in _STILL]
        for found in running:
            if not times(done, "stop_job", found.id):
                return self._stop_act(found.id)
        if running and any(not times(done, "stop_job", j.id, "refused") for j in running):
            raise SchedulerProblem(f"waiting for {_ids(running)} to stop on {name}")
        if not drained:
            # From here on nothing new starts there, even where the job could not be stopped.
            return self._drain(name, ours)
        if running:
            advice = "stop it by hand" if self._stop == "cancel" else "stop it, or set actions.slurm_stop = 'cancel'"
            raise SchedulerProblem(f"{name} is drained, but Slurm refused to {self._stop} {_ids(running)}: {advice}")
        return self._release(done)

    def _release(self, done: Sequence[Done]) -> Act | None:
        for held in dict.fromkeys(d.target for d in done if d.name == "stop_job" and d.outcome != "refused"):
            if self._stop == "requeue" and not times(done, "release_job", held):
                return Act("release_job", held, {"argv": [self._scontrol, "release", _job_id(held)]})
        return None

    def next_restore(self, member: Member, case_id: str, done: Sequence[Done]) -> Act | None:
        """Undrain the node where both its Comment and its Reason are still ours, and let held jobs of ours go."""
        name, ours, node = checked_name(member), mark(case_id), self._node(member)
        # A Reason of somebody else's, Action:Replace among them, says that the node is in other hands now.
        if node.comment == ours and node.reason == ours and node.states & DRAINS:
            return Act("undrain", name, {"argv": self._undrain_argv(name)})
        return self._release(done)

    def by_hand(self, member: Member) -> str:
        """Return the command with which a person gives the node back."""
        return " ".join(self._undrain_argv(checked_name(member)))

    def perform(self, act: Act) -> ActResult:
        """Run the argument vector of an act once."""
        answer = self._run(act.request["argv"], self._seconds)
        return ActResult(*_judged(answer))

    def plan(self, member: Member, job: str, case_id: str) -> list[dict[str, Any]]:
        """Return the argument vectors; job ids are only known when it is done."""
        name, ours, each = checked_name(member), mark(case_id), f"<id of each job {job!r} on {member.node_name}>"
        acts = [self._stop_argv(each), self._drain(name, ours).request["argv"]]
        acts += [[self._scontrol, "release", each]] if self._stop == "requeue" else []
        return [{"argv": argv} for argv in acts]

    def describe(self, member: Member) -> str:
        """Return `scontrol show node` and the queue of the node."""
        name = checked_name(member)
        jobs = "\n".join(f"{j.id} {j.state} {j.user} {j.name}" for j in self._jobs(name))
        return f"{self._node(member).line}\n\njobs:\n{jobs or '(none)'}\n"

    def logs(self, member: Member, job: str) -> dict[str, str]:
        """Say that there is no road to them: a job's output is a file of its user's."""
        raise SchedulerProblem("Slurm keeps no output of a job; it is where the job's user has it written")

    def fail_request(self, member: Member) -> dict[str, Any]:
        """Return the exact request for a replacement."""
        words = [f"nodename={checked_name(member)}", "state=fail", f"reason={ACTION_REPLACE}"]
        return {"argv": [self._scontrol, "update", *words]}

    def fail(self, member: Member) -> ReplaceResult:
        """Ask HyperPod's agent for the replacement of a node that a case of ours drained and that runs no job."""
        try:
            name, node = checked_name(member), self._node(member)
            busy = self._jobs(name)
        except SchedulerProblem as error:
            return ReplaceResult(
                Outcome.REFUSED, type(error).__name__, str(error)[:500], retryable=not isinstance(error, NotOurs)
            )
        if not node.comment.startswith(MARK) or not node.states & OUT_OF_SERVICE:
            why = f"{name} is not drained by a case of ours (Comment {node.comment[:80]!r})"
            return ReplaceResult(Outcome.REFUSED, "NotIsolated", why, retryable=True)
        if busy:
            why = f"{_ids(busy)} still on {name}; Action:Replace would leave them running on bad hardware"
            return ReplaceResult(Outcome.REFUSED, "NodeBusy", why[:500], retryable=True)
        outcome, code, message = _judged(self._run(self.fail_request(member)["argv"], self._seconds))
        return ReplaceResult(outcome, code, message, retryable=code == "NotReached")

    def _undrain_argv(self, name: str) -> list[str]:
        # Not `resume`, which would also bring back a node that Slurm itself took for down.
        return [self._scontrol, "update", f"nodename={name}", "state=undrain", "comment="]

    def _stop_argv(self, job: str) -> list[str]:
        # Held, so that it cannot start on this very node before the drain; it is released after it.
        return [self._scontrol, "requeuehold", job] if self._stop == "requeue" else [self._scancel, job]

    def _stop_act(self, job: str) -> Act:
        return Act("stop_job", job, {"argv": self._stop_argv(_job_id(job))})

    def _drain(self, name: str, ours: str) -> Act:
        words = [f"nodename={name}", "state=drain", f"reason={ours}", f"comment={ours}"]
        return Act("drain", name, {"argv": [self._scontrol, "update", *words]})

    def _node(self, member: Member) -> _Node:
        name = checked_name(member)
        lines = self._ask([self._scontrol, "--oneliner", "show", "node", name]).splitlines()
        lines = [line for line in lines if line.strip()]
        if len(lines) != 1 or _value(lines[0], "NodeName", start=True) != name:
            raise NotOurs(f"Slurm does not know exactly one node of the name {name}; nothing was sent")
        line = lines[0]
        if _elsewhere(_value(line, "NodeAddr"), member.address):
            raise NotOurs(
                f"Slurm has {name} at {_value(line, 'NodeAddr')}, the inventory at {member.address}; nothing was sent"
            )
        states = frozenset(part.strip("*~#$@%^!-") for part in _value(line, "State").split("+"))
        # Slurm adds who set the reason and when: "words [root@2026-01-01T00:00:00]".
        reason = re.sub(r" \[[^\]]*\]$", "", _rest(line, "Reason"))
        return _Node(states, reason, _rest(line, "Comment"), line)

    def _jobs(self, name: str) -> list[_Job]:
        argv = [self._squeue, "--noheader", f"--nodelist={name}", f"--states={BUSY}", "--format=%i|%T|%u|%j"]
        found = []
        for line in self._ask(argv).splitlines():
            words = line.strip().split("|", 3)
            if len(words) == 4 and _JOB_ID.fullmatch(words[0]):
                found.append(_Job(*words))
        return found

    def _ask(self, argv: Sequence[str]) -> str:
        answer = self._run(argv, self._seconds)
        if answer.status != 0:
            raise SchedulerProblem(f"{' '.join(argv[:4])}: {answer.err or answer.out or answer.status}"[:500])
        return answer.out


class SlurmReplace:
    """A provider whose inventory and proof are another's, and whose replace request goes through Slurm."""

    def __init__(self, provider: Provider, slurm: Slurm) -> None:
        """Take the provider that owns the instances, and Slurm."""
        self._provider, self._slurm = provider, slurm
        self._members: dict[str, Member] = {}

    def inventory(self) -> Inventory:
        """Read the live inventory, and remember which node each instance is."""
        inventory = self._provider.inventory()
        self._members = {member.instance_id: member for member in inventory.members}
        return inventory

    def replace_request(self, instance_id: str) -> dict[str, Any]:
        """Return the argument vector; raises `SchedulerProblem` for an instance that the last inventory lacks."""
        member = self._members.get(instance_id)
        if member is None:
            raise SchedulerProblem(f"{instance_id[:40]!r} is not in the inventory; nothing was sent")
        return self._slurm.fail_request(member)

    def replace(self, instance_id: str) -> ReplaceResult:
        """Read the inventory once more, and set the node of exactly this instance to fail."""
        try:
            members = [m for m in self.inventory().members if m.instance_id == instance_id]
        except RemediationError as error:
            return ReplaceResult(Outcome.REFUSED, "InventoryUnreadable", str(error)[:500], retryable=True)
        same_name = [m for m in self._members.values() if members and m.node_name == members[0].node_name]
        if len(members) != 1 or len(same_name) != 1 or members[0].status != "Running":
            why = f"{instance_id} is not exactly one running instance with a node name of its own"
            return ReplaceResult(Outcome.REFUSED, "NotOneMember", why, retryable=False)
        return self._slurm.fail(members[0])

    def replacement_of(self, before: Inventory, now: Inventory, instance_id: str) -> Member | None:
        """Return the provider's own proof."""
        return self._provider.replacement_of(before, now, instance_id)


def _judged(answer: Answer) -> tuple[Outcome, str, str]:
    if answer.status == 0:
        return Outcome.ACCEPTED, "", ""
    words = (answer.err or answer.out)[:500]
    if answer.status is None:
        return Outcome.UNKNOWN, "Timeout", words
    if answer.status == 127 or "Unable to contact slurm controller" in words:
        return Outcome.REFUSED, "NotReached", words
    if any(known in words for known in _REFUSED):
        return Outcome.REFUSED, "Refused", words
    return Outcome.UNKNOWN, f"Status{answer.status}", words


def _value(line: str, key: str, *, start: bool = False) -> str:
    found = re.search(rf"{'^' if start else ' '}{key}=(\S*)", line)
    return found[1] if found else ""


def _rest(line: str, key: str) -> str:
    # Reason and Comment hold blanks; the next known key, or the end, ends them.
    found = re.search(rf" {key}=(.*?)(?= (?:Reason|Comment|Extra|ResumeAfterTime|InstanceId|InstanceType)=|\s*$)", line)
    return found[1].strip() if found else ""


def _elsewhere(listed: str, address: str) -> bool:
    try:
        return ipaddress.ip_address(listed) != ipaddress.ip_address(address)
    except ValueError:
        return False  # a host name: nothing to compare


def _job_id(text: str) -> str:
    if _JOB_ID.fullmatch(text) is None:
        raise NotOurs(f"{text[:40]!r} is no job id; nothing was sent")
    return text


def _ids(jobs: Sequence[_Job]) -> str:
    return "job " + ", ".join(sorted({job.id for job in jobs}))
