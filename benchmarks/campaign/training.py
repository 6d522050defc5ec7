"""One tiny DDP run with one fault, watched by sdcwatch, on one rank of a pool; and what was really wrong in it.

The truth is measured beside the monitor: what the injector changed, and whether the local gradient came out other than
without the fault. The run observes and never halts, so that whatever a fault leads to later is judged, too. Flow: pool
-> **training** -> score.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import torch
from sdcwatch import Monitor
from sdcwatch.fingerprint import fingerprint
from sdcwatch.testing import Fault, FaultPlan, Installed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.campaign.cases import REPLAYED, Case

_IN, _HIDDEN, _OUT, _BATCH = 12, 24, 6, 8


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross entropy of the model's answer."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def build(optimizer: str) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """A fresh model, equal on all ranks, and its optimizer."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(_IN, _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, _OUT))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    made: dict[str, torch.optim.Optimizer] = {
        "adamw": torch.optim.AdamW(ddp.parameters(), 1e-2),
        "sgd": torch.optim.SGD(ddp.parameters(), 1e-2, momentum=0.9),
    }
    return ddp, made[optimizer]


def batches(rank: int, steps: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's micro-batches."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [
        (torch.randn(_BATCH, _IN, generator=generator), torch.randint(_OUT, (_BATCH,), generator=generator))
        for _ in range(steps)
    ]


def precision(name: str) -> contextlib.AbstractContextManager[Any]:
    """The autocast of a case."""
    return torch.autocast("cpu", torch.bfloat16) if name.startswith("bf16") else contextlib.nullcontext()


class _Truth:
    """What a rank really computed: local gradients as they left backward, and as they should have."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._parameters = list(ddp.parameters())
        self._module = ddp.module
        self.local: dict[int, torch.Tensor] = {}
        self.norms: list[list[float]] = []
        self.weights: list[int] = []
        self.changed: list[int] = []
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._keep(index))

    def _keep(self, index: int) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            self.local[index] = parameter.grad.detach().clone()

        return hook

    def after_backward(self) -> None:
        """Norm of each parameter's local gradient."""
        self.norms.append([float(self.local[i].double().norm()) for i in range(len(self._parameters))])

    def compare(self, step: int, batch: Any, installed: Installed, name: str) -> None:
        """Computes the gradient once more without the fault; notes the step where it comes out other."""
        with installed.pause(), precision(name):
            right = torch.autograd.grad(loss_fn(self._module, batch), self._parameters)
        if fingerprint(right) != fingerprint(self.local[i] for i in range(len(right))):
            self.changed.append(step)

    def after_step(self) -> None:
        """What a comparison of weights would see."""
        self.weights.append(fingerprint(self._parameters))


def run(rank: int, size: int, scratch: str, case: Case, number: int) -> dict[str, Any]:
    """Runs one case on this rank; its verdicts and the truth."""
    ddp, optimizer = build(case.optimizer)
    installed = FaultPlan((Fault(**case.fault),)).install(ddp, optimizer, first_step=0)
    truth = _Truth(ddp)
    node = case.node_of[rank]
    monitor = Monitor(
        ddp,
        optimizer,
        loss_fn=loss_fn,
        job=f"campaign-{number}",
        spool_dir=f"{scratch}/world-{size}/node-{node}",
        node=f"node-{node}",
        agent="off",
        metrics_interval=1e6,
        replay_every=case.replay_every,
        conservation_every=case.conservation_every,
    )
    for step, batch in enumerate(batches(rank, case.steps, case.seed)):
        clean = (batch[0].clone(), batch[1])
        with monitor.step(step) as s:
            with precision(case.precision):
                loss = s.loss(batch)
            loss.backward()
            truth.after_backward()
            if rank == case.rank and step >= case.step and case.location in REPLAYED:
                truth.compare(step, clean, installed, case.precision)
            optimizer.step()
            optimizer.zero_grad()
            truth.after_step()
    monitor.close()
    return {**seen(monitor), **told(truth), "strikes": [dataclasses.astuple(s) for s in installed.strikes]}


def told(truth: _Truth) -> dict[str, Any]:
    """The truth as plain data."""
    return {"norms": truth.norms, "weights": truth.weights, "changed": truth.changed}


def seen(monitor: Monitor) -> dict[str, Any]:
    """What sdcwatch said on this rank: verdicts, checks that ran, and what went wrong in it."""
    epoch = monitor._epoch
    assert epoch is not None
    metrics = epoch.reporter.metrics
    checks = ("gradient_norm", "gradient_checksum", "allreduce_conservation", "weight_checksum", "replay")
    return {
        "verdicts": [
            {
                "step": v.step,
                "check": v.check,
                "kind": v.kind,
                "suspects": list(v.suspects),
                "differing": list(v.differing),
                "persistence": v.persistence,
                "path": v.path,
                "contains": v.contains,
                "sentence": v.sentence,
            }
            for v in monitor.verdicts
        ],
        "checks": {check: int(metrics.get("sdc_checks_total", check=check) or 0) for check in checks},
        "skipped": {
            f"{check}:{reason}": int(count)
            for check in checks
            for reason in ("nondeterministic", "undefined", "error", "batch", "collective", "disabled", "comm_hook")
            if (count := metrics.get("sdc_skips_total", check=check, reason=reason))
        },
        "outlier": int(metrics.get("sdc_calibration_outliers_total") or 0),
        "anomalies": int(metrics.get("sdc_gradient_norm_anomalies_total") or 0),
        "failures": int(metrics.get("sdc_skips_total", check="gradient_checksum", reason="error") or 0),
    }


def norm(values: list[float]) -> float:
    """One norm over all parameters."""
    return math.sqrt(sum(value * value for value in values))
