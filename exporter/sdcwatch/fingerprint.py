"""Fingerprints: a uint64 of a tensor's bytes, sensitive to position, equal for equal content whatever the stride.

CPU tensors are hashed in place by xxh3 (64 bits, about the speed of memory). On a device the same bytes are summed as
64-bit words, each multiplied by an odd pseudo-random weight of its position and mixed; both ends of a comparison
always run on the same kind of device (the environment digest says so), so the two forms never meet. Two different
contents collide with probability 2^-64 (xxh3, not against an adversary), and 2^-63 for the device form when one word
differs. Each tensor's length is hashed before its bytes, so a byte never counts for its neighbour in the sequence.

Never copies a contiguous tensor, never compares floats (NaN bits and signed zeros count), never raises for odd dtypes:
tensors without a run of bytes (sparse, meta, wrapper subclasses, freed storage) are skipped and the caller counts
their bytes as uncovered.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
import xxhash

from sdcwatch.shards import local

#: Words hashed at once on a device: bounds the temporary to 3 x 32 MB.
_CHUNK = 1 << 22
_PRIME = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)
_MASK = (1 << 64) - 1


def can_fingerprint(tensor: torch.Tensor) -> bool:
    """True for tensors whose value is a run of bytes: not sparse, meta, nested, wrapping others, or freed."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_nested:
        return False
    try:
        return not tensor.numel() or tensor.data_ptr() != 0
    except RuntimeError:  # some subclasses refuse to say where their data is
        return False


def fingerprint(tensors: Iterable[torch.Tensor | None]) -> int:
    """One uint64 over a sequence of tensors, in order; None (no gradient) counts as a value of its own.

    Args:
        tensors: any dtype, shape and device; mixed devices are allowed.

    Returns:
        0 <= n < 2**64. At most one host read for all device tensors together.
    """
    hasher = xxhash.xxh3_64()
    pending: list[torch.Tensor] = []
    for whole in tensors:
        tensor = None if whole is None else local(whole)
        if tensor is None:
            hasher.update(b"\x00none")
        elif not can_fingerprint(tensor):
            hasher.update(b"\x00skip")
        elif tensor.device.type == "cpu":
            _update(hasher, tensor)
        else:
            hasher.update(b"\x00device" + _size(tensor).to_bytes(8, "little"))
            pending.append(device_digest(tensor))
    if pending:
        for value in torch.stack(pending).tolist():
            hasher.update((value & _MASK).to_bytes(8, "little"))
    return hasher.intdigest()


def digest_bytes(data: bytes) -> int:
    """The uint64 fingerprint of a byte string."""
    return xxhash.xxh3_64_intdigest(data)


def combine(digests: Iterable[int]) -> int:
    """One uint64 over a sequence of uint64 digests, order-sensitive."""
    return xxhash.xxh3_64_intdigest(b"".join((d & _MASK).to_bytes(8, "little") for d in digests))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _update(hasher: xxhash.xxh3_64, tensor: torch.Tensor) -> None:
    value = _plain(tensor)
    size = _size(value)
    hasher.update(size.to_bytes(8, "little"))
    if size:
        # numpy is no dependency, so the memory is named through ctypes; `value` keeps it alive meanwhile.
        hasher.update((ctypes.c_ubyte * size).from_address(value.data_ptr()))


def device_digest(tensor: torch.Tensor) -> torch.Tensor:
    """The device form: a 0-d int64 tensor on the tensor's own device, without a host read."""
    value = _plain(tensor).view(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not value.numel():
        return total
    raw = value.view(torch.uint8)
    whole = raw.numel() // 8
    # A view that begins between two words, or memory that came from outside torch, is copied to where words may stand.
    head = raw[: whole * 8]
    aligned = head.storage_offset() % 8 == 0 and head.data_ptr() % 8 == 0
    words = (head if aligned else head.clone()).view(torch.int64)
    for start in range(0, whole, _CHUNK):
        total += _mixed_sum(words[start : start + _CHUNK], start)
    tail = raw[whole * 8 :]
    if tail.numel():
        total += _mixed_sum(tail.to(torch.int64) + 1, whole)
    return total


def _mixed_sum(words: torch.Tensor, start: int) -> torch.Tensor:
    position = torch.arange(start + 1, start + 1 + words.numel(), dtype=torch.int64, device=words.device)
    key = position * _PRIME
    key ^= _shift(key, 29)
    key *= _MIX
    key |= 1
    mixed = words * key
    mixed ^= _shift(mixed, 32)
    mixed += words
    mixed *= key
    return mixed.sum()


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch's own is arithmetic)."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
