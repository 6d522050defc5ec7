"""The device form of a fingerprint: 64-bit words hashed where they lie, without a host read.

A tensor is cut into tiles of 4,096 words. In a tile, each word's two halves are added to two keys of its place and
multiplied (32 x 32 -> 64 bits), once with each of two independent sets of keys, and both sums of products are mixed
with the tile's number; a tensor's digest is the sum of its tiles'. Sums of integers do not depend on their order, so a
kernel and torch operations give the same bits: `fingerprint_triton` does it in one launch for all tensors; where it
cannot run, `tile_digests` does the same with torch operations, some ten times slower.

Two different contents get one fingerprint with probability 2^-62. Both sums are NH universal hashes, equal for two
different tiles with probability 2^-32 each: 2^-64. Mixed into 64 bits, sums that differ meet again with another 2^-64:
2^-63 a digest of a tensor. `joined` hashes the tensors' digests in the same way: 2^-63 once more. The 2^-32 is proved
for random keys; that mixing spreads like a random function is taken for granted (without it only 2^-32 is proved);
and these keys are constants, so nothing holds against somebody who chooses contents to fit them.

A tile costs 24 bytes of extra memory. Copies of what is not contiguous live 16 MiB at a time (a larger tensor alone),
and torch operations keep two temporaries of 8 MiB. Never reads a value to the host, and writes to nothing that it did
not allocate. Flow: fingerprint -> **device form**.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import torch

log = logging.getLogger("sdcwatch")

#: Words of 8 bytes in a tile.
TILE = 4096
#: Tiles that torch operations take at once: each of their two temporaries has 8 MiB.
_AT_ONCE = 256
#: Bytes of copies that are alive at once; a tensor larger than this is copied alone.
_COPIES = 16 << 20
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
    ready = [n for n, tensor in enumerate(tensors) if _ready(tensor)]
    found = _hashed([raw(tensors[n]) for n in ready])
    if len(ready) == len(tensors):
        return found
    digests = dict(zip(ready, found.unbind(), strict=True))
    for group in _groups(tensors, [n for n in range(len(tensors)) if n not in digests]):
        # The copies die as soon as the kernel is launched, before it has run: on a GPU their memory is given only to
        # work that comes later on the same stream, which waits for the kernel.
        found = _hashed([_aligned(raw(tensors[n])) for n in group])
        digests.update(zip(group, found.unbind(), strict=True))
    return torch.stack([digests[n] for n in range(len(tensors))])


def _groups(tensors: Sequence[torch.Tensor], numbers: Iterable[int]) -> Iterator[list[int]]:
    """The numbers in runs whose tensors have `_COPIES` bytes at most; a larger tensor stands alone."""
    group: list[int] = []
    size = 0
    for n in numbers:
        if group and size + tensors[n].nbytes > _COPIES:
            yield group
            group, size = [], 0
        group.append(n)
        size += tensors[n].nbytes
    if group:
        yield group


def _hashed(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Digests of contiguous tensors of one device that begin at a word: by the kernel where it runs."""
    if values and has_kernel(values[0].device) and _Kernel.runs():
        try:
            from sdcwatch.fingerprint_triton import digests

            return digests(values)
        except Exception as error:  # a compiler or a cache folder that is missing shows at the first launch only
            _Kernel.failed(f"the kernel did not start ({error!r})")
    sums = [tile_digests(value).sum() for value in values]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)


def has_kernel(device: torch.device) -> bool:
    """Whether the kernel is for this kind of device."""
    return device.type == "cuda"


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
    one, two, three, four = (key[: words.shape[1]] for key in keys(words.device))
    a, b = _products(words, one, two), _products(words, three, four)
    number = torch.arange(first + 1, first + 1 + words.shape[0], dtype=torch.int64, device=words.device)
    return mixed(a + mixed(b + number * GOLDEN))


def _products(words: torch.Tensor, low_key: torch.Tensor, high_key: torch.Tensor) -> torch.Tensor:
    """The rows' sums of (low half + key) x (high half + key), in two temporaries as large as `words`."""
    product = (words + low_key).bitwise_and_(_MASK32)
    product *= (words >> 32).add_(high_key).bitwise_and_(_MASK32)  # bits above the half are masked, the sign's too
    return product.sum(1)


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


def _ready(tensor: torch.Tensor) -> bool:
    """Whether a tensor's value can be hashed where it lies, without a copy."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()) and not _between_words(tensor)


def _between_words(value: torch.Tensor) -> bool:
    """A view that begins between two words, or memory from outside torch."""
    return bool(value.numel() and (value.storage_offset() * value.element_size() % 8 or value.data_ptr() % 8))


def _aligned(value: torch.Tensor) -> torch.Tensor:
    """The tensor, or its copy at a place where words may stand."""
    return value.clone() if _between_words(value) else value


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
