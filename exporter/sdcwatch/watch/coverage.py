"""What is checked and what is not: the lines that `Monitor` prints at start and `monitor.coverage()` returns.

Counts bytes, never claims: state that no check reaches is a line of its own, with the reason. Measures nothing of
training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sdcwatch.checks.weights import covered_bytes, state_tensors
from sdcwatch.fingerprint import fingerprint
from sdcwatch.verdict.records import ALLREDUCE_CONSERVATION

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
        optimizer=(state, missed + sum(covered_bytes(state_tensors(optimizer, others)))),
        buffers=sum(b.numel() * b.element_size() for b in module.buffers() if b.layout is torch.strided),
        unwatched=sum(p.numel() * p.element_size() for p in parameters if id(p) not in stepped),
    )


def describe(
    sizes: Sizes,
    *,
    check_every: int,
    replay_every: int,
    replay_off: str,
    nodes: int,
    conservation_every: int = 1,
    conservation_off: str = "",
) -> tuple[CoverageLine, ...]:
    """The coverage of this run.

    Args:
        replay_off: why replay cannot run at all (empty: it can).
        nodes: distinct nodes of the group.
        conservation_off: why the reduce is not defined to be a plain average (empty: it is).
    """
    conservation_off = conservation_off or ("" if conservation_every else "disabled: conservation_every is 0")
    read, missed = sizes.parameters
    state, state_missed = sizes.optimizer
    named = "names a strict majority's odd one" if nodes >= 3 else f"{nodes} node(s): nobody can be named"
    return (
        CoverageLine(
            "gradient_norm", True, check_every, "each rank's local gradient before the reduce (a hint)", read, missed
        ),
        CoverageLine("gradient_checksum", True, check_every, "the reduced gradient on every replica", read, missed),
        CoverageLine(
            ALLREDUCE_CONSERVATION,
            not conservation_off,
            conservation_every,
            "the reduced gradient against the average of the local ones",
            0 if conservation_off else read,
            read + missed if conservation_off else missed,
            conservation_off,
        ),
        CoverageLine(
            "weight_checksum",
            True,
            check_every,
            f"parameters and optimizer state, at begin and end of optimizer.step; {named}",
            read + state,
            missed + state_missed,
        ),
        CoverageLine(
            "replay",
            bool(replay_every) and not replay_off,
            replay_every,
            "local gradients of every rank, re-run by itself and on the next node",
            read if replay_every and not replay_off else 0,
            0 if replay_every and not replay_off else read,
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
        taken += parameter.numel() * parameter.element_size()
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
    if sizes.unwatched:
        rows.append(
            f"  {'not watched':<22} {'':<12} {_mb(sizes.unwatched):>10}  parameters that this optimizer does not step "
            "(compared at rest only)"
        )
    rows.append(f"  predicted cost of fingerprints: {seconds * 1000:.1f} ms a checked step, audits apart")
    return "\n".join(rows)


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
