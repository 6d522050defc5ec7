"""Start of an epoch: what the monitor can watch, and who its peers are.

The one exchange of objects happens here, as DDP's own constructor does: every rank brings its identity, environment,
schema and settings, or the error that kept it from having them. So one rank's bad setting is one clear error on all
ranks, never a hang. Nothing here measures a step. Flow: monitor -> **start** -> exchange; its `Membership` is fixed
for the epoch.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from dataclasses import dataclass
from typing import Any

import torch

from sdcwatch.errors import ConfigurationError
from sdcwatch.fingerprint import digest_bytes
from sdcwatch.identity import Identity
from sdcwatch.latch.files import Latch
from sdcwatch.settings import Settings
from sdcwatch.verdict import Group
from sdcwatch.watch.exchange import Exchange
from sdcwatch.watch.same_step import merged

#: Settings that decide which collectives run when; ranks that differ in one would split.
SHARED_SETTINGS = ("on_fault", "check_every", "conservation_every", "replay_every", "heal_window", "max_overhead")


@dataclass(frozen=True, slots=True)
class Brought:
    """What one rank brings to the start-up exchange."""

    error: str | None = None
    disabled: bool = False
    halted: bool = False
    identity: Identity | None = None
    facts: dict[str, str] | None = None
    environment: int = 0
    schema: int = 0
    settings: tuple[Any, ...] = ()
    epoch: str = ""
    replays: bool = False
    blind: tuple[str, ...] = ()  # checks whose self-test failed on this rank
    halts: tuple[Latch, ...] = ()  # former halts of this job that this rank can read


@dataclass(frozen=True, slots=True)
class Membership:
    """The fixed membership of one epoch. Index = rank."""

    epoch: str
    identities: tuple[Identity, ...]
    facts: tuple[dict[str, str], ...]
    group: Group
    replays: bool
    blind: tuple[str, ...] = ()  # checks whose self-test failed on any rank
    parts: tuple[Group, ...] = ()  # replica sets, where not all ranks hold the same state
    halts: tuple[Latch, ...] = ()  # former halts of this job, the newest last

    @property
    def nodes(self) -> dict[str, list[int]]:
        """Node key -> its ranks, nodes ordered by their lowest rank."""
        found: dict[str, list[int]] = {}
        for rank, identity in enumerate(self.identities):
            found.setdefault(identity.node_key, []).append(rank)
        return found

    def reporters(self, without: frozenset[str] = frozenset()) -> tuple[int, ...]:
        """The lowest rank of each of the two lowest nodes that are not in `without`."""
        return tuple(ranks[0] for key, ranks in self.nodes.items() if key not in without)[:2]


def check_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Raises ConfigurationError for anything but one `torch.optim.Optimizer`."""
    if isinstance(optimizer, (list, tuple)):
        raise ConfigurationError(
            f"Monitor watches one optimizer, got {len(optimizer)}: pass the one that steps most of the model; "
            "parameters of the others stay compared at rest, and coverage() counts them"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"optimizer is {type(optimizer).__name__}; pass the torch.optim.Optimizer itself (unwrapped)"
        )
    return optimizer


def check_given(
    optimizer: Any, parameters: list[tuple[str, torch.nn.Parameter]], loss_fn: Any, settings: Settings
) -> None:
    """Raises ConfigurationError for what can be seen to be a mistake before the first step."""
    stepped = {id(p) for group in check_optimizer(optimizer).param_groups for p in group["params"]}
    if not parameters:
        raise ConfigurationError("the model has no parameter whose gradient DDP reduces: nothing to compare")
    if not any(id(p) in stepped for _, p in parameters):
        raise ConfigurationError(
            "this optimizer steps no parameter of this model: pass the optimizer that was made from its parameters "
            "(make it after the model was wrapped or moved)"
        )
    check_settings(loss_fn, settings)


def check_settings(loss_fn: Any, settings: Settings) -> None:
    """The part of it that needs no process group."""
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigurationError(
            f"loss_fn is {type(loss_fn).__name__}; pass the function itself: loss_fn(model, batch)"
        )
    folder = settings.checkpoint_dir
    if folder and os.path.exists(folder) and not os.path.isdir(folder):
        raise ConfigurationError(f"checkpoint_dir is {folder}, which is no folder; name the folder of the checkpoints")


def schema_digest(parameters: list[tuple[str, torch.nn.Parameter]], sets: tuple[tuple[int, ...], ...] = ()) -> int:
    """uint64 of names, shapes and dtypes, and of the replica sets where there are several."""
    lines = [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in parameters]
    return digest_bytes("\n".join([*lines, repr(sets)] if len(sets) > 1 else lines).encode())


def instance_digest(identity: Identity) -> int:
    """The uint64 that every row of this rank must carry."""
    return digest_bytes("|".join(map(str, dataclasses.astuple(identity))).encode())


def shared(settings: Settings) -> tuple[Any, ...]:
    """The values that must be equal on all ranks."""
    return tuple(getattr(settings, name) for name in SHARED_SETTINGS)


def new_epoch() -> str:
    """A fresh epoch id: `e<unix milliseconds>-<8 hex>`."""
    return f"e{int(time.time() * 1000):013d}-{secrets.token_hex(4)}"


def join(
    exchange: Exchange, mine: Brought, own_error: Exception | None, sets: tuple[tuple[int, ...], ...] = ()
) -> Membership | None:
    """Exchanges what all ranks brought.

    Args:
        sets: the ranks that hold the same state, as every rank reads them from its model; empty: all of them.

    Returns:
        The membership, or None when a rank has the monitor switched off (then it is off on all).

    Raises:
        ConfigurationError: a rank's error, or settings or schemas that differ; the same on all ranks.
        SystemExit: a latch or quarantine stands on some rank (status 86).
    """
    brought: list[Brought] = exchange.everyone(mine)
    if any(b.halted for b in brought):
        raise SystemExit(86)
    if own_error is not None:
        raise own_error
    errors = [(rank, b.error) for rank, b in enumerate(brought) if b.error]
    if errors:
        raise ConfigurationError("; ".join(f"rank {rank}: {error}" for rank, error in errors[:4]))
    if any(b.disabled for b in brought):
        return None
    for position, name in enumerate(SHARED_SETTINGS):
        values = {b.settings[position] for b in brought}
        if len(values) > 1:
            listed = ", ".join(f"rank {r}: {b.settings[position]}" for r, b in enumerate(brought[:8]))
            raise ConfigurationError(f"{name} differs between ranks ({listed}); set it to one value on all ranks")
    if len({b.schema for b in brought}) > 1:
        odd = [r for r, b in enumerate(brought) if b.schema != brought[0].schema]
        raise ConfigurationError(
            f"the replicated parameters (names, shapes, dtypes, requires_grad) of rank(s) {odd[:8]} are not those of "
            "rank 0: replicas cannot be compared; build the same model on every rank"
        )
    identities = tuple(_required(b.identity) for b in brought)
    _refuse_twins(identities)
    epoch = brought[0].epoch
    group = Group(
        nodes=tuple(i.node_key for i in identities),
        instances=tuple(instance_digest(i) for i in identities),
        environments=tuple(b.environment for b in brought),
        epoch=digest_bytes(epoch.encode()),
    )
    return Membership(
        epoch=epoch,
        identities=identities,
        facts=tuple(b.facts or {} for b in brought),
        group=group,
        replays=all(b.replays for b in brought),
        blind=tuple(sorted({check for b in brought for check in b.blind})),
        parts=tuple(group.part(members) for members in sets) if len(sets) > 1 else (),
        halts=merged(b.halts for b in brought),
    )


def _required(identity: Identity | None) -> Identity:
    assert identity is not None, "a rank without an error always brings an identity"
    return identity


def _refuse_twins(identities: tuple[Identity, ...]) -> None:
    jobs = {(i.job, i.cluster) for i in identities}
    if len(jobs) > 1:
        raise ConfigurationError(f"ranks of one group name different jobs or clusters: {sorted(jobs)}; set one on all")
    devices: dict[str, int] = {}
    for rank, identity in enumerate(identities):
        other = devices.setdefault(f"{identity.node_key}|{identity.gpu_uuid}", rank)
        if other != rank and identity.gpu_uuid.startswith("GPU-"):
            raise ConfigurationError(
                f"ranks {other} and {rank} both run on {identity.gpu_uuid} of node {identity.node}: a verdict could "
                "not tell them apart; give each rank its own device"
            )
