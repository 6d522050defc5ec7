"""The device form as one Triton kernel for many tensors: memory is read once, and no value is read to the host.

A program hashes one tile of one tensor, found through tables of addresses and sizes; the digests of tiles are then
summed by tensor. Bit for bit what `fingerprint_device.tile_digests` gives. Imported only where a kernel is to run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from sdcwatch.fingerprint_device import GOLDEN, MIX_1, MIX_2, TILE, keys

_M1: Any = tl.constexpr(MIX_1)
_M2: Any = tl.constexpr(MIX_2)
_GOLDEN: Any = tl.constexpr(GOLDEN)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _mix(value: Any) -> Any:
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * _M1
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * _M2
    return value ^ ((value >> 31) & 0x1FFFFFFFF)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tile_kernel(
    addresses: Any, sizes: Any, owners: Any, numbers: Any, k1: Any, k2: Any, k3: Any, k4: Any, out: Any,
    TILE_WORDS: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    number = tl.load(numbers + program)
    address = tl.load(addresses + owner)
    size = tl.load(sizes + owner)
    whole = size // 8
    place = tl.arange(0, TILE_WORDS)
    at = number * TILE_WORDS + place
    words = tl.load(address.to(tl.pointer_type(tl.int64)) + at, mask=at < whole, other=0)
    # The last bytes that fill no word, as one word with zeros behind them.
    bytes_at = tl.arange(0, 8)
    left = whole * 8 + bytes_at
    tail = tl.load(address.to(tl.pointer_type(tl.uint8)) + left, mask=left < size, other=0).to(tl.int64)
    word = tl.sum(tail << (8 * bytes_at).to(tl.int64), axis=0)
    partial = size % 8 != 0
    words = tl.where((at == whole) & partial, word, words)
    used = (at < whole) | ((at == whole) & partial)
    low, high = words.to(tl.uint32), (words >> 32).to(tl.uint32)
    one = (low + tl.load(k1 + place).to(tl.uint32)).to(tl.uint64)
    two = (high + tl.load(k2 + place).to(tl.uint32)).to(tl.uint64)
    three = (low + tl.load(k3 + place).to(tl.uint32)).to(tl.uint64)
    four = (high + tl.load(k4 + place).to(tl.uint32)).to(tl.uint64)
    nothing = tl.zeros((TILE_WORDS,), dtype=tl.int64)
    a = tl.sum(tl.where(used, (one * two).to(tl.int64), nothing), axis=0)
    b = tl.sum(tl.where(used, (three * four).to(tl.int64), nothing), axis=0)
    tl.store(out + program, _mix(a + _mix(b + (number + 1) * _GOLDEN)))


def digests(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Digests of contiguous tensors of one device whose memory begins at a word: (len(values),) int64 there.

    Raises:
        Exception: whatever keeps the kernel from being compiled or started; then nothing of ours stays on the device.
    """
    try:
        return _launched(values)
    except Exception:
        _tables.cache_clear()
        _narrow_keys.cache_clear()
        raise


def _launched(values: Sequence[torch.Tensor]) -> torch.Tensor:
    device = values[0].device
    sizes = tuple(value.nbytes for value in values)
    sizes_there, owners, numbers = _tables(sizes, device)
    found = torch.zeros(len(values), dtype=torch.int64, device=device)
    if not owners.numel():
        return found
    addresses = torch.tensor([value.data_ptr() for value in values], dtype=torch.int64)
    if device.type == "cuda":
        addresses = addresses.pin_memory().to(device, non_blocking=True)
    tiles = torch.empty(owners.numel(), dtype=torch.int64, device=device)
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        _tile_kernel[(owners.numel(),)](
            addresses, sizes_there, owners, numbers, *_narrow_keys(device), tiles, TILE_WORDS=TILE, num_warps=8
        )
    return found.index_add_(0, owners, tiles)


@lru_cache(maxsize=256)
def _tables(sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sizes of the tensors; and for each tile which tensor it is of, and its number there."""
    there = torch.tensor(sizes, dtype=torch.int64)
    counts = (there + 8 * TILE - 1) // (8 * TILE)
    owners = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    numbers = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts)[owners]
    return there.to(device), owners.to(device), numbers.to(device)


@lru_cache(maxsize=32)
def _narrow_keys(device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(key.to(torch.int32) for key in keys(device))
