"""Measures every query of every dashboard against one job of many ranks, in a real Prometheus on this machine.

    python dashboards/scale.py --ranks 16384

Writes synthetic samples of every metric in the catalogues (8 ranks a node, ten minutes), has promtool turn them into a
Prometheus block, and asks each query as a panel would. Prints time and series of each; exit status 1 where a query
fails, answers with more than 50 series, or takes longer than --limit seconds.
What it never does: judge a fleet's Prometheus, which also scrapes and evaluates rules while it is asked.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from ask import PreviewError, Source
from preview import FOLDER, find_program, serving
from queries import load, marks, targets
from sdcwatch.catalog import LAST_MISMATCH, METRICS, MISMATCHES, Metric
from sdcwatch_remediation.catalog import CATALOG

RANKS_PER_NODE = 8
SAMPLES, SPACING = 6, 120.0
MOST_SERIES = 50
#: The one rank that events name.
_NAMED = 3


def write(stream: TextIO, ranks: int, end: float) -> int:
    """Writes OpenMetrics text for one job.

    Returns:
        How many series.
    """
    total = 0
    for name, labels in _series(ranks):
        total += 1
        for back in range(SAMPLES - 1, -1, -1):
            value = end - SPACING * back if "timestamp" in name else total % 7 + SAMPLES - back
            if name == MISMATCHES and f'rank="{_NAMED}"' not in labels:
                value = 0  # as in any job: the counters of all ranks are there, and stay at 0
            stream.write(f"{name}{{{labels}}} {value} {end - SPACING * back:.3f}\n")
    stream.write("# EOF\n")
    return total


def _series(ranks: int) -> Iterator[tuple[str, str]]:
    for metric in METRICS.values():
        for identity in _identities(metric, ranks):
            for own in _own(metric):
                yield metric.name, ",".join(f'{key}="{value}"' for key, value in (identity | own).items())
    for remote in CATALOG:
        yield remote.name, ",".join(f'{label}="some"' for label in remote.labels)
    for name in ("up", "scrape_duration_seconds", "scrape_samples_scraped"):
        for node in range(ranks // RANKS_PER_NODE):
            yield name, f'job="sdcwatch",instance="n{node}:9478"'
    for rank in range(ranks):
        yield "DCGM_FI_DEV_GPU_TEMP", f'UUID="GPU-{rank}",Hostname="n{rank // RANKS_PER_NODE}"'


def _identities(metric: Metric, ranks: int) -> Iterator[dict[str, str]]:
    if metric.name == LAST_MISMATCH:
        ranks = _NAMED + 1  # absent means never
    each = {"job": 0, "rank": 1}.get(metric.scope, RANKS_PER_NODE)
    for rank in range(_NAMED if metric.name == LAST_MISMATCH else 0, ranks, each) if each else (0,):
        node = rank // RANKS_PER_NODE
        known = {"training_job": "large", "training_cluster": "c", "training_node": f"n{node}"}
        known |= {"training_instance": f"i-{node}", "gpu_uuid": f"GPU-{rank}", "rank": str(rank)}
        yield {label: known[label] for label in metric.all_labels if label in known}


def _own(metric: Metric) -> Iterator[dict[str, str]]:
    """The first values of each enumerated label; all of them at once is more than a job has."""
    label = metric.labels[0] if metric.labels else None
    fixed = {name: metric.enums[name][0] if name in metric.enums else "x" for name in metric.labels}
    for value in metric.enums[label][:3] if label in metric.enums else (None,):
        yield fixed | ({label: value} if label and value else {})


def measure(source: Source, limit: float) -> int:
    """Asks everything and prints it, the slowest first; returns how many queries broke a limit."""
    rows = []
    for path in sorted(FOLDER.glob("*.json")):
        document = load(path)
        variables = source.variables(document, {"__rate_interval": f"{3 * SPACING:.0f}s"})
        for target in (*targets(document, variables), *marks(document, variables)):
            began = time.monotonic()
            try:
                answer = f"{len(source.lines(target)):3d} series"
            except PreviewError as error:
                answer = f"FAILED {error}"
            rows.append((time.monotonic() - began, answer, f"{path.stem}: {target.panel} {target.ref}"))
    bad = [row for row in rows if row[0] > limit or "FAILED" in row[1] or int(row[1].split()[0]) > MOST_SERIES]
    for seconds, answer, name in sorted(rows, reverse=True)[:15]:
        print(f"{seconds:6.2f} s  {answer}  {name}")
    seconds = sorted(row[0] for row in rows)
    print(
        f"{len(rows)} queries; median {seconds[len(seconds) // 2]:.2f} s, slowest {seconds[-1]:.2f} s; {len(bad)} bad"
    )
    for row in bad:
        print("bad:", *row, file=sys.stderr)
    return len(bad)


def main(argv: Sequence[str] | None = None) -> int:
    """0: every query within its limits; 1: one is not, or a program is missing."""
    parser = argparse.ArgumentParser(description="Measure the dashboards' queries at the size of a large job.")
    parser.add_argument("--ranks", type=int, default=16384, help="a multiple of 8")
    parser.add_argument("--limit", type=float, default=15.0, metavar="SECONDS", help="longest that a query may take")
    arguments = parser.parse_args(argv)
    try:
        promtool = find_program("promtool")
        with tempfile.TemporaryDirectory(prefix="sdcwatch-scale-") as folder:
            text, data = Path(folder) / "samples.txt", Path(folder) / "data"
            end = float(int(time.time()) - 60)
            with text.open("w") as stream:
                count = write(stream, arguments.ranks, end)
            made = subprocess.run(
                [promtool, "tsdb", "create-blocks-from", "openmetrics", text, data], capture_output=True, text=True
            )
            if made.returncode != 0:
                raise PreviewError(f"promtool made no block: {made.stderr.strip()}")
            text.unlink()
            print(f"{arguments.ranks} ranks, {count} series, {SAMPLES} samples each", flush=True)
            with serving(data) as url:
                return 1 if measure(Source(url, end - SPACING * (SAMPLES - 1), end), arguments.limit) else 0
    except PreviewError as error:
        print(f"scale: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
