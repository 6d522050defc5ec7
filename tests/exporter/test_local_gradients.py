"""Local gradients: read before the reduce, never written, and a NaN shows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sdcwatch.checks.gradients import LocalGradients, ReducedGradients, norm
from sdcwatch.fingerprint import fingerprint
from torch import nn


def watch(parameters: list[nn.Parameter], *, reducing: bool = True) -> tuple[LocalGradients, list[int]]:
    calls: list[int] = []
    found = LocalGradients(parameters, reducing=lambda: reducing, first=lambda: calls.append(1))
    found.begin(due=True, audited=True)
    return found, calls


def test_norm_and_digests_are_those_of_the_gradient() -> None:
    """The L2 norm over all parameters, one digest each, and the gradient untouched."""
    net = nn.Linear(4, 3)
    watched, calls = watch(list(net.parameters()))
    net(torch.randn(5, 4)).square().sum().backward()
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    assert float(watched.norm()) == pytest.approx(float(torch.cat([g.flatten() for g in gradients]).norm()))
    assert watched.digests() == {i: fingerprint([g]) for i, g in enumerate(gradients)}
    assert len(calls) == 2
    assert all(g._version == 0 for g in gradients)


def test_without_an_audit_nothing_is_hashed_and_begin_forgets() -> None:
    """Digests are for audit steps; the next backward starts afresh."""
    net = nn.Linear(4, 3)
    watched, _ = watch(list(net.parameters()))
    watched.begin(due=True, audited=False)
    net(torch.ones(1, 4)).sum().backward()
    assert watched.digests() == {}
    assert watched.norm() > 0
    watched.begin(due=True, audited=False)
    assert watched.norm() == 0.0


def test_a_backward_that_does_not_reduce_is_not_looked_at() -> None:
    """Under `no_sync` gradients differ by design (field case 2)."""
    net = nn.Linear(4, 3)
    watched, calls = watch(list(net.parameters()), reducing=False)
    net(torch.ones(1, 4)).sum().backward()
    assert (watched.norm(), watched.digests(), calls) == (0.0, {}, [])


def test_closed_hooks_see_nothing() -> None:
    """After `close` a backward is only the user's."""
    net = nn.Linear(4, 3)
    watched, calls = watch(list(net.parameters()))
    watched.close()
    net(torch.ones(1, 4)).sum().backward()
    assert calls == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_makes_the_norm_not_finite(bad: float) -> None:
    """In any parameter, first or last (field case 21)."""
    net = nn.Linear(4, 3)
    watched, _ = watch(list(net.parameters()))
    (net(torch.ones(1, 4)) * torch.tensor([1.0, bad, 1.0])).sum().backward()
    assert not math.isfinite(watched.norm())


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64], ids=str
)
def test_norms_of_odd_gradients(dtype: torch.dtype) -> None:
    """Half precisions do not overflow, complex gives its modulus, empty is zero, sparse counts its values."""
    value = torch.full((400,), 4.0).to(dtype)
    assert float(norm(value)) == pytest.approx(80.0)
    assert float(norm(torch.empty(0, dtype=dtype))) == 0.0
    large = torch.full((4,), 40000.0, dtype=torch.float16)
    assert float(norm(large)) == pytest.approx(80000.0, rel=1e-3)
    sparse = torch.sparse_coo_tensor([[0, 0]], [3.0, 1.0], (5,), check_invariants=False)
    assert float(norm(sparse)) == 4.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_reduced_gradients_say_when_they_are_not_finite(dtype: torch.dtype) -> None:
    """Sums that only overflow are finite; NaN, one imaginary Inf, or opposite Infs are not."""
    parameter = nn.Parameter(torch.zeros(4, dtype=dtype))
    other = nn.Parameter(torch.zeros(2))
    largest = torch.finfo(dtype).max
    bad = complex(1, math.inf) if dtype.is_complex else math.nan
    for values, expected in (([1.0] * 4, False), ([largest] * 4, False), ([1.0, bad, 1, 1], True)):
        parameter.grad = torch.tensor(values, dtype=dtype)
        digest, nonfinite = ReducedGradients([parameter, other]).measured()
        assert bool(nonfinite) is expected
        assert digest == fingerprint([parameter.grad, None])
    parameter.grad = torch.tensor([math.inf, -math.inf, 0, 0], dtype=dtype)
    assert ReducedGradients([parameter]).measured()[1] == 1
    assert ReducedGradients([other]).measured() == (fingerprint([None]), False)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_among_many_small_reduced_gradients_shows(bad: float) -> None:
    """They are asked together; large finite values, whose squares overflow, are still finite."""
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(5)]
    for parameter in parameters:
        parameter.grad = torch.full((3,), 1e30)
    reduced = ReducedGradients(parameters)
    assert reduced.measured() == (fingerprint([p.grad for p in parameters]), 0)
    parameters[3].grad = torch.tensor([1.0, bad, 1.0])
    assert reduced.measured() == (fingerprint([p.grad for p in parameters]), 1)


def distributed(rank: int, size: int) -> tuple[dict[int, int], list[int], dict[int, int]]:
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    ddp = nn.parallel.DistributedDataParallel(net)
    watched, _ = watch(list(net.parameters()))
    batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))
    ddp(batch).square().sum().backward()
    after = [fingerprint([p.grad]) for p in net.parameters()]
    alone: Any = torch.autograd.grad(net(batch).square().sum(), list(net.parameters()))
    return watched.digests(), after, {i: fingerprint([g]) for i, g in enumerate(alone)}


def test_under_ddp_the_local_gradient_is_seen_before_the_reduce(ranks: Any) -> None:
    """Each rank's own differs from its peer's and from the reduced one, which both share."""
    results = ranks(distributed, 2)
    for seen, _, alone in results:
        assert seen == alone
    assert results[0][0] != results[1][0]
    assert results[0][1] == results[1][1] != list(results[0][0].values())
