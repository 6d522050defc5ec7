"""What docs/decisions.md says about a gate without a host read, held against the torch that is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

FUSED: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.Adam, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
]


def trained(kind: Any, steps: int, found: float | None, **settings: Any) -> list[torch.Tensor]:
    """Parameters and optimizer state after `steps`; `found`: the flag of the last one, 0 before it (None: no flag)."""
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 513))
    optimizer = kind([parameter], lr=1e-2, **settings)
    for step in range(steps):
        parameter.grad = torch.sin(torch.arange(513.0) + step)
        if found is not None:
            optimizer.found_inf = torch.tensor(found if step == steps - 1 else 0.0)
        optimizer.step()
    state = optimizer.state[parameter]
    return [parameter.detach(), *(state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor))]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("kind", "settings"), FUSED)
def test_a_fused_step_holds_weights_and_state_on_a_flag_and_keeps_its_bits_without(
    kind: Any, settings: dict[str, Any]
) -> None:
    """A flag of 1 leaves weights and state as the step before left them; a flag of 0 gives the bits of no flag."""
    settings = {**settings, "fused": True}
    assert same(trained(kind, 3, 1.0, **settings), trained(kind, 2, None, **settings))
    assert same(trained(kind, 3, 0.0, **settings), trained(kind, 3, None, **settings))


@pytest.mark.parametrize("foreach", [True, False])
def test_no_other_form_of_the_step_takes_the_flag(foreach: bool) -> None:
    """So a gate on the device could not hold a loop that did not ask for a fused optimizer."""
    with pytest.raises(AssertionError, match="found_inf"):
        trained(torch.optim.AdamW, 1, 1.0, foreach=foreach)


def test_a_fused_adamw_gives_other_bits_than_the_default_one() -> None:
    """So the monitor may not switch a loop to the fused form: weights would no longer be those of a run without it."""
    assert not same(trained(torch.optim.AdamW, 3, None, fused=True), trained(torch.optim.AdamW, 3, None, foreach=False))
