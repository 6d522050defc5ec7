"""Fingerprints of the state that a checkpoint holds, parameter by parameter, so that a resume can say what differs.

Reads tensors and writes nothing. Independent of where small numbers live: an optimizer's step count compares equal on
a CPU and on a GPU. Flow: monitor -> **state** -> record; resume compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sdcwatch.checkpoints.record import StateDigests
from sdcwatch.fingerprint import FORM, digest_bytes, fingerprint

#: Most digests of one kind in a manifest; a model of more parameters has neighbours share one.
MOST_DIGESTS = 10_000


def measure(parameters: Sequence[tuple[str, torch.nn.Parameter]], optimizer: torch.optim.Optimizer) -> StateDigests:
    """Fingerprints parameters and optimizer state as they are now: one pass over both, at the speed of memory.

    Args:
        parameters: the replicated ones, named, in module order.
        optimizer: the one that steps them.
    """
    device = parameters[0][1].device if parameters else torch.device("cpu")
    weights = {name: fingerprint([p]) for name, p in parameters}
    states = {name: _entry(optimizer.state[p]) for name, p in parameters if optimizer.state.get(p)}
    return StateDigests(_form(device), _texts(weights), _texts(states))


def difference(saved: StateDigests, held: StateDigests) -> str | None:
    """What is wrong with the state that a rank holds, in words; None where it is the saved one.

    Digests of different forms are not compared: see `comparable`.
    """
    return _differ("parameters", saved.parameters, held.parameters) or _differ(
        "optimizer state", saved.optimizer, held.optimizer
    )


def comparable(saved: StateDigests, held: StateDigests) -> bool:
    """Whether both were taken in the same way: another kind of device or another sdcwatch may hash otherwise."""
    return saved.form == held.form


def _differ(what: str, saved: Mapping[str, str], held: Mapping[str, str]) -> str | None:
    if saved and not held:
        return f"it holds no {what}"
    strangers = sorted(saved.keys() ^ held.keys())
    if strangers:
        where = "the checkpoint" if strangers[0] in saved else "this rank"
        return f"{what}: {len(strangers)} names are not the same, {strangers[0]} is only in {where}"
    wrong = [name for name, digest in saved.items() if held[name] != digest]
    return f"{what}: {len(wrong)} of {len(saved)} differ, first {wrong[0]}" if wrong else None


def _form(device: torch.device) -> str:
    """A digest of known bytes on this device: two ways of hashing give two of them."""
    probe = torch.arange(251, dtype=torch.uint8).to(device)
    return f"{device.type}-{fingerprint([probe]) ^ digest_bytes(FORM.encode()):016x}"


def _entry(entry: Mapping[Any, Any]) -> int:
    parts = [f"{key}={_value(entry[key])}" for key in sorted(entry, key=str)]
    return digest_bytes(";".join(parts).encode())


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{fingerprint([value]):016x}" if value.numel() > 1 else repr(value.detach().cpu().tolist())
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_value(value[k])}" for k in sorted(value, key=str)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_value, value)) + "]"
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else type(value).__qualname__


def _texts(digests: Mapping[str, int]) -> dict[str, str]:
    names = list(digests)
    every = max(1, -(-len(names) // MOST_DIGESTS))
    found = {}
    for start in range(0, len(names), every):
        shared = names[start : start + every]
        value = digests[shared[0]]
        if len(shared) > 1:
            value = digest_bytes("".join(f"{digests[name]:016x}" for name in shared).encode())
        found[shared[0]] = f"{value:016x}"
    return found
