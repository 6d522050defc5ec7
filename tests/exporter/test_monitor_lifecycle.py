"""How a Monitor starts, refuses, halts, restarts and ends; training is touched only where it was asked for."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Body = Callable[[int, Any, Any, Callable[..., Any], Any], Any]


def loop(rank: int, size: int, root: str, settings: dict[str, Any], body: Body) -> Any:
    """Builds a small DDP model and hands it to `body(rank, ddp, optimizer, make, batches)`."""
    import torch
    from sdcwatch import Monitor
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)))
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(rank)

    def batches() -> Any:
        while True:
            yield torch.randn(8, 16, generator=generator), torch.randint(8, (8,), generator=generator)

    def make(**more: Any) -> Monitor:
        given = {"loss_fn": loss_fn, "spool_dir": f"{root}/node-{rank}", "node": f"node-{rank}", "replay_every": 3}
        return Monitor(more.pop("model", ddp), more.pop("optimizer", optimizer), **(given | settings | more))

    return body(rank, ddp, optimizer, make, batches())


def loss_fn(model: Any, batch: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def steps(
    monitor: Any, optimizer: Any, batches: Any, numbers: range, after: Callable[[int], None] | None = None
) -> None:
    """The documented loop."""
    for step in numbers:
        with monitor.step(step) as s:
            s.loss(next(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if after is not None:
            after(step)


def counted(monitor: Any, check: str, reason: str | None = None) -> float:
    """Runs of a check, or its skips for one reason, as exported."""
    metrics = monitor._epoch.reporter.metrics
    value = (
        metrics.get("sdc_checks_total", check=check)
        if reason is None
        else metrics.get("sdc_skips_total", check=check, reason=reason)
    )
    return float(value or 0.0)


def test_a_model_without_ddp_is_refused_with_the_line_to_write(ranks: Any, tmp_path: Path) -> None:
    """The same sentence on every rank, nothing hangs."""

    def body(rank: int, ddp: Any, optimizer: Any, make: Any, batches: Any) -> Any:
        with pytest.raises(ValueError, match=r"ddp_model = DistributedDataParallel\(model\)"):
            make(model=ddp.module)
        with pytest.raises(ValueError, match="watches one optimizer, got 2"):
            make(optimizer=[optimizer, optimizer])
        return True

    assert ranks(loop, 2, str(tmp_path), {}, body) == [True, True]


def test_a_process_group_smaller_than_the_job_is_refused(ranks: Any, tmp_path: Path) -> None:
    """Rank numbers of a subgroup are not those of the job, so nobody could be named rightly."""

    def body(rank: int, ddp: Any, optimizer: Any, make: Any, batches: Any) -> Any:
        import torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        groups = [dist.new_group([0, 1]), dist.new_group([2])]
        model = DistributedDataParallel(nn.Linear(16, 8), process_group=groups[rank // 2])
        with pytest.raises(ValueError, match="of 3 ranks"):
            make(model=model)
        return True

    assert ranks(loop, 3, str(tmp_path), {}, body) == [True] * 3


def test_one_ranks_bad_setting_is_the_same_error_on_all(ranks: Any, tmp_path: Path) -> None:
    """A typo, a wrong value and a value that differs: named, with the rank, on every rank."""

    def body(rank: int, ddp: Any, optimizer: Any, make: Any, batches: Any) -> Any:
        from sdcwatch import ConfigurationError

        said = []
        for bad in ({"repaly_every": 3}, {"on_fault": "stop"}, {"check_every": 0}):
            with pytest.raises(ConfigurationError) as caught:
                make(**(bad if rank == 1 else {}))
            said.append(str(caught.value))
        with pytest.raises(ValueError, match="replay_every differs between ranks"):
            make(replay_every=3 + 3 * rank)
        monitor = make()
        steps(monitor, optimizer, batches, range(2))
        monitor.close()
        return said

    first, second = ranks(loop, 2, str(tmp_path), {}, body)
    for mine, theirs in zip(first, second, strict=True):
        assert mine == f"rank 1: {theirs}"
    assert "did you mean replay_every?" in second[0]


def test_disabled_on_one_rank_is_off_on_all(ranks: Any, tmp_path: Path) -> None:
    """`SDCWATCH_DISABLE=1` needs no code change, and half a group never waits for the other half."""

    def body(rank: int, ddp: Any, optimizer: Any, make: Any, batches: Any) -> Any:
        if rank == 1:
            os.environ["SDCWATCH_DISABLE"] = "1"
        monitor = make()
        steps(monitor, optimizer, batches, range(3))
        monitor.close()
        return monitor.enabled, monitor.coverage(), monitor.verdicts

    assert ranks(loop, 3, str(tmp_path), {}, body) == [(False, (), ())] * 3


def test_without_a_process_group_it_is_a_no_op_that_still_calls_the_loss() -> None:
    """A laptop run of the same script works unchanged."""
    import torch
    from sdcwatch import Monitor

    model = torch.nn.Linear(16, 8)
    monitor = Monitor(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=loss_fn)
    with monitor.step(0) as s:
        loss = s.loss((torch.ones(2, 16), torch.tensor([1, 2])))
        loss.backward()
    monitor.close()
    assert not monitor.enabled
    assert model.weight.grad is not None


def test_a_second_monitor_is_refused_until_the_first_is_closed(ranks: Any, tmp_path: Path) -> None:
    """Same model, other model: each its own sentence; after close() a new one works (field case 25)."""

    def body(rank: int, ddp: Any, optimizer: Any, make: Any, batches: Any) -> Any:
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        other = DistributedDataParallel(nn.Linear(16, 8))
        monitor = make()
        with pytest.raises(ValueError, match="already has a Monitor; close"):
            make()
        with pytest.raises(ValueError, match="on another model"):
            make(model=other)
        steps(monitor, optimizer, batches, range(2))
        monitor.close()
        with pytest.raises(ValueError, match="is closed"):
            monitor.step(5)
        again = make()
        steps(again, optimizer, batches, range(2, 5))
        runs = counted(again, "gradient_checksum")
        again.close()
        return runs

    assert ranks(loop, 2, str(tmp_path), {}, body) == [5.0, 5.0]  # counters go on from the first monitor's file


def test_a_step_number_that_falls_back_is_refused(ranks: Any, tmp_path: Path) -> None:
    """The sentence says what to do instead; the run itself is intact."""

    def body(rank: int, ddp: Any, optimizer: Any, make: Any, batches: Any) -> Any:
        monitor = make()
        steps(monitor, optimizer, batches, range(4, 6))
        with pytest.raises(ValueError, match="step 5 after step 5: step numbers must rise"):
            monitor.step(5)
        steps(monitor, optimizer, batches, range(6, 8))
        runs = counted(monitor, "gradient_checksum")
        monitor.close()
        return runs

    assert ranks(loop, 2, str(tmp_path), {}, body) == [4.0, 4.0]


def test_a_loss_computed_by_plain_code_turns_replay_off_visibly(ranks: Any, tmp_path: Path) -> None:
    """No audit, a counted skip a cadence, and the other checks go on."""

    def body(rank: int, ddp: Any, optimizer: Any, make: Any, batches: Any) -> Any:
        monitor = make()
        for step in range(6):
            with monitor.step(step):
                loss_fn(ddp, next(batches)).backward()
                optimizer.step()
                optimizer.zero_grad()
        result = counted(monitor, "replay"), counted(monitor, "replay", "disabled"), counted(monitor, "weight_checksum")
        monitor.close()
        return result

    for replays, skips, weights in ranks(loop, 3, str(tmp_path), {}, body)[:2]:
        assert (replays, skips) == (0.0, 2.0)
        assert weights >= 5


def test_a_compiled_ddp_and_two_backwards_a_step_are_supported(ranks: Any, tmp_path: Path) -> None:
    """The wrapper is looked through, and the second reducing backward of a step has an exchange of its own."""

    def body(rank: int, ddp: Any, optimizer: Any, make: Any, batches: Any) -> Any:
        import torch

        compiled = torch.compile(ddp, backend="eager")
        monitor = make(model=compiled, on_fault="halt")
        for step in range(4):
            with monitor.step(step) as s:
                s.loss(next(batches)).backward()
                s.loss(next(batches)).backward()
                optimizer.step()
                optimizer.zero_grad()
        result = counted(monitor, "gradient_checksum"), len(monitor.verdicts)
        monitor.close()
        return result

    assert ranks(loop, 3, str(tmp_path), {}, body)[0] == (8.0, 0)


def test_an_exception_in_a_check_of_ours_on_one_rank_is_counted_and_training_goes_on(
    ranks: Any, tmp_path: Path
) -> None:
    """The rank still joins the exchange, with an error code (field case 16)."""

    def body(rank: int, ddp: Any, optimizer: Any, make: Any, batches: Any) -> Any:
        from sdcwatch.checks.gradients import ReducedGradients

        monitor = make(on_fault="halt")
        healthy = ReducedGradients.measured

        def broken(reduced: ReducedGradients) -> Any:
            if rank == 1 and monitor._epoch.step == 2:
                raise RuntimeError("a bug of ours")
            return healthy(reduced)

        ReducedGradients.measured = broken  # type: ignore[method-assign]
        steps(monitor, optimizer, batches, range(6))
        result = counted(monitor, "gradient_checksum"), counted(monitor, "gradient_checksum", "error")
        monitor.close()
        return result, len(monitor.verdicts)

    results = ranks(loop, 3, str(tmp_path), {}, body)
    assert [verdicts for _, verdicts in results] == [0, 0, 0]
    assert results[0][0] == (5.0, 1.0)


def test_a_rank_that_misreads_its_rows_cannot_split_the_group(ranks: Any, tmp_path: Path) -> None:
    """One rank reads a different digest from the same rows: all ranks stop at one step, and nobody is named."""

    def body(rank: int, ddp: Any, optimizer: Any, make: Any, batches: Any) -> Any:
        import dataclasses

        from sdcwatch import CorruptionDetected

        monitor = make(on_fault="halt", replay_every=0)
        exchange = monitor._epoch.exchange
        healthy = exchange.rows

        def misread(row: Any) -> Any:
            rows = list(healthy(row))
            if rank == 1 and row.row.step == 3:
                rows[2] = dataclasses.replace(rows[2], reduced=12345)
            return rows

        exchange.rows = misread
        with pytest.raises(CorruptionDetected) as caught:
            steps(monitor, optimizer, batches, range(6))
        verdict = monitor.verdicts[-1]
        monitor.close()
        return caught.value.step, verdict.kind, verdict.suspects

    assert ranks(loop, 3, str(tmp_path), {}, body) == [(3, "inconclusive", ())] * 3


def broken_optimizer(rank: int, optimizer: Any, ddp: Any, step: int) -> None:
    """From `step` on, rank 2's optimizer writes a wrong value."""
    from sdcwatch.testing import FaultPlan

    FaultPlan().fail_at(2, step, location="optimizer_weight", pattern="bit_flip").install(ddp, optimizer, first_step=0)


def test_a_loop_that_catches_everything_meets_the_halt_again_and_exits_86(ranks: Any, tmp_path: Path) -> None:
    """`except RuntimeError: continue` does not train on over a corrupt state."""

    def body(rank: int, ddp: Any, optimizer: Any, make: Any, batches: Any) -> Any:
        broken_optimizer(rank, optimizer, ddp, 2)
        monitor = make(on_fault="halt")
        for step in range(8):
            with contextlib.suppress(RuntimeError), monitor.step(step) as s:
                s.loss(next(batches)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return "trained on"

    assert ranks(loop, 3, str(tmp_path), {}, body, raw=True) == [("died", 86)] * 3


def test_a_standing_latch_ends_every_rank_with_86_before_the_first_step(ranks: Any, tmp_path: Path) -> None:
    """Also on the nodes whose own spool has none, since the checkpoint folder is shared; a release lets it start."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()

    def halted(rank: int, ddp: Any, optimizer: Any, make: Any, batches: Any) -> Any:
        from sdcwatch import CorruptionDetected

        broken_optimizer(rank, optimizer, ddp, 2)
        monitor = make(on_fault="halt", checkpoint_dir=folder)
        with pytest.raises(CorruptionDetected):
            steps(monitor, optimizer, batches, range(6))
        monitor.close()

    def again(rank: int, ddp: Any, optimizer: Any, make: Any, batches: Any) -> Any:
        monitor = make(on_fault="halt", checkpoint_dir=folder)
        steps(monitor, optimizer, batches, range(3))
        monitor.close()
        return "trained"

    ranks(loop, 3, str(tmp_path), {}, halted)
    latch = json.loads((folder / "HALTED.json").read_text())
    assert [named["rank"] for named in latch["named"]] == [2]
    assert all(list((tmp_path / f"node-{r}").rglob("HALTED.json")) for r in range(3))
    assert ranks(loop, 3, str(tmp_path / "fresh"), {}, again, raw=True) == [("exit", 86)] * 3

    from sdcwatch.latch.files import release

    assert release(folder, latch["latch_id"], by="test", reason="replaced") == "released"
    assert ranks(loop, 3, str(tmp_path / "fresh"), {}, again) == ["trained"] * 3


def test_an_uncaught_halt_ends_the_process_with_86() -> None:
    """Also under wrappers that raise from it; exit handlers run."""
    script = (
        "import atexit; from sdcwatch.watch.contain import _exit_with_status; from sdcwatch import CorruptionDetected\n"
        "error = CorruptionDetected('halted', event_id='sdc-0', step=3); _exit_with_status(error)\n"
        "atexit.register(print, 'handlers ran', flush=True)\n"
        "try:\n raise error\nexcept RuntimeError as e:\n raise KeyError('wrapper') from e\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 86
    assert "handlers ran" in done.stdout


def test_a_checkpoint_is_a_candidate_then_checked_then_verified_and_tainted_by_a_later_verdict(
    ranks: Any, tmp_path: Path
) -> None:
    """A compute fault between two audits: the checkpoint in between is never chosen, the verified one before it is."""
    folder = tmp_path / "checkpoints"

    def body(rank: int, ddp: Any, optimizer: Any, make: Any, batches: Any) -> Any:
        from sdcwatch import CorruptionDetected
        from sdcwatch.testing import FaultPlan

        plan = FaultPlan().fail_at(1, 7, location="backward", pattern="scale", parameter=2)
        plan.install(ddp, optimizer, first_step=0)
        monitor = make(on_fault="halt", checkpoint_dir=folder, replay_every=6)
        seen: dict[int, str] = {}

        def after(step: int) -> None:
            from sdcwatch.checkpoints.manifest import list_checkpoints

            if step in (2, 5, 8):
                monitor.checkpoint(folder / f"step-{step}.pt", lambda path: path.write_bytes(b"weights %d" % step))
            if rank == 0 and step in (2, 3, 6):
                seen[step] = list_checkpoints(folder)[0].trust

        with pytest.raises(CorruptionDetected):
            steps(monitor, optimizer, batches, range(20), after)
        monitor.close()
        return seen

    seen = ranks(loop, 3, str(tmp_path), {}, body)[0]
    assert seen == {2: "candidate", 3: "checked", 6: "verified"}
    names = sorted(p.name for p in folder.iterdir() if not p.name.endswith(".json"))
    assert "step-8.pt.tainted" in names
    assert "step-8.pt" not in names
    from sdcwatch.checkpoints.manifest import last_clean

    chosen = last_clean(folder, "verified")
    assert chosen is not None
    assert chosen.step == 5


def test_the_last_step_is_settled_by_close(ranks: Any, tmp_path: Path) -> None:
    """A checkpoint of the very last step becomes checked without another training step."""
    folder = tmp_path / "checkpoints"

    def body(rank: int, ddp: Any, optimizer: Any, make: Any, batches: Any) -> Any:
        monitor = make(checkpoint_dir=folder)
        steps(monitor, optimizer, batches, range(5))
        monitor.checkpoint(folder / "last.pt", lambda path: path.write_bytes(b"weights"))
        monitor.close()

    ranks(loop, 3, str(tmp_path), {}, body)
    assert json.loads((folder / "last.pt.manifest.json").read_text())["trust"] in ("checked", "verified")


def test_a_wrong_last_step_is_found_by_close_and_halts(ranks: Any, tmp_path: Path) -> None:
    """No later exchange would show it: close() names the rank, taints the final checkpoint and raises."""
    folder = tmp_path / "checkpoints"

    def body(rank: int, ddp: Any, optimizer: Any, make: Any, batches: Any) -> Any:
        from sdcwatch import CorruptionDetected

        broken_optimizer(rank, optimizer, ddp, 4)
        monitor = make(on_fault="halt", checkpoint_dir=folder)
        steps(monitor, optimizer, batches, range(5))
        monitor.checkpoint(folder / "last.pt", lambda path: path.write_bytes(b"weights"))
        with pytest.raises(CorruptionDetected):
            monitor.close()
        return [v.suspects for v in monitor.verdicts]

    assert ranks(loop, 3, str(tmp_path), {}, body) == [[(2,)]] * 3
    assert (folder / "HALTED.json").exists()
    assert (folder / "last.pt.tainted").exists()


def test_coverage_counts_optimizer_state_once_it_exists_and_close_counts_no_skip(ranks: Any, tmp_path: Path) -> None:
    """AdamW's two moments are made in its first step; the last row has no gradient, which is no skip."""

    def body(rank: int, ddp: Any, optimizer: Any, make: Any, batches: Any) -> Any:
        monitor = make()
        covered = [{line.check: line.covered_bytes for line in monitor.coverage()}["weight_checksum"]]
        steps(monitor, optimizer, batches, range(2))
        covered.append({line.check: line.covered_bytes for line in monitor.coverage()}["weight_checksum"])
        metrics = monitor._epoch.reporter.metrics
        monitor.close()
        skips = metrics.get("sdc_skips_total", check="gradient_checksum", reason="disabled")
        return covered, skips, metrics.get("sdc_coverage_bytes", check="weight_checksum", covered="yes")

    size = (16 * 32 + 32 + 32 * 8 + 8) * 4
    for covered, skips, exported in ranks(loop, 2, str(tmp_path), {}, body):
        assert covered[0] == size
        assert covered[1] >= 3 * size
        assert exported == covered[1]
        assert not skips


def test_a_step_that_is_no_number_is_refused_in_one_sentence(ranks: Any, tmp_path: Path) -> None:
    """Text, fractions, negatives and numbers beyond 63 bits; the run goes on."""

    def body(rank: int, ddp: Any, optimizer: Any, make: Any, batches: Any) -> Any:
        monitor = make()
        for odd in ("x", None, 1.5, True, -1, 2**70):
            with pytest.raises(ValueError, match="is no step number"):
                monitor.step(odd)
        steps(monitor, optimizer, batches, range(2))
        monitor.close()
        return True

    assert ranks(loop, 2, str(tmp_path), {}, body) == [True, True]


def test_where_the_monitor_is_off_any_step_number_will_do(capsys: pytest.CaptureFixture[str]) -> None:
    """One process, and `SDCWATCH_DISABLE=1`, change nothing about a loop; it is said in one line."""
    import torch
    from sdcwatch import Monitor

    model = torch.nn.Linear(16, 8)
    monitor = Monitor(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=loss_fn)
    for number in (5, 4, 4):
        with monitor.step(number):
            pass
    assert capsys.readouterr().out.count("sdcwatch is off") == 1
