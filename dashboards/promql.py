"""Pieces of PromQL that keep a query small at 16,384 ranks.

What it does: builds expressions. What it never does: run them; `bounds` checks that every committed one is bounded.
Flow: **promql** -> the dashboard modules.
"""

from __future__ import annotations

#: Lines that a panel about single ranks, nodes or jobs draws at most.
MOST = 10
#: Pins a selector to the end of the shown range: evaluated once, so the same few series are chosen at every step.
END = "@ end()"


def worst(on: str, expr: str, ranking: str, most: int = MOST) -> str:
    """`expr`, only for the `most` values of label(s) `on` that `ranking` puts first.

    A bare topk over a range chooses anew at every step, and so gives far more series than it says.

    Args:
        on: labels, comma separated, that both sides carry and that tell series apart.
        expr: what is drawn.
        ranking: an aggregation by `on`; each of its selectors must be pinned with `END`.
        most: how many.
    """
    return f"{expr} and on ({on}) topk({most}, {ranking})"


def outliers(on: str, by: str, selector: str, ranking: str, most: int = MOST) -> str:
    """The few series of single ranks or nodes that `ranking` puts first, by labels `by`.

    Filtered before they are aggregated: an aggregation by rank over all ranks builds as many label sets at each step.
    """
    return f"max by ({by}) ({worst(on, selector, ranking, most)})"


def newest(metric: str, by: str, *, range_: str = "$__range") -> str:
    """Time, in milliseconds as Grafana wants it, of the newest event by labels `by`, at the end of the range."""
    return f"topk({2 * MOST}, max by ({by}) (max_over_time({metric}[{range_}] {END}))) * 1000"


def grew(metric: str, matchers: str, by: str) -> str:
    """Where a count is larger than a minute ago, or was born within it; for annotations."""
    selector = f"{metric}{{{matchers}}}"
    now, before = f"max by ({by}) ({selector})", f"max by ({by}) ({selector} offset 1m)"
    return f"({now} > 0) unless ({before} >= {now})"
