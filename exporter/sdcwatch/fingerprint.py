"""Fingerprints: a uint64 of a tensor's bytes, sensitive to position, equal for equal content whatever the stride.

CPU tensors are hashed in place by XXH3 (64 bits, about the speed of memory); a large one in fixed pieces, by as many
threads as torch uses, so the number never depends on how many there are. Tensors of a device are hashed there by
`fingerprint_device`, and their digests are hashed once more into one, which stays there until somebody reads it: a
checked step reads a row, not its fingerprints. Both ends of a comparison always run on the same kind of device (the
environment digest says so), so the two forms never meet. Two different contents collide with probability 2^-64 (XXH3,
not against an adversary), or 2^-62 in the device form. The tensors' lengths are hashed after all bytes, and their
count last, so a byte never counts for its neighbour in the sequence.

Never copies a contiguous tensor, never compares floats (NaN bits and signed zeros count), never raises for odd dtypes:
tensors without a run of bytes (sparse, meta, wrapper subclasses, freed storage) are skipped and the caller counts
their bytes as uncovered.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeAlias

import torch
import xxhash

from sdcwatch.fingerprint_device import device_digest, device_digests, joined, raw
from sdcwatch.shards import local

#: The form of the numbers; it changes whenever equal bytes would give another one.
FORM = "xxh3-4MiB-2,nh-tiles-2"

#: A uint64 that the host knows, or one that still lies on a device: the same 64 bits, as a 0-d int64 tensor.
Digest: TypeAlias = int | torch.Tensor

_PIECE = 4 << 20
#: More threads than this no memory of one socket keeps busy.
_MOST_THREADS = 8
_MASK = (1 << 64) - 1
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_STRIDED = torch.strided
#: What stands for a length where there is none: no gradient, nothing that can be read; or marks one of a device.
_NONE, _SKIP, _DEVICE = _MASK, _MASK - 1, 1 << 63

__all__ = [
    "FORM", "Digest", "can_fingerprint", "combine", "combine_unread", "device_digest", "digest_bytes", "fingerprint",
    "on_host", "read_digests", "unread_fingerprint",
]  # fmt: skip

_pool: tuple[int, int, ThreadPoolExecutor] | None = None


def can_fingerprint(tensor: torch.Tensor) -> bool:
    """True for tensors whose value is a run of bytes: not sparse, meta, nested, wrapping others, or freed."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return False
    try:
        # the storage, too: a view into the middle of freed memory still has an address
        return not tensor.numel() or (tensor.data_ptr() != 0 and tensor.untyped_storage().nbytes() != 0)
    except (RuntimeError, NotImplementedError):  # some subclasses refuse to say where their data is
        return False


def on_host(tensor: torch.Tensor) -> bool:
    """Whether the host may look at a tensor's memory without waiting for a device."""
    return tensor.is_cpu


def fingerprint(tensors: Iterable[torch.Tensor | None]) -> int:
    """`unread_fingerprint`, read: 0 <= n < 2**64, and one host read where there are tensors of a device."""
    return read_digests({0: unread_fingerprint(tensors)})[0]


def unread_fingerprint(tensors: Iterable[torch.Tensor | None]) -> Digest:
    """One uint64 over a sequence of tensors, in order; None (no gradient) counts as a value of its own.

    Args:
        tensors: any dtype, shape and device; mixed devices are allowed.

    Returns:
        A number where all tensors lie in host memory; else it lies on the first device, and nothing was read from one.
    """
    hasher = xxhash.xxh3_64()
    lengths: list[int] = []
    pending: list[torch.Tensor] = []
    for whole in tensors:
        # A model of small parameters comes by here a thousand times a check, so what nearly all tensors are (the host's
        # memory at their address is their value) is seen without a call; where not, or not for sure, `_closer` looks.
        try:
            address = (
                whole.data_ptr()
                if whole is not None
                and type(whole) in _PLAIN
                and on_host(whole)
                and whole.layout is _STRIDED
                and whole.is_contiguous()
                and not (whole.is_nested or whole.is_neg() or whole.is_conj() or whole.storage_offset())
                else 0
            )
        except RuntimeError:
            address = 0
        if address and whole is not None and (size := whole.nbytes) <= _PIECE:
            hasher.update(_array(size).from_address(address))
            lengths.append(size)
        else:
            lengths.append(_closer(hasher, whole, pending))
    hasher.update(struct.pack(f"<{len(lengths) + 1}Q", *lengths, len(lengths)))
    return joined(device_digests(pending), hasher.intdigest()) if pending else hasher.intdigest()


def _closer(hasher: xxhash.xxh3_64, whole: torch.Tensor | None, pending: list[torch.Tensor]) -> int:
    """Hashes a tensor of any kind, or leaves it in `pending` where it lies on a device; what stands for its length."""
    tensor = None if whole is None else local(whole)
    if tensor is None:
        return _NONE
    if not can_fingerprint(tensor):
        return _SKIP
    if not on_host(tensor):
        pending.append(tensor)
        return _DEVICE | tensor.nbytes
    value = raw(tensor)
    size = value.nbytes
    if size > _PIECE:
        hasher.update(b"".join(_pieces(value.data_ptr(), size)))
    elif size:
        hasher.update(_memory(value.data_ptr(), size))
    return size


def read_digests(digests: Mapping[int, Digest]) -> dict[int, int]:
    """Digests as numbers, by the same keys; one host read for all that lie on a device."""
    unread = [digest for digest in digests.values() if isinstance(digest, torch.Tensor)]
    numbers = iter(torch.stack([d.to(unread[0].device) for d in unread]).tolist() if unread else ())
    return {
        key: next(numbers) & _MASK if isinstance(digest, torch.Tensor) else digest for key, digest in digests.items()
    }


def digest_bytes(data: bytes) -> int:
    """The uint64 fingerprint of a byte string."""
    return xxhash.xxh3_64_intdigest(data)


def combine(digests: Iterable[int]) -> int:
    """One uint64 over a sequence of uint64 digests, order-sensitive."""
    return xxhash.xxh3_64_intdigest(b"".join((d & _MASK).to_bytes(8, "little") for d in digests))


def combine_unread(digests: Sequence[Digest]) -> Digest:
    """`combine` for digests some of which may lie on a device: then so does the answer."""
    unread = [digest for digest in digests if isinstance(digest, torch.Tensor)]
    known = combine([0 if isinstance(digest, torch.Tensor) else digest for digest in digests])
    return joined(torch.stack([d.to(unread[0].device) for d in unread]), known) if unread else known


def _memory(address: int, size: int) -> Any:
    # numpy is no dependency, so the memory is named through ctypes.
    return _array(size).from_address(address)


@lru_cache(maxsize=4096)
def _array(size: int) -> Any:
    return ctypes.c_ubyte * size


def _pieces(address: int, size: int) -> list[bytes]:
    """Digests of a large tensor's pieces, in order."""
    places = [(address + start, min(_PIECE, size - start)) for start in range(0, size, _PIECE)]
    threads = min(torch.get_num_threads(), _MOST_THREADS, len(places))
    digests = [b""] * len(places)
    unread = deque(range(len(places)))

    def read() -> None:
        # Each takes the next piece, so nobody waits for a thread that gets no processor.
        while (n := _next(unread)) is not None:
            digests[n] = _piece(places[n])

    others = [_threads().submit(read) for _ in range(1, threads)]
    try:
        read()
    finally:  # nobody reads on in memory that the caller may let go
        for other in others:
            if not other.cancel():
                other.result()
    return digests


def _next(numbers: deque[int]) -> int | None:
    try:
        return numbers.popleft()
    except IndexError:
        return None


def _piece(place: tuple[int, int]) -> bytes:
    digest: bytes = xxhash.xxh3_64_digest(_memory(*place))  # lets other threads run meanwhile
    return digest


def _threads() -> ThreadPoolExecutor:
    """The pool of this process: a fork has none of its parent's threads."""
    global _pool
    count = min(torch.get_num_threads(), _MOST_THREADS)
    if _pool is None or _pool[:2] != (os.getpid(), count):
        _pool = (os.getpid(), count, ThreadPoolExecutor(count - 1, thread_name_prefix="sdcwatch-fingerprint"))
    return _pool[2]
