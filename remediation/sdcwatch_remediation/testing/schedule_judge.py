"""What must never have happened in a schedule, and what must have: the judgement after it came to rest.

What it does: counts replacement requests per instance on the far side (the simulator's call log, Slurm's), compares
them with what truly happened, and reads the audit log and the database.
What it never does: change the world.
Its place: after `schedule_world.rest`, called by `schedules.run`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from sqlalchemy import select

from sdcwatch_remediation import schema
from sdcwatch_remediation.actions.scheduler import MARK
from sdcwatch_remediation.states import STATES
from sdcwatch_remediation.testing.kubernetes_memory import KubernetesMemory
from sdcwatch_remediation.testing.schedule_world import REPLACE, World


def problems(world: World) -> Iterator[str]:
    """Yield what must never happen, one sentence each."""
    asked = _asked(world)
    world.result.asked = len(asked)
    for instance, count in asked.items():
        if count > 1:
            yield f"{instance} was asked to be replaced {count} times"
        yield from _wrongly(world, instance, "asked to be replaced")
    if world.result.mode == "recommend" and asked:
        yield "something was replaced in mode recommend"
    yield from _touched(world)
    if world.kubernetes is not None:
        yield from _of_kubernetes(world, world.kubernetes)
    yield from _service_problems(world)


def _asked(world: World) -> Counter[str]:
    """Return how often each instance was asked to be replaced, without calls that surely had no effect.

    A refusal that came after a call that had, or may have had, an effect counts: who asks again relies on the far
    side's good sense.
    """
    found: Counter[str] = Counter()
    for call in world.simulator.calls(REPLACE):
        instance = call.request["NodeIds"][0]
        if found[instance] or not _refused(call):
            found[instance] += 1
    if world.slurm is not None:
        for act in world.slurm.acts:
            if "state=fail" in act.argv and (found[act.instance_id] or act.effect or act.status is None):
                found[act.instance_id] += 1
    if world.kubernetes is not None:
        # One handover that was taken back may be followed by another case's; one case speaks of a node once.
        told = Counter((e.instance_id, e.case_id) for e in world.kubernetes.effects if e.what == "suspect")
        for (instance, _), count in told.items():
            found[instance] = max(found[instance], count)
    return found


def _refused(call: Any) -> bool:
    """Whether the caller could know for certain that a call had no effect."""
    if call.affected or call.status is None or call.status >= 500:
        return False
    return call.status != 200 or bool(call.response.get("Failed"))


def _wrongly(world: World, instance: str, what: str) -> Iterator[str]:
    kinds = world.blamed.get(instance, [])
    if not kinds:
        yield f"{instance} was {what}, and nothing true blames it alone"
    elif world.confirm == "persistent" and "persistent" not in kinds and len(kinds) < 2:
        yield f"{instance} was {what} after one transient fault"


def _touched(world: World) -> Iterator[str]:
    """Judge what is done to a node before it is replaced."""
    for agent in world.agents.values():
        if agent.quarantined:
            yield from _wrongly(world, agent.instance, "quarantined")
            if world.result.mode == "recommend":
                yield "something was quarantined in mode recommend"
    for act in world.slurm.acts if world.slurm is not None else ():
        if "state=drain" in act.argv and act.effect:
            yield from _wrongly(world, act.instance_id, "drained")
    for name, node in world.slurm.nodes.items() if world.slurm is not None else ():
        if node.comment.startswith(MARK) and node.reason == "maintenance":
            yield f"{name}: somebody else's drain carries our mark"


def _of_kubernetes(world: World, kubernetes: KubernetesMemory) -> Iterator[str]:
    events: Counter[tuple[str, str]] = Counter()
    for effect in kubernetes.effects:
        if effect.what == "cordon":
            yield from _wrongly(world, effect.instance_id, "cordoned")
        elif effect.what == "event":
            events[(effect.instance_id, effect.case_id)] += 1
        elif effect.what == "evict" and not effect.target.startswith("rank-"):
            yield f"{effect.target} was evicted, and is not of the job"
        if world.result.mode == "recommend":
            yield f"{effect.what} in mode recommend"
    for (instance, case_id), count in events.items():
        if count > 1:
            yield f"{case_id} wrote {count} Events about {instance}"
    yield from kubernetes.wrongs
    if world.result.road == "handover" and world.simulator.calls(REPLACE):
        yield "a node that is its owner's to replace was asked to be replaced from here"
    for case in world.services[-1].store.cases():
        ended_by_no = case.state in ("closed", "cancelled") and case.outcome in ("rejected", "cancelled")
        if ended_by_no and kubernetes.carries(case.instance_id, case.id):
            yield f"{case.id} ended as {case.outcome}, and its node was not given back"


def _service_problems(world: World) -> Iterator[str]:
    for other in world.services:
        for where in ("case", "round"):
            errors = other.telemetry.registry.get_sample_value("sdc_remediation_errors_total", {"where": where})
            if errors:
                yield f"{errors:.0f} unexpected errors ({where})"
    service = world.services[-1]
    with service.database.read() as connection:
        stored = len(connection.execute(select(schema.deliveries.c.id)).all())
        audit = connection.execute(select(schema.audit).order_by(schema.audit.c.id)).all()
        approvals = {row.case_id for row in connection.execute(select(schema.approvals)) if row.decision == "approved"}
    if stored < world.acknowledged:
        yield f"{world.acknowledged} deliveries were acknowledged, {stored} are kept"
    yield from _audit_problems(world, [(line.step, line.case_id) for line in audit], approvals)
    for case in service.store.cases():
        world.result.ends[f"{case.state} {case.outcome}".strip()] += 1
        if STATES[case.state].kind == "working":
            yield f"{case.id} is still {case.state}: {case.reason}"
        if case.outcome == "replaced" and case.quarantined_at:
            own = [agent for agent in world.agents.values() if agent.quarantined == case.id]
            if any(case.event_id in agent.released for agent in own):
                yield f"{case.id}: the replaced node itself was told to go on"


def _audit_problems(world: World, lines: list[tuple[str, str]], approvals: set[str]) -> Iterator[str]:
    paused, held = False, set()
    for step, case_id in lines:
        if step in ("paused", "resumed"):
            paused = step == "paused"
        elif step == "held_by_person":
            held.add(case_id)
        elif step == "hold_ended":
            held.discard(case_id)
        elif step in ("replace_requested", "handover_requested"):
            if paused or case_id in held:
                yield f"{case_id} asked for a replacement while paused or held"
            if world.result.mode == "approve" and case_id not in approvals:
                yield f"{case_id} asked for a replacement that nobody approved"
