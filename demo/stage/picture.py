"""`timeline.png`: each rank's local gradient norm over time, with fault, verdict, replacement and resume marked."""

from __future__ import annotations

from pathlib import Path

from stage import plan
from stage.facts import Facts

MARKS = {
    "fault": ("fault begins", "#c0392b"),
    "detection": ("verdict", "#8e44ad"),
    "alert firing": ("alert fires", "#d35400"),
    "replacement asked": ("replace asked", "#7f8c8d"),
    "proven": ("replaced", "#16a085"),
    "resumed": ("resumed", "#27ae60"),
    "finished": ("finished", "#2c3e50"),
}


def draw(path: Path, scenario: plan.Scenario, facts: Facts) -> None:
    """Writes the picture; time runs from the first step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [e for e in facts.log if e["kind"] == "step"]
    zero = min((e["time"] for e in steps), default=0.0)
    figure, axes = pyplot.subplots(figsize=(11, 4.5), layout="constrained")
    colours = pyplot.rcParams["axes.prop_cycle"].by_key()["color"]
    # One line for each life of a rank: nothing was measured between two of them.
    for rank, pid in sorted({(e["rank"], e["pid"]) for e in steps}):
        mine = [e for e in steps if (e["rank"], e["pid"]) == (rank, pid)]
        first = pid == next(e["pid"] for e in steps if e["rank"] == rank)
        axes.plot(
            [e["time"] - zero for e in mine],
            [e["gradient_norm"] for e in mine],
            marker=".",
            linewidth=1,
            color=colours[rank % len(colours)],
            label=f"rank {rank}" if first else None,
        )
    top = max((e["gradient_norm"] for e in steps), default=1.0) * 1.35
    for place, (name, (text, colour)) in enumerate(MARKS.items()):
        if name in facts.moments:
            x = facts.moments[name] - zero
            axes.axvline(x, color=colour, linewidth=1.2, linestyle="--")
            axes.annotate(
                text,
                (x, top * (0.98 - 0.06 * (place % 5))),
                color=colour,
                fontsize=8,
                ha="left",
                va="top",
                xytext=(3, 0),
                textcoords="offset points",
            )
    axes.set_ylim(0, top)
    axes.set_xlabel("seconds since the first step")
    axes.set_ylabel("local gradient norm before the reduce")
    axes.set_title(f"{scenario.name}: {scenario.title}", fontsize=10)
    axes.legend(loc="lower right", fontsize=8, ncols=4)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
