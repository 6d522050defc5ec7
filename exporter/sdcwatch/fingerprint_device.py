"""The device form of a fingerprint: 64-bit words hashed where they lie, without a host read.

A tensor is cut into tiles of 4,096 words. In a tile, each word's two halves are added to two keys of its place and
multiplied (32 x 32 -> 64 bits), once with each of two independent sets of keys, and both sums of products are mixed
with the tile's number; a tensor's digest is the sum of its tiles'. That is the NH universal hash: two different tiles
collide with probability 2^-32 a set, so 2^-64 with both. Sums of integers do not depend on their order, so a kernel
and torch operations give the same bits: `fingerprint_triton` does it in one launch for all tensors; where it cannot
run, `tile_digests` does the same with torch operations, some ten times slower.

Never reads a value to the host, and writes to nothing that it did not allocate. Flow: fingerprint -> **device form**.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache

import torch

log = logging.getLogger("sdcwatch")

#: Words of 8 bytes in a tile.
TILE = 4096
#: Tiles that torch operations take at once: bounds their temporaries to a few times 32 MB.
_AT_ONCE = 1024
_MASK32 = (1 << 32) - 1
#: Odd constants of well-mixing multiplications (splitmix64), as signed numbers.
MIX_1, MIX_2, GOLDEN = (n - (1 << 64) for n in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's value as contiguous memory; a copy only where it is none yet."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def device_digest(tensor: torch.Tensor) -> torch.Tensor:
    """One tensor's digest: a 0-d int64 tensor on its own device."""
    return device_digests([tensor])[0]


def device_digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Digests of many tensors.

    Args:
        tensors: any dtypes and shapes, each a run of bytes.

    Returns:
        (len(tensors),) int64 on the first tensor's device; nothing was read to the host.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        parts = [device_digests([tensor]) for tensor in tensors]
        return torch.cat([part.to(parts[0].device) for part in parts])
    values = [_aligned(raw(tensor)) for tensor in tensors]
    device = values[0].device
    if device.type == "cuda" and _Kernel.runs():
        try:
            from sdcwatch.fingerprint_triton import digests

            return digests(values)
        except Exception as error:  # a compiler or a cache folder that is missing shows at the first launch only
            _Kernel.failed(f"the kernel did not start ({error!r})")
    return torch.stack([tile_digests(value).sum() for value in values])


def joined(digests: torch.Tensor, known: int) -> torch.Tensor:
    """One digest over several and their order.

    Args:
        digests: (n,) int64.
        known: a uint64 that the host knows of what they stand for.

    Returns:
        0-d int64 on the device of `digests`; nothing was read to the host.
    """
    return mixed(device_digests([digests])[0] + (known - (1 << 64) if known >> 63 else known))


def tile_digests(value: torch.Tensor) -> torch.Tensor:
    """The digests of one contiguous tensor's tiles, with torch operations: (tiles,) int64."""
    data = value.view(-1).view(torch.uint8) if value.numel() else value.new_empty(0, dtype=torch.uint8)
    whole = data.numel() // 8
    words = data[: whole * 8].view(torch.int64)
    parts = [_tiles(words[at : at + _AT_ONCE * TILE], at // TILE) for at in range(0, whole, _AT_ONCE * TILE)]
    tail = data[whole * 8 :]
    if tail.numel():
        place = whole % TILE
        word = torch.zeros(8, dtype=torch.uint8, device=data.device)
        word[: tail.numel()] = tail
        last = words[whole - place :]
        again = torch.cat([last, word.view(torch.int64)])
        if place:
            parts[-1] = parts[-1][:-1]
        parts.append(_tiles(again, whole // TILE))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=data.device)


def _tiles(words: torch.Tensor, first: int) -> torch.Tensor:
    """Digests of the tiles in `words`, the first of which has the number `first`; the last may be short."""
    count = -(-words.numel() // TILE)
    if words.numel() % TILE:
        full = words.numel() // TILE * TILE
        last = [_rows(words[full:].view(1, -1), first + count - 1)]
        return torch.cat([_rows(words[:full].view(-1, TILE), first), *last]) if full else last[0]
    return _rows(words.view(-1, TILE), first)


def _rows(words: torch.Tensor, first: int) -> torch.Tensor:
    low, high = words & _MASK32, (words >> 32) & _MASK32
    one, two, three, four = (key[: words.shape[1]] for key in keys(words.device))
    a = (((low + one) & _MASK32) * ((high + two) & _MASK32)).sum(1)
    b = (((low + three) & _MASK32) * ((high + four) & _MASK32)).sum(1)
    number = torch.arange(first + 1, first + 1 + words.shape[0], dtype=torch.int64, device=words.device)
    return mixed(a + mixed(b + number * GOLDEN))


def mixed(value: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64: a bijection after which each bit depends on all."""
    value = (value ^ _shift(value, 30)) * MIX_1
    value = (value ^ _shift(value, 27)) * MIX_2
    return value ^ _shift(value, 31)


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch's own is arithmetic)."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@lru_cache(maxsize=32)
def keys(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four keys of 32 bits for each place in a tile, as (TILE,) int64 on `device`; equal on every rank."""
    place = torch.arange(1, TILE + 1, dtype=torch.int64)
    first, second = mixed(place * GOLDEN), mixed((place + TILE) * GOLDEN)
    found = (first & _MASK32, _shift(first, 32), second & _MASK32, _shift(second, 32))
    one, two, three, four = (key.to(device) for key in found)
    return one, two, three, four


def _aligned(value: torch.Tensor) -> torch.Tensor:
    """A view that begins between two words, or memory from outside torch, is copied to where words may stand."""
    odd = value.numel() and (value.storage_offset() * value.element_size() % 8 or value.data_ptr() % 8)
    return value.clone() if odd else value


class _Kernel:
    """Whether the Triton kernel can run in this process; asked once, and no more after it failed to start."""

    usable: bool | None = None

    @classmethod
    def runs(cls) -> bool:
        if cls.usable is None:
            try:
                import triton  # noqa: F401
            except Exception as error:  # some builds raise other things than ImportError where a driver is missing
                cls.failed(f"Triton cannot be imported ({type(error).__name__})")
            else:
                cls.usable = True
        return bool(cls.usable)

    @classmethod
    def failed(cls, why: str) -> None:
        """From now on torch operations; said once. The numbers are the same, so ranks need not agree on it."""
        if cls.usable is not False:
            log.warning("sdcwatch: fingerprints use torch operations, which is slower: %s", why)
        cls.usable = False
