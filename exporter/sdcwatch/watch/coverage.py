"""What is checked and what is not: the lines that `Monitor` prints at start and `monitor.coverage()` returns.

Counts bytes, never claims: state that no check reaches is a line of its own, with the reason. Measures nothing of
training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from sdcwatch.checks.conservation import undefined
from sdcwatch.checks.weights import covered_bytes, state_tensors
from sdcwatch.fingerprint import fingerprint
from sdcwatch.settings import Settings
from sdcwatch.shards import local
from sdcwatch.verdict.records import ALLREDUCE_CONSERVATION
from sdcwatch.watch.budget import Cadences
from sdcwatch.watch.row_fields import Watched
from sdcwatch.watch.start import Membership

_SHARDED = "undefined: fully_shard hands a gradient out only after it was reduced"

#: At most this much is fingerprinted once at start to predict the cost of a step.
_PROBE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class CoverageLine:
    """One check. `every` counts reducing backwards (0: off); bytes are this rank's; `reason` says why it is off."""

    check: str
    enabled: bool
    every: int
    covers: str
    covered_bytes: int
    uncovered_bytes: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of state on this rank, each as (a fingerprint reaches, it does not)."""

    parameters: tuple[int, int]
    optimizer: tuple[int, int]
    buffers: int
    unwatched: int
    apart: int = 0  # parameters that no reduce makes equal: frozen, a rank's own, experts, other shards


def measure(
    module: torch.nn.Module, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> Sizes:
    """Counts the bytes of parameters, optimizer state, buffers, and parameters that no watched optimizer steps."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    replicated = {id(p) for p in parameters}
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in replicated]
    state, missed = covered_bytes(state_tensors(optimizer, parameters))
    return Sizes(
        parameters=covered_bytes(iter(parameters)),
        optimizer=(
            state,
            missed + sum(covered_bytes(state_tensors(optimizer, others))) + _sharded_state(optimizer),
        ),
        buffers=sum(b.numel() * b.element_size() for b in module.buffers() if b.layout is torch.strided),
        unwatched=sum(_bytes(p) for p in parameters if id(p) not in stepped),
        apart=sum(_bytes(p) for p in module.parameters() if id(p) not in replicated),
    )


def _bytes(parameter: torch.Tensor) -> int:
    shard = local(parameter)
    return shard.numel() * shard.element_size()


def _sharded_state(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of what `ZeroRedundancyOptimizer` keeps for this rank's share, in an optimizer inside it."""
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, torch.optim.Optimizer):
        return 0
    own = [p for group in inner.param_groups for p in group["params"]]
    return sum(covered_bytes(state_tensors(inner, own)))


def of_run(watched: Watched, membership: Membership, settings: Settings) -> tuple[Sizes, tuple[CoverageLine, ...]]:
    """Counts and describes what one run covers now."""
    cadences = Cadences.of(settings)
    sizes = measure(watched.ddp.module, watched.parameters, watched.optimizer)
    alone = "" if watched.comparable else "disabled: each shard is held by one rank only, so nothing can be compared"
    lines = describe(
        sizes,
        check_every=cadences.checks,
        conservation_every=cadences.conservation,
        replay_every=cadences.replay,
        replay_off=replay_off(watched, membership),
        nodes=min(len(part.node_order) for part in membership.parts or (membership.group,)),
        conservation_off=_conservation_off(watched),
        norm_off="" if watched.local_gradients else _SHARDED,
        state_off=alone,
    )
    return sizes, lines


def _conservation_off(watched: Watched) -> str:
    if not isinstance(watched.ddp, DistributedDataParallel):
        return _SHARDED
    return "comm_hook: the reduce is the user's own, not a plain average" if undefined(watched.ddp) else ""


def replay_off(watched: Watched, membership: Membership) -> str:
    """Why no audit can ever run (empty: it can); the word before the colon is the skip reason."""
    if not watched.local_gradients:
        return "collective: the forward gathers shards from other ranks, so no rank can run it alone"
    if not membership.replays:
        return "disabled: Monitor has no loss_fn"
    if len(membership.nodes) < 2:
        return "disabled: one node has no other to replay on"
    return ""


def describe(
    sizes: Sizes,
    *,
    check_every: int,
    replay_every: int,
    replay_off: str,
    nodes: int,
    conservation_every: int = 1,
    conservation_off: str = "",
    norm_off: str = "",
    state_off: str = "",
) -> tuple[CoverageLine, ...]:
    """The coverage of this run.

    Args:
        replay_off: why replay cannot run at all (empty: it can).
        nodes: distinct nodes of the group.
        conservation_off: why the reduce is not defined to be a plain average (empty: it is).
        norm_off: why no rank's local gradient is seen before the reduce (empty: it is).
        state_off: why no state is held by more than one rank (empty: it is).
    """
    conservation_off = conservation_off or ("" if conservation_every else "disabled: conservation_every is 0")
    read, missed = sizes.parameters
    state, state_missed = sizes.optimizer
    named = "names a strict majority's odd one" if nodes >= 3 else f"{nodes} node(s): nobody can be named"

    def line(check: str, every: int, covers: str, sizes: tuple[int, int], off: str) -> CoverageLine:
        here, not_here = (0, sum(sizes)) if off else sizes
        return CoverageLine(check, not off, every, covers, here, not_here, off)

    gradient = (read, missed)
    return (
        line("gradient_norm", check_every, "each rank's local gradient before the reduce (a hint)", gradient, norm_off),
        line("gradient_checksum", check_every, "the reduced gradient on every replica", gradient, state_off),
        line(
            ALLREDUCE_CONSERVATION,
            conservation_every,
            "the reduced gradient against the average of the local ones",
            gradient,
            conservation_off,
        ),
        line(
            "weight_checksum",
            check_every,
            f"parameters and optimizer state, at begin and end of optimizer.step; {named}",
            (read + state, missed + state_missed + sizes.apart),
            state_off,
        ),
        line(
            "replay",
            replay_every,
            "local gradients of every rank, re-run by itself and on the next node",
            (read, 0),
            replay_off or ("" if replay_every else "disabled: replay_every is 0"),
        ),
    )


def predicted_seconds(parameters: Sequence[torch.nn.Parameter], sizes: Sizes, *, conservation_every: int = 1) -> float:
    """Seconds of fingerprinting that a checked step will cost this rank on average, measured on its own parameters."""
    probe: list[torch.Tensor] = []
    taken = 0
    for parameter in parameters:
        if taken >= _PROBE_BYTES:
            break
        probe.append(parameter)
        taken += _bytes(parameter)
    if not taken:
        return 0.0
    begin = time.perf_counter()
    fingerprint(probe)
    rate = taken / max(time.perf_counter() - begin, 1e-9)
    # A weighted float64 sum takes about four fingerprints on a CPU; the local and the reduced gradient have one each.
    conservation = 8 / conservation_every if conservation_every else 0.0
    gradients_and_weights = (6 + conservation) * sizes.parameters[0]
    return (gradients_and_weights + 2 * max(sizes.optimizer[0], 2 * sizes.parameters[0])) / rate


def table(lines: Sequence[CoverageLine], sizes: Sizes, seconds: float) -> str:
    """The lines as text for the training log."""
    rows = ["sdcwatch coverage (bytes are this rank's):"]
    for line in lines:
        state = f"every {line.every}" if line.enabled else f"OFF ({line.reason})"
        rows.append(f"  {line.check:<22} {state:<12} {_mb(line.covered_bytes):>10}  {line.covers}")
    rows.append(
        f"  {'not compared':<22} {'':<12} {_mb(sizes.buffers):>10}  buffers (they differ between ranks by design)"
    )
    if sizes.apart:
        rows.append(
            f"  {'not compared':<22} {'':<12} {_mb(sizes.apart):>10}  parameters that no reduce makes equal (frozen, a "
            "rank's own, shards that no other rank holds)"
        )
    if sizes.unwatched:
        rows.append(
            f"  {'not watched':<22} {'':<12} {_mb(sizes.unwatched):>10}  parameters that this optimizer does not step "
            "(compared at rest only)"
        )
    rows.append(f"  predicted cost of fingerprints: {seconds * 1000:.1f} ms a checked step, audits apart")
    return "\n".join(rows)


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
