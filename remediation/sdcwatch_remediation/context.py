"""What the working side of the service holds (memory, provider, agents, clock), and how facts are gathered.

What it does: reads inventory, proof, budgets and stops afresh and asks `policy` with them.
What it never does: move a case or act.
Its place: `casework` and `actions/*` receive one `Context` each round.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sdcwatch_remediation import known_answer
from sdcwatch_remediation.actions.handover import Handover
from sdcwatch_remediation.actions.scheduler import Scheduler
from sdcwatch_remediation.agents import AgentClient, latch_body
from sdcwatch_remediation.cases import Case
from sdcwatch_remediation.errors import RemediationError
from sdcwatch_remediation.evidence import canonical_json
from sdcwatch_remediation.facts import Decision, Facts, Usage
from sdcwatch_remediation.lease import Lease
from sdcwatch_remediation.ledger import Ledger
from sdcwatch_remediation.policy import decide, gpus
from sdcwatch_remediation.proof import ProvenEvent, judge
from sdcwatch_remediation.records import Inventory, Member, NodeView, Orchestrator, Provider
from sdcwatch_remediation.settings import Config
from sdcwatch_remediation.store import Store
from sdcwatch_remediation.telemetry import Telemetry

BY = "sdcwatch-remediation"
"""How the service names itself to agents."""

TESTED = "known_answer_test"
"""Audit step that keeps what the suspect's own agent said of its known-answer test."""

_BEFORE_DECIDED = ("received", "proving", "unproven", "settling", "observed")


SEEN_SECONDS = 2.0
"""How long one look at the inventory serves the cases of a round that are not acted on yet."""


@dataclass(slots=True)
class Seen:
    """The inventory as one round has seen it; used by the worker's thread alone."""

    at: float = 0.0
    """Unix seconds; 0: not looked yet."""
    inventory: Inventory | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """Everything a step may use."""

    config: Config
    store: Store
    """Fenced by `lease`, as is `ledger`."""
    ledger: Ledger
    lease: Lease
    provider: Provider
    agents: AgentClient
    telemetry: Telemetry
    clock: Callable[[], float]
    schedulers: tuple[Scheduler, ...] = ()
    """Who is told to keep work off a quarantined node, besides its own agent."""
    orchestrator: Orchestrator | None = None
    handover: Handover | None = None
    """How nodes of `policy.handover_groups` are handed over; None: none is."""
    frozen: str = ""
    """Why this database is not the one that was meant, so that nothing may be done on it; empty: it is."""
    seen: Seen = field(default_factory=Seen)

    def glance(self) -> Inventory | None:
        """Return the inventory as this round has seen it, at most `SEEN_SECONDS` old; for what leads to no act.

        A thousand cases share one look. Whatever acts reads it afresh (`inventory`), and asks every gate again.
        """
        now = self.clock()
        if not self.seen.at or not 0 <= now - self.seen.at <= SEEN_SECONDS:
            self.seen.inventory = self.inventory()
            self.seen.at = self.clock()
        return self.seen.inventory

    def inventory(self) -> Inventory | None:
        """Read the live inventory, or return None when it cannot be read whole."""
        try:
            inventory = self.provider.inventory()
        except RemediationError as error:
            self.telemetry.count("sdc_remediation_provider_calls_total", "inventory", type(error).__name__)
            return None
        self.telemetry.count("sdc_remediation_provider_calls_total", "inventory", "ok")
        return inventory if inventory.cluster == self.config.cluster.name else None

    def stop(self) -> str:
        """Return why nothing may be done now, read afresh; empty when nothing stops it."""
        if self.frozen:
            return f"frozen: {self.frozen}"
        paused = self.ledger.paused()
        if paused:
            return f"paused by {paused['by']}: {paused['reason']}"
        return kill_switch(self.config.kill_switch.file)

    def look(self, case: Case, member: Member | None) -> NodeView | None:
        """Ask the orchestrator about a node; None where there is none, or it does not answer."""
        if self.orchestrator is None or member is None:
            return None
        try:
            return self.orchestrator.look(member, case.job, case.id)
        except RemediationError:
            return None

    def proof(self, case: Case) -> tuple[tuple[ProvenEvent, ...], str]:
        """Judge all kept copies of a case; events that an earlier case dealt with do not count again."""
        proof = judge(self.store.copies(case.id), instance_id=case.instance_id, cluster=case.cluster)
        if not proof.events:
            return (), proof.reason
        handled = self.ledger.handled_until(case)
        fresh = tuple(item for item in proof.events if item.event.time > handled)
        if not fresh:
            return (), f"{proof.events[0].event.id} was dealt with by an earlier case"
        return fresh, proof.reason

    def decide(self, action: str, case: Case, inventory: Inventory | None) -> tuple[Decision, Facts]:
        """Gather the facts about a case and ask the policy."""
        events, reason = self.proof(case)
        facts = self.facts(action, case, inventory, events, reason)
        decision = decide(action, facts, self.config.policy)
        self.telemetry.decided(decision)
        return decision, facts

    def facts(
        self, action: str, case: Case, inventory: Inventory | None, events: tuple[ProvenEvent, ...], reason: str
    ) -> Facts:
        """Gather everything that the policy must know about a case, besides what proves it.

        Without an event nothing can come of it but to wait or to refuse, and a flood of forged alerts is a case each:
        what only the gates about an event, or about a replacement, ask is not read then.
        """
        member = find(inventory, case.instance_id)
        event = events[0].event if events else None
        told = self.known_answer(case, event.id) if event else {}
        key = event_key(event.check, event.step) if event else ""
        return Facts(
            now=self.clock(),
            cluster=case.cluster,
            instance_id=case.instance_id,
            node_name=case.node_name,
            opened_at=case.opened_at,
            events=events,
            proof_reason=reason,
            past=self.ledger.suspicions(case.cluster, case.instance_id) if events else (),
            members=inventory.members if inventory else None,
            retired=self.ledger.retired(case.cluster, case.instance_id),
            others=self.store.others(case) if events else (),
            failed_again=event is not None and self.ledger.failed_again(case, key, event.job),
            usage=self.ledger.usage(case.cluster, member.group if member else case.group_name, besides=case.id)
            if events or action == "replace"
            else Usage(0, 0, 0),
            stop=self.stop(),
            held=case.held_by,
            decided=case.state not in _BEFORE_DECIDED,
            approved=case.approved,
            here=here(self.config.cluster.own_node, member),
            short_groups=inventory.short_groups if inventory else (),
            node=self.look(case, member) if action == "replace" else None,
            lately=self.store.proven_lately(case) if events else (),
            test=known_answer.read(told["test"]) if told.get("test") else None,
            no_test=told.get("problem", ""),
            test_later=told.get("later", False),
            returned_gpus=self.ledger.returned_gpus(
                case.cluster, dict.fromkeys(gpus(event, case.instance_id), case.instance_id)
            )
            if event
            else (),
        )

    def known_answer(self, case: Case, latch_id: str) -> dict[str, Any]:
        """Return what is on record of the suspect's known-answer test under a latch; empty: it was not asked about."""
        lines = (line for line in reversed(self.store.timeline(case.id)) if line["step"] == TESTED)
        return next((line["detail"] for line in lines if line["detail"]["latch_id"] == latch_id), {})

    def mode(self, action: str, case: Case) -> str:
        """Return the mode of an action in a case's group."""
        return self.config.policy.mode_of(action, case.group_name)

    def road(self, case: Case) -> str:
        """Return how a case's instance comes to be replaced: `replace` (asked for here) or `handover` (its owner)."""
        return "handover" if case.group_name in self.config.policy.handover_groups else "replace"

    def may_release(self, case: Case) -> bool:
        """Whether the service may release latches: only where it may also quarantine."""
        return self.mode("quarantine", case) in ("approve", "auto")

    def request_of(self, case: Case, event_id: str, *actions: str) -> str:
        """Return the exact requests of some actions as canonical JSON: what is approved, or would be done."""
        request: dict[str, Any] = {"case": case.id, "event": event_id, "instance": case.instance_id}
        if "quarantine" in actions:
            body = latch_body(latch_id=event_id, decision="leave", instance_id=case.instance_id, case_id=case.id, by=BY)
            request["quarantine"] = {"agent": case.instance_id, "path": "/latch/release", "body": body}
            before = case.before_inventory()
            if (member := find(before, case.instance_id)) is not None:
                for scheduler in self.schedulers:
                    request["quarantine"][scheduler.name] = scheduler.plan(member, case.job, case.id)
        if "replace" in actions and self.road(case) == "replace":
            request["replace"] = self.provider.replace_request(case.instance_id)
        elif "replace" in actions:
            member = find(case.before_inventory(), case.instance_id)
            told = self.handover.of(replace(case, event_id=event_id)) if self.handover else None
            request["handover"] = told.plan(member, case.job, case.id) if told and member else []
        return canonical_json(request)

    def replaced_elsewhere(self, case: Case, inventory: Inventory | None) -> Member | None:
        """Return the instance that runs in place of this case's although we asked for none."""
        before = case.before_inventory()
        if before is None or inventory is None:
            return None
        return self.provider.replacement_of(before, inventory, case.instance_id)


def gates_json(*decisions: Decision) -> str:
    """Return the gates of decisions as JSON, for the case."""
    rows = [
        {"action": d.action, **asdict(gate), "otherwise": gate.otherwise.value} for d in decisions for gate in d.gates
    ]
    return canonical_json(rows)


def event_key(check: str, step: int) -> str:
    """Return what must not fail again on new hardware."""
    return f"{check} at step {step}"


def find(inventory: Inventory | None, instance_id: str) -> Member | None:
    """Return the member with an instance id, or None."""
    members = inventory.members if inventory else ()
    return next((member for member in members if member.instance_id == instance_id), None)


def here(own_node: str, member: Member | None) -> frozenset[str]:
    """Return names and addresses of the machine that this service runs on, as far as one member could be it."""
    host = socket.gethostname()
    found = {own_node, host, host.partition(".")[0]}
    try:
        address = ipaddress.ip_address(member.address) if member is not None else None
        # A datagram socket that is connected sends nothing; it only says from which of our addresses it would.
        if address is not None and not address.is_loopback:
            family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((str(address), 9))
                found.add(str(probe.getsockname()[0]))
    except (OSError, ValueError):
        pass  # no road to that address, so it is not ours
    return frozenset(found - {""})


def kill_switch(path: str) -> str:
    """Return why the kill-switch file stops everything now, looked at afresh; empty when it does not."""
    if not path:
        return ""
    try:
        # A folder that is gone or closed says nothing about the file in it, so it stops too.
        names = os.listdir(os.path.dirname(path) or ".")
    except OSError as error:
        return f"the kill switch cannot be looked at ({error.strerror}): treated as on"
    return f"kill switch {path} is on; remove the file to go on" if os.path.basename(path) in names else ""
