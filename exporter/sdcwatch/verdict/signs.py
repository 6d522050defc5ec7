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
    "written": "what code wrote to the parameters outside the optimizer step (their version counters moved)",
    "first_check": "the state from the first check of this epoch on",
}

#: Counters that never go back. An old difference says nothing about a new fault, so only what they moved counts.
COUNTERS = ("compile_count", "optimizer_steps", "unfinished")

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
_FOR_GRADIENT = ("schema", "loss_scale", "step", "environment")
_COUNTED_FOR_GRADIENT = ("compile_count",)

Counts = tuple[tuple[int | None, ...], ...]

_WEIGHT_FIELDS = ("weights_now", "gradient_begin", "weights_begin", "weights_end", "state_begin", "state_end")


def counters(columns: Columns) -> Counts:
    """The counters of one row, in the order of `COUNTERS`."""
    return tuple(columns.integers(name) for name in COUNTERS)


def of_weights(columns: Columns, before: Counts) -> tuple[str, ...]:
    """Signs that explain a difference of weights or optimizer state.

    Args:
        before: the counters as the state was last compared; empty at first, where their values are compared.
    """
    then = dict(zip(COUNTERS, before, strict=True)) if before else {}
    found = tuple(name for name in _FOR_WEIGHTS if _differs(columns, name, then.get(name, ())))
    unfinished = columns.integers("unfinished")
    known = then.get("unfinished", (0,) * len(unfinished))
    # Not whether ranks differ in it: where all of them left a reduce unfinished, all hold gradients of their own.
    counted = any(known) or any(unfinished)
    if counted and any((a or 0) != (b or 0) for a, b in zip(known, unfinished, strict=True)):
        found += ("unfinished",)  # the optimizer stepped with gradients that no reduce had made equal
    return (*found, "measured") if any(columns.partial(name) for name in _WEIGHT_FIELDS) else found


def of_gradient(columns: Columns, of_row: tuple[str, ...]) -> tuple[str, ...]:
    """Signs that explain a difference of the reduced gradient.

    Args:
        of_row: what `of_weights` found in the same row; it knows how far the counters moved.
    """
    found = tuple(name for name in _FOR_GRADIENT if columns.labels(name))
    found += tuple(name for name in _COUNTED_FOR_GRADIENT if name in of_row)
    return (*found, "measured") if columns.partial("reduced") else found


def _differs(columns: Columns, name: str, before: tuple[int | None, ...]) -> bool:
    moved = columns.moved(before, name) if name in COUNTERS else None
    return bool(columns.labels(name)) if moved is None else len(set(moved)) > 1
