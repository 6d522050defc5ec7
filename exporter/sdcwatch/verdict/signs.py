"""Positive signs of software: proofs that the ranks do not run the same thing, so that no hardware is blamed.

`software` is never a guess: it needs one of these signs. Flow: columns -> **signs** -> gradient, weights.
"""

from __future__ import annotations

from sdcwatch.verdict.columns import Columns

#: Differences that are reported even while all state is still equal: state cannot stay equal under them.
CONFIGURATION = ("schema", "loss_scale", "step")

WORDS = {
    "schema": "parameter names, shapes or dtypes",
    "loss_scale": "the loss scale",
    "step": "the step number",
    "optimizer_steps": "the number of optimizer steps taken",
    "optimizer_step_of": "the step in which the optimizer last ran",
    "hyperparameters": "the optimizer's hyperparameters",
    "compile_count": "the compile counter",
    "environment": "the environment (GPU model, driver, library versions or flags)",
    "measured": "what was measured",
    "unfinished": "a reduce that DDP could not finish (parameters without a gradient)",
    "versions": "the parameters' version counters (code wrote to them on some ranks only)",
    "first_check": "the state from the first check of this epoch on",
}

_FOR_WEIGHTS = (
    "schema",
    "loss_scale",
    "step",
    "optimizer_steps",
    "optimizer_step_of",
    "hyperparameters",
    "compile_count",
    "environment",
)
# What the optimizer does with a gradient cannot change what the all-reduce handed back.
_FOR_GRADIENT = ("schema", "loss_scale", "step", "compile_count", "environment")

_WEIGHT_FIELDS = ("weights_now", "gradient_begin", "weights_begin", "weights_end", "state_begin", "state_end")


def of_weights(columns: Columns) -> tuple[str, ...]:
    """Signs that explain a difference of weights or optimizer state."""
    found = tuple(name for name in _FOR_WEIGHTS if columns.labels(name))
    if any(columns.integers("unfinished")):
        found += ("unfinished",)  # the optimizer stepped with gradients that no reduce had made equal
    return (*found, "measured") if any(columns.partial(name) for name in _WEIGHT_FIELDS) else found


def of_gradient(columns: Columns) -> tuple[str, ...]:
    """Signs that explain a difference of the reduced gradient."""
    found = tuple(name for name in _FOR_GRADIENT if columns.labels(name))
    return (*found, "measured") if columns.partial("reduced") else found
