"""Field cases 5-7, 9, 17-23: which values are compared or only hint, what a check costs, and whose rows are whose."""

from __future__ import annotations

import math
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from sdcwatch.checks.gradients import norm
from sdcwatch.errors import SpoolError
from sdcwatch.fingerprint import can_fingerprint, fingerprint
from sdcwatch.testing.simulated_group import SimulatedGroup, group_of
from torch import nn


def corrupt(t: Any, location: str, step: int, rank: int, **fault: Any) -> None:
    """Installs one fault; before the Monitor."""
    from sdcwatch.testing import FaultPlan

    FaultPlan().fail_at(rank, step, location=location, **fault).install(t.ddp, t.optimizer, first_step=0)


def test_nan_on_all_ranks_is_counted_and_aborts_nothing(field: Any) -> None:
    """Case 5: two steps of NaN everywhere; training goes on, skips say `undefined`, no verdict."""

    def body(t: Any) -> Any:
        t.watch()
        for number in range(6):
            with t.monitor.step(number) as step:
                loss = step.loss(t.batch()) * (math.nan if number in (2, 3) else 1.0)
                loss.backward()
                if number not in (2, 3):
                    t.optimizer.step()
                t.optimizer.zero_grad()
        checks = ("gradient_checksum", "allreduce_conservation", "gradient_norm")
        return t.verdicts(), [t.skipped(check, "undefined") for check in checks], t.ran("gradient_checksum")

    assert field(body, 3)[0] == ([], [2, 2, 2], 4)


def test_a_dropped_batch_is_no_outlier() -> None:
    """Case 5: a rank whose loop dropped its batch has a norm of zero; it neither counts nor stands out."""
    group = SimulatedGroup(group_of(1, 1, 1, 1))
    judgement = group.step({"local_norm": {2: 0.0}})
    assert judgement.deviations[2] == 0.0
    assert max(judgement.deviations) < 3
    assert group.step({"local_norm": {2: 0.0, 0: 1000.0}}).deviations[0] > 100
    assert group.step({"local_norm": dict.fromkeys(range(4), 0.0)}).deviations == (0.0,) * 4


def test_two_replicas_name_nobody(field: Any) -> None:
    """Case 5: world size 2 and a wrong weight: contained, suspect unknown."""

    def body(t: Any) -> Any:
        corrupt(t, "optimizer_weight", 3, 1, pattern="bit_flip")
        t.watch()
        with pytest.raises(RuntimeError, match="halted"):
            t.train(range(8))
        return t.verdicts()

    assert field(body, 2) == [[("weight_checksum", "inconclusive", ())]] * 2


def test_mixed_devices_are_not_compared_before_the_reduce() -> None:
    """Case 5: other GPU models round otherwise, so their local norms are no hint; the reduced gradient still counts."""
    group = SimulatedGroup(group_of(1, 1, 1))
    group.steps(2)
    judgement = group.step({"environment": {0: 9}, "local_norm": {0: 500.0}})
    assert (judgement.deviations, dict(judgement.checks)["gradient_norm"]) == ((), "skipped:disabled")
    assert dict(judgement.checks)["gradient_checksum"] == "clean"


def bits(pattern: int) -> torch.Tensor:
    return torch.tensor([pattern], dtype=torch.int32).view(torch.float32)


def test_nan_payloads_and_signed_zeros_are_bits() -> None:
    """Case 6: equal NaN bits are equal, another payload and -0.0 differ."""
    assert fingerprint([bits(0x7FC00001)]) == fingerprint([bits(0x7FC00001)])
    assert fingerprint([bits(0x7FC00001)]) != fingerprint([bits(0x7FC00002)])
    assert fingerprint([torch.tensor([0.0])]) != fingerprint([torch.tensor([-0.0])])


@pytest.mark.parametrize("rank_3", ["same NaN", "other payload", "negative zero"])
def test_equal_nan_bits_are_agreement_on_real_ranks(field: Any, rank_3: str) -> None:
    """Case 6: the same NaN in a frozen value everywhere is agreement; other bits of the same number are not."""

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 8)
            self.held = nn.Parameter(bits(0 if rank_3 == "negative zero" else 0x7FC00001).clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x) + 0.0 * self.held.detach().nan_to_num()
            return out + (self.held - self.held.detach()).sum().nan_to_num() * 0.0

    def body(t: Any) -> Any:
        t.optimizer = torch.optim.SGD(t.net.linear.parameters(), 1e-2)
        t.watch(on_fault="observe")

        def change(number: int) -> None:
            if number == 2 and t.rank == 2 and rank_3 != "same NaN":
                value = bits(-0x80000000) if rank_3 == "negative zero" else bits(0x7FC00002)
                t.net.held.data.copy_(value)

        t.train(range(5), before=change)
        return t.verdicts()

    results = field(body, 3, {"net": Held})
    expected = [] if rank_3 == "same NaN" else [("weight_checksum", "inconclusive", ())]
    assert results == [expected] * 3


def test_tied_weights_count_once(field: Any) -> None:
    """Case 7: one entry a storage in bytes, fingerprint and norm."""

    def tied() -> nn.Module:
        net = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False))
        net[2].weight = net[0].weight
        return net

    def body(t: Any) -> Any:
        t.watch()
        batch = t.batch()
        gradient = torch.autograd.grad(t.loss(t.net, batch), [t.net[0].weight])[0]
        with t.monitor.step(0) as step:
            step.loss(batch).backward()
            measured = t.monitor._epoch.reporter.metrics.get("sdc_gradient_norm")
            t.optimizer.step()
        line = next(line for line in t.monitor.coverage() if line.check == "gradient_checksum")
        return measured == pytest.approx(float(gradient.norm())), line.covered_bytes, t.verdicts()

    assert field(body, 2, {"net": tied}) == [(True, 4 * 16 * 16, [])] * 2


ODD = {
    "fp8": torch.randn(6).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "int8": torch.tensor([-1, 2], dtype=torch.int8),
    "0-d": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "expanded": torch.ones(1, 4).expand(5, 4),
    "channels_last": torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last),
    "transposed": torch.randn(4, 6).t(),
    "strided": torch.randn(16)[::3],
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_tensors_are_hashed_by_value(kind: str) -> None:
    """Case 9: equal content gives equal fingerprints whatever the stride; one changed byte another."""
    tensor = ODD[kind]
    plain = tensor.resolve_conj().clone(memory_format=torch.contiguous_format)
    assert fingerprint([tensor]) == fingerprint([plain])
    if plain.numel():
        plain.view(-1).view(torch.uint8)[-1:].bitwise_xor_(1) if plain.dim() else plain.add_(1)
        assert fingerprint([tensor]) != fingerprint([plain])
    if tensor.is_floating_point():
        assert math.isfinite(float(norm(tensor)))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_tensors_without_bytes_are_skipped_and_never_raise() -> None:
    """Case 9: sparse and meta are not claimed."""
    for tensor in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        assert not can_fingerprint(tensor)
        assert fingerprint([tensor]) == fingerprint([tensor])


class Reads:
    """Counts reads of tensor values by the host: each would be a device synchronisation on a GPU."""

    NAMES = ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy")

    def __init__(self) -> None:
        self.count = 0

    def install(self) -> None:
        for name in self.NAMES:
            setattr(torch.Tensor, name, self._counting(getattr(torch.Tensor, name)))

    def _counting(self, original: Any) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return original(*args, **kwargs)

        return read


def deep(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)), nn.Linear(16, 8))


def test_host_reads_do_not_grow_with_the_model_and_are_none_off_cadence(field: Any) -> None:
    """Case 18: zero on an unchecked step, one small constant on a checked one (docs/decisions.md says why not one)."""

    def body(t: Any) -> Any:
        t.optimizer = torch.optim.SGD(t.ddp.parameters(), 1e-2)
        t.watch(check_every=2, metrics_interval=3600.0)
        t.train(range(2))
        reads = Reads()
        reads.install()
        counts = []
        for number in range(2, 6):
            batch, reads.count = t.batch(), 0
            with t.monitor.step(number):
                t.loss(t.ddp, batch).backward()
                t.optimizer.step()
                t.optimizer.zero_grad()
            counts.append(reads.count)
        return counts

    small, large = (field(body, 2, {"net": lambda layers=layers: deep(layers)})[0] for layers in (2, 12))
    print("host reads a step (checked, unchecked, ...): ", small, large)
    assert small[1] == small[3] == large[1] == large[3] == 0
    assert large[0] == small[0] == 4  # two of them only in host memory: tests/exporter/test_host_reads.py


def test_the_norm_of_a_real_run_is_unsuspected_from_its_first_step(field: Any) -> None:
    """Cases 19 and 20: cold start, warm-up and a resume raise no anomaly (test_norm_history.py has the statistics)."""

    def body(t: Any) -> Any:
        anomalies = []
        for life in range(2):
            t.watch()
            schedule = torch.optim.lr_scheduler.LambdaLR(t.optimizer, lambda n: min(1.0, (n + 1) / 20))
            for number in range(40 * life, 40 * life + 40):
                t.train(range(number, number + 1))
                schedule.step()
            anomalies.append(t.monitor._epoch.reporter.metrics.get("sdc_gradient_norm_anomalies_total"))
            t.monitor.close()
        t.monitor = None
        return anomalies

    assert field(body, 3) == [[0, 0]] * 3


def test_a_real_spike_is_seen_after_a_huge_one(field: Any) -> None:
    """Case 20: 1e6 at step 40, tenfold at step 50, on rank 1 of three: two anomalies there, none elsewhere."""

    def body(t: Any) -> Any:
        t.optimizer = torch.optim.SGD(t.ddp.parameters(), 1e-9)
        t.watch()
        for number in range(60):
            factor = {40: 1e6, 50: 30.0}.get(number, 1.0) if t.rank == 1 else 1.0
            with t.monitor.step(number) as step:
                (step.loss(t.batch()) * factor).backward()
                t.optimizer.zero_grad()
        return t.monitor._epoch.reporter.metrics.get("sdc_gradient_norm_anomalies_total")

    assert field(body, 3) == [0, 2, 0]


def test_the_rank_where_a_nan_began_is_known_after_the_all_reduce(field: Any) -> None:
    """Case 21: NaN in rank 3's local gradient reaches every rank, and only rank 3 counts it as its own."""

    def body(t: Any) -> Any:
        t.watch()
        for number in range(4):
            with t.monitor.step(number) as step:
                (step.loss(t.batch()) * (math.nan if (t.rank, number) == (3, 2) else 1.0)).backward()
                everywhere = bool(torch.isnan(t.net[0].weight.grad).any())
                if not everywhere:
                    t.optimizer.step()
                t.optimizer.zero_grad()
            if number == 2:
                assert everywhere
        return t.monitor._epoch.reporter.metrics.get("sdc_nonfinite_gradients_total"), t.verdicts()

    assert field(body, 4) == [(0, []), (0, []), (0, []), (1, [])]


def claim(root: str, out: Any) -> None:
    from sdcwatch.spool.rank import Spool

    try:
        Spool.open(Path(root), "job", "e0000000000001-00000001", 2, 0, IDENTITY).close()
        out.put("opened")
    except SpoolError as error:
        out.put(str(error))


IDENTITY = {
    "training_job": "job", "training_cluster": "", "training_node": "n", "training_instance": "i", "gpu_uuid": "g",
    "rank": "2",
}  # fmt: skip


def test_a_second_process_that_claims_a_rank_is_refused(tmp_path: Path) -> None:
    """Case 22: a clear message for the second, nothing of the first is touched, and its place is free once it ended."""
    from sdcwatch.spool.rank import Spool

    context = multiprocessing.get_context("fork")
    out: Any = context.Queue()
    first = Spool.open(tmp_path, "job", "e0000000000001-00000001", 2, 0, IDENTITY)
    first.write_metrics("sdc_training_step 1\n")
    said = []
    for _ in range(2):
        process = context.Process(target=claim, args=(str(tmp_path), out))
        process.start()
        said.append(out.get(timeout=20))
        process.join(20)
        first.close()
    assert "rank 2" in said[0]
    assert said[1] == "opened"
    assert len(list(tmp_path.rglob("rank-2.prom"))) == 1


def test_rows_in_the_wrong_slots_blame_nobody(field: Any) -> None:
    """Case 23: a gather that permutes its rows is a transport fault on all ranks; it is gone with the next exchange."""

    def body(t: Any) -> Any:
        t.watch(on_fault="observe")
        healthy = t.monitor._epoch.exchange.rows

        def permuted(row: Any) -> Any:
            rows = healthy(row)
            return rows[1:] + rows[:1] if t.monitor._step == 2 else rows

        t.monitor._epoch.exchange.rows = permuted
        t.train(range(5))
        return [(v.kind, v.suspects, v.path) for v in t.monitor.verdicts], t.ran("gradient_checksum")

    results = field(body, 3)
    assert [verdicts for verdicts, _ in results] == [[("inconclusive", (), "transport")]] * 3
    assert results[0][1] == 4


def test_collectives_come_only_from_the_training_thread_and_after_backward(field: Any) -> None:
    """Case 17: every collective of ours is issued on the thread that trains, once DDP's of that backward are over."""

    def body(t: Any) -> Any:
        seen = []
        monitor = t.watch(metrics_interval=0.1)
        exchange = monitor._epoch.exchange
        for name in ("rows", "agree_on_most"):
            healthy = getattr(exchange, name)

            def counted(*args: Any, healthy: Any = healthy) -> Any:
                reduced = fingerprint(p.grad for p in t.ddp.parameters())
                seen.append((threading.current_thread() is threading.main_thread(), reduced))
                return healthy(*args)

            setattr(exchange, name, counted)
        after: list[int] = []
        t.train(range(4), before=lambda n: after.append(fingerprint(p.grad for p in t.ddp.parameters())))
        return all(main for main, _ in seen), [reduced for _, reduced in seen] == [d for d in after for _ in range(2)]

    assert field(body, 3) == [(True, True)] * 3


@pytest.mark.parametrize("who", ["all ranks", "rank 0"])
@pytest.mark.parametrize("how", ["bare module", "second backward"])
def test_a_backward_that_ddp_does_not_reduce_is_none_of_ours(field: Any, who: str, how: str) -> None:
    """Cases 4 and 17: a probe of gradients through the bare module, or a graph run twice, is never an exchange."""

    def body(t: Any) -> Any:
        t.watch()
        for number in range(6):
            with t.monitor.step(number) as step:
                loss = step.loss(t.batch())
                loss.backward(retain_graph=True)
                if number == 3 and (who == "all ranks" or t.rank == 0):
                    kept = [p.grad.clone() for p in t.ddp.parameters()]
                    (t.loss(t.net, t.batch()) if how == "bare module" else loss).backward()
                    for parameter, gradient in zip(t.ddp.parameters(), kept, strict=True):
                        parameter.grad.copy_(gradient)
                t.optimizer.step()
                t.optimizer.zero_grad()
        return t.verdicts(), t.ran("gradient_checksum")

    results = field(body, 3, {"timeout": 10})
    assert results[0] == ([], 6)
    assert [verdicts for verdicts, _ in results] == [[]] * 3


def test_a_watched_model_can_be_copied_and_pickled(field: Any) -> None:
    """Case 25's kind: what the monitor hangs on a model holds no process group, socket or file."""

    def body(t: Any) -> Any:
        import copy
        import io

        t.watch()
        t.train(range(2))
        buffer = io.BytesIO()
        torch.save(t.ddp, buffer)
        copied = copy.deepcopy(t.net)
        t.train(range(2, 4))
        return buffer.tell() > 0, len(list(copied.parameters())), t.verdicts()

    assert field(body, 2) == [(True, 4, [])] * 2
