"""The campaign `make campaign-kill`: real processes of the service, killed with SIGKILL while a node is replaced.

Every run is one fault, one simulated HyperPod over HTTP, and `serve`: alone on SQLite, or twice on a PostgreSQL of our
own where its programs are there. Results go to `benchmarks/out/remediation/kills-*.jsonl`, one line a run; a campaign
that was stopped goes on where it was. Status 1 when one thing happened that must never happen.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from campaign import DOCUMENT, OUT, ROOT, known, version
from sdcwatch_remediation.testing.kills import KillResult, run
from sdcwatch_remediation.testing.postgres import PostgresServer, programs
from sdcwatch_remediation.testing.schedule_report import write_block


@contextlib.contextmanager
def postgres(wanted: bool) -> Iterator[PostgresServer | None]:
    """Start a PostgreSQL of our own, or none."""
    found = programs(ROOT / ".tools" / "postgresql" / "bin") if wanted else None
    if found is None:
        yield None
        return
    with PostgresServer(found) as server:
        yield server


def one(seed: int, url: str) -> KillResult:
    """Make one run in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return run(seed, Path(folder), postgres=url)


def table(results: list[dict[str, Any]]) -> str:
    """Return what the runs came to, as Markdown."""
    bad = sum(bool(result["problems"]) for result in results)
    bases = Counter(result["database"] for result in results)
    moments = Counter(moment for result in results for moment in result["moments"])
    faults = Counter(result["fault"] or "none" for result in results)
    ends = Counter(result["end"] for result in results)
    seeds = [result["seed"] for result in results]
    lines = [
        f"{len(results)} runs (seeds {min(seeds)} to {max(seeds)}): **{bad} with a problem**. "
        f"{bases['sqlite']} on SQLite with one process, {bases['postgresql']} on PostgreSQL with two. "
        f"{sum(moments.values())} kills; {sum(result['acknowledged'] for result in results)} deliveries were "
        f"acknowledged and all are kept; {sum(result['effects'] for result in results)} instances were replaced, "
        f"with {sum(result['calls'] for result in results)} requests.",
        "",
        "| killed at | times |",
        "|---|---:|",
        *(f"| {moment} | {count} |" for moment, count in moments.most_common()),
        "",
        f"The provider's fault: {', '.join(f'{name} {count}' for name, count in faults.most_common())}. "
        f"Cases ended as: {', '.join(f'{name} {count}' for name, count in ends.most_common())}.",
    ]
    return "\n".join(lines)


def main() -> int:
    """Make the runs that have no result yet, and say what all of them came to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--count", type=int, default=60, help="how many runs (default 60)")
    parser.add_argument("--side-by-side", type=int, default=4, help="runs at once; most is waiting (default 4)")
    parser.add_argument("--document", action="store_true", help="write the table in docs/remediation-proof.md")
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"kills-{version()}.jsonl"
    wanted = range(arguments.seed, arguments.seed + arguments.count)
    done = {seed: result for seed, result in known(path).items() if seed in wanted}
    left = [seed for seed in wanted if seed not in done]
    began = time.monotonic()
    print(
        f"seeds {wanted.start} to {wanted.stop - 1}; {len(done)} have a result in {path.relative_to(ROOT)}", flush=True
    )
    with postgres(bool(left)) as server, ThreadPoolExecutor(arguments.side_by_side) as pool, path.open("a") as out:
        urls = {seed: server.new_database() if server is not None and seed % 2 else "" for seed in left}
        for future in as_completed([pool.submit(one, seed, urls[seed]) for seed in left]):
            result = asdict(future.result())
            out.write(json.dumps(result) + "\n")
            out.flush()
            done[result["seed"]] = result
            print(
                f"[{time.monotonic() - began:5.0f} s] {len(done)} of {arguments.count}: seed {result['seed']} "
                f"{result['database']}, killed at {', '.join(result['moments']) or 'nothing'}: "
                f"{'; '.join(result['problems']) or result['end']}",
                flush=True,
            )
    results = [done[seed] for seed in sorted(done)]
    print(table(results))
    if arguments.document:
        write_block(DOCUMENT, "kills", table(results))
    return 1 if any(result["problems"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
