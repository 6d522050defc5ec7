"""Audits on real ranks: what a healthy step may look like when it is replayed, and who settles a single odd replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn


def rows(t: Any, number: int) -> Any:
    """A batch of `number` rows."""
    return torch.randn(number, 16, generator=t.generator), torch.randint(8, (number,), generator=t.generator)


@pytest.mark.parametrize("form", ["plain", pytest.param("compiled", marks=pytest.mark.integration)])
def test_ragged_batches_are_audited_and_accuse_nobody(field: Any, form: str) -> None:
    """Each rank's last batch of a pass has another size; the compiled module makes another graph of it, on one rank."""

    def body(t: Any) -> Any:
        model = torch.compile(t.ddp, backend="eager", dynamic=False) if form == "compiled" else t.ddp
        from sdcwatch import Monitor

        t.monitor = Monitor(
            model, t.optimizer, loss_fn=t.loss, replay_every=2, on_fault="halt", spool_dir=f"{t.root}/n{t.rank}",
            node=f"n{t.rank}",
        )  # fmt: skip
        for number in range(12):
            ragged = number % 4 == 2 and (form == "plain" or t.rank == 1)
            with t.monitor.step(number) as step:
                step.loss(rows(t, 3 + t.rank if ragged else 8)).backward()
                t.optimizer.step()
                t.optimizer.zero_grad()
        return t.verdicts(), t.ran("replay")

    results = field(body, 3)
    assert [verdicts for verdicts, _ in results] == [[]] * 3
    assert results[0][1] == 6


def test_a_loss_scale_that_overflows_costs_one_audit_and_accuses_nobody(field: Any) -> None:
    """GradScaler begins too high: a step of Inf is undefined, its fall is no difference, and audits then run."""

    def body(t: Any) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=10**6, backoff_factor=2.0**-60)
        from sdcwatch import Monitor

        t.monitor = Monitor(
            t.ddp, t.optimizer, loss_fn=t.loss, scaler=scaler, replay_every=1, on_fault="halt", node=f"n{t.rank}",
            spool_dir=f"{t.root}/n{t.rank}",
        )  # fmt: skip
        scales = []
        for number in range(6):
            with t.monitor.step(number) as step:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = step.loss(t.batch())
                scaler.scale(loss * 1e6).backward()
                scaler.step(t.optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
                t.optimizer.zero_grad()
        return t.verdicts(), scales[0] < 2.0**127, t.skipped("replay", "undefined"), t.ran("replay")

    results = field(body, 3)
    verdicts, fell, undefined, ran = results[0]
    assert [result[0] for result in results] == [[]] * 3
    assert fell
    assert (undefined >= 1, undefined + ran) == (True, 6)
    assert ran >= 4
    assert verdicts == []


@pytest.mark.parametrize("short", ["its own replay", "its neighbour's batch"])
def test_a_rank_without_memory_for_an_audit_stops_it_on_all_before_it_begins(field: Any, short: str) -> None:
    """Agreed from the rows: nobody replays and nobody waits; with memory again the next audits run."""

    def body(t: Any) -> Any:
        import sdcwatch.watch.row_fields as row_fields
        from sdcwatch.checks import replay

        replayed: list[int] = []
        healthy = replay.run

        def counted(*args: Any, **kwargs: Any) -> Any:
            replayed.append(t.monitor._step)
            return healthy(*args, **kwargs)

        replay.run = counted
        needed = 2 * 4 * sum(p.numel() for p in t.ddp.parameters())

        def free(device: torch.device) -> int:
            if t.rank != 1 or t.monitor._step not in (2, 4):
                return 1 << 30
            # in the second case room for its own small micro-batch, and not for the large one that it serves
            return needed // 2 if short == "its own replay" else needed + 20_000

        row_fields._free_memory = free
        t.watch(replay_every=2)
        for number in range(8):
            with t.monitor.step(number) as step:
                step.loss(rows(t, 4000 if t.rank == 0 and short != "its own replay" else 8)).backward()
                t.optimizer.step()
                t.optimizer.zero_grad()
        return t.verdicts(), sorted(set(replayed)), t.skipped("replay", "oom"), t.ran("replay")

    results = field(body, 3)
    assert [result[:2] for result in results] == [([], [0, 6])] * 3
    assert results[0][2:] == (2, 2)


@pytest.mark.parametrize(("call", "named"), [(1, None), (2, 1)], ids=["its own replay", "the one for another rank"])
def test_one_odd_replay_is_settled_by_a_real_third_node(field: Any, call: int, named: int | None) -> None:
    """Rank 1 errs in one replay of one audit: its own original refutes it, or a third node's replay does."""

    def body(t: Any) -> Any:
        from sdcwatch.testing import FaultPlan

        plan = FaultPlan().fail_at(1, 4, location="backward", mode="transient", call=call, pattern="scale")
        plan.install(t.ddp, t.optimizer, first_step=0)
        t.watch(replay_every=2, on_fault="observe")
        t.train(range(8))
        (verdict,) = t.monitor.verdicts
        return verdict.step, verdict.kind, verdict.suspects, verdict.persistence, verdict.contains, t.ran("replay")

    results = field(body, 4)
    kind, persistence = ("inconclusive", None) if named is None else ("attributed", "transient")
    suspects = () if named is None else (named,)
    assert [result[:5] for result in results] == [(4, kind, suspects, persistence, False)] * 4
    assert results[0][5] == 4


def test_a_node_that_is_wrong_from_the_first_audit_is_an_outlier_and_never_silent(field: Any) -> None:
    """Its edges never calibrate, so it is not accused; each audit says which rank stands apart."""

    def body(t: Any) -> Any:
        from sdcwatch.testing import FaultPlan

        FaultPlan().fail_at(2, 0, location="backward", pattern="scale").install(t.ddp, t.optimizer, first_step=0)
        t.watch(replay_every=2)
        t.train(range(6))
        metrics = t.monitor._epoch.reporter.metrics
        return t.verdicts(), metrics.get("sdc_calibration_outliers_total"), t.skipped("replay", "nondeterministic")

    results = field(body, 4)
    assert [verdicts for verdicts, *_ in results] == [[]] * 4
    assert [outliers for _, outliers, _ in results] == [0, 0, 3, 0]
    assert results[0][2] == 3


class Bag(nn.Module):
    """Sparse gradients, a scalar and a complex parameter, and buffers without plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 8, sparse=True)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("wide", torch.ones(1).expand(6))
        self.register_buffer("none", torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table(x.abs().mul(10).long().clamp(max=31)).sum(1)
        return out * self.scale + self.phase.abs()


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("audits", [0, 2])
def test_odd_parameters_train_on_real_ranks(field: Any, audits: int) -> None:
    """Case 9: sparse gradients are counted as undefined, scalar and complex ones are compared; nothing raises."""

    def body(t: Any) -> Any:
        t.watch(replay_every=audits, on_fault="halt")
        t.train(range(6))
        metrics = t.monitor._epoch.reporter.metrics
        skipped = t.skipped("allreduce_conservation", "undefined")
        line = next(line for line in t.monitor.coverage() if line.check == "weight_checksum")
        errors = metrics.get("sdc_checks_skipped_total")
        return t.verdicts(), t.ran("weight_checksum") >= 5, skipped, line.covered_bytes, errors

    sgd = {"optimizer": lambda p: torch.optim.SGD(p, 1e-2), "net": Bag, "ddp": {"broadcast_buffers": False}}
    results = field(body, 3, sgd)
    assert [result[0] for result in results] == [[]] * 3
    assert results[0][1:3] == (True, 6)
    assert results[0][3] >= 4 * 32 * 8 + 4 + 8 * 8
