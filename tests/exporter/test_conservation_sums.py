"""Conservation's sums: what they see, what they leave alone, and how far rounding moves them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sdcwatch.checks.conservation import Conservation, weights
from sdcwatch.observation import SkipReason
from sdcwatch.verdict.conservation import BOUND
from torch import nn


class FakeDDP:
    """As much of DDP as the sums ask for."""

    find_unused_parameters = False
    static_graph = False
    _comm_hooks: tuple[()] = ()

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}


def measured(gradients: list[torch.Tensor], reduced: list[torch.Tensor], *, count: int = 0) -> dict[str, Any]:
    """The row's fields of a group of one whose reduce handed back `reduced`."""
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    found = Conservation(FakeDDP(), parameters, 1)  # type: ignore[arg-type]
    found.begin(count, due=True)
    for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        parameter.grad = gradient
        found.local(index, gradient)
    for parameter, value in zip(parameters, reduced, strict=True):
        parameter.grad = value
    fields = found.fields({i: torch.linalg.vector_norm(g) for i, g in enumerate(gradients)})
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in fields.items()}


def excess(gradient: torch.Tensor, reduced: torch.Tensor, count: int = 0) -> float:
    """Error over the bound."""
    fields = measured([gradient], [reduced], count=count)
    return abs(fields["reduced_sum_0"] - fields["local_sum_0"]) / (BOUND * fields["reduce_noise_0"])


def swap(g: torch.Tensor) -> None:
    g[[100, 40_000]] = g[[40_000, 100]]


def same_place_of_two_chunks(g: torch.Tensor) -> None:
    g[[7, 7 + (1 << 15)]] = g[[7 + (1 << 15), 7]]


WRONG = {
    "one element off by 1 %": lambda g: g[77].mul_(1.01),
    "a block zeroed": lambda g: g[64:128].zero_(),
    "two elements swapped": swap,
    "the same place of two chunks swapped": same_place_of_two_chunks,
    "shifted by one": lambda g: g.copy_(g.roll(1)),
    "all off by 1e-5": lambda g: g.mul_(1 + 1e-5),
    "one rank's share lost": lambda g: g.mul_(0.75),
    "sign of one element": lambda g: g[5].neg_(),
    "last element": lambda g: g[-1].add_(1.0),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_result_passes_the_bound(what: str) -> None:
    """100,000 fp32 elements: each of these is at least three times the bound, at nearly all of the weights in turn."""
    gradient = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    wrong = gradient.clone()
    WRONG[what](wrong)
    assert excess(gradient, gradient.clone()) == 0.0
    seen = [excess(gradient, wrong, count) for count in range(8)]
    assert sorted(seen)[1] > 3, seen


def test_swapped_parameters_are_seen() -> None:
    """Two parameters of one shape whose gradients came back in each other's place."""
    a, b = torch.randn(50), torch.randn(50)
    fields = measured([a, b], [b.clone(), a.clone()])
    assert fields["local_sum_0"] != fields["reduced_sum_0"]


def test_weights_are_equal_everywhere_and_leave_the_global_rng_alone() -> None:
    """Same seed, same weights; |w| in [0.5, 1); no draw from the user's generator."""
    before = torch.get_rng_state()
    first, second = weights(5000, 3), weights(5000, 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)
    assert 0.5 <= float(first.abs().min()) <= float(first.abs().max()) < 1
    assert abs(float(first.mean())) < 0.05


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(
    "gradient",
    [
        torch.randn(0),
        torch.randn(()),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.randn(7, 5).t(),
        torch.randn(40, dtype=torch.float64),
        torch.randn(4).to(torch.bfloat16),
    ],
    ids=["empty", "0-d", "complex", "channels_last", "transposed", "float64", "bfloat16"],
)
def test_odd_gradients_have_sums_that_do_not_depend_on_strides(gradient: torch.Tensor) -> None:
    """Equal values give equal sums whatever their layout, and nothing is written."""
    fields = measured([gradient], [gradient.clone(memory_format=torch.contiguous_format)])
    assert fields["conservation"] == 1
    assert fields["local_sum_0"] == pytest.approx(fields["reduced_sum_0"], rel=1e-12)
    assert gradient._version == 0 or gradient.numel()


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_gradient_that_was_not_seen_makes_the_step_undefined() -> None:
    """Sparse gradients, and parameters whose hook did not fire although all must be used."""
    undefined = SkipReason.code("undefined")
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    found = Conservation(FakeDDP(), parameters[:1], 2)  # type: ignore[arg-type]
    found.begin(0, due=True)
    found.local(0, torch.ones(2).to_sparse())
    assert found.fields({}) == {"conservation": undefined}
    found = Conservation(FakeDDP(), parameters, 2)  # type: ignore[arg-type]
    found.begin(0, due=True)
    found.local(0, torch.ones(2))
    assert found.fields({}) == {"conservation": undefined}


def rounding(rank: int, size: int, dtype: torch.dtype) -> tuple[float, int]:
    """The largest error of healthy all-reduces, in units of announced rounding, and their number."""
    import torch.distributed as dist

    worst, comparisons = 0.0, 0
    for elements, steps in ((1, 40), (30, 40), (3000, 30), (100_000, 6)):
        generator = torch.Generator().manual_seed(rank + elements)
        parameter = nn.Parameter(torch.zeros(elements, dtype=dtype))
        found = Conservation(FakeDDP(), [parameter], size)  # type: ignore[arg-type]
        for step in range(steps):
            shapes = (
                torch.randn(elements, generator=generator),
                torch.full((elements,), 0.1 + float(torch.rand((), generator=generator))),
                torch.randn(elements, generator=generator).mul(3).exp(),
                torch.sin(torch.arange(elements) * (2 * math.pi / 1024) + rank),
            )
            gradient = (shapes[step % 4] * 1e-2).to(dtype)
            found.begin(step, due=True)
            found.local(0, gradient)
            parameter.grad = gradient * (1.0 / size)  # as DDP does it
            dist.all_reduce(parameter.grad)
            fields = {k: float(v) for k, v in found.fields({0: torch.linalg.vector_norm(gradient.float())}).items()}
            mean = torch.tensor([fields["local_sum_0"], fields["reduce_noise_0"]], dtype=torch.float64)
            dist.all_reduce(mean)
            average, unit = (mean / size).tolist()
            worst, comparisons = max(worst, abs(fields["reduced_sum_0"] - average) / unit), comparisons + 1
    return worst, comparisons


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_rounding_stays_far_below_the_bound(ranks: Any, size: int, dtype: torch.dtype) -> None:
    """Random, constant, heavy-tailed and periodic gradients of 1 to 100,000 elements: at most one unit of eight."""
    worst, comparisons = max(ranks(rounding, size, dtype))
    print(f"{dtype} at {size} ranks: {worst:.2f} units of {BOUND} in {comparisons} comparisons")
    assert comparisons == 116
    assert 0.01 < worst < 1.0


def trained(rank: int, size: int, root: str, options: dict[str, Any]) -> dict[str, Any]:
    """Trains a small model; returns results of the check by name, verdicts, and what coverage says."""
    from sdcwatch import Monitor
    from sdcwatch.testing import Fault, FaultPlan
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.unused = nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor, other: bool = False) -> torch.Tensor:
            return self.b(self.a(x).tanh()) + (self.unused(x) if other or not options.get("unused") else 0)

    ddp = DistributedDataParallel(
        Net().to(options.get("dtype", torch.float32)), bucket_cap_mb=0.001, **options.get("ddp", {})
    )
    optimizer = torch.optim.SGD(ddp.parameters(), 1e-2)
    fault = options.get("fault")
    if fault:
        FaultPlan(tuple(Fault(rank=r, location="reduced_gradient", **fault) for r in range(size))).install(
            ddp, optimizer, first_step=0
        )
    if options.get("hook"):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    if options.get("builtin"):
        ddp._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.ALLREDUCE)
    monitor = Monitor(
        ddp,
        optimizer,
        spool_dir=f"{root}/n{rank}",
        node=f"n{rank}",
        replay_every=0,
        on_fault="halt",
        conservation_every=options.get("every", 1),
    )
    if "edit" in options:

        def edit(parameter: torch.Tensor) -> None:
            if monitor._step == options["edit"] and rank in options["edits"] and parameter.grad is not None:
                with torch.no_grad():
                    parameter.grad.mul_(0.5)

        ddp.module.a.weight.register_post_accumulate_grad_hook(edit)
    generator = torch.Generator().manual_seed(rank)
    stopped = None
    try:
        for step in range(7):
            with monitor.step(step):
                for micro in range(options.get("accumulate", 1)):
                    x = torch.randn(8, 16, generator=generator).to(options.get("dtype", torch.float32))
                    last = micro == options.get("accumulate", 1) - 1
                    ddp.require_backward_grad_sync = last
                    ddp(x, other=bool(options.get("unused")) and rank == 0 and step % 2 == 1).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=options.get("set_to_none", True))
    except RuntimeError as error:
        stopped = str(error)
    metrics = monitor._epoch.reporter.metrics
    counts = {
        reason: metrics.get("sdc_skips_total", check="allreduce_conservation", reason=reason) or 0
        for reason in ("comm_hook", "undefined", "disabled", "error")
    }
    line = next(line for line in monitor.coverage() if line.check == "allreduce_conservation")
    result = {
        "ran": metrics.get("sdc_checks_total", check="allreduce_conservation") or 0,
        "skips": {reason: n for reason, n in counts.items() if n},
        "verdicts": [(v.check, v.kind, v.step, v.suspects) for v in monitor.verdicts],
        "clean": [v.last_clean_step for v in monitor.verdicts],
        "stopped": stopped,
        "enabled": (line.enabled, metrics.get("sdc_detector_enabled", check="allreduce_conservation")),
    }
    monitor.close()
    return result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 3},
        {"ddp": {"gradient_as_bucket_view": True}},
        {"ddp": {"static_graph": True}},
        {"ddp": {"find_unused_parameters": True}, "unused": True},
        {"dtype": torch.bfloat16},
    ],
    ids=["plain", "accumulation", "bucket view", "static graph", "unused on some ranks", "bf16"],
)
def test_a_healthy_run_is_conserved_at_every_step(ranks: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    """Seven steps, seven clean runs of the check, no verdict."""
    for result in ranks(trained, 3, str(tmp_path), options)[:2]:
        assert (result["ran"], result["skips"], result["verdicts"]) == (7, {}, [])
        assert result["enabled"] == (True, 1)


def test_a_stale_gradient_of_an_unused_parameter_is_undefined(ranks: Any, tmp_path: Path) -> None:
    """DDP reduces what the last step left in it, which no hook saw: counted, not judged."""
    options = {"ddp": {"find_unused_parameters": True}, "unused": True, "set_to_none": False}
    result = ranks(trained, 2, str(tmp_path), options)[0]
    assert result["verdicts"] == []
    assert result["skips"]["undefined"] >= 1


@pytest.mark.parametrize("kind", ["hook", "builtin"])
def test_under_a_comm_hook_it_is_off_and_says_so_once(ranks: Any, tmp_path: Path, kind: str) -> None:
    """One counted skip, no series that would raise SDCCheckDisabled, and a line in the coverage."""
    result = ranks(trained, 2, str(tmp_path), {kind: True})[0]
    assert (result["ran"], result["skips"], result["verdicts"]) == (0, {"comm_hook": 1}, [])
    assert result["enabled"] == (False, None)


@pytest.mark.parametrize("pattern", ["zero_block", "scale"])
def test_the_same_wrong_gradient_on_all_ranks_halts_before_the_weights(
    ranks: Any, tmp_path: Path, pattern: str
) -> None:
    """Every replica agrees, and still the step is stopped; nobody is named."""
    options = {"fault": {"step": 4, "mode": "transient", "pattern": pattern, "parameter": 0}}
    for result in ranks(trained, 3, str(tmp_path), options):
        assert result["verdicts"] == [("allreduce_conservation", "inconclusive", 4, ())]
        assert "halted step 4" in result["stopped"]


def test_off_its_cadence_it_is_no_skip_and_a_find_reaches_back_to_its_last_clean_run(
    ranks: Any, tmp_path: Path
) -> None:
    """Every third backward: the steps in between may have been reduced wrong in the same way."""
    healthy = ranks(trained, 2, str(tmp_path / "healthy"), {"every": 3})[0]
    assert (healthy["ran"], healthy["skips"], healthy["verdicts"]) == (3, {}, [])
    fault = {"step": 5, "mode": "persistent", "pattern": "scale", "parameter": 0}
    found = ranks(trained, 2, str(tmp_path / "faulty"), {"every": 3, "fault": fault})[0]
    assert found["verdicts"] == [("allreduce_conservation", "inconclusive", 6, ())]
    assert found["clean"] == [3]


@pytest.mark.parametrize("edits", [(1,), (0, 1)], ids=["one rank", "all ranks"])
def test_user_code_that_may_edit_a_gradient_before_the_reduce_makes_it_undefined(
    ranks: Any, tmp_path: Path, edits: tuple[int, ...]
) -> None:
    """A hook that runs after ours: what DDP reduces need not be what we saw, so nothing is said of it, visibly."""
    result = ranks(trained, 2, str(tmp_path), {"edit": 4, "edits": edits})[0]
    assert result["stopped"] is None
    assert (result["verdicts"], result["ran"], result["skips"]) == ([], 0, {"undefined": 7})
