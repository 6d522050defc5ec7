"""Breaks each verdict rule once, in a copy, and shows that a test turns red: `make mutants`.

A rule whose breakage no test notices is a rule that the next change may lose. Each row names a file of the verdict
engine, the text to break, what to put there, and the test file that must notice. Exits 1 when a broken rule survives
or a row matches nothing. `--only intake.py` tries the rows whose file or text has that in it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Longest time for the tests of one row; more is no answer, on a busy machine or because a broken rule never ends.
SECONDS = 300

#: (file, text, broken text, test file), one a rule.
RULES = (
    ("partition.py", "if 2 * count <= group.size:", "if 2 * count < group.size:", "weights"),
    ("partition.py", "if 2 * held <= len(order):", "if False:", "weights"),
    ("partition.py", "return len(set(zip(before, after, strict=True))) > len(set(before))", "return False", "weights"),
    ("weights.py", "first = not seen_weights and splits(old_weights, weights)", "first = False", "weights"),
    ("weights.py", "if splits(stage.before, part):", "if part:", "weights"),
    (
        "weights.py",
        "if gradient_differs or since is None or needed is None or since > needed:",
        "if False:",
        "weights",
    ),
    ("weights.py", 'if not columns.same("gradient_begin"):', "if False:", "weights"),
    ("weights.py", "    if signs:\n        return replace", "    if False:\n        return replace", "weights"),
    ("weights.py", "signs += _code_wrote(run, stage)", "signs += ()", "weights"),
    (
        "weights.py",
        'return ("written",) if stage.path == WEIGHTS_AT_REST and',
        'return ("written",) if False and',
        "weights",
    ),
    ("weights.py", "return steps is not None and set(steps) ==", "return True or set(steps or ()) ==", "weights"),
    ("weights.py", "if ran and (stepped or not history.counters):", "if True:", "weights"),
    ("signs.py", "if name in COUNTERS else None", "if False else None", "weights"),
    ("signs.py", 'known = then.get("unfinished", (0,) * len(unfinished))', "known = (0,) * len(unfinished)", "weights"),
    ("weights.py", "signs + seen_before", "signs", "weights"),
    (
        "gradient.py",
        "    if all_nonfinite(columns):\n        return Outcome",
        "    if False:\n        return Outcome",
        "gradient",
    ),
    (
        "gradient.py",
        'return product(columns.labels("reduced"), columns.labels("reduced_nonfinite"))',
        'return columns.labels("reduced")',
        "gradient",
    ),
    (
        "gradient.py",
        "candidates=() if signs else tuple(range(group.size))",
        "candidates=() if signs else differing",
        "gradient",
    ),
    ("intake.py", "or row.rank != group.ranks[slot]", "", "transport"),
    ("intake.py", 'and columns.column("rank") == group.ranks', "", "transport"),
    ("intake.py", 'and columns.distinct("error") <= {0, None}', "", "transport"),
    ("intake.py", "return row.step <= sent", "return False", "transport"),
    ("engine.py", "    return replace(history, gradient_clean_since=None)\n", "    return history\n", "transport"),
    ("engine.py", "    if history.open", "    if False", "audit"),
    ("engine.py", "contains = highest_code >= CONTAINS_FROM", "contains = False", "transport"),
    (
        "audit.py",
        "edges = frozenset(owner for owner, key in keys.items() if key in before.edges)",
        "edges = frozenset(keys)",
        "audit",
    ),
    (
        "audit.py",
        "shown = frozenset(rank for rank, key in originals.items() if key in before.originals)",
        "shown = everyone",
        "audit",
    ),
    ("audit.py", "if not transit_ok or", "if", "audit"),
    ("audit.py", "any(row.batch_unchanged != 1 or", "any(", "audit"),
    ("audit.py", "or row.batch_sent is None for row in first", "for row in first", "audit"),
    ("audit.py", "if len(weights) != 1 or None in weights", "if False", "audit"),
    ("edges.py", "and len(_far_nodes(group, ranks)) >= 2", "", "edges"),
    ("edges.py", "and not view.original_differs(owner):", "and True:", "edges"),
    ("edges.py", "if 2 * len(apart) >= len(view.shown) and", "if False and", "edges"),
    ("edges.py", "and (len(apart), len(view.shown)) != (1, 2):", ":", "edges"),
    ("edges.py", "    if common:\n", "    if False:\n", "edges"),
    ("edges.py", "if 2 * len(failing) >= len(view.judged):", "if False:", "edges"),
    (
        "edges.py",
        "    if owner not in view.shown or view.served[owner] != view.original[owner]:",
        "    if True:",
        "edges",
    ),
    ("edges.py", "    if view.unsure:\n", "    if False:\n", "audit"),
    ("edges.py", "    if len(group.node_order) != 2:", "    if True:", "edges"),
    ("replay.py", "return row.served_digest if same_input else None", "return row.served_digest", "audit"),
    ("replay.py", "audited = step if everyone and not history.tainted", "audited = step if everyone", "edges"),
    ("replay.py", "audited = step if everyone and", "audited = step if", "audit"),
    ("replay.py", "and _originals_speak_alike(seen)", "", "audit"),
    ("outcome.py", "new=False", "new=True", "gradient"),
)


def survives(copy: Path, rule: tuple[str, str, str, str]) -> str:
    """Runs the tests against one broken rule; returns why that is not good, empty when a test noticed."""
    name, text, broken, test = rule
    file = copy / "sdcwatch" / "verdict" / name
    source = file.read_text()
    if text not in source:
        return "the row matches nothing: update it"
    file.write_text(source.replace(text, broken, 1))
    try:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider"),
                str(ROOT / "tests" / "exporter" / f"test_verdict_{test}.py"),
            ],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {SECONDS} s"
    finally:
        file.write_text(source)
    return "" if done.returncode == 1 else f"SURVIVED (pytest ended with {done.returncode})"


def main() -> int:
    """Breaks every rule, or those that were asked for, and prints one line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose file or text to break has this in it")
    only = parser.parse_args().only
    rules = [rule for rule in RULES if only in rule[0] or only in rule[1]]
    bad = int(not rules)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "exporter" / "sdcwatch", copy / "sdcwatch", ignore=shutil.ignore_patterns("__pycache__"))
        for number, rule in enumerate(rules, 1):
            why = survives(copy, rule)
            bad += bool(why)
            print(f"{number:>2}/{len(rules)} {rule[0]:<13} {why or 'noticed':<40} {rule[1].strip()[:70]}", flush=True)
    print(f"{len(rules) - bad} of {len(rules)} broken rules were noticed" if rules else f"no row has {only!r} in it")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
