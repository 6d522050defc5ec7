"""Sharded and replicated models on real ranks: each shard is held against its own replicas, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def hsdp(
    rank: int, size: int, root: str, shape: tuple[int, ...], fault: dict[str, Any], steps: int = 5, **options: Any
) -> dict[str, Any]:
    """Trains under `fully_shard` on a mesh of this shape, one node a rank; verdicts, coverage and final weights."""
    import hashlib

    import torch
    from sdcwatch import CorruptionDetected, Monitor
    from sdcwatch.shards import local
    from sdcwatch.testing import Fault, FaultPlan
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    FaultPlan((Fault(**fault),) if fault else ()).install(model, optimizer, first_step=0)
    monitor = None
    if options.get("watch", True):
        monitor = Monitor(
            model,
            optimizer,
            loss_fn=lambda module, batch: module(batch).square().mean(),
            spool_dir=f"{root}/node-{rank}",
            node=f"node-{rank}",
            on_fault=options.get("on_fault", "observe"),
            replay_every=2,
        )
    generator = torch.Generator().manual_seed(rank)
    stopped = None
    try:
        for step in range(steps):
            batches = [torch.randn(8, 16, generator=generator) for _ in range(2)]
            if monitor is None:
                _step(model, optimizer, batches)
                continue
            with monitor.step(step) as s:
                _step(model, optimizer, batches, s.loss)
    except CorruptionDetected as error:
        stopped = error.step
    found: dict[str, Any] = {
        "stopped": stopped,
        "weights": hashlib.sha256(b"".join(bytes(local(p).detach().numpy()) for p in model.parameters())).hexdigest(),
    }
    if monitor is not None:
        assert monitor._epoch is not None
        found["verdicts"] = [
            (v.step, v.check, v.kind, v.suspects, v.differing, v.path, v.contains) for v in monitor.verdicts
        ]
        found["sentences"] = [v.sentence for v in monitor.verdicts]
        found["coverage"] = {c.check: (c.enabled, c.covered_bytes, c.uncovered_bytes) for c in monitor.coverage()}
        found["metrics"] = monitor._epoch.reporter.metrics.lines()
        found["checked"] = monitor._epoch.histories[0].checked
        monitor.close()
    return found


def _step(model: Any, optimizer: Any, batches: list[Any], loss: Any = None) -> None:
    """Two micro-batches; only the second one reduces."""
    for index, batch in enumerate(batches):
        model.set_requires_gradient_sync(index == len(batches) - 1)
        (loss(batch) if loss else model(batch).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


def same(results: list[dict[str, Any]]) -> list[Any]:
    """The verdicts, on which all ranks agree."""
    assert all(r["verdicts"] == results[0]["verdicts"] for r in results)
    found: list[Any] = results[0]["verdicts"]
    return found


def test_a_clean_hsdp_run_is_checked_and_ends_with_the_same_weights(ranks: Any, tmp_path: Path) -> None:
    """Two replicas of two shards: checks run at every reducing backward, no verdict, weights as without a monitor."""
    watched = ranks(hsdp, 4, str(tmp_path), (2, 2), {})
    plain = [r["weights"] for r in ranks(_plain, 4, str(tmp_path), (2, 2))]
    assert [r["weights"] for r in watched] == plain
    assert len(set(plain)) == 2, "each shard is on two ranks"
    assert same(watched) == []
    assert watched[0]["checked"] == 3
    text = watched[0]["metrics"]
    assert 'sdc_replica_groups{training_job="test-job",training_cluster="",check="weight_checksum"} 1' in text
    assert [watched[0]["coverage"][c][0] for c in ("gradient_norm", "allreduce_conservation", "replay")] == [False] * 3


def _plain(rank: int, size: int, root: str, shape: tuple[int, ...]) -> dict[str, Any]:
    return hsdp(rank, size, root, shape, {}, watch=False)


@pytest.mark.parametrize("location", ["optimizer_weight", "optimizer_state"])
def test_with_two_replicas_a_wrong_optimizer_step_is_proven_and_names_nobody(
    ranks: Any, tmp_path: Path, location: str
) -> None:
    """Ranks 1 and 3 hold one shard; their difference halts all four and blames neither."""
    fault = {"location": location, "step": 2, "rank": 3, "pattern": "bit_flip", "mode": "transient"}
    results = ranks(_halting, 4, str(tmp_path), (2, 2), fault)
    assert same(results) == [
        (3, "weight_checksum", "inconclusive", (), (1, 3), "optimizer compute", True),
    ]
    assert [r["stopped"] for r in results] == [3] * 4


def _halting(rank: int, size: int, root: str, shape: tuple[int, ...], fault: dict[str, Any]) -> dict[str, Any]:
    return hsdp(rank, size, root, shape, fault, on_fault="halt")


@pytest.mark.integration
@pytest.mark.parametrize("bad", [0, 3])
def test_with_three_replicas_a_wrong_optimizer_step_names_the_rank(ranks: Any, tmp_path: Path, bad: int) -> None:
    """Three replicas of two shards: the odd one of its set is attributed, in the job's rank numbers."""
    fault = {"location": "optimizer_weight", "step": 2, "rank": bad, "pattern": "bit_flip", "mode": "transient"}
    results = ranks(_halting, 6, str(tmp_path), (3, 2), fault)
    assert same(results) == [(3, "weight_checksum", "attributed", (bad,), (bad,), "optimizer compute", True)]
    assert f"rank {bad} on node-{bad}" in results[0]["sentences"][0].lower()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("reduced_gradient", [(2, "gradient_checksum", "inconclusive", (), (2,), "reduce", True)]),
        ("weights_at_rest", [(2, "weight_checksum", "inconclusive", (), (2,), "weights at rest", True)]),
    ],
)
def test_what_the_reduce_handed_back_and_weights_at_rest_name_nobody(
    ranks: Any, tmp_path: Path, location: str, expected: list[Any]
) -> None:
    """Seen in the same backward, before the optimizer uses it; the set's odd rank is only a candidate."""
    fault = {"location": location, "step": 2, "rank": 2, "pattern": "bit_flip", "mode": "transient"}
    results = ranks(_halting, 6, str(tmp_path), (3, 2), fault)
    assert same(results) == expected
    assert [r["stopped"] for r in results] == [2] * 6


def test_shards_without_a_replica_are_counted_and_never_judged(ranks: Any, tmp_path: Path) -> None:
    """Plain FSDP2: a wrong weight on one rank gives no verdict; every check is off, and its bytes are uncovered."""
    fault = {"location": "optimizer_weight", "step": 1, "rank": 0, "pattern": "bit_flip"}
    results = ranks(hsdp, 2, str(tmp_path), (2,), fault)
    assert same(results) == []
    for enabled, covered, uncovered in results[0]["coverage"].values():
        assert not enabled
        assert covered == 0
        assert uncovered > 0
    text = results[0]["metrics"]
    assert 'check="weight_checksum"} 0' in text.split("sdc_detector_enabled{", 1)[1]
    assert "sdc_checks_total{" not in text
