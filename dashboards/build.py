"""Writes the dashboards as JSON files, or checks that the committed ones are what would be written.

    python dashboards/build.py            write dashboards/*.json
    python dashboards/build.py --check    exit 1 where a committed file differs, and say which

What it never does: talk to a Grafana; provisioning/ has Grafana read the files.
Flow: panels -> fleet, training_job, gpu, health -> **build**.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fleet import fleet
from gpu import gpu
from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from health import health
from training_job import training_job

FOLDER = Path(__file__).parent
#: file name -> the dashboard in it.
DASHBOARDS: Mapping[str, Callable[[], Dashboard]] = {
    "fleet.json": fleet,
    "gpu.json": gpu,
    "health.json": health,
    "training-job.json": training_job,
}


def render(dashboard: Dashboard) -> str:
    """The dashboard as the text of its file."""
    document = json.loads(json.dumps(dashboard.build(), cls=JSONEncoder))
    for entry in [*document["links"], *document["annotations"]["list"]]:
        # The SDK always writes the place where newer Grafana hides links and marks behind a menu.
        entry.pop("placement", None)
    return json.dumps(document, indent=2) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """0: written, or all equal; 1: a committed file differs."""
    parser = argparse.ArgumentParser(description="Build the Grafana dashboards.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a committed file differs")
    arguments = parser.parse_args(argv)
    stale = []
    for name, build in DASHBOARDS.items():
        path, text = FOLDER / name, render(build())
        if arguments.check:
            if not path.exists() or path.read_text() != text:
                stale.append(name)
        else:
            path.write_text(text)
    if stale:
        print(f"{', '.join(stale)}: not what build.py writes; run `python dashboards/build.py`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
