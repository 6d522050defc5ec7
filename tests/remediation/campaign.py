"""The campaign `make campaign-remediation`: a thousand random schedules of the whole service, on a virtual clock.

Each schedule is repeatable: `--seed N --count 1` runs that one again and prints what happened in it. Results go to
`benchmarks/out/remediation/`, one line a schedule, so that a campaign that was stopped goes on where it was; another
version of the service begins afresh. Status 1 when one thing happened that must never happen, with the seed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import fields
from pathlib import Path
from typing import Any

import sdcwatch_remediation
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from sdcwatch_remediation.testing.schedule_report import summary, table, write_block
from sdcwatch_remediation.testing.schedules import Result, describe, run

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "benchmarks" / "out" / "remediation"
DOCUMENT = ROOT / "docs" / "remediation-proof.md"


def one(seed: int) -> Result:
    """Run one schedule in a folder of its own, in memory where there is room for that."""
    logging.disable(logging.CRITICAL)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        return run(seed, Path(folder))


def version() -> str:
    """Return what the results belong to: a digest of the package's sources."""
    digest = hashlib.sha256()
    folder = Path(sdcwatch_remediation.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def known(path: Path) -> dict[int, dict[str, Any]]:
    """Return the results of an earlier run, by seed; a torn last line is left out."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            result = json.loads(line)
        except ValueError:
            continue
        found[result["seed"]] = result
    return found


def results(seeds: list[int], workers: int, minutes: float) -> Iterator[Result]:
    """Run schedules side by side, and yield each as it ends."""
    began, pending = time.monotonic(), iter(seeds)
    with ProcessPoolExecutor(workers) as pool:
        running = {pool.submit(one, seed) for _, seed in zip(range(workers * 2), pending, strict=False)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
            within = time.monotonic() - began < minutes * 60
            while within and len(running) < workers * 2 and (seed := next(pending, None)) is not None:
                running.add(pool.submit(one, seed))


def main() -> int:
    """Run the schedules that have no result yet, and say what all of them came to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--count", type=int, default=1000, help="how many schedules (default 1000)")
    parser.add_argument("--workers", type=int, default=2, help="processes that run them side by side (default 2)")
    parser.add_argument("--minutes", type=float, default=120.0, help="begin no further one after this long")
    parser.add_argument("--fresh", action="store_true", help="forget the results of an earlier run")
    parser.add_argument("--document", action="store_true", help="write the table in docs/remediation-proof.md")
    arguments = parser.parse_args()
    if arguments.count == 1:
        result = one(arguments.seed)
        print("\n".join([*result.trace, describe(result)]))
        return 1 if result.problems else 0
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"schedules-{version()}.jsonl"
    if arguments.fresh:
        path.unlink(missing_ok=True)
    wanted = range(arguments.seed, arguments.seed + arguments.count)
    done = {seed: result for seed, result in known(path).items() if seed in wanted}
    print(f"seeds {wanted.start} to {wanted.stop - 1}; {len(done)} have a result in {path.relative_to(ROOT)}")
    began, before = time.monotonic(), len(done)
    columns = (
        TextColumn("schedules"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, disable=not sys.stdout.isatty()) as bar, path.open("a") as out:
        task = bar.add_task("", total=arguments.count, completed=len(done))
        for result in results([seed for seed in wanted if seed not in done], arguments.workers, arguments.minutes):
            # Not `asdict`: it makes a Counter of (key, count) pairs out of a Counter.
            line = {field.name: getattr(result, field.name) for field in fields(result) if field.name != "trace"}
            out.write(json.dumps(line) + "\n")
            out.flush()
            done[result.seed] = json.loads(json.dumps(line))
            if result.problems:
                print(f"BAD {describe(result)}", flush=True)
            bad = sum(bool(one["problems"]) for one in done.values())
            bar.update(task, completed=len(done), description=f"{bad} bad")
            if bar.disable and len(done) % 50 == 0:
                print(f"[{time.monotonic() - began:5.0f} s] {len(done)} of {arguments.count}, {bad} bad", flush=True)
    found = summary(list(done.values()))
    seconds = time.monotonic() - began
    print(f"{len(done) - before} schedules in {seconds:.0f} s; all {len(done)}:")
    (OUT / "schedules.json").write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    if arguments.document:
        write_block(DOCUMENT, "schedules", table(found))
    return 1 if found["bad"] or len(done) < arguments.count else 0


if __name__ == "__main__":
    sys.exit(main())
