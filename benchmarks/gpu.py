"""What sdcwatch costs on one GPU, in under five minutes and without a network: `python benchmarks/gpu.py`.

Two ranks share the device (or two processes a CPU, `--device cpu --tiny`): fingerprint bandwidth against a copy's,
whole steps with and without the monitor, host reads a step, how far the host runs ahead of the device (what a strict
gate costs), extra memory, and equality of the weights. The two ranks reduce over gloo, since NCCL refuses two ranks on
one device: that is slower than a real reduce, so `overhead` is also given as `added_ms` a step, to be held against a
step of your own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "exporter")]

from sdcwatch.fingerprint_device import device_digests  # noqa: E402

from benchmarks.model import BILLION, GPT2, TINY, Size, Transformer, batch_of, loss_fn  # noqa: E402
from benchmarks.overhead import Plain, Watched  # noqa: E402
from benchmarks.ranks import on_ranks  # noqa: E402


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(work: Any, device: torch.device, repeats: int = 7) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        _wait(device)
        begin = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def bandwidth(device: torch.device, megabytes: int) -> dict[str, float]:
    """GB/s that a fingerprint reads, and that a copy reads and writes together."""
    buffer = torch.randint(256, (megabytes << 20,), dtype=torch.uint8, device=device)
    other = torch.empty_like(buffer)
    hashed = buffer.numel() / _timed(lambda: device_digests([buffer]), device) / 1e9
    copied = 2 * buffer.numel() / _timed(lambda: other.copy_(buffer), device) / 1e9
    return {"fingerprint_gb_s": hashed, "copy_gb_s": copied, "share": hashed / copied}


class Reads:
    """Counts reads of values by the host while it is entered: each stops a GPU's run-ahead."""

    NAMES = ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy")

    def __enter__(self) -> Reads:
        self.count = 0
        self._before = {name: getattr(torch.Tensor, name) for name in self.NAMES}
        for name, original in self._before.items():
            setattr(torch.Tensor, name, self._counting(original))
        return self

    def _counting(self, original: Any) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return original(*args, **kwargs)

        return read

    def __exit__(self, *_: object) -> None:
        for name, original in self._before.items():
            setattr(torch.Tensor, name, original)


def _steps(rank: int, ranks: int, kind: str, size: Size, tokens: int, pairs: int, half: bool) -> dict[str, Any]:
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    dtype = torch.bfloat16 if half else torch.float32
    batch = batch_of(size, tokens // ranks, device, seed=rank)

    def build(form: type[Plain], **settings: Any) -> Plain:
        torch.manual_seed(0)
        return form(Transformer(size).to(device, dtype), **settings)

    plain = build(Plain)
    plain.step(batch, loss_fn)
    peak_before = torch.cuda.max_memory_allocated() if kind == "cuda" else 0
    watched = build(Watched, replay_every=0)
    assert isinstance(watched, Watched)
    watched.step(batch, loss_fn)
    ratios, added, reads = [], [], 0
    ahead: dict[str, list[float]] = {"Plain": [], "Watched": []}
    for number in range(pairs):
        seconds = {}
        for run in (plain, watched) if number % 2 else (watched, plain):
            dist.barrier()
            begin = time.perf_counter()
            run.step(batch, loss_fn)
            issued = time.perf_counter()
            _wait(device)
            ahead[type(run).__name__].append(1000 * (time.perf_counter() - issued))
            seconds[type(run).__name__] = time.perf_counter() - begin
        ratios.append(seconds["Watched"] / seconds["Plain"])
        added.append(1000 * (seconds["Watched"] - seconds["Plain"]))
    with Reads() as counted:
        watched.step(batch, loss_fn)
        reads = counted.count
    with Reads() as optimizers_own:
        plain.step(batch, loss_fn)
    reads -= optimizers_own.count
    same = all(torch.equal(a, b) for a, b in zip(plain.ddp.parameters(), watched.ddp.parameters(), strict=True))
    state = 6 * sum(p.nbytes for p in plain.ddp.parameters())
    peak = torch.cuda.max_memory_allocated() - peak_before - state if kind == "cuda" else 0
    watched.monitor.close()
    return {
        "overhead": statistics.median(ratios) - 1, "added_ms": statistics.median(added),
        "pairs": pairs, "host_reads": reads, "same_bits": same,
        # work still queued on the device as the loop's body ended: what the gate's reads leave of the run-ahead
        "run_ahead_ms": statistics.median(ahead["Watched"]), "run_ahead_ms_without": statistics.median(ahead["Plain"]),
        "extra_mb": max(peak, 0) / 2**20,
    }  # fmt: skip


def main() -> int:
    """Prints one JSON object; 1 where weights differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes: does it run?")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --tiny tries the script without one")
    device = torch.device(options.device)
    models = {"tiny": (TINY, 64, 3)} if options.tiny else {"gpt2_124m": (GPT2, 65536, 20), "1b": (BILLION, 65536, 6)}
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "bandwidth": bandwidth(device, 8 if options.tiny else 4096),
    }
    for name, (size, tokens, pairs) in models.items():
        print(f"[gpu] {name} ...", file=sys.stderr, flush=True)
        found[name] = on_ranks(_steps, 2, options.device, size, tokens, pairs, options.device == "cuda")[0]
    print(json.dumps(found, indent=1))
    return 0 if all(found[name]["same_bits"] for name in models) else 1


if __name__ == "__main__":
    sys.exit(main())
