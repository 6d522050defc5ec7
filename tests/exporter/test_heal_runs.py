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

    calls = [0]

    def loss_fn(module: nn.Module, batch: Any) -> torch.Tensor:
        calls[0] += 1
        if mode.get("runs_once") == rank and calls[0] > 5:
            raise RuntimeError("this rank's sixth call")
        with torch.autocast("cpu", torch.bfloat16, enabled=mode.get("autocast", False)):
            output = module(batch.pop("input") if mode.get("eats_batch") else batch["input"])
        loss = nn.functional.cross_entropy(output.float(), batch["target"])
        return loss * (1 + calls[0]) if mode.get("counts_calls") == rank else loss

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
                    x.requires_grad_(mode.get("requires_grad", False))
                    with ddp.no_sync() if micro < accumulate - 1 else contextlib.nullcontext():
                        batch = {"input": x, "target": y}
                        if mode.get("backwards") == 2:
                            s.loss(batch).backward()
                        loss = loss_fn(ddp, batch) if mode.get("direct") == rank else s.loss(batch)
                        scaler.scale(loss / accumulate).backward()
                    x.detach().zero_()  # a loop that fills its batch anew
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


PLAIN: dict[str, Any] = {}
ACCUMULATION = {
    "accumulate": 3, "scaler": True, "set_to_none": False, "settings": {"replay_every": 2}, "eats_batch": True,
}  # fmt: skip
slow = pytest.mark.integration


@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        pytest.param(GRADIENT, PLAIN, id="gradient"),
        pytest.param(WEIGHT, PLAIN, id="weight", marks=slow),
        pytest.param(STATE, PLAIN, id="state", marks=slow),
        pytest.param(AT_REST, PLAIN, id="at_rest", marks=slow),
        pytest.param(GRADIENT, ACCUMULATION, id="gradient-accumulation", marks=slow),
        pytest.param(WEIGHT, ACCUMULATION, id="weight-accumulation"),
        pytest.param(STATE, ACCUMULATION, id="state-accumulation", marks=slow),
        pytest.param(AT_REST, ACCUMULATION, id="at_rest-accumulation", marks=slow),
        pytest.param(GRADIENT, {"ddp": {"gradient_as_bucket_view": True}}, id="gradient-bucket-view", marks=slow),
        pytest.param(GRADIENT, {"ddp": {"static_graph": True}}, id="gradient-static-graph", marks=slow),
        pytest.param(GRADIENT, {"autocast": True}, id="gradient-autocast", marks=slow),
    ],
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


@slow
def test_a_fault_that_comes_back_in_the_recompute_halts(ranks: Any, tmp_path: Path) -> None:
    """The reduce is wrong again: every rank stops at that step, under the latch of the same event."""
    fault = {**GRADIENT, "mode": "persistent"}
    results = ranks(train, 3, str(tmp_path), fault, {})
    assert [r["stopped"] for r in results] == [4] * 3
    assert results[0]["heals"] == {("gradient_checksum", "failed"): 1.0}
    assert len(results[0]["verdicts"]) == 1
    assert list(tmp_path.rglob("HALTED.json"))


@slow
def test_a_second_event_of_the_same_node_halts(ranks: Any, tmp_path: Path) -> None:
    """The optimizer step of one rank stays wrong: healed once, then refused."""
    results = ranks(train, 3, str(tmp_path), {**WEIGHT, "mode": "persistent"}, {})
    assert [r["stopped"] for r in results] == [6] * 3
    assert results[0]["heals"] == {("weight_checksum", "healed"): 1.0, ("weight_checksum", "refused"): 1.0}


@slow
def test_optimizer_state_that_changed_at_rest_halts(ranks: Any, tmp_path: Path) -> None:
    """A step has used it before it is seen."""
    fault = {**STATE, "location": "optimizer_state_at_rest"}
    results = ranks(train, 3, str(tmp_path), fault, {})
    assert [r["stopped"] for r in results] == [5] * 3
    assert results[0]["heals"] == {("weight_checksum", "refused"): 1.0}


def test_a_loss_that_cannot_run_twice_on_one_rank_halts_all(ranks: Any, tmp_path: Path) -> None:
    """It fails in private, before any collective: nobody hangs, and all stop at the same step."""
    results = ranks(train, 3, str(tmp_path), GRADIENT, {"runs_once": 2})
    assert [r["stopped"] for r in results] == [4] * 3
    assert results[0]["heals"] == {("gradient_checksum", "failed"): 1.0}


@slow
def test_a_step_that_repeats_otherwise_on_one_rank_halts_all(ranks: Any, tmp_path: Path) -> None:
    """A loss function that counts its calls gives another gradient, equal on all ranks: the norms tell."""
    results = ranks(train, 3, str(tmp_path), GRADIENT, {"counts_calls": 1})
    assert [r["stopped"] for r in results] == [4] * 3
    assert results[0]["heals"] == {("gradient_checksum", "failed"): 1.0}


@slow
@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ({"direct": 1}, "did not come from s.loss"),
        ({"backwards": 2}, "a second backward pass"),
        ({"requires_grad": True}, "part of a larger graph"),
    ],
    ids=["no_s_loss", "two_backwards", "outer_graph"],
)
def test_a_loop_that_cannot_be_healed_is_refused_in_its_first_step(
    ranks: Any, tmp_path: Path, mode: dict[str, Any], reason: str
) -> None:
    """By name and on all ranks, also where one rank alone is the odd one."""
    results = ranks(train, 2, str(tmp_path), None, mode, raw=True)
    assert all(kind == "error" and "ConfigurationError" in text and reason in text for kind, text in results), results
