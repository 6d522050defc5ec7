"""Ways to ask whether replicas agree, side by side on the same weights: how long a check takes, and what it misses.

A way misses a pair of structured changes where it calls replicas equal that are not.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from sdcwatch.fingerprint import fingerprint

from benchmarks.model import SMALL, Size, Transformer
from benchmarks.ranks import on_ranks

Vote = Callable[[Sequence[torch.Tensor]], bool]


def _all_equal(value: torch.Tensor) -> bool:
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value)
    return all(torch.equal(value, other) for other in found)


def ours(tensors: Sequence[torch.Tensor]) -> bool:
    """sdcwatch's fingerprint of all tensors, in one small gather."""
    return _all_equal(torch.tensor([fingerprint(tensors) - (1 << 63)]))


def sha256(tensors: Sequence[torch.Tensor]) -> bool:
    """SHA-256 of all bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().view(-1).view(torch.uint8).numpy().data)
    return _all_equal(torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8))


def hash_tensor(tensors: Sequence[torch.Tensor]) -> bool:
    """`torch.hash_tensor`, one number a tensor."""
    return _all_equal(torch.stack([torch.hash_tensor(t.detach()).view(torch.int64) for t in tensors]))


def int64_sum(tensors: Sequence[torch.Tensor]) -> bool:
    """A plain sum of 64-bit words, one number a tensor; of 32-bit ones where its bytes are no multiple of 8."""
    words = [t.detach().view(-1).view(torch.int32 if t.nbytes % 8 else torch.int64) for t in tensors]
    return _all_equal(torch.stack([word.sum() for word in words]))


def gather(tensors: Sequence[torch.Tensor]) -> bool:
    """Every weight of every rank, compared."""
    answers = [_all_equal(t.detach()) for t in tensors]  # every gather runs on every rank
    return all(answers)


def votes() -> dict[str, Vote]:
    """The ways at hand; `sdcguard.check_replicas` where the package is."""
    found: dict[str, Vote] = {
        "sdcwatch": ours, "sha256": sha256, "torch.hash_tensor": hash_tensor, "int64 sum": int64_sum,
        "gather and compare": gather,
    }  # fmt: skip
    try:
        from sdcguard.replica import check_replicas
    except ImportError:
        return found
    found["sdcguard.check_replicas"] = lambda tensors: not check_replicas(tensors)[0]
    return found


def structured() -> dict[str, Callable[[torch.Tensor], None]]:
    """Changes of one flat float32 tensor that simple sums cancel; each is done in place."""

    def swap(distance: int) -> Callable[[torch.Tensor], None]:
        def change(t: torch.Tensor) -> None:
            t[[100, 100 + distance]] = t[[100 + distance, 100]]

        return change

    def bits(t: torch.Tensor) -> torch.Tensor:
        return t.view(torch.int32)

    def opposite(t: torch.Tensor) -> None:
        bits(t)[7] += 4096
        bits(t)[5007] -= 4096

    def twins(bit: int) -> Callable[[torch.Tensor], None]:
        def change(t: torch.Tensor) -> None:
            bits(t)[5:8000:4000].bitwise_xor_(1 << bit if bit < 31 else -(1 << 31))

        return change

    def zeroed(t: torch.Tensor) -> None:
        t[1000:1064] = 0

    def one_bit(t: torch.Tensor) -> None:
        bits(t)[77:78].bitwise_xor_(1)

    def moved(t: torch.Tensor) -> None:
        block = t[:256].clone()
        t[:256] = t[512:768]
        t[512:768] = block

    return {
        "swapped neighbours": swap(1), "swapped words": swap(4096), "opposite deltas": opposite,
        "twin flips, low bit": twins(3), "twin flips, sign bit": twins(31), "moved block": moved,
        "zeroed run": zeroed, "one low bit": one_bit,
    }  # fmt: skip


def _measure(rank: int, ranks: int, size: Size, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Transformer(size)
    tensors = [p.detach() for p in model.parameters()]
    ways = votes()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            assert way(tensors), f"{name} calls equal replicas different"
            seconds[name].append(time.perf_counter() - begin)
    misses: dict[str, list[str]] = {name: [] for name in ways}
    flat = torch.randn(65536, generator=torch.Generator().manual_seed(1))
    for change_name, change in structured().items():
        mine = flat.clone()
        if rank == ranks - 1:
            change(mine)
            assert not torch.equal(mine.view(torch.int32), flat.view(torch.int32)), change_name
        for name, way in ways.items():
            if way([mine]):
                misses[name].append(change_name)
    return {"seconds": {name: statistics.median(times) for name, times in seconds.items()}, "misses": misses}


def side_by_side(*, size: Size = SMALL, repeats: int = 7) -> list[dict[str, Any]]:
    """One row a way: seconds a check as a multiple of the fastest that misses nothing, and what it misses."""
    found = on_ranks(_measure, 2, size, repeats)[0]
    exact = min(s for name, s in found["seconds"].items() if not found["misses"][name])
    return [
        {"way": name, "seconds": seconds, "times": seconds / exact, "misses": found["misses"][name]}
        for name, seconds in sorted(found["seconds"].items(), key=lambda item: item[1])
    ]
