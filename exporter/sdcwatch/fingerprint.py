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
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
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
# Asked of all tensors of a sequence, one after the other, without a line of Python in between.
_ADDRESS, _CONTIGUOUS = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
_NEGATED, _CONJUGATED = torch.Tensor.is_neg, torch.Tensor.is_conj
_SIZE, _IN_HOST_MEMORY = attrgetter("nbytes"), attrgetter("is_cpu")
#: What stands for a length where there is none: no gradient, nothing that can be read; or marks one of a device.
_NONE, _SKIP, _DEVICE = _MASK, _MASK - 1, 1 << 63

__all__ = [
    "FORM", "Digest", "Fingerprinter", "can_fingerprint", "combine", "combine_unread", "device_digest", "digest_bytes",
    "fingerprint", "on_host", "read_digests", "unread_fingerprint",
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
    return Fingerprinter().fingerprint([list(tensors)])


class Fingerprinter:
    """`unread_fingerprint` of one sequence again and again (weights, optimizer state), for less.

    A model of small parameters comes by here a thousand times a check, and asking what each one is takes longer than
    hashing it. So what was found out about a part of the sequence holds as long as its tensors lie where they lay, each
    as long as it was. Kept are numbers, and no tensor is kept alive.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Places] = {}

    def fingerprint(self, parts: Iterable[Sequence[torch.Tensor | None]]) -> Digest:
        """The fingerprint of all parts, as if they were one; the next is asked for when the last one is hashed."""
        running = _Running()
        for number, tensors in enumerate(parts):
            known = self._known.get(number)
            if known is not None and known.hold(tensors):
                running.read(known)
            elif (places := running.look(tensors)) is not None:
                self._known[number] = places
            else:
                self._known.pop(number, None)
        return running.digest()


class _Running:
    """A fingerprint that is being taken."""

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_64()
        self._lengths: list[int] = []
        self._pending: list[torch.Tensor] = []

    def read(self, places: _Places) -> None:
        """Hashes memory of the host that is known to be the next tensors' value."""
        update = self._hasher.update
        for address, size, kind in zip(places.addresses, places.sizes, places.kinds, strict=True):
            if size <= _PIECE:
                update(kind.from_address(address))
            else:
                self._hash(address, size)
        self._lengths += places.sizes

    def look(self, tensors: Sequence[torch.Tensor | None]) -> _Places | None:
        """Hashes the next tensors, of any kind; where they lie, if they all are plain memory of the host."""
        places = _Places([], [], [])
        for tensor in tensors:
            if tensor is not None and (address := _plain_address(tensor)):
                size = tensor.nbytes
                self._hash(address, size)
                self._lengths.append(size)
                places.addresses.append(address)
                places.sizes.append(size)
                places.kinds.append(_array(size))
            else:
                self._lengths.append(self._odd(tensor))
        return places if len(places.sizes) == len(tensors) else None

    def digest(self) -> Digest:
        """The fingerprint of what was hashed."""
        self._hasher.update(struct.pack(f"<{len(self._lengths) + 1}Q", *self._lengths, len(self._lengths)))
        known = self._hasher.intdigest()
        return joined(device_digests(self._pending), known) if self._pending else known

    def _hash(self, address: int, size: int) -> None:
        if size <= _PIECE:
            self._hasher.update(_array(size).from_address(address))
        else:
            self._hasher.update(b"".join(_pieces(address, size)))

    def _odd(self, whole: torch.Tensor | None) -> int:
        """Hashes a tensor of any kind, or leaves it to be hashed on its device; what stands for its length."""
        tensor = None if whole is None else local(whole)
        if tensor is None:
            return _NONE
        if not can_fingerprint(tensor):
            return _SKIP
        if not on_host(tensor):
            self._pending.append(tensor)
            return _DEVICE | tensor.nbytes
        value = raw(tensor)
        if value.nbytes:
            self._hash(value.data_ptr(), value.nbytes)
        return value.nbytes


@dataclass(frozen=True, slots=True)
class _Places:
    """Where some tensors lay when they were looked at, each of them plain memory of the host and nothing else.

    Attributes:
        kinds: the types of ctypes arrays over that memory.
    """

    addresses: list[int]
    sizes: list[int]
    kinds: list[Any]

    def hold(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether these tensors are the values of the same memory; asks all that can change where an address stays."""
        seen: Any = tensors
        try:
            return (
                _PLAIN.issuperset(map(type, seen))
                and list(map(_ADDRESS, seen)) == self.addresses
                and list(map(_SIZE, seen)) == self.sizes
                and all(map(_IN_HOST_MEMORY, seen))
                and all(map(_CONTIGUOUS, seen))
                and not any(map(_NEGATED, seen))
                and not any(map(_CONJUGATED, seen))
            )
        except RuntimeError:  # one of them has no address
            return False


def _plain_address(tensor: torch.Tensor) -> int:
    """The address of the host memory that is this tensor's value; 0 where it is not, or not for sure."""
    try:
        return (
            tensor.data_ptr()
            if type(tensor) in _PLAIN
            and on_host(tensor)
            and tensor.layout is _STRIDED
            and tensor.is_contiguous()
            and not (tensor.is_nested or tensor.is_neg() or tensor.is_conj())
            and (not tensor.storage_offset() or can_fingerprint(tensor))
            else 0
        )
    except RuntimeError:
        return 0


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


@lru_cache(maxsize=4096)
def _array(size: int) -> Any:
    """The type of so many bytes of memory: numpy is no dependency, so memory is named through ctypes."""
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
    hasher = xxhash.xxh3_64()  # reads memory faster than the call that hashes at once, which gives the same number
    hasher.update(_array(place[1]).from_address(place[0]))  # lets other threads run meanwhile
    return hasher.digest()


def _threads() -> ThreadPoolExecutor:
    """The pool of this process: a fork has none of its parent's threads."""
    global _pool
    count = min(torch.get_num_threads(), _MOST_THREADS)
    if _pool is None or _pool[:2] != (os.getpid(), count):
        _pool = (os.getpid(), count, ThreadPoolExecutor(count - 1, thread_name_prefix="sdcwatch-fingerprint"))
    return _pool[2]
