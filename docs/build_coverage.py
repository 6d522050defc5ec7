"""Writes docs/coverage.md: for each way to train, what each check does with a fault that was really put in.

Every cell is an outcome, not an opinion: real gloo ranks train under a `Monitor`, one fault a run strikes rank 1, and
the cell says what the check made of it. A run in which a healthy rank is named, or a clean run with any verdict, is an
error. A test runs this again and compares. `python docs/build_coverage.py` writes the file.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import re
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "coverage.md"
BAD = 1
STEPS = 7
CHECKS = ("gradient_norm", "gradient_checksum", "allreduce_conservation", "weight_checksum", "replay", "checkpoint")

#: Row -> ranks, and what is special about it.
ROWS: dict[str, tuple[int, str]] = {
    "DDP": (3, "`DistributedDataParallel`, AdamW"),
    "compiled DDP": (3, "`torch.compile(ddp)` (Dynamo, backend `eager`)"),
    "HSDP": (6, "`fully_shard` over 3 replicas of 2 shards"),
    "FSDP2": (3, "`fully_shard` over 3 shards, no replica"),
    "ZeRO-1": (3, "DDP with `ZeroRedundancyOptimizer`"),
    "LoRA": (3, "DDP over a frozen base with trainable adapters"),
    "accumulation": (3, "DDP, two micro-batches a step, the first under `no_sync`"),
    "GradScaler": (3, "DDP, bfloat16 autocast and a loss scaler"),
    "user comm hook": (3, "DDP with `default_hooks.fp16_compress_hook`"),
    "join": (3, "DDP inside `ddp.join()`, one rank with fewer batches"),
}

#: Fault -> the check that it is meant for, and what the loop's `Fault` is.
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("", {}),
    "large gradient": ("gradient_norm", {}),
    "reduce": ("gradient_checksum", {"location": "reduced_gradient", "pattern": "bit_flip", "mode": "transient"}),
    "reduce, alike": (
        "allreduce_conservation",
        {"location": "reduced_gradient_all", "pattern": "percent", "mode": "transient"},
    ),
    "optimizer step": (
        "weight_checksum",
        {"location": "optimizer_weight", "pattern": "bit_flip", "mode": "transient"},
    ),
    "weights at rest": (
        "weight_checksum",
        {"location": "weights_at_rest", "pattern": "bit_flip", "mode": "transient"},
    ),
    "optimizer state": (
        "weight_checksum",
        {"location": "optimizer_state", "pattern": "bit_flip", "mode": "transient"},
    ),
    "backward": ("replay", {"location": "backward", "pattern": "percent"}),
    "bytes on disk": ("checkpoint", {}),
}


def _parts(row: str) -> tuple[Any, Any, Any, Callable[[Any, Any], Any]]:
    """Model as the loop calls it, optimizer, scaler and loss function of one row."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    size = torch.distributed.get_world_size()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8))
    if row == "LoRA":
        model = _lora()
    if row in ("HSDP", "FSDP2"):
        shape, names = ((3, 2), ("replicate", "shard")) if row == "HSDP" else ((size,), ("shard",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        # several buckets, but for Dynamo, which splits its graph at them and wants a small first one
        model = DistributedDataParallel(model, bucket_cap_mb=25 if row == "compiled DDP" else 0.001)
    optimizer: Any
    if row == "ZeRO-1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    if row == "user comm hook":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if row == "GradScaler" else None

    def loss_fn(module: Any, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=row == "GradScaler"):
            return nn.functional.cross_entropy(module(batch[0]), batch[1])

    return model, optimizer, scaler, loss_fn


def _lora() -> Any:
    from torch import nn

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(16, 8).requires_grad_(False)
            self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 8, bias=False)

        def forward(self, x: Any) -> Any:
            return self.base(x) + self.up(self.down(x))

    return Adapted()


def _train(row: str, name: str, rank: int, root: str) -> dict[str, Any]:
    """One run on this rank: what the checks said, and what they say about themselves."""
    import torch
    from sdcwatch import Monitor
    from sdcwatch.testing import Fault, FaultPlan

    model, optimizer, scaler, loss_fn = _parts(row)
    _, fault = FAULTS[name]
    if fault:
        FaultPlan((Fault(rank=BAD, step=3, **fault),)).install(model, optimizer, first_step=0)
    trained = torch.compile(model, backend="eager") if row == "compiled DDP" else model
    step = 0
    if name == "large gradient" and rank == BAD:

        def enlarge(parameter: Any) -> None:
            if step >= 3:
                parameter.grad.mul_(1e4)

        for parameter in optimizer.param_groups[0]["params"]:
            parameter.register_post_accumulate_grad_hook(enlarge)
    folder = f"{root}/{name}".replace(" ", "-").replace(",", "")
    monitor = Monitor(
        trained,
        optimizer,
        loss_fn=loss_fn,
        scaler=scaler,
        spool_dir=f"{folder}/node-{rank}",
        checkpoint_dir=f"{folder}/checkpoints",
        node=f"node-{rank}",
        job="coverage",
        replay_every=1,
        conservation_every=1,
    )
    generator = torch.Generator().manual_seed(rank)
    with model.join() if row == "join" else contextlib.nullcontext():
        for step in range(STEPS - (row == "join" and rank == 0)):
            with monitor.step(step) as s:
                for last in (False, True) if row == "accumulation" else (True,):
                    batch = (torch.randn(8, 16, generator=generator), torch.randint(8, (8,), generator=generator))
                    with contextlib.nullcontext() if last else model.no_sync():
                        loss = s.loss(batch)
                        (loss if scaler is None else scaler.scale(loss)).backward()
                (optimizer.step if scaler is None else lambda: (scaler.step(optimizer), scaler.update()))()
                optimizer.zero_grad()
    torch.distributed.barrier()
    found = {
        "verdicts": [(v.check, v.kind, v.suspects) for v in monitor.verdicts],
        "coverage": {c.check: (c.enabled, c.reason, c.covered_bytes, c.uncovered_bytes) for c in monitor.coverage()},
        "metrics": monitor._epoch.reporter.metrics.lines() if monitor._epoch else "",
        "file": _file(monitor, optimizer, f"{folder}/checkpoints") if name == "bytes on disk" else None,
    }
    monitor.close()
    return found


def _file(monitor: Any, optimizer: Any, folder: str) -> str:
    """Saves, damages and verifies one checkpoint."""
    import torch
    from sdcwatch.checkpoints import manifest
    from sdcwatch.errors import CheckpointError
    from sdcwatch.shards import local

    state = [local(p.detach()) for p in optimizer.param_groups[0]["params"]]
    path = Path(folder) / "last.pt"
    monitor.checkpoint(path, lambda place: torch.save(state, place))
    if torch.distributed.get_rank() != 0:
        return "detects"
    manifest.verify(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    try:
        manifest.verify(path)
    except CheckpointError:
        return "detects"
    return "misses"


def _rank(row: str, rank: int, size: int, port: int, root: str, out: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size),
        SDCWATCH_AGENT="off", SDCWATCH_MAX_OVERHEAD="0",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    quiet = open(os.devnull, "w")  # noqa: SIM115
    try:
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            found: Any = {name: _train(row, name, rank, root) for name in FAULTS}
    except BaseException:
        found = traceback.format_exc()
    out.put((rank, found))
    out.close()
    out.join_thread()
    os._exit(0)


def run(row: str) -> list[dict[str, Any]]:
    """Runs all faults of one row on real ranks; what each rank found, in rank order.

    Raises:
        RuntimeError: a rank failed, or did not answer in time.
    """
    import sdcwatch.monitor  # noqa: F401  # once, before the ranks are forked
    import torch._dynamo  # noqa: F401

    size, _ = ROWS[row]
    context = multiprocessing.get_context("fork")
    out: Any = context.Queue()
    with socket.socket() as probe, tempfile.TemporaryDirectory() as root:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        ranks = [context.Process(target=_rank, args=(row, rank, size, port, root, out)) for rank in range(size)]
        for process in ranks:
            process.start()
        found: dict[int, Any] = {}
        deadline = time.monotonic() + 150
        try:
            while len(found) < size:
                rank, value = out.get(timeout=max(0.1, deadline - time.monotonic()))
                found[rank] = value
        finally:
            for process in ranks:
                process.join(timeout=5)
                process.kill()
    broken = [value for value in found.values() if isinstance(value, str)]
    if broken:
        raise RuntimeError(f"{row}: {broken[0]}")
    return [found[rank] for rank in range(size)]


def cells(row: str, found: list[dict[str, Any]]) -> dict[str, str]:
    """Check -> what it did with the faults of one row.

    Raises:
        RuntimeError: a verdict without a fault, or one that names a healthy rank.
    """
    for name, by_rank in ((n, [f[n] for f in found]) for n in FAULTS):
        for result in by_rank:
            if name in ("none", "bytes on disk") and result["verdicts"]:
                raise RuntimeError(f"{row}, no fault: {result['verdicts']}")
            if any(set(suspects) - {BAD} for _, _, suspects in result["verdicts"]):
                raise RuntimeError(f"{row}, {name}: a healthy rank was named: {result['verdicts']}")
    return {check: _cell(check, found) for check in CHECKS}


def _cell(check: str, found: list[dict[str, Any]]) -> str:
    names = [name for name, (meant_for, _) in FAULTS.items() if meant_for == check]
    if check == "checkpoint":
        return str(found[0]["bytes on disk"]["file"])
    if check == "gradient_norm":
        for name in names:
            seen = re.search(r"sdc_gradient_norm_anomalies_total\{[^}]*\} ([1-9]\S*)", found[BAD][name]["metrics"])
            others = [f for rank, f in enumerate(found) if rank != BAD]
            loud = [f for f in others if re.search(r"anomalies_total\{[^}]*\} [1-9]", f[name]["metrics"])]
            if seen and not loud:
                return "hints"
    kinds = [(kind, suspects) for n in names for said, kind, suspects in found[0][n]["verdicts"] if said == check]
    if any(kind == "attributed" and suspects == (BAD,) for kind, suspects in kinds):
        return "accuses"
    if any(kind == "inconclusive" for kind, _ in kinds):
        return "detects"
    enabled, reason, _, _ = found[0]["none"]["coverage"].get(check, (True, "", 0, 0))
    if not enabled:
        return f"off: {reason}"
    skipped = set(
        re.findall(rf'sdc_skips_total\{{[^}}]*check="{check}",reason="(\w+)"\}} [1-9]', found[0]["none"]["metrics"])
    )
    return f"off: skipped and counted (`{', '.join(sorted(skipped))}`)" if skipped else "misses"


HEAD = """# Coverage: what each check does, by way of training

Made by `python docs/build_coverage.py` from real runs on gloo ranks, one node each: in every run one fault strikes
rank 1, and the cell says what the check that it is meant for made of it. A run that names a healthy rank, or a clean
one with any verdict, fails the build.

- **accuses**: the rank was named. **detects**: the difference was proven, and nobody was named. **hints**: a metric,
  never a verdict.
- **off**: the check does not run there, and says so at start, in `monitor.coverage()`, or as counted skips.
- Faults: a gradient that is 10,000 times too large; one bit of what the reduce handed to one rank; 1 % of a part of it
  on all ranks alike; one bit of weights or optimizer state inside `optimizer.step`, and of weights at rest; 1 % of a
  part of one layer's gradient from step 3 on; one bit of a file.

"""


def render(rows: dict[str, list[dict[str, Any]]]) -> str:
    """The page, from what all rows found."""
    notes: dict[str, int] = {}
    lines = [f"| training | {' | '.join(f'`{c}`' for c in CHECKS)} |", "|---" * (len(CHECKS) + 1) + "|"]
    for row, found in rows.items():
        shown = []
        for check, cell in cells(row, found).items():
            word, _, why = cell.partition(": ")
            shown.append(f"{word} <sup>{notes.setdefault(why, len(notes) + 1)}</sup>" if why else word)
            assert check in CHECKS
        lines.append(f"| {row} | {' | '.join(shown)} |")
    lines += ["", *(f"{number}. {why}" for why, number in notes.items())]
    lines += [
        "",
        "## Bytes of state that `weight_checksum` compares on rank 0",
        "",
        "| training | set up as | compared | not compared |",
    ]
    lines.append("|---|---|---|---|")
    for row, found in rows.items():
        enabled, _, covered, uncovered = found[0]["none"]["coverage"]["weight_checksum"]
        lines.append(f"| {row} | {ROWS[row][1]} | {covered if enabled else 0} | {uncovered} |")
    return HEAD + "\n".join(lines) + "\n"


def read(page: str) -> dict[str, dict[str, str]]:
    """Row -> check -> cell, with the note's text in place of its number, as the page has them."""
    notes = dict(re.findall(r"^(\d+)\. (.*)$", page, flags=re.MULTILINE))
    rows: dict[str, dict[str, str]] = {}
    for line in page.partition("## Bytes")[0].splitlines():
        row, *shown = [part.strip() for part in line.strip("| ").split(" | ")]
        if row in ROWS:
            words = (re.sub(r" <sup>(\d+)</sup>", lambda found: f": {notes[found[1]]}", cell) for cell in shown)
            rows[row] = dict(zip(CHECKS, words, strict=True))
    return rows


def main(wanted: Iterator[str] | None = None) -> int:
    """Runs every row and writes the page."""
    rows = {}
    for row in wanted or ROWS:
        begin = time.monotonic()
        rows[row] = run(row)
        print(f"{row}: {cells(row, rows[row])} in {time.monotonic() - begin:.1f} s", flush=True)
    if not wanted:
        PAGE.write_text(render(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(iter(sys.argv[1:]) if sys.argv[1:] else None))
