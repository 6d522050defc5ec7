"""Field cases 11 and 12: a step that cannot be repeated is a skip, and repeating one changes nothing of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sdcwatch.fingerprint import digest_bytes, fingerprint
from torch import nn


class Scatter(torch.autograd.Function):
    """An identity whose backward adds up in another order each time, as atomic scatter-adds do."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Scatter.calls += 1
        return gradient * (1 + 2.0**-20 * Scatter.calls)


class Unrepeatable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scatter: Any = Scatter.apply
        out: torch.Tensor = self.last(scatter(self.first(x)))
        return out


def test_a_step_that_is_not_deterministic_is_skipped_and_never_judged(field: Any) -> None:
    """Case 11: calibration marks it; every later audit is a skip with that reason, no verdict and no halt."""

    def body(t: Any) -> Any:
        t.watch(replay_every=2)
        t.train(range(9))
        return t.verdicts(), t.skipped("replay", "nondeterministic"), t.ran("replay"), t.ran("weight_checksum") >= 8

    verdicts, skipped, ran, weights = field(body, 3, {"net": Unrepeatable})[0]
    assert verdicts == []
    assert skipped >= 3
    assert skipped + ran == 5
    assert weights


def everything(t: Any) -> dict[str, int]:
    """Digests of all that training reads or writes."""
    return {
        "parameters": fingerprint(t.ddp.parameters()),
        "buffers": fingerprint(t.ddp.buffers()),
        "gradients": fingerprint(p.grad for p in t.ddp.parameters()),
        "optimizer": fingerprint(v for s in t.optimizer.state.values() for v in s.values()),
        "rng": digest_bytes(bytes(torch.get_rng_state().tolist())),
        "flags": digest_bytes(repr([m.training for m in t.ddp.modules()]).encode()),
        "requires_grad": digest_bytes(repr([p.requires_grad for p in t.ddp.parameters()]).encode()),
        "versions": sum(p._version for p in t.ddp.parameters()),
        "autocast": int(torch.is_autocast_enabled("cpu")),
        "grad_mode": int(torch.is_grad_enabled()),
        "sync": int(t.ddp.require_backward_grad_sync),
    }


@pytest.mark.parametrize("raises", [False, True], ids=["replay ends", "replay raises"])
def test_an_audit_leaves_training_as_it_was(field: Any, raises: bool) -> None:
    """Case 12: BatchNorm, dropout, autocast; digests of all state are equal before and after, also when it raises."""

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Dropout(0.3), nn.Linear(24, 8))

    def body(t: Any) -> Any:
        replaying = []

        def loss(model: Any, batch: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = nn.functional.cross_entropy(model(batch[0]).float(), batch[1])
            if raises and replaying and t.rank == 1:
                model.eval()
                raise RuntimeError("the replay meets an error of the user's")
            return out

        monitor = t.watch(loss_fn=loss, replay_every=2)
        audit = monitor._epoch.auditor.run
        pairs = []

        def watched(*args: Any, **kwargs: Any) -> Any:
            before = everything(t)
            replaying.append(True)
            outcome = audit(*args, **kwargs)
            replaying.clear()
            pairs.append((before, everything(t)))
            return outcome

        monitor._epoch.auditor.run = watched
        t.train(range(6))
        changed = [name for before, after in pairs for name in before if before[name] != after[name]]
        return len(pairs), changed, t.verdicts(), t.ran("replay")

    results = field(body, 3, {"net": net})
    assert [result[:3] for result in results] == [(3, [], [])] * 3
    assert results[0][3] == (0 if raises else 3)
