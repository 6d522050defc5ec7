"""The gradients of the running step, computed again by all ranks: first in private, then through DDP.

`rehearse` runs every micro-batch on the plain module and throws the result away: what cannot be run again fails there,
on one rank and without a collective, so that the ranks can agree to halt. `recompute` then does what the loop did:
the same batches, random numbers, autocast and backward seeds, on buffers as they were before the step, with DDP's own
reduce at the end. What the loop does after `backward()` (unscale, clip, step) runs on the result as ever. Whether it
was the same computation is for the caller to compare. Flow: healer -> **recompute**.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from sdcwatch.checks.replay import LossFunction, rng_state, set_rng_state, traceless
from sdcwatch.heal.keep import StepKeeper, own_copy


def rehearse(
    keeper: StepKeeper,
    *,
    module: torch.nn.Module,
    loss_fn: LossFunction,
    parameters: Sequence[torch.nn.Parameter],
    device: torch.device,
) -> None:
    """Runs the step on the plain module and leaves no trace; not collective.

    Raises:
        Exception: whatever the loss function raises when it runs a second time.
    """
    torch.clear_autocast_cache()
    with traceless(module, device), torch.enable_grad():
        assert keeper.entry is not None
        keeper.entry.restore()
        for kept in keeper.batches:
            set_rng_state(kept.rng, device)
            kind, enabled, dtype = kept.autocast
            with torch.autocast(kind, dtype, enabled=enabled):
                loss = loss_fn(module, own_copy(kept.batch))
            torch.autograd.grad(loss, list(parameters), grad_outputs=kept.seeds[0], allow_unused=True)


def recompute(
    keeper: StepKeeper,
    *,
    model: torch.nn.Module,
    ddp: DistributedDataParallel,
    loss_fn: LossFunction,
    parameters: Sequence[torch.nn.Parameter],
    device: torch.device,
) -> None:
    """Fills `grad` anew through DDP. Collective: every rank calls it, at the end of the same backward.

    Raises:
        Exception: as in any step of the loop; a rank on which that happens must not go on.
    """
    now = rng_state(device)
    # It may hold half-precision copies of weights that were overwritten since.
    torch.clear_autocast_cache()
    assert keeper.entry is not None
    keeper.entry.restore()
    _restore_gradients(keeper, parameters)
    _send_buffers(ddp, keeper.forward_sync)
    try:
        with torch.enable_grad():
            for kept in keeper.batches:
                set_rng_state(kept.rng, device)
                kind, enabled, dtype = kept.autocast
                with contextlib.nullcontext() if kept.sync else ddp.no_sync():
                    with torch.autocast(kind, dtype, enabled=enabled):
                        loss = loss_fn(model, kept.batch)
                    torch.autograd.backward(loss, kept.seeds[0])
    finally:
        set_rng_state(now, device)


def _restore_gradients(keeper: StepKeeper, parameters: Sequence[torch.nn.Parameter]) -> None:
    for parameter, had in zip(parameters, keeper.had_gradients, strict=True):
        if not had:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()


def _send_buffers(ddp: DistributedDataParallel, due: bool) -> None:
    """Rank 0's buffers to all, where DDP's first forward of the step did that; afterwards no forward does it again.

    In a forward it would be a collective that a rank whose loss function fails before it never reaches.
    """
    ddp.require_forward_param_sync = due
    if ddp.will_sync_module_buffers():
        ddp._sync_buffers()
    ddp.require_forward_param_sync = False
