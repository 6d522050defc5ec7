"""Fault patterns: each changes bits, at a place the seed decides, and no version counter moves."""

from __future__ import annotations

import pytest
import torch
from sdcwatch.fingerprint import fingerprint
from sdcwatch.testing import PATTERNS
from sdcwatch.testing.patterns import apply

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int64,
    torch.complex64, torch.complex128,
]  # fmt: skip
EACH = pytest.mark.parametrize("pattern", sorted(PATTERNS))


@EACH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_pattern_changes_any_tensor(pattern: str, dtype: torch.dtype) -> None:
    """Random, zero, NaN and infinite values, one element and many."""
    for numel in (1, 5, 100):
        for fill in ("random", 0.0, float("nan"), float("inf")):
            if not dtype.is_floating_point and not isinstance(fill, str) and fill != 0.0:
                continue
            if isinstance(fill, str):
                value = torch.randn(numel, generator=torch.Generator().manual_seed(0)).mul(20).to(dtype)
            else:
                value = torch.full((numel,), fill).to(dtype)
            for seed in range(3):
                hit = value.clone()
                apply(pattern, hit, seed)
                assert fingerprint([hit]) != fingerprint([value]), (numel, fill, seed)


@EACH
def test_a_pattern_is_decided_by_its_seed(pattern: str) -> None:
    """One seed does the same on two ranks; others hit elsewhere. The global RNG is not drawn from."""
    value = torch.randn(1000)
    state = torch.get_rng_state()
    numbers = []
    for seed in (0, 0, 1, 2, 3):
        hit = value.clone()
        apply(pattern, hit, seed)
        numbers.append(fingerprint([hit]))
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) > 2
    assert torch.equal(torch.get_rng_state(), state)


@EACH
def test_no_version_moves_and_parameters_may_be_hit(pattern: str) -> None:
    """As broken memory does it: autograd and `_version` notice nothing."""
    parameter = torch.nn.Parameter(torch.randn(4, 8))
    before = fingerprint([parameter])
    apply(pattern, parameter, seed=1)
    assert parameter._version == 0
    assert fingerprint([parameter]) != before


@EACH
def test_finite_numbers_stay_finite(pattern: str) -> None:
    """A detector of NaN must not be enough."""
    for seed in range(50):
        value = torch.randn(64, generator=torch.Generator().manual_seed(seed))
        apply(pattern, value, seed)
        assert bool(torch.isfinite(value).all())


def test_where_nothing_can_be_written_is_an_error() -> None:
    """Empty and strided tensors, and a pattern that there is not."""
    for value in (torch.empty(0), torch.zeros(4, 4).t()[:, :2]):
        with pytest.raises(ValueError, match="contiguous tensor with elements"):
            apply("ulp", value, 0)
    with pytest.raises(KeyError):
        apply("gamma_rays", torch.zeros(1), 0)
