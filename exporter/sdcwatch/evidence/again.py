"""`sdcwatch evidence replay`: the kept micro-batch, run again on this machine, against the gradients on record.

It judges nothing that it cannot: other weights, another kind of device, a model that does not repeat itself here are
"could not judge". Nothing of the file is executed; the model is code that the caller names. It uses no network and
writes no file. Flow: form -> **again** -> command.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sdcwatch import environment
from sdcwatch.checks import replay
from sdcwatch.checks.module_state import overlaps
from sdcwatch.errors import ConfigurationError
from sdcwatch.evidence.facts import Side, hex_text, sides
from sdcwatch.evidence.form import EvidenceError, EvidenceFile
from sdcwatch.evidence.values import Reader
from sdcwatch.fingerprint import fingerprint

#: Facts that do not change a bit, or that the run itself sets to what they were.
_NOT_THE_BITS = frozenset({"sdcwatch", "python", "threads"})


class CannotJudge(Exception):
    """Why what came out here would say nothing about what is on record."""


@dataclass(frozen=True, slots=True)
class Result:
    """What the micro-batch gave here.

    Attributes:
        outcome: `majority`, `suspect`, `side` (of a record without a majority), `neither`, or `unknown`.
        detail: one sentence.
        digest: of this run's gradients, 16 hex digits; None where there was none.
        ranks, nodes: of the side on record that it equals.
        environment: facts that differ from those on record, each `name: there, here`.
        first_parameter: the first whose gradient differs from what the file's own rank had, where it says so.
    """

    outcome: str
    detail: str
    digest: str | None = None
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    first_parameter: str | None = None


def run(
    file: EvidenceFile, *, model: str, device: str | None = None, weights: Path | None = None, times: int = 2
) -> Result:
    """Runs the micro-batch `times` times.

    Args:
        model: `module:function`; the function returns `(module, loss_fn)`.
        device: a torch device; default: the kind on record.
        weights: a file of `torch.save` with the state dict after the step on record, read without running code.
        times: the runs must agree with each other, or nothing is judged.

    Raises:
        ConfigurationError: the model cannot be made, or no such device.
        EvidenceError: the file holds something that no rank of ours writes.
    """
    recorded = str(file.manifest["environment"].get("device", "cpu"))
    place = _device(device or recorded)
    try:
        module, loss_fn = _made(model)
        return _judged(file, module, loss_fn, place, recorded, weights, times)
    except CannotJudge as why:
        return Result("unknown", str(why))


def _judged(
    file: EvidenceFile,
    module: torch.nn.Module,
    loss_fn: replay.LossFunction,
    device: torch.device,
    recorded: str,
    weights: Path | None,
    times: int,
) -> Result:
    manifest = file.manifest
    if device.type != recorded:
        raise CannotJudge(f"the gradients on record are of a {recorded} device and cannot be compared on {device.type}")
    if manifest["step"] is None or manifest["batch"] is None:
        raise CannotJudge(
            f"the file holds no micro-batch ({manifest['batch_missing']}): set evidence_data to batch or weights "
            "in the job, and wait for its next event"
        )
    if device.type == "cpu" and str(manifest["environment"].get("threads", "")).isdigit():
        torch.set_num_threads(max(1, min(int(manifest["environment"]["threads"]), 1024)))
    reader = Reader(file.sections, device)
    module.to(device)
    _load(manifest, module, reader, weights)
    parameters = _parameters(manifest, module)
    payload = _payload(manifest, reader, module)
    found = [
        replay.run(payload, module=module, loss_fn=loss_fn, parameters=parameters, device=device)
        for _ in range(max(1, times))
    ]
    if len({one.digest for one in found}) > 1:
        raise CannotJudge("two runs here differ from each other: the model does not repeat itself on this machine")
    return _compared(manifest, found[0], _environment(manifest, device))


def _compared(manifest: Mapping[str, Any], found: replay.Replayed, differing: tuple[str, ...]) -> Result:
    digest = str(hex_text(found.digest))
    first = _first_difference(manifest, found.digests)
    side = next((s for s in sides(manifest) if s.digest == digest), None)
    if side is not None:
        return Result(side.role or "side", _sentence(side), digest, side.ranks, side.nodes, differing, first)
    if differing:
        detail = f"it gave another gradient than any on record, and the environment differs: {'; '.join(differing)}"
        return Result("unknown", detail, digest, (), (), differing, first)
    return Result("neither", "it gave another gradient than any on record", digest, (), (), differing, first)


def _sentence(side: Side) -> str:
    who = f"rank{'s' * (len(side.ranks) > 1)} {', '.join(map(str, side.ranks))} (node {', '.join(side.nodes)})"
    what = {
        "majority": "what the witnesses computed, so the suspect stands alone against one machine more",
        "suspect": "what the suspect computed, so this machine does the same: not a broken device there",
        "": "one of the gradients on record; which of them is right the record does not say",
    }[side.role]
    return f"it gave the gradient of {who}: {what}"


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigurationError(f"--device {name}: {first}; name a device that this machine has") from error
    return device


def _made(spec: str) -> tuple[torch.nn.Module, Callable[[Any, Any], torch.Tensor]]:
    name, _, function = spec.partition(":")
    if not name or not function:
        raise ConfigurationError(
            f"--model is {spec!r}; write module:function, where function() gives (module, loss_fn)"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(name), function)()
    except Exception as error:  # the caller's code
        raise ConfigurationError(f"--model {spec} cannot be made: {type(error).__name__}: {error}") from error
    if (
        not isinstance(made, tuple)
        or len(made) != 2
        or not isinstance(made[0], torch.nn.Module)
        or not callable(made[1])
    ):
        raise ConfigurationError(f"--model {spec} gave {type(made).__name__}; it must give (module, loss_fn)")
    return made


def _parameters(manifest: Mapping[str, Any], module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The replicated parameters in the order on record; they must hold the weights on record."""
    here = dict(module.named_parameters())
    found = []
    for entry in manifest["parameters"]:
        parameter = here.get(entry["name"])
        if parameter is None:
            raise CannotJudge(f"this model has no parameter {entry['name']}: it is not the one that was trained")
        if list(parameter.shape) != entry["shape"] or str(parameter.dtype) != f"torch.{entry['dtype']}":
            raise CannotJudge(
                f"parameter {entry['name']} is {tuple(parameter.shape)} {parameter.dtype} here and "
                f"{tuple(entry['shape'])} {entry['dtype']} on record"
            )
        found.append(parameter)
    for entry, parameter in zip(manifest["parameters"], found, strict=True):
        if hex_text(fingerprint([parameter])) != entry["weights"]:
            places = ", ".join(f"{c['path']} (step {c['step']})" for c in manifest["checkpoints"]) or "none was known"
            raise CannotJudge(
                f"the weights are not those on record (first: {entry['name']}): they are needed as they were after "
                f"step {manifest['weights_after_step']}; pass such a checkpoint as --weights, or keep them with "
                f"evidence_data=weights. Checkpoints near it: {places}"
            )
    return found


def _load(manifest: Mapping[str, Any], module: torch.nn.Module, reader: Reader, path: Path | None) -> None:
    if path is None and manifest["weights"] is None:
        return
    state = reader.read(manifest["weights"]) if path is None else _checkpoint(path)
    named = {**state.get("parameters", {}), **state.get("buffers", {})} if path is None else state
    places = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    with torch.no_grad():
        for name, value in named.items():
            held = places.get(name)
            fits = held is not None and isinstance(value, torch.Tensor) and held.shape == value.shape
            if held is not None and fits and not overlaps(held):  # an expanded buffer is what the model made it
                held.copy_(value)


def _checkpoint(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unreadable, or it asks for classes
        raise ConfigurationError(
            f"--weights {path} cannot be read as plain tensors: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error
    for key in ("model", "state_dict", "module"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict):
        raise ConfigurationError(f"--weights {path} holds no state dict")
    return {str(name).removeprefix("module."): value for name, value in content.items()}


def _payload(manifest: Mapping[str, Any], reader: Reader, module: torch.nn.Module) -> bytes:
    try:
        content = reader.read(manifest["step"])
        batches = reader.read(manifest["batch"])
        steps = content["batches"]
        whole = [(b, s["rng"], s["autocast"], s["seed"]) for b, s in zip(batches, steps, strict=True)]
        flags = len(content["training"])
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(f"the micro-batch in the file is not of the form that ranks write: {error!r}") from error
    if flags and flags != len(list(module.modules())):
        raise CannotJudge(f"this model has {len(list(module.modules()))} modules and the one on record had {flags}")
    return replay.packed({**content, "batches": whole})


def _environment(manifest: Mapping[str, Any], device: torch.device) -> tuple[str, ...]:
    there, here = manifest["environment"], environment.describe(device)
    names = sorted((there.keys() | here.keys()) - _NOT_THE_BITS)
    return tuple(f"{n}: {there.get(n, '-')}, here {here.get(n, '-')}" for n in names if there.get(n) != here.get(n))


def _first_difference(manifest: Mapping[str, Any], digests: Mapping[int, int]) -> str | None:
    own = manifest["digests"]
    held: Mapping[str, str] = own.get("self") or own.get("served") or {}
    if not held:
        return None
    names: Sequence[Mapping[str, Any]] = manifest["parameters"]
    for index in range(len(names)):
        if held.get(str(index)) != hex_text(digests.get(index)):
            return str(names[index]["name"])
    return None
