"""`torch.distributed.checkpoint` with a manifest: the same two calls, with the monitor in front.

`save` writes the shards of all ranks beside the place and gives them their name when they are whole. `async_save`
lets torch write in the background and has the manifest completed after it. Loading is torch's own.
Flow: training loop -> **dcp** -> monitor.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver as torch_dcp

from sdcwatch.checkpoints import content
from sdcwatch.errors import CheckpointError
from sdcwatch.monitor import Monitor

#: Background writes talk on a group of their own: on the training's group they would meet DDP's reduces half way.
_own_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def save(monitor: Monitor, state_dict: dict[str, Any], path: str | os.PathLike[str], **options: Any) -> None:
    """Saves the state of the newest step as a folder of shards; collective, as `torch.distributed.checkpoint.save` is.

    Args:
        path: final place on a file system that all ranks share, in `checkpoint_dir`.
        options: further arguments of torch's `save`.

    Raises:
        CheckpointError: no step has run yet.
    """
    final = Path(path)
    if not monitor.enabled:
        torch_dcp.save(state_dict, checkpoint_id=final, **options)
        return
    if monitor.newest_step is None:
        raise CheckpointError("no step has run: there is no state to save yet")
    beside = final.with_name(f".{final.name}.{monitor.epoch}-{monitor.newest_step}.partial")
    try:
        torch_dcp.save(state_dict, checkpoint_id=beside, **options)
        monitor.checkpoint(final, lambda place: os.rename(beside, place))
    except BaseException:
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):
                content.remove(beside)
        raise


def async_save(monitor: Monitor, state_dict: dict[str, Any], path: str | os.PathLike[str], **options: Any) -> Any:
    """Starts to save the state of the newest step; collective. Until it is whole and hashed, nothing resumes from it.

    Args:
        path: a path that all ranks share, or a URL that fsspec knows, with `storage_writer` in `options` for it.
        options: further arguments of torch's `async_save`. Without `process_group` a gloo group is made, once.

    Returns:
        What torch returns: a future, or an `AsyncSaveResponse`.

    Raises:
        CheckpointError: no step has run yet.
    """
    step = monitor.newest_step
    if monitor.enabled and step is None:
        raise CheckpointError("no step has run: there is no state to save yet")
    if dist.is_initialized():
        options.setdefault("process_group", _own_group())
    if "storage_writer" not in options:
        options["checkpoint_id"] = os.fspath(path)
    write = torch_dcp.async_save(state_dict, **options)
    if step is not None:
        monitor.note_checkpoint(path, step, when=write)
    return write


def _own_group() -> dist.ProcessGroup:
    whole = dist.group.WORLD
    assert whole is not None
    if whole not in _own_groups:
        _own_groups.clear()
        _own_groups[whole] = dist.new_group(backend="gloo")
    return _own_groups[whole]
