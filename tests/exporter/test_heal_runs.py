"""With `on_fault="heal"` a run with a fault ends with the weights of a run without one, bit for bit, or halts."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import pytest

STEPS = 8


def train(rank: int, size: int, root: str, fault: dict[str, Any] | None, mode: dict[str, Any]) -> dict[str, Any]:
    """Trains a small net with dropout and batch norm; digest of weights, buffers, optimizer state and RNG."""
    import torch
    from sdcwatch import CorruptionDetected, Monitor
    from sdcwatch.testing import Fault, FaultPlan
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, **mode.get("ddp", {}))
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    FaultPlan((Fault(**fault),) if fault else ()).install(ddp, optimizer, first_step=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, enabled=mode.get("scaler", False))
    accumulate = mode.get("accumulate", 1)

    def loss_fn(module: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=mode.get("autocast", False)):
            output = module(batch.pop("input") if mode.get("eats_batch") else batch["input"])
        return nn.functional.cross_entropy(output.float(), batch["target"])

    monitor = Monitor(
        ddp,
        optimizer,
        loss_fn=loss_fn,
        spool_dir=f"{root}/node-{rank}",
        node=f"node-{rank}",
        on_fault="heal",
        **{"replay_every": 0, **mode.get("settings", {})},
    )
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(100 + rank)
    stopped, done = None, 0
    try:
        for step in range(STEPS):
            with monitor.step(step) as s:
                for micro in range(accumulate):
                    x, y = torch.randn(8, 16, generator=generator), torch.randint(8, (8,), generator=generator)
                    with ddp.no_sync() if micro < accumulate - 1 else contextlib.nullcontext():
                        loss = s.loss({"input": x, "target": y})
                        scaler.scale(loss / accumulate).backward()
                    x.zero_()  # a loop that fills its batch anew
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=mode.get("set_to_none", True))
            done = step + 1
    except CorruptionDetected as error:
        stopped = error.step
    metrics = monitor._epoch.reporter.metrics
    heals = {
        (check, outcome): n
        for check in ("gradient_checksum", "allreduce_conservation", "weight_checksum", "replay")
        for outcome in ("healed", "failed", "refused")
        if (n := metrics.get("sdc_heals_total", check=check, outcome=outcome))
    }
    checked = metrics.get("sdc_checked_step")
    verdicts = [(v.check, v.kind, v.step) for v in monitor.verdicts]
    monitor.close()
    state = [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]
    content = b"".join(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in state)
    return {
        "digest": hashlib.sha256(content + repr(torch.get_rng_state().tolist()).encode()).hexdigest(),
        "heals": heals,
        "stopped": stopped,
        "done": done,
        "checked": checked,
        "verdicts": verdicts,
    }


GRADIENT = {"location": "reduced_gradient", "step": 4, "rank": 1, "pattern": "scale", "mode": "once"}
WEIGHT = {"location": "optimizer_weight", "step": 4, "rank": 0, "pattern": "bit_flip", "mode": "transient"}
STATE = {"location": "optimizer_state", "step": 4, "rank": 2, "pattern": "scale", "mode": "transient"}
AT_REST = {"location": "weights_at_rest", "step": 4, "rank": 0, "pattern": "scale", "mode": "transient"}


@pytest.mark.parametrize("fault", [GRADIENT, WEIGHT, STATE, AT_REST], ids=["gradient", "weight", "state", "at_rest"])
@pytest.mark.parametrize(
    "mode",
    [{}, {"accumulate": 3, "scaler": True, "set_to_none": False, "settings": {"replay_every": 2}, "eats_batch": True}],
    ids=["plain", "accumulation"],
)
def test_a_transient_fault_is_healed_to_the_bit(
    ranks: Any, tmp_path: Path, fault: dict[str, Any], mode: dict[str, Any]
) -> None:
    """One event, one heal, no halt; weights, buffers, optimizer state and random numbers are those of a clean run."""
    clean = ranks(train, 3, str(tmp_path / "clean"), None, mode)
    healed = ranks(train, 3, str(tmp_path / "healed"), fault, mode)
    assert [r["done"] for r in healed] == [STEPS] * 3, healed
    assert [r["verdicts"] for r in clean] == [[]] * 3
    assert len(healed[0]["verdicts"]) == 1
    check = "gradient_checksum" if fault is GRADIENT else "weight_checksum"
    assert healed[0]["heals"] == {(check, "healed"): 1.0}
    assert [r["digest"] for r in healed] == [r["digest"] for r in clean]
    assert healed[0]["checked"] == clean[0]["checked"] == STEPS - 2
