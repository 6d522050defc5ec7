"""What ranks and agents of a big job would export, made by the product's own store and names."""

from __future__ import annotations

from sdcwatch.catalog import METRICS
from sdcwatch.exposition import Sample, parse, render, series
from sdcwatch.metrics import RankMetrics


def labels_of(rank: int, per_node: int) -> dict[str, str]:
    """The identity of one rank of a simulated job."""
    node = rank // per_node
    return {
        "training_job": "bench", "training_cluster": "c", "training_node": f"node-{node:05d}",
        "training_instance": f"i-{node:017x}", "gpu_uuid": f"GPU-{rank:032x}", "rank": str(rank),
    }  # fmt: skip


def fill(metrics: RankMetrics) -> None:
    """One value in every family that a rank writes without a fault; enumerated labels take their first value.

    Counters stand at 0, as those of rare things do; of the others only their number of series matters here.
    """
    for name, metric in METRICS.items():
        if metric.scope == "agent" or "mismatch" in name or "dropped" in name or "drill" in name:
            continue
        free = {label: metric.enums.get(label, ("x",))[0] for label in metric.labels}
        if metric.kind == "counter":
            metrics.inc(name, 0.0, **free)
        else:
            metrics.set(name, 1.0, **free)


def job_text(*, agents: int = 2048, per_node: int = 8) -> list[str]:
    """One text a node, as its agent would serve the ranks' own series."""
    texts = []
    for node in range(agents):
        parts = []
        for rank in range(node * per_node, (node + 1) * per_node):
            metrics = RankMetrics(labels_of(rank, per_node), writes_node=rank % per_node == 0, writes_job=rank == 0)
            fill(metrics)
            parts.append(metrics.lines())
        samples = [sample for sample in parse("".join(parts)) if isinstance(sample, Sample)]
        texts.append(render((one.name, series(one.name, one.labels), one.value) for one in samples))
    return texts
