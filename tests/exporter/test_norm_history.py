"""A rank's own norm history: robust, blind to nothing, and silent where it should be (field cases 19 and 20)."""

from __future__ import annotations

import math
import random

import pytest
from sdcwatch.checks.norm_history import BOUND, NormHistory


def flags(norms: list[float]) -> list[int]:
    """Steps whose deviation passes the bound."""
    history = NormHistory()
    deviations = [history.observe(norm) for norm in norms]
    return [step for step, d in enumerate(deviations) if d is not None and d > BOUND]


def gaussian(steps: int, seed: int, spread: float = 0.1) -> list[float]:
    source = random.Random(seed)
    return [max(source.gauss(1.0, spread), 1e-3) for _ in range(steps)]


def test_false_rate_over_ten_thousand_gaussian_steps() -> None:
    """No flag in three runs of 10,000 steps; the bound stated is one in a thousand runs."""
    assert [flags(gaussian(10_000, seed)) for seed in range(3)] == [[]] * 3


@pytest.mark.parametrize(
    "norms",
    [
        [1.0] * 200,
        [0.0] * 50 + [1.0] * 100,
        [math.exp(-5 + step / 50) for step in range(400)],
        [math.exp(5 - step / 50) for step in range(400)],
        [1e6, 1.0, 50.0, 3.0] * 8,
        [],
    ],
    ids=["zero variance", "zeros first", "warm-up", "decay", "cold start", "nothing"],
)
def test_what_healthy_runs_do_is_not_flagged(norms: list[float]) -> None:
    """Cold start, zero variance, a learning-rate warm-up, a decaying gradient."""
    assert flags(norms) == []


def test_a_resume_begins_without_a_flag_whatever_the_norm() -> None:
    """A new history knows nothing of the old run's scale."""
    assert flags([100.0 * n for n in gaussian(31, 5)]) == []


@pytest.mark.parametrize("huge", [1e6, math.inf, math.nan, 1e-12])
def test_one_outlier_does_not_blind_it_to_the_next(huge: float) -> None:
    """The outlier at step 50 is seen and refused; a real tenfold spike at step 70 still stands out."""
    norms = gaussian(100, 3)
    norms[50], norms[70] = huge, 10.0
    assert flags(norms) == [50, 70]


def test_many_outliers_in_a_row_do_not_enter_the_statistics() -> None:
    """Fifteen huge values, then normal ones: none of the normal ones is called an outlier."""
    norms = gaussian(200, 4)
    norms[80:95] = [1e5] * 15
    assert flags(norms) == list(range(80, 95))


def test_a_lasting_change_of_the_run_is_learned() -> None:
    """After 16 refused values in a row the history begins afresh at the new level."""
    norms = gaussian(100, 5) + [50 * n for n in gaussian(300, 6)]
    found = flags(norms)
    assert found == list(range(100, 116))
    assert flags([*norms[:300], 2000.0])[-1] == 300
