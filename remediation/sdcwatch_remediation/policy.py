"""Every rule about touching a node, on one page; pure.

What it does: `decide` asks every gate, records each one's reason, and lets the first gate that fails say what happens.
What it never does: read a clock, a file, the database or the network. All it knows stands in `facts.Facts`.
Its place: `casework` and `actions/*` call it before every step that leads to an outside action, with facts read afresh.
"""

from __future__ import annotations

from collections import Counter

from sdcwatch_remediation import known_answer, windows
from sdcwatch_remediation.evidence import Event
from sdcwatch_remediation.facts import Answer, Decision, Facts, Gate
from sdcwatch_remediation.records import Member
from sdcwatch_remediation.settings import Policy

FUTURE_SECONDS = 120.0
"""An event further ahead than this is not judged until its time has come."""


def decide(action: str, facts: Facts, policy: Policy) -> Decision:
    """Decide about one action (`quarantine` or `replace`) on one instance."""
    member = _the_member(facts)
    gates = [*_identity(facts, policy, member)]
    if facts.events:
        gates += _breaker(facts, policy)
        gates += _timing(facts, policy)
        gates.append(_confirmed(facts, policy))
    if member is not None:
        gates += _left_to_others(facts, member)
        if action == "replace":
            gates += _budgets(facts, policy, member)
            gates += _asked(facts, policy, member)
    gates += [
        Gate("not_held", not facts.held, facts.held or "nobody holds it", Answer.HOLD),
        Gate("not_stopped", not facts.stop, facts.stop or "no pause, no kill switch", Answer.HOLD),
    ]
    answer = next((gate.otherwise for gate in gates if not gate.passed), Answer.GO)
    return Decision(action, answer, policy.mode_of(action, member.group if member else ""), tuple(gates))


def gpus(event: Event, instance_id: str) -> frozenset[str]:
    """Return the GPUs of one instance that an event names."""
    return frozenset(rank.gpu_uuid for rank in event.suspect_ranks() if rank.instance == instance_id)


def _the_member(facts: Facts) -> Member | None:
    found = [member for member in facts.members or () if member.instance_id == facts.instance_id]
    return found[0] if len(found) == 1 else None


def _identity(facts: Facts, policy: Policy, member: Member | None) -> list[Gate]:
    members = facts.members or ()
    count = sum(m.instance_id == facts.instance_id for m in members)
    heir = next((m.instance_id for m in members if m.node_name == facts.node_name and not count), "")
    absent = f"already replaced: {facts.node_name} is {heir} now" if heir else f"the inventory has it {count} times"
    gates = [
        Gate("not_retired", not facts.retired, "already replaced" if facts.retired else "no tombstone", Answer.REFUSE),
        Gate("inventory_read", facts.members is not None, f"{len(members)} instances", Answer.HOLD),
        Gate("one_member", count == 1, absent if count != 1 else "exactly one instance has this id", Answer.REFUSE),
    ]
    if member is None:
        return gates
    allowed = member.group in policy.groups
    gates += [
        Gate("node_matches", member.node_name == facts.node_name, f"inventory: {member.node_name}", Answer.REFUSE),
        Gate("not_forbidden", member.group not in policy.forbidden_groups, f"group {member.group}", Answer.REFUSE),
        _not_here(facts, member),
        Gate("proven", bool(facts.events), facts.proof_reason, Answer.WAIT),
    ]
    if facts.events:
        event = facts.events[0].event
        nodes = {rank.node for rank in event.suspect_ranks() if rank.instance == facts.instance_id}
        latest = event.time - policy.clock_doubt_seconds
        gates += [
            Gate("event_node_matches", nodes == {member.node_name}, f"event: {sorted(nodes)}", Answer.REFUSE),
            Gate(
                "launched_before",
                member.launch_time <= latest,
                f"launched {event.time - member.launch_time:.0f} s before its fault; "
                f"more than {policy.clock_doubt_seconds:.0f} s needed",
                Answer.REFUSE,
            ),
        ]
    listed = "is" if allowed else "is not"
    gates.append(Gate("group_allowed", allowed, f"group {member.group} {listed} in policy.groups", Answer.REFUSE))
    return gates


def _not_here(facts: Facts, member: Member) -> Gate:
    ours = {member.node_name, member.address, member.instance_id} & facts.here
    reason = f"the service itself runs on {', '.join(sorted(ours))}" if ours else "the service runs elsewhere"
    return Gate("not_my_node", not ours, reason, Answer.REFUSE)


def _breaker(facts: Facts, policy: Policy) -> list[Gate]:
    event = facts.events[0].event
    lately = {*facts.lately, facts.instance_id}
    suspects = {rank.instance for rank in event.suspect_ranks()}
    same_job = [other.id for other in facts.others if other.proven and other.job == event.job]
    return [
        _same_environment(facts, event),
        Gate("one_suspect", len(suspects) == 1, f"the event names {len(suspects)} instance(s)", Answer.FREEZE),
        Gate(
            "one_case_in_job", not same_job, f"open cases of this job: {', '.join(same_job) or 'none'}", Answer.FREEZE
        ),
        Gate(
            "new_failure",
            not facts.failed_again,
            "the same step failed on hardware replaced before" if facts.failed_again else "not failed before",
            Answer.FREEZE,
        ),
        Gate(
            "breaker",
            len(lately) < policy.breaker_instances,
            f"{len(lately)} instance(s) with proven events in {policy.breaker_seconds:.0f} s; "
            f"{policy.breaker_instances} look like a bad detector or build",
            Answer.FREEZE,
        ),
    ]


def _same_environment(facts: Facts, event: Event) -> Gate:
    own = {rank.environment for rank in event.suspect_ranks() if rank.instance == facts.instance_id}
    others = Counter(rank.environment for rank in event.ranks if rank.instance != facts.instance_id)
    usual = others.most_common(1)[0][0] if others else ""
    same = own == {usual}
    reason = "software and settings as on the other ranks" if same else "its software or settings differ: not hardware"
    return Gate("same_environment", same, reason, Answer.FREEZE)


def _timing(facts: Facts, policy: Policy) -> list[Gate]:
    event = facts.events[0].event
    age = facts.now - event.time
    gates = [Gate("clock", age >= -FUTURE_SECONDS, f"the event is {age:.0f} s old", Answer.HOLD)]
    if not facts.decided:
        newest = max([facts.opened_at, *(other.opened_at for other in facts.others)])
        until = min(newest + policy.settle_seconds, facts.opened_at + policy.max_settle_seconds)
        gates += [
            Gate("fresh", age <= policy.evidence_max_age_seconds, f"the event is {age:.0f} s old", Answer.EXPIRE),
            Gate("settled", facts.now >= until, f"{max(0.0, until - facts.now):.0f} s to wait", Answer.HOLD),
        ]
    return gates


def _confirmed(facts: Facts, policy: Policy) -> Gate:
    if policy.confirm == "first":
        return Gate("confirmed", True, "confirm = first: one attributed verdict", Answer.SUSPECT)
    if facts.returned_gpus:
        came_back = f"{facts.returned_gpus[0]} left with a replaced instance and is back"
        return Gate("confirmed", True, came_back, Answer.SUSPECT)
    events = [item.event for item in facts.events]
    if any(event.persistence == "persistent" for event in events):
        return Gate("confirmed", True, "the fault is persistent", Answer.SUSPECT)
    seen: dict[str, set[tuple[str, int]]] = {}
    for event in events:
        for gpu in gpus(event, facts.instance_id):
            seen.setdefault(gpu, set()).add((event.epoch, event.step))
    for past in facts.past:
        seen.setdefault(past.gpu_uuid, set()).add((past.epoch, past.step))
    repeated = sorted(gpu for gpu in gpus(events[0], facts.instance_id) if len(seen[gpu]) > 1)
    if repeated:
        return Gate("confirmed", True, f"{repeated[0]} failed {len(seen[repeated[0]])} times", Answer.SUSPECT)
    return _tested(facts, policy, events[0])


def _tested(facts: Facts, policy: Policy, event: Event) -> Gate:
    """Let the suspect's own failed known-answer test confirm a first transient fault; nothing else of it counts."""
    first = "a first transient fault; "
    if facts.test is not None:
        failed, reason = known_answer.judge(
            facts.test, event, facts.instance_id, gpus(event, facts.instance_id), facts.now
        )
        return Gate("confirmed", failed, first + reason, Answer.SUSPECT)
    left = event.time + policy.test_wait_seconds - facts.now
    if facts.test_later and left > 0:
        waits = f"waits up to {left:.0f} s for its known-answer test ({facts.no_test})"
        return Gate("confirmed", False, first + waits, Answer.HOLD)
    why = f", and no known-answer test: {facts.no_test}" if facts.no_test else ""
    return Gate("confirmed", False, f"{first}confirm = persistent{why}", Answer.SUSPECT)


def _left_to_others(facts: Facts, member: Member) -> list[Gate]:
    idle = member.status == "Running"
    left = "" if idle else ": left to its provider"
    cordon = facts.node.cordoned_by if facts.node is not None else ""
    alone = f"{cordon} took the node out of service: left to them" if cordon else "nobody else cordoned it"
    return [
        Gate("provider_idle", idle, f"the instance is {member.status}{left}", Answer.HOLD),
        Gate("not_cordoned", not cordon, alone, Answer.HOLD),
    ]


def _asked(facts: Facts, policy: Policy, member: Member) -> list[Gate]:
    """Ask what may be done, but never unasked: an approval of this very request is an answer."""
    said = " (approved)" if facts.approved else ""
    running = sum(m.group == member.group and m.status == "Running" for m in facts.members or ()) - 1
    scarce = member.group in facts.short_groups or running < policy.min_running
    missing = ", instances of it are missing already" if member.group in facts.short_groups else ""
    if facts.node is not None:
        work = facts.node.others_work
        others = f"other work on the node: {', '.join(work)}" if work else "no other work on the node"
        alone = not work
    else:
        alone = not policy.shared_nodes
        others = "nodes are not shared" if alone else "the orchestrator cannot say what else runs on the node"
    inside = windows.inside(policy.windows, facts.now)
    return [
        Gate(
            "capacity",
            not scarce or facts.approved,
            f"{running} others of group {member.group} run, {policy.min_running} must{missing}{said}",
            Answer.ASK,
        ),
        Gate("others_work", alone or facts.approved, others + said, Answer.ASK),
        Gate(
            "window",
            inside or facts.approved,
            ("inside" if inside else "outside") + " of policy.windows" + said,
            Answer.ASK,
        ),
    ]


def _budgets(facts: Facts, policy: Policy, member: Member) -> list[Gate]:
    size = sum(m.group == member.group for m in facts.members or ())
    share = max(1, int(policy.group_share * size))
    usage = facts.usage
    rested = facts.now - usage.last_proven_at
    return [
        Gate(
            "concurrent",
            usage.in_flight < policy.concurrent,
            f"{usage.in_flight} of {policy.concurrent} replacements under way",
            Answer.HOLD,
        ),
        Gate("per_day", usage.last_day < policy.per_day, f"{usage.last_day} of {policy.per_day} in 24 h", Answer.HOLD),
        Gate(
            "group_share",
            usage.in_flight_in_group < share,
            f"{usage.in_flight_in_group} of {share} under way in group {member.group}",
            Answer.HOLD,
        ),
        Gate(
            "cooldown",
            rested >= policy.cooldown_seconds,
            f"the last replacement was proven {rested:.0f} s ago; {policy.cooldown_seconds:.0f} s needed"
            if usage.last_proven_at
            else "nothing was replaced before",
            Answer.HOLD,
        ),
    ]
