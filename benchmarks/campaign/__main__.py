"""Runs the campaign: `python -m benchmarks.campaign`; see `benchmarks.campaign` for its parts.

Goes on where a killed one was. Writes `benchmarks/out/campaign.json` and, when it is whole, `docs/detection.md`. Exits
1 when a guarantee is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("SDCWATCH_AGENT", "off")

import sdcwatch.monitor  # noqa: F401  the same
import torch
import torch._dynamo  # DDP's constructor imports it: seconds that every forked rank would pay again
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from sdcwatch import __version__

from benchmarks.campaign import document, guarantees, healthy, ondisk, peers, simulated, training
from benchmarks.campaign.cases import LAYOUTS, PRECISIONS, SEED, Case, fault_list, quick_list
from benchmarks.campaign.journal import OUT, Journal, product_digest
from benchmarks.campaign.pool import Answer, Job, Pool, run_all
from benchmarks.campaign.score import score

#: Steps of each healthy run: so many that the comparisons of all of them pass 100,000.
HEALTHY_STEPS, QUICK_STEPS = 62, 12


def main() -> int:
    """Parses the command line, runs what is missing, writes and judges."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaign", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="some dozen faults and short healthy runs; no document")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--pools", type=int, default=2, help="pools of ranks that work side by side")
    parser.add_argument("--limit", type=int, default=0, help="only the first so many faults (for a look)")
    parser.add_argument("--no-peers", action="store_true", help="leave sdcguard out")
    parser.add_argument("--document", action="store_true", help="only write docs/detection.md from the last result")
    options = parser.parse_args()
    name = "campaign-quick" if options.quick else "campaign"
    if options.document:
        document.write(json.loads((OUT / f"{name}.json").read_text()))
        return 0
    with_peer = not options.no_peers and peers.fetch()
    made = {"product": product_digest(), "seed": options.seed, "sdcguard": peers.VERSION if with_peer else None}
    journal = Journal(name, made)
    cases = quick_list(options.seed) if options.quick else fault_list(options.seed)
    cases = cases[: options.limit or len(cases)]
    begin = time.time()
    with tempfile.TemporaryDirectory(prefix="sdcwatch-campaign-") as scratch:
        result = _run(journal, cases, Path(scratch), options, with_peer)
    result["made"] |= {**made, "seconds": round(time.time() - begin, 1)}
    (OUT / f"{name}.json").write_text(json.dumps(result, indent=1))
    if not options.quick and not options.limit:
        document.write(result)
    return _tell(result)


def _run(journal: Journal, cases: list[Case], scratch: Path, options: Any, with_peer: bool) -> dict[str, Any]:
    by_key = {case.key: case for case in cases}
    pools = {world: Pool(world, scratch) for world in LAYOUTS}
    for number, case in enumerate(cases):
        if case.key not in journal.results:
            pools[case.world].waiting.append(Job(case.key, training.run, (case, number, with_peer)))
    loops = dict(_healthy_jobs(options.quick))
    for key, (world, arguments) in loops.items():
        if key not in journal.results:
            pools[world].waiting.append(Job(key, healthy.run, arguments))
    jobs = sum(len(pool.waiting) for pool in pools.values())
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, refresh_per_second=2) as progress:
        bar = progress.add_task(
            "faults and healthy loops", total=len(cases) + len(loops), completed=len(cases) + len(loops) - jobs
        )
        for answer in run_all(list(pools.values()), options.pools):
            if answer.error:
                progress.console.print(f"[red]{answer.job.key}: {answer.error}")
            case = by_key.get(answer.job.key)
            journal.add(answer.job.key, _fault(case, answer) if case else _loop(answer))
            progress.advance(bar)
            if not any(pool.running for pool in pools.values()):
                healthy.clear(scratch)
        disk = ondisk.cases(options.seed, quick=options.quick)
        bar = progress.add_task("checkpoints on disk", total=len(disk))
        for case in disk:
            if case.key not in journal.results:
                journal.add(case.key, ondisk.run(case, scratch))
            progress.advance(bar)
        bar = progress.add_task("simulated groups", total=len(simulated.GROUPS))
        for layout, steps in simulated.GROUPS:
            key = f"simulated|{sum(layout)}"
            if key not in journal.results:
                journal.add(key, simulated.run(layout, 5 if options.quick else steps, options.seed))
            progress.advance(bar)
    rows = [(case, journal.results[case.key]) for case in [*cases, *disk]]
    return _result(rows, [journal.results[key] for key in loops], journal, options)


def _healthy_jobs(quick: bool) -> Iterable[tuple[str, tuple[int, tuple[Any, ...]]]]:
    steps = QUICK_STEPS if quick else HEALTHY_STEPS
    number = itertools.count()
    for name, precision, world in itertools.product(healthy.SCENARIOS, PRECISIONS, LAYOUTS):
        for nodes in dict.fromkeys(LAYOUTS[world]):
            if quick and (world, precision, len(nodes)) != (3, PRECISIONS[0], 3):
                continue
            key = f"healthy|{name}|{precision}|{nodes}|{steps}"
            yield key, (world, (name, nodes, precision, steps, f"healthy-{next(number)}"))


def _fault(case: Case, answer: Answer) -> dict[str, Any]:
    if answer.error:
        return {"outcome": "broken", "error": answer.error, "seen_step": None, "first": None, "struck": [], "elements": 0,
                "error_size": None, "times_bound": 0.0, "contained": False, "agreed": False, "failures": 1, "software": [],
                "peers": {}, "cpu": 0.0}  # fmt: skip
    return {**score(case, answer.values), "cpu": round(answer.cpu, 3)}


def _loop(answer: Answer) -> dict[str, Any]:
    """One healthy run: comparisons over the group, and verdicts that are false there."""
    name = answer.job.arguments[0]
    allowed = healthy.SCENARIOS[name]
    # the rank that leaves knows only the first part
    parts = answer.values[0] if answer.values else []
    verdicts = [v for part in parts for v in part["verdicts"] if v["kind"] != "undefined"]
    false = [
        f"{v['kind']} {v['check']}: {v['sentence']}" for v in verdicts if v["kind"] not in allowed or v["suspects"]
    ]
    if answer.error:
        false.append(answer.error)
    ranks = sum(answer.job.arguments[1])
    comparisons = sum(sum(part["checks"].values()) for part in parts)
    return {
        "key": answer.job.key,
        "scenario": name,
        "comparisons": comparisons,
        "rank_rows": comparisons * ranks,
        "checks": {
            check: sum(part["checks"][check] for part in parts) for check in (parts[0]["checks"] if parts else ())
        },
        "skipped": {k: v for part in parts for k, v in part["skipped"].items()},
        "verdicts": [f"{v['kind']} {v['check']}" for v in verdicts],
        "outliers": sum(part["outlier"] for value in answer.values for part in value),
        "false": false,
        "cpu": round(answer.cpu, 3),
    }


def _result(rows: list[Any], loops: list[Any], journal: Journal, options: Any) -> dict[str, Any]:
    groups = [journal.results[f"simulated|{sum(layout)}"] for layout, _ in simulated.GROUPS]
    full = not (options.quick or options.limit)
    promises = [*guarantees.of_faults(rows), *guarantees.of_healthy(loops, full), *guarantees.of_simulated(groups)]
    if full:
        few = () if len(rows) >= guarantees.FAULTS else (f"{len(rows)} faults",)
        promises.append(guarantees.Guarantee(f"at least {guarantees.FAULTS:,} injected faults", len(rows), few))
    import dataclasses

    return {
        "made": {
            "sdcwatch": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "cpu_seconds": round(sum(r.get("cpu", 0.0) for _, r in rows) + sum(r["cpu"] for r in loops), 1),
        },
        "guarantees": [
            {"text": g.text, "cases": g.cases, "broken": list(g.broken), "holds": g.holds} for g in promises
        ],
        "faults": [{"case": dataclasses.asdict(c), "result": r} for c, r in rows],
        "healthy": loops,
        "simulated": groups,
    }


def _tell(result: dict[str, Any]) -> int:
    bad = 0
    for one in result["guarantees"]:
        bad += not one["holds"]
        print(f"{'holds ' if one['holds'] else 'MISSED'} {one['cases']:>5} {one['text']}")
        for line in one["broken"][:5]:
            print(f"         {line}")
    print(f"{len(result['guarantees']) - bad} of {len(result['guarantees'])} guarantees hold")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
