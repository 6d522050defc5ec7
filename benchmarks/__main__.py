"""`python -m benchmarks`: measure, write benchmarks/out/bench.json, then docs/performance.md and its plots from it.

A section that benchmarks/out/bench.json already holds for this source is not measured again (`--fresh` does), so a run
that was cut short goes on where it stopped. `--tiny` tries every section on toy sizes and writes no document.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import bandwidth, fleet, memory, node_agent, overhead, scale, votes
from benchmarks.model import SMALL, TINY

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "out"


def sections(tiny: bool) -> dict[str, Callable[[], Any]]:
    """Name -> measurement, cheapest and most wanted first; about twenty-five minutes together on two quiet cores."""
    size = TINY if tiny else SMALL
    if tiny:
        return {
            "bandwidth": lambda: bandwidth.bandwidth(megabytes=(8,), rounds=3),
            "votes": lambda: votes.side_by_side(size=size, repeats=2),
            "step": lambda: overhead.step_overhead(size=size, tokens=32, pairs=6),
            "curve": lambda: overhead.curve(size=size, tokens=(16,), pairs=12),
            "flat": lambda: overhead.flat(counts=(10, 100), total=40_000, pairs=12, rounds=2),
            "ranks": lambda: scale.ranks_growth(sizes=(64, 128), repeats=3),
            "bytes": lambda: bandwidth.growth(megabytes=(1, 4)),
            "agent": lambda: node_agent.agent(ranks=2, scrapes=3),
            "fleet": lambda: fleet.fleet(agents=4, repeats=2, interval=2),
            "memory": lambda: memory.memory(size=size),
        }
    return {
        "bandwidth": bandwidth.bandwidth,
        "votes": lambda: votes.side_by_side(size=size),
        "step": lambda: overhead.step_overhead(size=size),
        "ranks": scale.ranks_growth,
        "bytes": bandwidth.growth,
        "agent": node_agent.agent,
        "flat": overhead.flat,
        "memory": lambda: memory.memory(size=size),
        "curve": lambda: overhead.curve(size=size),
        "fleet": fleet.fleet,
    }


def source_digest() -> str:
    """Digest of the source of product, alert rules and benchmarks: another one means other numbers."""
    digest = hashlib.sha256()
    patterns = ("exporter/sdcwatch/**/*.py", "alert_rules/*.rules.yaml", "benchmarks/*.py")
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    for path in sorted(found - {ROOT / "benchmarks" / "gpu.py"}):  # that one is run by itself
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return {
        "cpu": names[0] if names else platform.processor(), "cores": len(names), "torch": torch.__version__,
        "python": platform.python_version(),
    }  # fmt: skip


def main() -> int:
    """Measures what is missing; 1 where a section failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="toy sizes, no document: does every section run?")
    parser.add_argument("--fresh", action="store_true", help="measure all again")
    parser.add_argument("--only", nargs="*", default=[], help="sections to measure")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / ("tiny.json" if options.tiny else "bench.json")
    source = source_digest()
    held = json.loads(path.read_text()) if path.exists() and not options.fresh else {}
    found = held if held.get("source") == source else {"source": source, "machine": machine(), "sections": {}}
    todo = [n for n in sections(options.tiny) if not options.only or n in options.only]
    failed = []
    for number, name in enumerate(todo, 1):
        if name in found["sections"] and not options.tiny:
            print(f"[bench {number}/{len(todo)}] {name}: already measured", flush=True)
            continue
        print(f"[bench {number}/{len(todo)}] {name} ...", flush=True)
        begin = time.monotonic()
        try:
            found["sections"][name] = sections(options.tiny)[name]()
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        found["sections"][name + "_took"] = round(time.monotonic() - begin, 1)
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"  {time.monotonic() - begin:.0f} s: {json.dumps(found['sections'][name])[:300]}", flush=True)
    if not options.tiny:
        from benchmarks import render

        render.write(found, ROOT / "docs")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
