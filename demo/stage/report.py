"""`report.json`: the run in numbers, and whether each of them is what this fault must lead to. Pure.

The keys are those of docs/contracts.md; null where one does not apply.
"""

from __future__ import annotations

from typing import Any

from stage import plan
from stage.facts import Event, Facts

KEYS = (
    "fault", "world_size", "fault_step", "detected_step", "check", "verdict", "suspect_rank", "suspect_node",
    "candidates", "seconds_event_to_webhook", "seconds_event_to_replaced", "resumed_from_step", "resumed_from_trust",
    "clean_weights_sha256", "final_weights_sha256", "weights_equal_clean_run", "steps_on_bad_node_after_halt",
    "replace_calls", "false_verdicts",
)  # fmt: skip


def build(scenario: plan.Scenario, facts: Facts, clean_sha256: str | None) -> dict[str, Any]:
    """The report of one run."""
    event = facts.events[0] if facts.events else None
    moments = facts.moments
    resumed = [e for e in facts.log if e["kind"] == "start" and e["resumed_from"] is not None]
    final = set(facts.done().values()) if len(facts.done()) == len(plan.NODES) else set()
    final_sha256 = final.pop() if len(final) == 1 else None
    named = event is not None and len(event.suspects) == 1
    return {
        "fault": scenario.name,
        "world_size": len({e["rank"] for e in facts.log}),
        "fault_step": scenario.fault["step"] - 1 if scenario.fault is not None else None,
        "detected_step": event.step if event else None,
        "check": event.check if event else None,
        "verdict": event.kind if event else None,
        "suspect_rank": event.suspects[0] if event and named else None,
        "suspect_node": event.ranks[event.suspects[0]]["node"] if event and named else None,
        "candidates": list(event.candidates) if event else None,
        "seconds_event_to_webhook": _seconds(moments, "webhook"),
        "seconds_event_to_replaced": _seconds(moments, "proven"),
        "resumed_from_step": resumed[-1]["resumed_from"] if resumed else None,
        "resumed_from_trust": resumed[-1]["trust"] if resumed else None,
        "clean_weights_sha256": clean_sha256,
        "final_weights_sha256": final_sha256,
        "weights_equal_clean_run": final_sha256 is not None and final_sha256 == clean_sha256,
        "steps_on_bad_node_after_halt": steps_after_halt(facts),
        "replace_calls": facts.replace_calls,
        "false_verdicts": sum(not is_true(scenario, e) for e in facts.events),
    }


def _seconds(moments: dict[str, float], name: str) -> float | None:
    return round(moments[name] - moments["detection"], 3) if {name, "detection"} <= set(moments) else None


def is_true(scenario: plan.Scenario, event: Event) -> bool:
    """Whether a verdict is what the injected fault must lead to: right check, kind, step, and nobody else named."""
    expected = scenario.expected
    named = {plan.instance_id(plan.BAD)} if expected.named else set()
    return (event.check, event.kind, event.step) == (
        expected.check,
        expected.verdict,
        expected.detected_step,
    ) and event.instances() == named


def steps_after_halt(facts: Facts) -> int:
    """Steps that the bad node began after the halt; where nobody is replaced: before the latch was released."""
    if not facts.events:
        return 0
    halted = facts.events[0].time
    until = float("inf")
    if not facts.events[0].suspects and facts.released is not None:
        until = float(facts.released["released"]["time"])
    bad = plan.instance_id(plan.BAD)
    return sum(e["kind"] == "begin" and e["instance"] == bad and halted < e["time"] < until for e in facts.log)


def problems(scenario: plan.Scenario, report: dict[str, Any], facts: Facts) -> list[str]:
    """One sentence for each expectation that does not hold; empty when all do."""
    expected, bad = scenario.expected, plan.BAD
    wanted: dict[str, Any] = {
        "world_size": len(plan.NODES),
        "fault_step": expected.fault_step,
        "detected_step": expected.detected_step,
        "check": expected.check,
        "verdict": expected.verdict,
        "suspect_rank": bad if expected.named else None,
        "suspect_node": f"hyperpod-{plan.instance_id(bad)}" if expected.named else None,
        "resumed_from_step": expected.resumed_from_step,
        "resumed_from_trust": expected.resumed_from_trust,
        "weights_equal_clean_run": True,
        "steps_on_bad_node_after_halt": 0,
        "replace_calls": expected.replace_calls,
        "false_verdicts": 0,
    }
    found = [f"{k} is {report[k]!r}, expected {v!r}" for k, v in wanted.items() if report[k] != v]
    if expected.named:
        found += _replaced(facts)
    elif expected.check is not None:
        found += _released_by_job(facts)
    else:
        found += [f"alert {a} fired though nothing was wrong" for a in sorted(facts.alerts - {"SDCWatchdog"})]
    if "SDCWatchdog" not in facts.alerts:
        found.append("the watchdog never arrived at the pager")
    return found


def _replaced(facts: Facts) -> list[str]:
    bad, case = plan.instance_id(plan.BAD), facts.case or {}
    found = []
    if case.get("state") != "closed" or case.get("outcome") != "replaced":
        found.append(f"the case is {case.get('state')!r} ({case.get('outcome')!r}), expected closed and replaced")
    finished = {e["instance"] for e in facts.log if e["kind"] == "done"}
    if bad in finished or facts.replacements.get(bad) not in finished:
        found.append(f"finished on {sorted(finished)}; expected the replacement of {bad} among them, and not itself")
    if "paged" not in facts.moments:
        found.append("no page named the node")
    return found


def _released_by_job(facts: Facts) -> list[str]:
    event = facts.events[0] if facts.events else None
    found = []
    if event is None or not event.candidates or not event.differing or event.path != "reduce":
        found.append("the event must say the reduce path, the ranks that differed and, apart, the candidates")
    if set(facts.preflight.values()) != {"pass"} or len(facts.preflight) != len(plan.NODES):
        found.append(f"preflight must pass on all nodes, got {facts.preflight}")
    if facts.released is None or facts.released["released"]["by"] != "job":
        found.append("the job must release the latch itself")
    started = {e["instance"] for e in facts.log if e["kind"] == "start"}
    if started != {plan.instance_id(n) for n in range(len(plan.NODES))}:
        found.append(f"the job must go on with the same nodes, ran on {sorted(started)}")
    if "paged" not in facts.moments:
        found.append("the page to the job's owner never arrived")
    return found


def sentence(scenario: plan.Scenario, report: dict[str, Any], facts: Facts, wrong: list[str]) -> str:
    """The outcome in one sentence."""
    if wrong:
        return f"NOT as expected: {'; '.join(wrong)}."
    same = "the final weights equal those of the run that never had a fault, bit for bit"
    if report["check"] is None:
        return f"Nothing fired but the watchdog, and {same}."
    seen = f"{report['check']} saw it at step {report['detected_step']}"
    back = f"the job went on from the {report['resumed_from_trust']} checkpoint of step {report['resumed_from_step']}"
    if report["suspect_rank"] is None:
        event = facts.events[0]
        return (
            f"{seen} before the weights, on the reduce path (differing ranks {list(event.differing)}, candidates "
            f"{list(event.candidates)}); nobody was blamed, every node passed preflight, {back} on the same nodes, "
            f"and {same}."
        )
    return (
        f"{seen} and named rank {report['suspect_rank']} on {report['suspect_node']}; "
        f"{report['seconds_event_to_replaced']:.0f} s later another instance ran in its place, {back}, and {same}."
    )
