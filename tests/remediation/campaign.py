"""The campaign `make campaign-remediation`: many random schedules of the whole service, on a virtual clock.

Each schedule is repeatable: `--seed N --count 1` runs that one again and prints what happened in it. Status 1 when one
thing happened that must never happen, with the seed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from sdcwatch_remediation.testing.schedules import Result, describe, run


def one(seed: int) -> Result:
    """Run one schedule in a folder of its own, in memory where there is room for that."""
    logging.disable(logging.CRITICAL)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        return run(seed, Path(folder))


def main() -> int:
    """Run the schedules side by side and say what they came to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--count", type=int, default=1000, help="how many schedules (default 1000)")
    parser.add_argument("--workers", type=int, default=2, help="processes that run them side by side (default 2)")
    parser.add_argument("--minutes", type=float, default=120.0, help="begin no further one after this long")
    arguments = parser.parse_args()
    began, done, bad = time.monotonic(), 0, 0
    ends: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    pending = iter(range(arguments.seed, arguments.seed + arguments.count))
    with ProcessPoolExecutor(arguments.workers) as pool:
        running = {pool.submit(one, seed) for _, seed in zip(range(arguments.workers * 2), pending, strict=False)}
        while running:
            future = next(as_completed(running))
            running.discard(future)
            result = future.result()
            done += 1
            ends.update(result.ends)
            totals.update(replaced=result.replaced, kills=result.kills, turns=result.points)
            if result.problems:
                bad += 1
                print(f"BAD {describe(result)}", flush=True)
            if arguments.count == 1:
                print("\n".join([*result.trace, describe(result)]))
            if done % 25 == 0:
                print(f"[{time.monotonic() - began:5.0f} s] {done} schedules, {bad} bad, {dict(totals)}", flush=True)
            within = time.monotonic() - began < arguments.minutes * 60
            if within and (seed := next(pending, None)) is not None:
                running.add(pool.submit(one, seed))
    print(f"{done} schedules from seed {arguments.seed}, {bad} bad; {dict(totals)}; cases: {dict(ends.most_common())}")
    return 1 if bad or not done else 0


if __name__ == "__main__":
    sys.exit(main())
