"""The picture of docs/detection.md: share of faults found by place, for sdcwatch and its peers.

Flow: document -> **picture**.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdcwatch.testing import LOCATIONS

from benchmarks.campaign.cases import Case
from benchmarks.campaign.score import INCONCLUSIVE, MASKED, NAMED, WRONG

_COLUMNS = (("sdcwatch", "sdcwatch"), ("sdcguard", "sdcguard"), ("parity", "rank-0 parity"), ("norm", "norm threshold"))


def draw(rows: Sequence[tuple[Case, dict[str, Any]]], to: Path) -> None:
    """Draws named, seen without a name, and wrong blame, as shares of the faults that had an effect."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    places = list(reversed(LOCATIONS))
    figure, axes = plt.subplots(1, len(_COLUMNS), figsize=(13, 5), sharey=True, layout="constrained")
    for axis, (key, title) in zip(axes, _COLUMNS, strict=True):
        shares = [_shares(rows, place, key) for place in places]
        left = [0.0] * len(places)
        for index, (color, label) in enumerate(
            (("#1b6ca8", "rank named"), ("#9cc5e3", "seen, nobody named"), ("#c0392b", "healthy rank blamed"))
        ):
            values = [share[index] for share in shares]
            axis.barh(places, values, left=left, color=color, label=label)
            left = [a + b for a, b in zip(left, values, strict=True)]
        axis.set_title(title)
        axis.set_xlim(0, 100)
        axis.set_xlabel("% of faults")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _shares(rows: Sequence[tuple[Case, dict[str, Any]]], place: str, key: str) -> tuple[float, float, float]:
    some = [r for c, r in rows if c.location == place and r["outcome"] != MASKED]
    outcomes = [r["outcome"] if key == "sdcwatch" else r["peers"].get(key) for r in some]
    said = [outcome for outcome in outcomes if outcome is not None]  # only where that detector ran
    if not said:
        return 0.0, 0.0, 0.0
    named, seen, wrong = (100 * said.count(outcome) / len(said) for outcome in (NAMED, INCONCLUSIVE, WRONG))
    return named, seen, wrong
