"""Runs the campaign: `python -m benchmarks.heal`; see `benchmarks.heal` for its parts.

Goes on where a killed one was, and runs what failed again. Writes `heal.jsonl` (a line a case) and `heal.json`. Exit
status 1 where a case ended otherwise than it must, or has not run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP's constructor imports it: seconds that every forked rank would pay again
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.campaign.journal import OUT, Journal, product_digest
from benchmarks.heal import document, ranks
from benchmarks.heal.cases import Case, all_cases
from benchmarks.heal.lived import Result, clean_digests, lived

#: What decides how a case ends, beside the product.
DECIDES = ("cases.py", "life.py", "lived.py", "ranks.py", "traps.py")


def main() -> int:
    """Parses the command line, runs what is missing, writes and judges."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heal", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[3, 4], help="numbers of ranks")
    parser.add_argument("--only", default="", help="cases whose section, name, when and on_fault hold this text")
    parser.add_argument("--workers", type=int, default=2, help="cases that run side by side")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    parser.add_argument("--document", action="store_true", help="also write docs/healing.md, if all is well")
    options = parser.parse_args()
    whole = all_cases(options.sizes)
    wanted = [c for c in whole if options.only in f"{c.section} {c.name} {c.when} {c.on_fault}"]
    journal = Journal("heal", {"sources": sources_digest(), "torch": torch.__version__}, options.out)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="campaign-heal-") as scratch:
        _run(journal, wanted, Path(scratch), options)
    results = [r for case in wanted if (r := _known(journal, case)) is not None]
    content = [{**r.stored(), "case": asdict(r.case), "fine": not r.trouble} for r in results]
    (options.out / "heal.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    bad = [r for r in results if r.trouble]
    for r in bad:
        print(f"BAD {r.case.key}: {r.trouble}; see {_failed(options.out, r.case)}")
    if options.document and not bad and len(results) == len(whole):
        document.write(results, sum(r.seconds for r in results))
    took = time.monotonic() - begin
    print(f"{len(results) - len(bad)} of {len(wanted)} cases as they must be, {took:.0f} s")
    return int(bool(bad) or not wanted or len(results) < len(wanted))


def sources_digest() -> str:
    """What the results are true of: the product, and the files here that decide how a case ends."""
    digest = hashlib.sha256(product_digest().encode())
    for name in DECIDES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]


def _known(journal: Journal, case: Case) -> Result | None:
    stored = journal.results.get(case.key)
    return None if stored is None else Result.read(case, stored)


def _failed(out: Path, case: Case) -> Path:
    """Where the logs of a case that failed are kept."""
    name = "".join(c if c.isalnum() else "-" for c in case.key)
    return out / "heal-failed" / name


def _run(journal: Journal, wanted: Sequence[Case], scratch: Path, options: argparse.Namespace) -> None:
    """Runs what the journal does not hold, or holds as failed."""
    known = {case.key: _known(journal, case) for case in wanted}
    missing = [case for case in wanted if (r := known[case.key]) is None or r.trouble]
    sizes = sorted({case.size for case in missing})
    clean = {size: clean_digests(size, scratch / f"clean-{size}") for size in sizes}
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    # No thread that redraws: the processes of a case are forked from this one.
    with Progress(TextColumn("{task.description}"), *columns, auto_refresh=False) as progress:
        bar = progress.add_task("faults and kills", total=len(wanted), completed=len(wanted) - len(missing))
        for case, result in side_by_side(missing, scratch, clean, options.workers):
            journal.add(case.key, result.stored())
            state = "[red]BAD" if result.trouble else "ok "
            progress.console.print(
                f"{state} {case.key}: equal={result.equal} healed={result.healed} lives={result.lives} "
                f"repeated={result.repeated} resumed={result.resumed} {result.seconds} s {result.trouble}",
                highlight=False,
                soft_wrap=True,
            )
            folder = scratch / _failed(scratch, case).name
            if result.trouble:
                shutil.copytree(folder, _failed(options.out, case), dirs_exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            progress.advance(bar)
            progress.refresh()


def side_by_side(
    cases: Sequence[Case], scratch: Path, clean: dict[int, list[str]], workers: int
) -> Iterator[tuple[Case, Result]]:
    """Lives through all cases, `workers` at a time, each in a process of its own; as they end."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(reversed(cases)), dict[Any, tuple[Case, Any]]()
    while waiting or running:
        while waiting and len(running) < max(1, workers):
            case = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            root = scratch / _failed(scratch, case).name
            process = context.Process(target=_one, args=(case, root, clean[case.size], theirs))
            process.start()
            theirs.close()
            running[ours] = (case, process)
        for ready in wait(list(running)):
            case, process = running.pop(ready)
            try:
                yield case, ready.recv()  # type: ignore[union-attr]
            except EOFError:
                yield case, Result(case, trouble="its process died")
            process.join()


def _one(case: Case, root: Path, clean: list[str], pipe: Any) -> None:
    ranks.die_with_parent()
    try:
        result = lived(case, root, clean)
    except Exception:
        result = Result(case, trouble=traceback.format_exc())
    pipe.send(result)


if __name__ == "__main__":
    raise SystemExit(main())
