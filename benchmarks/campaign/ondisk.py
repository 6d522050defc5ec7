"""Checkpoint bytes that rot: a manifest's digests must not fit any more. Single process. Flow: main -> **ondisk**."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from sdcwatch.checkpoints import manifest
from sdcwatch.errors import CheckpointError
from sdcwatch.testing import PATTERNS, corrupt_file

from benchmarks.campaign.cases import ON_DISK, Case


def cases(seed: int, *, quick: bool) -> list[Case]:
    """One case a pattern and seed."""
    return [
        Case(
            group=ON_DISK, world=1, nodes=(1,), precision="fp32", optimizer="sgd", location="checkpoint",
            pattern=pattern, mode="persistent", rank=0, step=3, parameter=0, seed=seed + number,
        )
        for pattern, number in itertools.product(PATTERNS, range(1 if quick else 5))
    ]  # fmt: skip


def run(case: Case, scratch: Path) -> dict[str, Any]:
    """Writes a checkpoint with its manifest, lets it rot, and asks whether it may be loaded."""
    path = scratch / f"checkpoint-{case.pattern}-{case.seed}.pt"
    state = {"weight": torch.randn(64, 16, generator=torch.Generator().manual_seed(case.seed))}
    manifest.save(path, lambda to: torch.save(state, to), step=case.step, epoch="e0", job="campaign")
    manifest.verify(path)
    changed = corrupt_file(path, pattern=case.pattern, seed=case.seed)
    try:
        manifest.verify(path)
        found, said = False, ""
    except CheckpointError as error:
        found, said = True, str(error)
    return {
        "outcome": "inconclusive" if found else "missed",
        "seen_step": case.step if found else None,
        "first": {"check": "checkpoint", "kind": "inconclusive", "path": "", "suspects": [], "contains": True,
                  "sentence": said[:200]} if found else None,
        "struck": [case.step],
        "elements": changed,
        "error": None,
        "times_bound": 0.0,
        "loud_step": None,
        "contained": found,
        "agreed": True,
        "failures": 0,
        "software": [],
        "peers": {"parity": "missed", "norm": "missed", "sdcguard": "missed"},
    }  # fmt: skip
