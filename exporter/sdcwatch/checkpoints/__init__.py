"""Checkpoints one can trust: the manifest beside each, what a verdict does to them, and the command that chooses.

A training script needs `resume_point(directory)`, or `agree_on_resume(directory)` where ranks should hash only once.

    record.py    the manifest as JSON           content.py   bytes: files, folders, URLs
    manifest.py  save, verify, taint, choose    trust.py     a running epoch's checkpoints
    state.py     fingerprints of the state      resume.py    is what was loaded the checkpoint?
    dcp.py, torch_file.py    in the words of torch.distributed.checkpoint and torch.save
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdcwatch.checkpoints.manifest import CheckpointRecord, last_clean, resume_point, verify

if TYPE_CHECKING:
    from sdcwatch.checkpoints.resume import agree_on_resume

__all__ = ["CheckpointRecord", "agree_on_resume", "last_clean", "resume_point", "verify"]


def __getattr__(name: str) -> Any:
    if name == "agree_on_resume":  # needs torch; choosing and verifying do not
        from sdcwatch.checkpoints.resume import agree_on_resume

        return agree_on_resume
    raise AttributeError(f"module 'sdcwatch.checkpoints' has no attribute {name!r}")
