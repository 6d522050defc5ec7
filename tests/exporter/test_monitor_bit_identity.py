"""Promise 1: with the monitor attached, a healthy run's weights are bit-identical to a run without it."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import pytest

KW: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "static_graph_bucket_view": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused_parameters": {"find_unused_parameters": True},
}


def train(rank: int, size: int, root: str, mode: dict[str, Any], watched: bool) -> tuple[str, int, dict[str, float]]:
    """Six steps of a small net with dropout and batch norm; weights' digest, verdicts, and counters of checks."""
    import torch
    from sdcwatch import Monitor
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, **mode.get("ddp", {}))
    if mode.get("hook"):
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, enabled=mode.get("scaler", False))
    accumulate = mode.get("accumulate", 1)

    def loss_fn(module: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    monitor = (
        Monitor(
            ddp,
            optimizer,
            loss_fn=loss_fn,
            spool_dir=f"{root}/node-{rank}",
            node=f"node-{rank}",
            replay_every=2,
            on_fault="halt",
        )
        if watched
        else None
    )
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(100 + rank)
    steps = 6 - (rank % 2 if mode.get("join") else 0)
    with ddp.join() if mode.get("join") else contextlib.nullcontext():
        for step in range(steps):
            with monitor.step(step) if monitor else contextlib.nullcontext() as s:
                for micro in range(accumulate):
                    batch = (torch.randn(8, 16, generator=generator), torch.randint(8, (8,), generator=generator))
                    last = micro == accumulate - 1
                    with contextlib.nullcontext() if last else ddp.no_sync():
                        loss = s.loss(batch) if s is not None else loss_fn(ddp, batch)
                        scaler.scale(loss / accumulate).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=mode.get("set_to_none", True))
    verdicts, counters = 0, {}
    if monitor:
        verdicts = len(monitor.verdicts)
        metrics = monitor._epoch.reporter.metrics
        for check in ("gradient_checksum", "weight_checksum", "replay"):
            counters[check] = metrics.get("sdc_checks_total", check=check) or 0.0
        monitor.close()
    content = b"".join(p.detach().contiguous().numpy().tobytes() for p in ddp.parameters())
    return hashlib.sha256(content + repr(torch.get_rng_state().tolist()).encode()).hexdigest(), verdicts, counters


def compare(ranks: Any, tmp_path: Path, size: int, mode: dict[str, Any]) -> dict[str, float]:
    plain = ranks(train, size, str(tmp_path), mode, False)
    watched = ranks(train, size, str(tmp_path / str(size)), mode, True)
    assert [r[0] for r in watched] == [r[0] for r in plain]
    assert [r[1] for r in watched] == [0] * size
    return watched[0][2]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", KW)
def test_weights_and_rng_equal_a_run_without_the_monitor(ranks: Any, tmp_path: Path, name: str, size: int) -> None:
    """Every DDP mode, with replay audits on: same bits, no verdict, and the checks really ran."""
    counters = compare(ranks, tmp_path, size, {"ddp": KW[name]})
    assert counters["gradient_checksum"] == 6
    assert counters["weight_checksum"] >= 5
    assert counters["replay"] == 3


@pytest.mark.parametrize(
    "mode",
    [
        {"accumulate": 3},
        {"accumulate": 3, "scaler": True, "ddp": {"gradient_as_bucket_view": True}},
        {"set_to_none": False},
        {"set_to_none": False, "accumulate": 2, "ddp": {"gradient_as_bucket_view": True}},
        {"hook": True},
    ],
    ids=["accumulation", "accumulation_scaler", "zeroed", "zeroed_bucket_view", "users_hook"],
)
def test_weights_equal_under_accumulation_scaler_zeroing_and_a_users_hook(
    ranks: Any, tmp_path: Path, mode: dict[str, Any]
) -> None:
    """What a loop does round the backward leaves the promise intact, and audits still run."""
    for size in (2, 3):
        assert compare(ranks, tmp_path, size, mode)["replay"] == 3


def test_weights_equal_under_join_with_uneven_inputs(ranks: Any, tmp_path: Path) -> None:
    """Inside `join()` nothing of ours is collective, so shadowed ranks cannot mispair (field case 15)."""
    counters = compare(ranks, tmp_path, 3, {"join": True})
    assert counters["gradient_checksum"] == 0
