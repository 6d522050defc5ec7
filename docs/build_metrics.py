"""Writes docs/metrics.md from the catalogue; `--check` says whether it is up to date (exit status 1: it is not)."""

from __future__ import annotations

import sys
from pathlib import Path

from sdcwatch.catalog import IDENTITY_LABELS, markdown_table

TARGET = Path(__file__).with_name("metrics.md")

INTRODUCTION = """\
# Metrics of the exporter

Generated from `exporter/sdcwatch/catalog.py` by `python docs/build_metrics.py`; do not edit.

Every series carries the identity labels of its scope:

{identity}

Scopes say who writes: `rank` every rank; `node` local rank 0; `job` the lowest rank of each of the two lowest nodes;
`agent` the node agent. A named suspect's `sdc_mismatches_total` and `sdc_last_mismatch_timestamp_seconds` are also
written by reporters on two other nodes, so the same series can come from several agents: take `max by (...)`, never
`sum`. Counters never go down when a rank or the agent restarts. Series of dead ranks stay for an hour (`sdcwatch agent
--keep`).

The alert rules record five series of their own ([alerting.md](alerting.md#what-is-recorded)).

"""


def text() -> str:
    """The whole file."""
    identity = "\n".join(
        f"- `{scope}`: {', '.join(f'`{label}`' for label in labels)}" for scope, labels in IDENTITY_LABELS.items()
    )
    return INTRODUCTION.format(identity=identity) + markdown_table()


def main() -> int:
    """Writes or checks the file."""
    if "--check" in sys.argv[1:]:
        if TARGET.read_text(encoding="utf-8") == text():
            return 0
        print(f"{TARGET} is out of date: run python docs/build_metrics.py", file=sys.stderr)
        return 1
    TARGET.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
