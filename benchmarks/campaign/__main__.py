"""Runs the campaign: `python -m benchmarks.campaign`; see `benchmarks.campaign` for its parts.

Goes on where a killed one was. Writes `benchmarks/out/campaign.json` and, when it is whole, `docs/detection.md`. Exits
1 when a guarantee is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("SDCWATCH_AGENT", "off")
os.environ.setdefault("SDCWATCH_MAX_OVERHEAD", "0")  # models of a few kilobytes: the cadences are those of the list

import sdcwatch.monitor  # noqa: F401  the same
import torch
import torch._dynamo  # DDP's constructor imports it: seconds that every forked rank would pay again
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from sdcwatch import __version__

from benchmarks.campaign import document, guarantees, healthy, ondisk, peers, simulated, training
from benchmarks.campaign.cases import LAYOUTS, PRECISIONS, SEED, Case, fault_list, quick_list
from benchmarks.campaign.journal import OUT, Journal, product_digest
from benchmarks.campaign.pool import Answer, Job, Pool, run_all
from benchmarks.campaign.score import BROKEN, score, score_sdcguard

#: Steps of each healthy run: so many that the comparisons of all of them pass 100,000.
HEALTHY_STEPS, QUICK_STEPS = 34, 12
#: Faults between two healthy runs: a campaign that was stopped early has some of each.
BETWEEN = 5


def main() -> int:
    """Parses the command line, runs what is missing, writes and judges."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaign", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="some dozen faults and short healthy runs; no document")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--pools", type=int, default=2, help="pools of ranks that work side by side")
    parser.add_argument("--limit", type=int, default=0, help="only the first so many faults (for a look)")
    parser.add_argument("--no-peers", action="store_true", help="leave sdcguard out")
    parser.add_argument("--document", action="store_true", help="run nothing: judge and write what is there")
    options = parser.parse_args()
    name = "campaign-quick" if options.quick else "campaign"
    with_peer = not options.no_peers and peers.fetch()
    made = {"product": product_digest(), "seed": options.seed, "sdcguard": peers.VERSION if with_peer else None}
    journal = Journal(name, made)
    cases = quick_list(options.seed) if options.quick else fault_list(options.seed)
    cases = cases[: options.limit or len(cases)]
    begin = time.time()
    if not options.document:
        with tempfile.TemporaryDirectory(prefix="sdcwatch-campaign-") as scratch:
            _run(journal, cases, Path(scratch), options, with_peer)
    result = _result(cases, journal, options)
    result["made"] |= {**made, "seconds": round(time.time() - begin, 1)}
    (OUT / f"{name}.json").write_text(json.dumps(result, indent=1))
    if not options.quick and not options.limit:
        document.write(result)
    return _tell(result)


def _run(journal: Journal, cases: list[Case], scratch: Path, options: Any, with_peer: bool) -> None:
    by_key = {case.key: case for case in cases}
    pools = {world: Pool(world, scratch) for world in LAYOUTS}
    for number, case in enumerate(cases):
        if case.key not in journal.results:
            pools[case.world].waiting.append(Job(case.key, training.run, (case, number)))
    loops = dict(_healthy_jobs(options.quick))
    for key, (world, arguments) in loops.items():
        if key not in journal.results:
            _put_between(pools[world], Job(key, healthy.run, arguments))
    other = {f"sdcguard|{case.key}": case for case in cases} if with_peer else {}
    for key, case in other.items():
        known = journal.results.get(case.key, {}).get("peers", {})
        if key not in journal.results and "sdcguard" not in known:
            pools[case.world].waiting.append(Job(key, peers.run, (case,)))
    total = len(cases) + len(loops) + len(other)
    jobs = sum(len(pool.waiting) for pool in pools.values())
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, refresh_per_second=2) as progress:
        bar = progress.add_task("faults, healthy loops, sdcguard", total=total, completed=total - jobs)
        for answer in run_all(list(pools.values()), options.pools):
            if answer.error:
                progress.console.print(f"[red]{answer.job.key}: {answer.error}")
            journal.add(answer.job.key, _one(answer, by_key, other, journal))
            progress.advance(bar)
            for folder in scratch.glob(f"world-*/node-*/*/{_job_name(answer.job)}*"):
                shutil.rmtree(folder, ignore_errors=True)
        disk = ondisk.cases(options.seed, quick=options.quick)
        bar = progress.add_task("checkpoints on disk", total=len(disk))
        for case in disk:
            if case.key not in journal.results:
                journal.add(case.key, ondisk.run(case, scratch))
            progress.advance(bar)
        layouts = simulated.QUICK if options.quick else simulated.GROUPS
        bar = progress.add_task("simulated groups", total=len(layouts))
        for layout, steps in layouts:
            key = f"simulated|{sum(layout)}"
            if key not in journal.results:
                journal.add(key, simulated.run(layout, 5 if options.quick else steps, options.seed))
            progress.advance(bar)


def _job_name(job: Job) -> str:
    """What the job is called in the spool: the last argument of both kinds of runs decides it."""
    return str(job.arguments[-1]) if job.run is healthy.run else f"campaign-{job.arguments[-1]}"


def _put_between(pool: Pool, job: Job) -> None:
    """Puts one healthy run behind the next few faults."""
    last = max((i for i, known in enumerate(pool.waiting) if known.run is healthy.run), default=-1)
    pool.waiting.insert(min(last + 1 + BETWEEN, len(pool.waiting)), job)


def _one(answer: Answer, cases: dict[str, Case], other: dict[str, Case], journal: Journal) -> dict[str, Any]:
    """One answer as the journal keeps it."""
    key = answer.job.key
    if key in cases:
        return _fault(cases[key], answer)
    if key in other:
        struck = journal.results[other[key].key]["struck"]
        said = BROKEN if answer.error else score_sdcguard(other[key], struck, answer.values)
        return {"outcome": said, "cpu": round(answer.cpu, 3)}
    return _loop(answer)


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
        nothing: dict[str, Any] = {"seen_step": None, "first": None, "struck": [], "elements": 0, "peers": {}}
        failed = {"error": answer.error, "times_bound": 0.0, "loud_step": None, "agreed": False, "failures": 1}
        return {**nothing, "outcome": BROKEN, **failed}
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
    comparisons = sum(sum(part["checks"].values()) for part in parts)
    return {
        "key": answer.job.key,
        "scenario": name,
        "comparisons": comparisons,
        "rank_rows": sum(sum(part["checks"].values()) for value in answer.values for part in value),
        "checks": {
            check: sum(part["checks"][check] for part in parts) for check in (parts[0]["checks"] if parts else ())
        },
        "skipped": {k: v for part in parts for k, v in part["skipped"].items()},
        "verdicts": [f"{v['kind']} {v['check']}" for v in verdicts],
        "outliers": sum(part["outlier"] for value in answer.values for part in value),
        "false": false,
        "cpu": round(answer.cpu, 3),
    }


def _result(cases: list[Case], journal: Journal, options: Any) -> dict[str, Any]:
    """All that the journal holds of this campaign, judged; what has not run is not in it."""
    cases = [*cases, *ondisk.cases(options.seed, quick=options.quick)]
    loop_keys = [key for key, _ in _healthy_jobs(options.quick)]
    rows = [(case, _with_sdcguard(case, journal)) for case in cases if case.key in journal.results]
    loops = [journal.results[key] for key in loop_keys if key in journal.results]
    groups = [g for layout, _ in simulated.GROUPS if (g := journal.results.get(f"simulated|{sum(layout)}"))]
    full = not (options.quick or options.limit)
    promises = [*guarantees.of_faults(rows), *guarantees.of_healthy(loops, full), *guarantees.of_simulated(groups)]
    if full:
        few = () if len(rows) >= guarantees.FAULTS else (f"{len(rows)} faults",)
        promises.append(guarantees.Guarantee(f"at least {guarantees.FAULTS:,} injected faults", len(rows), few))
    return {
        "made": {
            "sdcwatch": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "planned": {"faults": len(cases), "healthy": len(loop_keys)},
            "cpu_seconds": round(sum(r.get("cpu", 0.0) for r in journal.results.values()), 1),
        },
        "guarantees": [
            {"text": g.text, "cases": g.cases, "broken": list(g.broken), "holds": g.holds} for g in promises
        ],
        "faults": [{"case": dataclasses.asdict(c), "result": r} for c, r in rows],
        "healthy": loops,
        "simulated": groups,
    }


def _with_sdcguard(case: Case, journal: Journal) -> dict[str, Any]:
    result: dict[str, Any] = journal.results[case.key]
    peer = journal.results.get(f"sdcguard|{case.key}")
    return result if peer is None else {**result, "peers": {**result["peers"], "sdcguard": peer["outcome"]}}


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
