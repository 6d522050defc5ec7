"""Why nothing would happen now: every reason for which a proven fault would not be acted on, each with what to do.

What it does: looks at stops, database, worker, modes, groups, provider, agents, clocks and deliveries, and rehearses
the policy's own gates for one running instance of each group; one finding each.
What it never does: act, write, or judge by rules of its own where the policy has one.
Its place: `app` shows it at `GET /v1/doctor`, `doctor` on the command line adds what only a client can see.
"""

from __future__ import annotations

from collections.abc import Iterator

from sdcwatch_remediation import preflight, tokens
from sdcwatch_remediation.actions.handover import NAME
from sdcwatch_remediation.actions.scheduler import SchedulerProblem
from sdcwatch_remediation.cases import Case
from sdcwatch_remediation.context import Context, kill_switch
from sdcwatch_remediation.facts import Answer, Gate
from sdcwatch_remediation.finding import Finding, Status
from sdcwatch_remediation.records import Inventory, Member
from sdcwatch_remediation.rehearsal import rehearse
from sdcwatch_remediation.service import Service
from sdcwatch_remediation.states import STATES

CLOCK_SECONDS = 30.0
"""Most that an agent's clock may differ from ours."""
CASES_SHOWN = 20
NEEDED = 3
"""Agents of a group that must answer, so that two others than the suspect's can attest a fault."""

FIXES = {
    "not_retired": "wait for the provider's inventory: this id was replaced",
    "not_forbidden": "take the group out of policy.forbidden_groups if it may be touched",
    "not_my_node": "run the service on a node outside of the groups it may act on",
    "group_allowed": "add the group to policy.groups",
    "breaker": "look at the frozen cases first: so many faults look like a bad detector, build or checkpoint",
    "settled": "wait: another case was opened a moment ago",
    "provider_idle": "wait, or look at the instance in the provider's console",
    "not_cordoned": "ask whoever took the node out of service",
    "concurrent": "wait for the replacement under way (`cases`), or raise policy.concurrent",
    "per_day": "wait until a day is over, or raise policy.per_day",
    "group_share": "wait for the replacement under way (`cases`), or raise policy.group_share",
    "cooldown": "wait, or lower policy.cooldown_seconds",
    "capacity": "a person is asked: add capacity, or lower policy.min_running",
    "others_work": "a person is asked: move the other work away, or set policy.shared_nodes",
    "window": "a person is asked outside of policy.windows",
    "launched_before": "the group's oldest instance is too young for policy.clock_doubt_seconds: wait",
}
"""What to do about a gate that fails for an instance about which nothing is wrong; the others are about evidence."""


def diagnose(service: Service) -> list[Finding]:
    """Look at everything once, and return what was found, in the order in which it would stop a case.

    Raises:
        StoreUnavailable: the database cannot be read.
    """
    ctx = service.context
    inventory = ctx.inventory()
    return [
        *_credentials(service),
        *_database(service),
        *_stops(ctx),
        _worker(service),
        *_modes(ctx),
        *_provider(ctx, inventory),
        *(found for group in ctx.config.policy.groups for found in _group(ctx, group, inventory)),
        *_deliveries(service),
        *_cases(ctx),
    ]


def _credentials(service: Service) -> Iterator[Finding]:
    config = service.config
    problems = [*tokens.problems(config.server), *preflight.agent_problems(config.agents)]
    for problem in problems:
        said, _, fix = problem.rpartition("; ")
        yield Finding("credentials", "fail", said, fix)
    if not problems:
        yield Finding("credentials", "pass", "every token file is readable, and no token stands in two", "")
    acting = {config.policy.mode_of("quarantine", group) for group in ("", *config.policy.groups)}
    if "approve" in acting and not config.server.approve_token_file:
        yield Finding("approvers", "fail", "nobody can approve anything", "set server.approve_token_file")


def _database(service: Service) -> Iterator[Finding]:
    pinned, known = service.config.database.id, service.database.id
    if service.context.frozen:
        said, _, fix = service.context.frozen.partition(": ")
        yield Finding("database", "fail", f"frozen, nothing is done on it: {said}", fix)
    elif pinned:
        yield Finding("database", "pass", f"{known}, as database.id says", "")
    else:
        yield Finding("database", "unknown", f"{known} is not pinned", f'set database.id = "{known}"')
    high_water = service.context.store.high_water
    if high_water is not None and high_water.problem:
        yield Finding(
            "mark", "fail", high_water.problem, f"make {high_water.path} writable: it tells an older database"
        )


def _stops(ctx: Context) -> Iterator[Finding]:
    paused = ctx.ledger.paused()
    if paused:
        yield Finding("pause", "fail", f"paused by {paused['by']}: {paused['reason']}", "sdcwatch-remediation resume")
    else:
        yield Finding("pause", "pass", "not paused", "")
    path = ctx.config.kill_switch.file
    stopped = kill_switch(path)
    if stopped:
        yield Finding("kill_switch", "fail", stopped, f"remove {path}, or make its folder readable")
    else:
        yield Finding("kill_switch", "pass", f"{path} is not there" if path else "no file is set", "")


def _worker(service: Service) -> Finding:
    if not service.worker_lives():
        return Finding("worker", "fail", "it has not ended a round lately", "look at the service's log and restart it")
    if service.context.lease.token:
        return Finding("worker", "pass", "it moves the cases", "")
    return Finding("worker", "pass", "another process of this database moves the cases; this one stands by", "")


def _modes(ctx: Context) -> Iterator[Finding]:
    policy = ctx.config.policy
    if not policy.groups:
        yield Finding("groups", "fail", "no group may be acted on", "name the groups in policy.groups")
    for group in policy.groups:
        quarantine, replacing = policy.mode_of("quarantine", group), policy.mode_of("replace", group)
        said = f"group {group}: quarantine {quarantine}, replace {replacing}"
        if group in policy.handover_groups:
            said += " by handing over to its owner"
        if quarantine in ("observe", "recommend"):
            yield Finding("mode", "fail", f"{said}: nothing is done", "raise policy.mode or its group's to act")
        elif replacing in ("observe", "recommend"):
            yield Finding("mode", "fail", f"{said}: a node is quarantined and never replaced", "raise policy.replace")
        else:
            asks = "; a person approves first" if "approve" in (quarantine, replacing) else ""
            yield Finding("mode", "pass", said + asks, "")


def _provider(ctx: Context, inventory: Inventory | None) -> Iterator[Finding]:
    if inventory is None:
        fix = "see the log; reading needs DescribeCluster, ListClusterNodes and DescribeClusterNode (cluster.region?)"
        yield Finding("provider", "fail", "the inventory cannot be read whole", fix)
    else:
        repair = f", its own node recovery: {inventory.node_recovery}" if inventory.node_recovery else ""
        yield Finding("provider", "pass", f"{len(inventory.members)} instances of {inventory.cluster}{repair}", "")
    attempt = getattr(ctx.provider, "try_actor", None)
    problem = attempt() if attempt is not None else None
    if problem is None:
        said = "whether BatchReplaceClusterNodes is allowed cannot be tried without replacing"
        fix = "aws iam simulate-principal-policy --action-names sagemaker:BatchReplaceClusterNodes"
        yield Finding("permission", "unknown", said, fix)
    elif problem:
        yield Finding("permission", "fail", f"the actor's role is not given: {problem}", "see deploy/remediation/iam")
    else:
        yield Finding("permission", "pass", "the actor's role can be taken", "")


def _group(ctx: Context, group: str, inventory: Inventory | None) -> Iterator[Finding]:
    if inventory is None:
        return
    members = [member for member in inventory.members if member.group == group]
    running = [member for member in members if member.status == "Running"]
    if not running:
        known = ", ".join(sorted({member.group for member in inventory.members})) or "none"
        said = f"group {group}: {len(members)} instances, none Running; the cluster has {known}"
        yield Finding("group", "fail", said, "correct policy.groups")
        return
    yield from _agents(ctx, group, running)
    yield from _roads(ctx, group, running[0])
    failed: dict[str, Gate] = {}
    for decision in rehearse(ctx, min(running, key=lambda member: member.launch_time), inventory):
        for gate in decision.gates:
            if not gate.passed and gate.name not in ("not_stopped", "not_held"):
                failed.setdefault(gate.name, gate)
    for gate in failed.values():
        # An answer that asks a person is not a stop, but nothing would happen unasked.
        said = f"group {group}: {gate.reason}" + (" (a person is asked)" if gate.otherwise is Answer.ASK else "")
        yield Finding(f"gate_{gate.name}", "fail", said, FIXES.get(gate.name, "see docs/remediation.md"))
    if not failed:
        yield Finding("gates", "pass", f"group {group}: every gate would pass for a proven fault", "")


def _agents(ctx: Context, group: str, running: list[Member]) -> Iterator[Finding]:
    answers = ctx.agents.events(running, running[0].instance_id, ctx.clock())
    good = [answer for answer in answers if not answer.problem]
    bad = next((f"{a.member.instance_id}: {a.problem}" for a in answers if a.problem), "")
    said = f"group {group}: {len(good)} of {len(running)} agents answer" + (f"; {bad}" if bad else "")
    if len(good) < NEEDED:
        fix = f"{NEEDED} must, so that two attest a fault of the third: agents.port, events_token_file, firewall?"
        yield Finding("agents", "fail", said, fix)
    else:
        yield Finding("agents", "pass", said, "")
    ahead = [seconds for seconds in ctx.agents.clocks(running) if seconds is not None]
    if not ahead:
        yield Finding("clock", "unknown", f"group {group}: no agent shows its clock", "see agents above")
        return
    worst = max(ahead, key=abs)
    said = f"group {group}: clocks differ from this one by at most {abs(worst):.0f} s"
    status: Status = "pass" if abs(worst) <= CLOCK_SECONDS else "fail"
    yield Finding("clock", status, said, "" if status == "pass" else "synchronise the clocks (NTP)")


def _roads(ctx: Context, group: str, member: Member) -> Iterator[Finding]:
    """Look at one node as whoever isolates it, or is handed it, sees it: else every case would stop there."""
    looks = [(scheduler.name, scheduler.describe) for scheduler in ctx.schedulers]
    if ctx.handover is not None and group in ctx.config.policy.handover_groups:
        looks.append((NAME, ctx.handover.describe))
    for name, look in looks:
        try:
            look(member)
        except SchedulerProblem as error:
            fix = "docs/remediation.md says what it needs: commands, kubeconfig, RBAC, and the names of nodes"
            yield Finding("road", "fail", f"group {group}: {name}: {error}", fix)
        else:
            yield Finding("road", "pass", f"group {group}: {name} knows {member.node_name} as this very instance", "")


def _deliveries(service: Service) -> Iterator[Finding]:
    last, drills = service.store.last_delivery(), service.store.drills()
    drill_fix = "from a training node: sdcwatch doctor --drill, with --alertmanager for the route and the receiver"
    if last is None:
        yield Finding("deliveries", "unknown", "Alertmanager has never sent anything", drill_fix)
    else:
        yield Finding("deliveries", "pass", f"the last one came {_ago(service.clock() - last)} ago", "")
    if drills:
        newest = service.clock() - max(drills.values())
        yield Finding("drill", "pass", f"the last drill came through {_ago(newest)} ago", "")
    else:
        yield Finding("drill", "unknown", "no drill has come through", drill_fix)


def _cases(ctx: Context) -> Iterator[Finding]:
    open_cases = ctx.store.cases(open_only=True)
    for case in open_cases[:CASES_SHOWN]:
        yield _case(case)
    if not open_cases:
        yield Finding("cases", "pass", "no case is open", "")


def _case(case: Case) -> Finding:
    said = f"{case.id} ({case.node_name}) is {case.state}: {case.reason or STATES[case.state].meaning}"
    if case.held_by:
        return Finding("case", "fail", f"{case.id} is held by {case.held_by}", f"sdcwatch-remediation unhold {case.id}")
    if STATES[case.state].kind == "waiting":
        how = "approve or reject" if case.state == "awaiting_approval" else "show, then reject or cancel"
        return Finding("case", "fail", said, f"a person decides: sdcwatch-remediation {how} {case.id}")
    return Finding("case", "pass", said, "")


def _ago(seconds: float) -> str:
    for size, name in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"
