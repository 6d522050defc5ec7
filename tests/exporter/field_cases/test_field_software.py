"""Field cases 1-4, 8, 10, 13-16: what loops, schemas and resumes do is never blamed on a node, and nothing hangs."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn


def batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Dropout(0.2), nn.Linear(24, 8))


@pytest.mark.parametrize("broadcast", [False, True])
def test_buffers_that_differ_by_design_are_no_mismatch(field: Any, broadcast: bool) -> None:
    """Case 1: BatchNorm statistics differ after a step on any setting; six audited steps stay clean."""

    def body(t: Any) -> Any:
        t.watch(replay_every=2)
        t.train(range(6))
        return t.verdicts(), t.ran("weight_checksum") >= 5, t.ran("replay"), float(t.net[1].running_mean.sum())

    results = field(body, 3, {"net": batchnorm, "ddp": {"broadcast_buffers": broadcast}})
    assert all(result[0] == [] for result in results)
    assert results[0][1:3] == (True, 3)
    assert len({result[3] for result in results}) == 3


def test_under_no_sync_the_check_waits_for_the_sync_step(field: Any) -> None:
    """Case 2: accumulation 2, ten backwards, five checks, no verdict although local gradients differ meanwhile."""

    def body(t: Any) -> Any:
        t.watch()
        for number in range(5):
            with t.monitor.step(number) as step:
                with t.ddp.no_sync():
                    step.loss(t.batch()).backward()
                step.loss(t.batch()).backward()
                t.optimizer.step()
                t.optimizer.zero_grad()
        return t.ran("gradient_checksum"), t.ran("allreduce_conservation"), t.verdicts()

    assert field(body, 2)[0] == (5, 5, [])


class Optional(nn.Module):
    """A model with a part that a call may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(16, 8), nn.Linear(16, 8)
        self.extra = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.always(x) + (self.sometimes(x) if self.extra else 0)
        return out


def test_a_parameter_used_only_in_a_no_sync_micro_step_is_no_mismatch(field: Any) -> None:
    """Case 2: DDP reduces what the micro-step left, which no hook of ours saw: conservation skips that step."""

    def body(t: Any) -> Any:
        t.watch()
        for number in range(6):
            with t.monitor.step(number) as step:
                if number == 3:
                    with t.ddp.no_sync():
                        step.loss(t.batch()).backward()
                    t.net.extra = False
                step.loss(t.batch()).backward()
                t.net.extra = True
                t.optimizer.step()
                t.optimizer.zero_grad()
        skips = t.skipped("allreduce_conservation", "undefined")
        return t.verdicts(), t.ran("gradient_checksum"), t.ran("allreduce_conservation"), skips

    assert field(body, 3, {"net": Optional, "ddp": {"find_unused_parameters": True}})[0] == ([], 6, 5, 1)


def test_replicas_that_code_parted_are_software(field: Any) -> None:
    """Case 2: an EMA swap on rank 0 under no_sync really parts the replicas: said, no node, no halt."""

    def body(t: Any) -> Any:
        t.watch()

        def swap(number: int) -> None:
            if t.rank == 0 and number == 3:
                with torch.no_grad():
                    t.net[0].weight.mul_(0.9)

        t.train(range(6), before=swap)
        return {(kind, suspects) for _, kind, suspects in t.verdicts()}

    assert field(body, 4) == [{("software", ())}] * 4


def test_a_reduce_that_ddp_did_not_finish_is_its_own_error_and_no_verdict(field: Any) -> None:
    """Case 2: without find_unused_parameters DDP refuses at the next forward; the replicas that parted are software."""

    def body(t: Any) -> Any:
        t.watch()
        t.train(range(2))
        t.net.extra = False
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            t.train(range(2, 6))
        before = t.verdicts(), t.ran("gradient_checksum"), t.skipped("gradient_checksum", "error")
        t.monitor.close()
        return before, t.verdicts(), t.monitor.verdicts[0].sentence

    results = field(body, 2, {"net": Optional})
    assert results[0][0][:2] == ([], 2)
    assert results[0][0][2] >= 1
    for _, verdicts, sentence in results:
        assert verdicts == [("weight_checksum", "software", ())]
        assert "DDP could not finish" in sentence


def test_loss_scales_that_drift_apart_are_named_as_such(field: Any) -> None:
    """Case 3: one rank's GradScaler halves its scale: software, "the loss scale", no node."""

    def body(t: Any) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        from sdcwatch import Monitor

        t.monitor = Monitor(
            t.ddp, t.optimizer, scaler=scaler, spool_dir=f"{t.root}/n{t.rank}", node=f"n{t.rank}", on_fault="halt"
        )
        for number in range(6):
            with t.monitor.step(number):
                scaler.scale(t.loss(t.ddp, t.batch())).backward()
                scaler.step(t.optimizer)
                scaler.update(512.0 if t.rank == 1 and number == 2 else None)
                t.optimizer.zero_grad()
        return {(kind, suspects) for _, kind, suspects in t.verdicts()}, t.monitor.verdicts[0].sentence

    for found, sentence in field(body, 3):
        assert found == {("software", ())}
        assert "loss scale" in sentence


@pytest.mark.parametrize("how", ["skips the step", "drops the batch in an except"])
def test_one_rank_that_goes_its_own_way_neither_hangs_nor_blames(field: Any, how: str) -> None:
    """Case 4: rank 1 skips optimizer steps; all ranks reach the end, the verdict is software."""

    def body(t: Any) -> Any:
        t.watch()
        done = 0
        for number in range(8):
            with contextlib.suppress(ValueError), t.monitor.step(number) as step:
                step.loss(t.batch()).backward()
                if t.rank == 1 and number in (3, 5):
                    if how == "drops the batch in an except":
                        raise ValueError("a bad batch")
                    continue
                t.optimizer.step()
                t.optimizer.zero_grad()
            done = number
        return done, {(kind, suspects) for _, kind, suspects in t.verdicts()}

    assert field(body, 3) == [(7, {("software", ())})] * 3


@pytest.mark.parametrize("audits", [0, 4])
def test_step_numbers_that_drift_apart_split_no_cadence(field: Any, audits: int) -> None:
    """Case 4: checks on every second backward; rank 1's loop leaves out a number twice. All of them run."""

    def body(t: Any) -> Any:
        t.watch(check_every=2, replay_every=audits)
        for number in range(12):
            left_out = (number >= 3) + (number >= 8) if t.rank == 1 else 0
            with t.monitor.step(number + left_out) as step:
                step.loss(t.batch()).backward()
                t.optimizer.step()
                t.optimizer.zero_grad()
        run = t.ran("replay") + t.skipped("replay", "nondeterministic") + t.skipped("replay", "error")
        return t.verdicts(), t.ran("gradient_checksum"), run

    results = field(body, 3, {"timeout": 20})
    for verdicts, *_ in results:
        assert verdicts[0] == ("weight_checksum", "software", ())
        assert {suspects for *_, suspects in verdicts} == {()}
        assert audits or len(verdicts) == 1
    assert results[0][1:] == (6, 3 if audits else 0)


def test_schemas_that_differ_are_one_clear_error_on_all_ranks(field: Any) -> None:
    """Case 8: other names on rank 1; the same sentence everywhere, before any step."""

    def body(t: Any) -> Any:
        if t.rank == 1:
            t.net.add_module("renamed", t.net[2])
            t.net._modules.pop("2")
        with pytest.raises(ValueError, match=r"of rank\(s\) \[1\]") as caught:
            t.watch()
        return str(caught.value)

    assert len(set(field(body, 3))) == 1


@pytest.mark.parametrize("when", ["before the monitor", "before the monitor, on rank 1", "in mid-run on rank 1"])
def test_parameters_frozen_after_the_wrap_neither_hang_nor_blame(field: Any, when: str) -> None:
    """Case 8: frozen on all ranks it trains, on one it is refused at start; in mid-run DDP still reduces it alike."""

    def body(t: Any) -> Any:
        def freeze(number: int) -> None:
            if number == 2 and t.rank == 1:
                t.net[0].weight.requires_grad_(False)

        if when == "before the monitor" or (when == "before the monitor, on rank 1" and t.rank == 1):
            t.net[0].weight.requires_grad_(False)
        if when == "before the monitor, on rank 1":
            with pytest.raises(ValueError, match=r"requires_grad\) of rank\(s\) \[1\]"):
                t.watch()
            return [], 0.0
        t.watch()
        t.train(range(6), before=freeze if when == "in mid-run on rank 1" else None)
        return t.verdicts(), t.ran("gradient_checksum")

    results = field(body, 3, {"ddp": {"find_unused_parameters": True}, "timeout": 20})
    assert [verdicts for verdicts, _ in results] == [[]] * 3
    assert results[0][1] == (0 if when == "before the monitor, on rank 1" else 6)


def test_ignored_parameters_of_one_rank_are_not_compared(field: Any) -> None:
    """Case 8: an expert that DDP ignores exists on one rank only: no mispairing, no verdict, not counted as covered."""

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.expert = nn.Linear(16, 8), nn.Linear(16, 8)
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                self, ["expert.weight", "expert.bias"]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.shared(x) + self.expert(x)
            return out

    def body(t: Any) -> Any:
        nn.init.normal_(t.net.expert.weight, std=1.0 + t.rank)
        t.optimizer = torch.optim.AdamW(t.net.shared.parameters(), 1e-2)
        t.watch()
        t.train(range(4))
        line = next(line for line in t.monitor.coverage() if line.check == "gradient_checksum")
        return t.verdicts(), line.covered_bytes

    assert field(body, 3, {"net": Expert}) == [([], 4 * (16 * 8 + 8))] * 3


def test_a_resume_that_only_rank_0_loaded_is_software_though_it_is_outvoted(field: Any) -> None:
    """Case 10: four ranks, only rank 0 has Adam state: flagged at its first check, nobody named."""

    def body(t: Any) -> Any:
        if t.rank == 0:
            for parameter in t.ddp.parameters():
                t.optimizer.state[parameter] = {
                    "step": torch.tensor(7.0),
                    "exp_avg": torch.ones_like(parameter),
                    "exp_avg_sq": torch.ones_like(parameter),
                }
        t.watch()
        t.train(range(4))
        return t.verdicts(), t.monitor.verdicts[0].step

    for verdicts, step in field(body, 4):
        assert {(kind, suspects) for _, kind, suspects in verdicts} == {("software", ())}
        assert step == 1


def test_a_corrupt_checkpoint_is_the_same_nan_everywhere_and_accuses_nobody(field: Any) -> None:
    """Case 13: two lives of the job load the same NaN; both count undefined steps, neither names a node."""

    def body(t: Any) -> Any:
        found = []
        for life in range(2):
            with torch.no_grad():
                t.net[0].weight.fill_(float("nan"))
            t.watch()
            t.train(range(10 * life, 10 * life + 3))
            found.append((t.verdicts(), t.skipped("gradient_checksum", "undefined")))
            t.monitor.close()
        t.monitor = None
        return found

    assert field(body, 3)[0] == [([], 3), ([], 6)]


def test_uninitialised_padding_is_not_compared(field: Any) -> None:
    """Case 14: parameters are views into a flat buffer whose padding holds other garbage on each rank."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.full((256,), float("nan"))
            self.weight = nn.Parameter(flat[3:131].view(8, 16))
            nn.init.normal_(self.weight)
            self.flat = [flat]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.t()

    def body(t: Any) -> Any:
        t.net.flat[0][131:] = float(t.rank)
        t.watch()
        t.train(range(4))
        return t.verdicts(), t.ran("weight_checksum") >= 3

    assert field(body, 3, {"net": Padded})[0] == ([], True)
    assert field(body, 3, {"net": Padded, "ddp": {"gradient_as_bucket_view": True}})[0] == ([], True)


def test_under_join_nothing_of_ours_is_collective(field: Any) -> None:
    """Case 15: five against six batches end normally; skips say `join`, once a step and check."""

    def body(t: Any) -> Any:
        t.watch()
        with t.ddp.join():
            for number in range(5 + t.rank):
                with t.monitor.step(number) as step:
                    step.loss(t.batch()).backward()
                    t.optimizer.step()
                    t.optimizer.zero_grad()
        counts = [t.skipped(c, "join") for c in ("gradient_checksum", "allreduce_conservation", "weight_checksum")]
        return t.ran("gradient_checksum"), counts, t.verdicts()

    assert field(body, 2)[0] == (0, [5, 5, 5], [])


@pytest.mark.integration
def test_uneven_inputs_without_join_end_as_they_do_without_the_monitor(field: Any) -> None:
    """Case 15: plain DDP times out in its own reduce; with the monitor the same rank raises the same kind of error."""

    def body(t: Any) -> Any:
        watched = t.settings.pop("watched")
        if watched:
            t.watch()
        for number in range(5 + t.rank):
            with t.monitor.step(number) if watched else contextlib.nullcontext():
                t.loss(t.ddp, t.batch()).backward()
                t.optimizer.step()
                t.optimizer.zero_grad()
        torch.distributed.barrier() if t.rank == 0 else None
        return "done"

    ends = []
    for watched in (False, True):
        results = field(body, 2, {"raw": True, "timeout": 4}, watched=watched)
        ends.append([(kind, "" if kind == "value" else str(value).split(":")[0]) for kind, value in results])
    assert ends[0] == ends[1]
    assert ends[0][1][0] == "error"


@pytest.mark.parametrize("where", ["hook", "row", "verdict"])
def test_our_own_exception_on_one_rank_is_counted_and_all_go_on(field: Any, where: str) -> None:
    """Case 16: in a gradient hook, while the row is made, in the verdict; all six steps train, nobody is named."""

    def body(t: Any) -> Any:
        import sdcwatch.checks.gradients
        import sdcwatch.watch.epoch
        import sdcwatch.watch.row_fields

        module, name = {
            "hook": (sdcwatch.checks.gradients, "norm"),
            "row": (sdcwatch.watch.row_fields, "versions"),
            "verdict": (sdcwatch.watch.epoch, "judge"),
        }[where]
        healthy = getattr(module, name)

        def broken(*args: Any, **kwargs: Any) -> Any:
            if t.rank == 1 and t.monitor._step == 3:
                raise RuntimeError("a bug of ours")
            return healthy(*args, **kwargs)

        t.watch(on_fault="observe")
        setattr(module, name, broken)
        t.train(range(6))
        return t.monitor._step, {suspects for *_, suspects in t.verdicts()} <= {()}, t.ran("gradient_checksum")

    results = field(body, 3)
    assert [result[:2] for result in results] == [(5, True)] * 3
    assert results[0][2] >= 5
