"""What sdcwatch costs on one GPU, in under five minutes and without a network: `python benchmarks/gpu.py`.

Two ranks share the device (or two processes a CPU, `--device cpu --tiny`): is the fingerprint kernel the one that
torch operations agree with, and how fast is it beside a copy; whole steps with and without the monitor; host reads of a
checked step; memory; what one read after the backward costs a loop that runs ahead of its device; equality of the
weights, beside a control of two runs without the monitor. The two ranks reduce over gloo, through the host, since NCCL
refuses two ranks on one device. So the share is taken of a step *without* its reduce, and it errs upwards: the passes
of both ranks share one device. With gloo rows are read before they leave, so a checked step reads once where NCCL's
reads twice. Results go to stdout and `--json FILE` after every part: a part that fails costs the others nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "exporter")]

from sdcwatch.fingerprint_device import device_digests, tile_digests  # noqa: E402

from benchmarks.model import BILLION, GPT2, TINY, Size, Transformer, batch_of, loss_fn  # noqa: E402
from benchmarks.overhead import UNBOUND, Plain, Watched, parts_of, share  # noqa: E402
from benchmarks.ranks import on_ranks  # noqa: E402

#: Goals: a fingerprint's share of a copy's bandwidth, at least; what checks add to a step, at most.
BANDWIDTH, OVERHEAD = 0.8, 0.01
#: A model's pairs of steps end then, and all of it is over in five minutes.
MODEL_SECONDS = 100.0
#: Conservation is measured more often than it runs by default, so that few pairs see it.
OFTEN = {"replay_every": 0, "conservation_every": 3, **UNBOUND}
DEFAULT = {"gradient_checksum": 1, "weight_checksum": 1, "allreduce_conservation": 10}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    begin = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - begin


def bandwidth(device: torch.device, megabytes: int) -> dict[str, Any]:
    """GB/s that a fingerprint reads, and that a copy reads and writes together, in turns."""
    buffer = torch.randint(256, (megabytes << 20,), dtype=torch.uint8, device=device)
    other = torch.empty_like(buffer)
    works: dict[str, Callable[[], object]] = {
        "fingerprint": lambda: device_digests([buffer]), "copy": lambda: other.copy_(buffer)
    }  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in works}
    for number in range(10):
        for name, work in works.items():
            seconds = _seconds(work, device)
            if number > 2:
                taken[name].append(seconds)
    hashed = buffer.numel() / statistics.median(taken["fingerprint"]) / 1e9
    copied = 2 * buffer.numel() / statistics.median(taken["copy"]) / 1e9
    found = hashed / copied
    return {"fingerprint_gb_s": hashed, "copy_gb_s": copied, "share": found, "met": found >= BANDWIDTH}


def kernel(device: torch.device) -> dict[str, Any]:
    """Does Triton's kernel run, with the bits of torch operations, and without waiting for the device?"""
    if device.type != "cuda":
        return {"runs": False, "why": "no CUDA device"}
    import triton
    from sdcwatch.fingerprint_triton import digests

    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)
    values = [torch.randn(n, device=device).to(dtype) for dtype in dtypes for n in (8, 4096, 40_000, 1_000_008)]
    expected = torch.stack([tile_digests(value).sum() for value in values])
    equal = torch.equal(digests(values), expected)
    torch.cuda.set_sync_debug_mode("error")
    try:
        digests(values)
        waits = ""
    except RuntimeError as error:
        waits = str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"runs": True, "triton": triton.__version__, "bits_of_torch": equal, "waits_for_the_device": waits}


class Reads:
    """Counts reads of values by the host while it is entered: each stops a GPU's run-ahead.

    Attributes:
        count: calls of the methods that read; tensors of the host count too.
        waits: what CUDA itself reports as waiting, 0 without it.
    """

    NAMES = ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.count = self.waits = 0

    def __enter__(self) -> Reads:
        self._before = {name: getattr(torch.Tensor, name) for name in self.NAMES}
        for name, original in self._before.items():
            setattr(torch.Tensor, name, self._counting(original))
        self._caught = warnings.catch_warnings(record=True)
        self._warnings = self._caught.__enter__()
        warnings.simplefilter("always")
        if self._device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def _counting(self, original: Any) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return original(*args, **kwargs)

        return read

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        self.waits = sum("synchroniz" in str(warning.message) for warning in self._warnings or ())
        self._caught.__exit__(None, None, None)
        for name, original in self._before.items():
            setattr(torch.Tensor, name, original)


class Bench:
    """One rank's models on the device."""

    def __init__(self, kind: str, size: Size) -> None:
        self.device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
        self.size = size
        self.dtype = torch.bfloat16 if kind == "cuda" else torch.float32

    def build(self, form: type[Plain], **settings: Any) -> Plain:
        """A model of always the same weights."""
        torch.manual_seed(0)
        return form(Transformer(self.size).to(self.device, self.dtype), **settings)

    def allocated(self) -> int:
        """Bytes on the device, now."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def peak_of(self, work: Callable[[], object]) -> int:
        """Bytes by which a step rises above what stands there before it."""
        if self.device.type != "cuda":
            work()
            return 0
        before = self.allocated()
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        return torch.cuda.max_memory_allocated(self.device) - before


def _steps(rank: int, ranks: int, kind: str, size: Size, tokens: int, micro: int, pairs: int) -> dict[str, Any]:
    bench = Bench(kind, size)
    batches = batch_of(size, tokens // ranks, bench.device, seed=rank).chunk(micro)
    start = bench.allocated()
    plain = bench.build(Plain)
    for _ in range(2):
        plain.step(loss_fn, *batches)
    alone = bench.allocated() - start
    watched = bench.build(Watched, **OFTEN)
    assert isinstance(watched, Watched)
    for _ in range(2):
        watched.step(loss_fn, *batches)
    resident = bench.allocated() - start - 2 * alone
    pair = (plain, watched)
    measured = list(_pairs(pair, batches, pairs, bench.device))
    peaks = [bench.peak_of(lambda run=run: run.step(loss_fn, *batches)) for run in pair]
    reads = []
    for run in pair:
        with Reads(bench.device) as counted:
            run.step(loss_fn, *batches)
        reads.append(counted)
    bare = statistics.median(
        _seconds(lambda: plain.step(loss_fn, *batches, reduce=False), bench.device) for _ in range(5)
    )
    watched.monitor.close()
    added = [(parts, bare, bare + with_ - without) for parts, without, with_ in measured]
    overhead = share(added, DEFAULT)
    return {
        "overhead": overhead, "met": overhead <= OVERHEAD, "added_ms": 1000 * overhead * bare,
        "step_without_reduce_ms": 1000 * bare, "pairs": len(measured),
        "step_ms": 1000 * statistics.median(without for _, without, _ in measured),
        "host_reads": reads[1].count - reads[0].count, "waits_that_cuda_reports": reads[1].waits - reads[0].waits,
        "resident_mb": resident / 2**20, "peak_above_plain_mb": (resident + peaks[1] - peaks[0]) / 2**20,
        "parameters_mb": sum(p.nbytes for p in plain.ddp.parameters()) / 2**20,
    }  # fmt: skip


def _pairs(
    pair: tuple[Plain, Watched], batches: Sequence[torch.Tensor], pairs: int, device: torch.device
) -> Iterator[tuple[frozenset[str], float, float]]:
    """What was measured in each pair of steps, and the seconds without and with."""
    deadline = time.monotonic() + MODEL_SECONDS
    for number in range(pairs):
        parts = parts_of(pair[1].count, pair[1].every())
        seconds: dict[Plain, float] = {}
        for run in pair if number % 2 else pair[::-1]:
            dist.barrier()
            seconds[run] = _seconds(lambda run=run: run.step(loss_fn, *batches), device)  # type: ignore[misc]
        yield parts, seconds[pair[0]], seconds[pair[1]]
        late = torch.tensor([float(time.monotonic() > deadline)])
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        if late.item() and number >= 5:
            return


def _bits(rank: int, ranks: int, kind: str, size: Size, tokens: int, micro: int, steps: int) -> dict[str, Any]:
    """Weights after some deterministic steps: without the monitor, again without, and with it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    bench = Bench(kind, size)
    batches = batch_of(size, tokens // ranks, bench.device, seed=rank).chunk(micro)
    ends = []
    for form, settings in ((Plain, {}), (Plain, {}), (Watched, OFTEN)):
        run = bench.build(form, **settings)
        for _ in range(steps):
            run.step(loss_fn, *batches)
        ends.append([p.detach().clone() for p in run.ddp.parameters()])
        if isinstance(run, Watched):
            run.monitor.close()
        del run
    control, same = (all(map(torch.equal, ends[0], other)) for other in ends[1:])
    return {"same_bits": same, "control_same_bits": control, "steps": steps}


def read_after_backward(kind: str, size: Size, tokens: int, steps: int) -> dict[str, float]:
    """What one read by the host after each backward costs a loop that never waits otherwise: the strict gate."""
    bench = Bench(kind, size)
    torch.manual_seed(0)
    model = Transformer(size).to(bench.device, bench.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = batch_of(size, tokens, bench.device)

    def loop(reads: bool) -> None:
        for _ in range(steps):
            loss = loss_fn(model, batch)
            loss.backward()
            if reads:
                loss.item()
            optimizer.step()
            optimizer.zero_grad()

    loop(True)
    taken = [
        (_seconds(lambda: loop(False), bench.device), _seconds(lambda: loop(True), bench.device)) for _ in range(5)
    ]
    without = statistics.median(one for one, _ in taken)
    return {
        "step_ms": 1000 * without / steps,
        "read_ms": 1000 * statistics.median(other - one for one, other in taken) / steps,
        "share": statistics.median(other / one for one, other in taken) - 1,
    }


def parts(kind: str, tiny: bool) -> dict[str, Callable[[], Any]]:
    """Name -> measurement, the quickest first."""
    device = torch.device(kind)
    model, tokens, micro = (TINY, 64, 2) if tiny else (GPT2, 65536, 8)
    models = {"tiny": (TINY, 64, 2, 8)} if tiny else {"gpt2_124m": (GPT2, 65536, 8, 20), "1b": (BILLION, 65536, 8, 12)}
    found: dict[str, Callable[[], Any]] = {
        "kernel": lambda: kernel(device),
        "bandwidth": lambda: bandwidth(device, 8 if tiny else 4096),
        "read_after_backward": lambda: read_after_backward(kind, model, tokens // 8, 3 if tiny else 10),
        "bits": lambda: on_ranks(_bits, 2, kind, model, tokens // 4, max(micro // 4, 1), 3)[0],
    }
    for name, plan in models.items():
        found[name] = lambda plan=plan: on_ranks(_steps, 2, kind, *plan)[0]
    return found


def main() -> int:
    """Prints one JSON object; 1 where a part failed, the kernel's bits are wrong, or the monitor changed a weight."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes: does it run?")
    parser.add_argument("--json", type=Path, help="also write what is known into this file, after every part")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --tiny tries the script without one")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic steps, for the bits
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu", "torch": torch.__version__
    }  # fmt: skip
    began = time.monotonic()
    for name, measure in parts(options.device, options.tiny).items():
        print(f"[gpu {time.monotonic() - began:4.0f} s] {name} ...", file=sys.stderr, flush=True)
        try:
            found[name] = measure()
        except Exception as error:  # one part, an allocation that failed for instance, must not cost the others
            found[name] = {"error": f"{type(error).__name__}: {error}"[-2000:]}
        if options.device == "cuda":
            torch.cuda.empty_cache()
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
    failed = any("error" in part for part in found.values() if isinstance(part, dict))
    changed = found["bits"].get("control_same_bits") and not found["bits"]["same_bits"]
    return int(failed or bool(changed) or found["kernel"].get("bits_of_torch") is False)


if __name__ == "__main__":
    sys.exit(main())
