"""`torchrun --nproc-per-node 4 -m sdcwatch.acceptance`: tries the promises on these ranks and prints one card.

It trains a model of its own on random tokens, starts no agent, writes only into a temporary spool and where `--json`
says, and ends with 0 where everything held and 1 where something did not. Flow: **main** -> trials -> card.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import platform
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from sdcwatch.acceptance import card, trials
from sdcwatch.acceptance.model import Shape


def main(arguments: list[str] | None = None) -> int:
    """Runs on every rank; only rank 0 prints."""
    parser = argparse.ArgumentParser(prog="torchrun ... -m sdcwatch.acceptance", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the card here (rank 0)")
    add("--pairs", type=int, default=30, help="pairs of steps with and without the monitor (30)")
    add("--minutes", type=float, default=8.0, help="take fewer pairs rather than more time (8)")
    add("--width", type=int, default=512, help="width of the model (512)")
    add("--layers", type=int, default=4, help="layers of the model (4)")
    add("--tokens", type=int, default=1024, help="tokens a rank and step (1024)")
    add("--ranks-a-node", type=int, metavar="N", help="call every N local ranks a node, to try naming on one machine")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 4 -m sdcwatch.acceptance")
    device = _join()
    if options.ranks_a_node:
        os.environ["SDCWATCH_NODE"] = f"{platform.node()}-{dist.get_rank() // options.ranks_a_node}"
    shape = Shape(options.width, options.layers, options.tokens)
    with tempfile.TemporaryDirectory(prefix="sdcwatch-acceptance-") as folder:
        found = trials.run(shape, device, pairs=options.pairs, seconds=60 * options.minutes, spool=folder)
    if dist.get_rank() == 0:
        print(card.text(found), flush=True)
        if options.json is not None:
            options.json.write_text(card.json_text(found), encoding="utf-8")
    # Torch may hang where DDP outlives its group. An injected fault is a cycle with its model, and after an error the
    # traceback holds it: then the group just ends with the process.
    gc.collect()
    dist.destroy_process_group()
    return 0 if found.passed else 1


def _join() -> torch.device:
    timeout = datetime.timedelta(seconds=300)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=timeout)
        return device
    dist.init_process_group("gloo", timeout=timeout)
    return torch.device("cpu")


if __name__ == "__main__":
    sys.exit(main())
