"""Breaks each guard of the service once, in a copy, and shows that a random schedule (or a named test) turns red.

`make mutants-remediation`. A campaign that finds nothing proves something only if it would have found it. Each row
names what is broken, and the texts to replace in which files; where two guards stand behind each other both are taken
away. Exits 1 when a broken guard survives `--seeds` schedules, or a row matches nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = "sdcwatch_remediation"

ONCE = (
    "schema.py",
    """"action",
        unique=True,""",
    """"action",
        unique=False,""",
)
#: What is broken, and (file, text, broken text) of each guard that stands there.
GUARDS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "an unknown outcome is tried again": (
        ONCE,
        (
            "actions/replace.py",
            'if live := [intent for intent in intents if intent.outcome != "refused"]:',
            "if live := []:",
        ),
        (
            "actions/replace.py",
            "if result.outcome is not Outcome.REFUSED:",
            "if result.outcome is Outcome.ACCEPTED:",
        ),
        ("actions/replace.py", "    if not result.retryable:\n", "    if False:\n"),
    ),
    "two processes move a case at once": (
        ONCE,
        ("store.py", "if fenced and self._fence is not None:", "if False:"),
        ("worker.py", "if not self.context.lease.hold():", "if False:"),
        ("worker.py", "or not ctx.lease.hold():", "or False:"),
        ("actions/replace.py", 'ctx.stop() or ("" if ctx.lease.hold()', 'ctx.stop() or ("" if True'),
        (
            "actions/replace.py",
            'if live := [intent for intent in intents if intent.outcome != "refused"]:',
            "if live := []:",
        ),
    ),
    "one agent is enough": (("proof.py", "WITNESSES = 2", "WITNESSES = 1"),),
    "one transient is enough": (("policy.py", 'if policy.confirm == "first":', "if True:"),),
    "two named in one event are both acted on": (
        ("policy.py", 'Gate("one_suspect", len(suspects) == 1,', 'Gate("one_suspect", True,'),
        ("policy.py", '"one_case_in_job", not same_job,', '"one_case_in_job", True,'),
    ),
    "nobody's approval is needed": (
        ("actions/isolate.py", '(decision.mode == "approve" and case.approved)', '(decision.mode == "approve")'),
        (
            "actions/isolate.py",
            'if mode == "auto" or (mode == "approve" and case.approved',
            "if True or (case.approved",
        ),
        ("casework.py", '"approve": "awaiting_approval"', '"approve": "containing"'),
    ),
    "a pause stops nothing": (
        ("context.py", "if paused:", "if False:"),
        ("ledger.py", "if paused := _pause_in(connection):", "if paused := None:"),
    ),
    "a hold stops nothing": (
        ("policy.py", 'Gate("not_held", not facts.held,', 'Gate("not_held", True,'),
        ("ledger.py", ', table.c.held_by == "")', ")"),
    ),
    "a call that was not recorded is waited for without end": (
        ("actions/replace.py", "and ctx.clock() - live[-1].reserved_at < ANSWER_SECONDS:", "and True:"),
        ("worker.py", "if overdue and not reads:", "if overdue and not reads and False:"),
    ),
    "one failed test of another halt is enough": (
        ("known_answer.py", "if test.latch_id != event.id:", "if False:"),
        ("known_answer.py", "if not event.time < test.time <= now + FUTURE_SECONDS:", "if False:"),
        ("context.py", 'if line["detail"]["latch_id"] == latch_id', "if True"),
    ),
    "a passing known-answer test confirms": (
        ("known_answer.py", 'if test.result == "pass":', "if False:"),
        ("known_answer.py", 'if device.outcome == "fail" for', "for"),
    ),
    "an owner is told without asking the gates": (
        (
            "actions/handing_over.py",
            'if (act is not None and act.name == "suspect") or intent is None:',
            "if intent is None:",
        ),
        ("actions/handing_over.py", "if not permitted(ctx, case, decision):", "if False:"),
        ("ledger.py", 'table.c.state == case.state, table.c.held_by == "")', "table.c.state == case.state)"),
        ("ledger.py", "if paused := _pause_in(connection):", "if paused := None:"),
    ),
    "a handed over node is replaced from here as well": (
        ("actions/isolate.py", '"handing_over" if road == "handover" else "replacing"', '"replacing"'),
    ),
    "an Event is named after the moment": (
        ("actions/handover.py", '"name": f"{head}.{self._case.id}"', '"name": f"{head}.{self._clock():.3f}"'),
        (
            "actions/handover.py",
            'if times(done, "announce", name, "accepted") or tried >= EVENT_TRIES:',
            "if tried >= 2:",
        ),
    ),
    "a condition that others set is written over": (
        ("actions/handover.py", 'if times(done, "suspect", name, "accepted"):', "if False:"),
        ("actions/handover.py", 'if found.get("status") == "True":', "if False:"),
        ("actions/handover.py", "found = _condition(node)", "found: dict[str, Any] = {}"),
    ),
    "a rejected node keeps its condition": (
        ("actions/handover.py", "if node is None or not _ours(_condition(node), ours):", "if True:"),
    ),
    "somebody else's cordon is taken for nobody's": (
        (
            "actions/eks.py",
            'if node.get("spec", {}).get("unschedulable") and marked != ours else ""',
            'if False else ""',
        ),
    ),
    "every pod on the node is evicted": (("actions/eks.py", "if job in pod.jobs and not pod.of_node]", "]"),),
    "a second case for one instance": (("batch.py", 'if case_id := self._joined.get(key, ""):', 'if case_id := "":'),),
}

#: Guards at moments that schedules meet too rarely: the test that holds them must turn red instead.
TESTS = {
    "two processes move a case at once": (
        "test_service_schedules.py::test_a_second_process_amid_a_replace_call_never_makes_another"
    ),
    "an owner is told without asking the gates": "test_handover.py::test_what_holds_a_replacement_holds_a_handover",
    "one failed test of another halt is enough": (
        "test_service_known_answer.py::test_every_other_answer_ends_as_suspected_with_its_reason"
    ),
    "an Event is named after the moment": (
        "test_handover.py::test_a_crash_amid_an_act_leaves_one_condition_and_one_event"
    ),
    "a rejected node keeps its condition": (
        "test_handover.py::test_a_no_sets_the_condition_to_false_and_a_later_case_may_hand_over_again"
    ),
    "somebody else's cordon is taken for nobody's": (
        "test_eks_action.py::test_a_node_that_others_took_out_of_service_is_left_to_them"
    ),
}

RUN = """
import logging, sys, tempfile
from pathlib import Path
from sdcwatch_remediation.testing.schedules import run
logging.disable(logging.CRITICAL)
memory = Path("/dev/shm")
for seed in range(int(sys.argv[1])):
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        result = run(seed, Path(folder))
    if result.problems:
        print(seed, result.problems[0])
        sys.exit(3)
"""


def broken(folder: Path, edits: tuple[tuple[str, str, str], ...]) -> str:
    """Make a copy of the package with some guards taken away; return a sentence where one is not there."""
    shutil.copytree(ROOT / "remediation" / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text, instead in edits:
        path = folder / PACKAGE / name
        source = path.read_text()
        if source.count(text) < 1:
            return f"{name} does not hold {text!r}"
        path.write_text(source.replace(text, instead))
    return ""


def judge(name: str, seeds: int, limit: float) -> tuple[bool, str]:
    """Return whether the schedules notice one broken guard, and a line about it."""
    test = TESTS.get(name, "")
    how = [sys.executable, "-c", RUN, str(seeds)]
    if test:
        # Plain assertions of pytest end with 1; anything else is no answer.
        how = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / test)]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if missing := broken(folder, GUARDS[name]):
            return False, f"STALE     {name}: {missing}"
        try:
            done = subprocess.run(
                how,
                env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                check=False,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return False, f"SURVIVED  {name}: nothing found in {limit:g} s"
    if test:
        caught = done.returncode == 1
        return caught, f"{'caught   ' if caught else 'SURVIVED '} {name}: {test} ends with {done.returncode}"
    if done.returncode == 3:
        seed, _, problem = done.stdout.strip().partition(" ")
        return True, f"caught    {name}: seed {seed}: {problem}"
    if done.returncode:
        return True, f"caught    {name}: it does not run: {done.stderr.strip().splitlines()[-1]}"
    return False, f"SURVIVED  {name}: {seeds} schedules"


def main() -> int:
    """Break every guard and tell what the schedules made of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=300, help="schedules that each broken guard must not survive")
    parser.add_argument("--only", default="", help="the guards whose name holds this")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one of them; more on a busy machine")
    arguments = parser.parse_args()
    names = [name for name in GUARDS if arguments.only in name]
    with ThreadPoolExecutor(2) as pool:
        results = []
        for result in pool.map(lambda name: judge(name, arguments.seeds, arguments.limit), names):
            print(result[1], flush=True)
            results.append(result[0])
    print(f"{sum(results)} of {len(results)} broken guards caught")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
