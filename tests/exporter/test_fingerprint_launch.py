"""What surrounds the kernel, without a GPU: the fall-back, launches, and memory beside the tensors.

The kernel's host side runs on CPU tensors, with a Triton that is none: each launch calls a function of the test.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo  # asks once whether there is a Triton: before there is one that is none
from sdcwatch import fingerprint_device
from sdcwatch.fingerprint_device import TILE, device_digests, keys, tile_digests
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

KERNEL = "sdcwatch.fingerprint_triton"


def with_kernel(monkeypatch: pytest.MonkeyPatch, launch: Callable[..., None]) -> Any:
    """`fingerprint_triton` as it is, for CPU tensors, on a Triton whose launches call `launch(grid, *arguments)`."""

    class Kernel:
        def __init__(self, function: Any) -> None: ...

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **_: launch(grid, *arguments)

    triton, language = ModuleType("triton"), ModuleType("triton.language")
    vars(language).update(constexpr=lambda value: value)
    vars(triton).update(jit=Kernel, language=language)
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    monkeypatch.setitem(sys.modules, KERNEL, triton)  # so that it goes away after the test
    del sys.modules[KERNEL]
    monkeypatch.setattr(fingerprint_device, "has_kernel", lambda device: True)
    monkeypatch.setattr(fingerprint_device._Kernel, "usable", None)
    return importlib.import_module(KERNEL)


def by_address(grid: tuple[int, ...], *arguments: torch.Tensor) -> None:
    """What the kernel does, read through the same tables."""
    addresses, sizes, owners, numbers, *_, out = arguments
    found: dict[int, torch.Tensor] = {}
    with _disable_current_modes():
        for program in range(grid[0]):
            owner = int(owners[program])
            if owner not in found:
                data = bytearray(ctypes.string_at(int(addresses[owner]), int(sizes[owner])))
                found[owner] = tile_digests(torch.frombuffer(data, dtype=torch.uint8))
            out[program] = found[owner][int(numbers[program])]


class Alive(TorchDispatchMode):
    """Bytes of storages that operations made and that still live: `now`, and `peak` as of the ends of operations.

    What was given is held weakly: a weak reference keeps its address from being another storage's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._given: dict[int, StorageWeakRef] = {}

    @property
    def now(self) -> int:
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return sum(size for _, size in self._made.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in torch.utils._pytree.tree_leaves(args):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._made and storage._cdata not in self._given:
                    self._given[storage._cdata] = StorageWeakRef(storage)
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._given:
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out


def refused(grid: tuple[int, ...], *arguments: torch.Tensor) -> None:
    raise RuntimeError("no C compiler found")


def contents() -> list[torch.Tensor]:
    """Tensors that a launch takes as they lie, and others that must be copied."""
    image = torch.randn(8, 16, 5, 5).to(memory_format=torch.channels_last)
    return [
        torch.randn(3 * TILE), image, torch.arange(100, dtype=torch.uint8)[3:], torch.zeros(0), torch.randn(7, 9).t(),
        torch.randn(5, dtype=torch.complex64).conj(), torch.arange(4 * TILE + 5), torch.ones(3, dtype=torch.bfloat16),
    ]  # fmt: skip


def by_operations(tensors: list[torch.Tensor]) -> list[int]:
    return [int(tile_digests(tensor.resolve_conj().contiguous().clone()).sum()) for tensor in tensors]


def test_one_launch_takes_all_that_is_contiguous_and_one_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests come back in the order of the tensors, whichever launch brought them."""
    grids: list[int] = []

    def launch(grid: tuple[int, ...], *arguments: torch.Tensor) -> None:
        grids.append(grid[0])
        by_address(grid, *arguments)

    with_kernel(monkeypatch, launch)
    tensors = contents()
    assert device_digests(tensors).tolist() == by_operations(tensors)
    assert len(grids) == 2
    assert device_digests([tensors[0], tensors[6]]).tolist() == by_operations([tensors[0], tensors[6]])
    assert len(grids) == 3


def test_a_kernel_that_does_not_start_leaves_the_same_digests_one_line_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No compiler: torch operations go on, the kernel is not tried again, and what it was given is free again."""
    launches: list[int] = []

    def launch(grid: tuple[int, ...], *arguments: torch.Tensor) -> None:
        launches.append(grid[0])
        refused(grid, *arguments)

    kernel = with_kernel(monkeypatch, launch)
    tensors = contents()
    expected = by_operations(tensors)
    gc.collect()
    gc.disable()  # nothing may wait for a collection
    try:
        with Alive() as alive:
            found = device_digests(tensors)
            assert alive.now == found.untyped_storage().nbytes()
    finally:
        gc.enable()
    assert [found.tolist(), device_digests(tensors).tolist(), device_digests(tensors).tolist()] == [expected] * 3
    assert len(launches) == 1
    assert (kernel._tables.cache_info().currsize, kernel._narrow_keys.cache_info().currsize) == (0, 0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "torch operations" in line
    assert "no C compiler found" in line


def test_a_kernel_that_fails_after_its_first_launch_gives_up_for_good(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a launch brought before is kept, and the rest comes from torch operations: the numbers are the same."""
    launches: list[int] = []

    def launch(grid: tuple[int, ...], *arguments: torch.Tensor) -> None:
        launches.append(grid[0])
        (by_address if len(launches) == 1 else refused)(grid, *arguments)

    with_kernel(monkeypatch, launch)
    tensors = contents()
    assert device_digests(tensors).tolist() == by_operations(tensors)
    assert device_digests(tensors).tolist() == by_operations(tensors)
    assert len(launches) == 2
    assert len(caplog.records) == 1


def test_a_triton_that_has_changed_is_a_kernel_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel's module may fail as it is read; Triton itself was there."""
    with_kernel(monkeypatch, refused)
    del sys.modules[KERNEL]
    del sys.modules["triton"].jit
    tensors = contents()
    assert device_digests(tensors).tolist() == by_operations(tensors)
    assert device_digests(tensors).tolist() == by_operations(tensors)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "AttributeError" in line


@pytest.mark.parametrize("form", ["kernel", "kernel that does not start", "operations"])
def test_copies_of_what_is_not_contiguous_are_bounded_whatever_their_number(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve channels_last tensors of 1 MiB beside contiguous ones: 4 MiB of copies at a time, three launches."""
    launches: list[int] = []

    def launch(grid: tuple[int, ...], *arguments: torch.Tensor) -> None:
        launches.append(grid[0])
        (by_address if form == "kernel" else refused)(grid, *arguments)

    if form != "operations":
        with_kernel(monkeypatch, launch)
    monkeypatch.setattr(fingerprint_device, "_COPIES", 4 << 20)
    images = [torch.randn(16, 64, 16, 16).to(memory_format=torch.channels_last) for _ in range(12)]
    flat = [torch.randn(1 << 18) for _ in range(12)]
    large = torch.randn(32, 128, 24, 24).to(memory_format=torch.channels_last)
    tensors = [tensor for pair in zip(images, flat, strict=True) for tensor in pair]
    expected = by_operations([*tensors, large])
    copies: list[tuple[StorageWeakRef, int]] = []
    peaks = []

    def raw(tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.detach().contiguous()
        if value.data_ptr() != tensor.data_ptr():
            copies.append((StorageWeakRef(value.untyped_storage()), value.nbytes))
        peaks.append(sum(size for ref, size in copies if not ref.expired()))
        return value

    monkeypatch.setattr(fingerprint_device, "raw", raw)
    assert device_digests(tensors).tolist() == expected[:-1]
    assert (len(copies), max(peaks)) == (12, 4 << 20)
    assert len(launches) == {"kernel": 4, "kernel that does not start": 1, "operations": 0}[form]
    assert device_digests([*tensors, large]).tolist() == expected  # more than 4 MiB by itself: alone
    assert max(peaks) == large.nbytes
    assert all(ref.expired() for ref, _ in copies)


@pytest.mark.parametrize("tiles", [3, 6], ids=["24 MiB", "48 MiB"])
def test_torch_operations_keep_two_temporaries_whatever_the_size(tiles: int) -> None:
    """The peak of what they allocate: 16 MiB of temporaries, and 16 MiB of copies. The promise is 64 MB."""
    keys(torch.device("cpu"))
    one = torch.ones(tiles * fingerprint_device._AT_ONCE * TILE, dtype=torch.int64)
    with Alive() as alive:
        device_digests([one])
    print(f"{one.nbytes >> 20} MiB, peak {alive.peak / 2**20:.2f} MiB")
    assert 16 << 20 <= alive.peak < 17 << 20
    assert alive.now == 0
    images = [torch.ones(64, 128, 16, 16).to(memory_format=torch.channels_last) for _ in range(tiles)]
    with Alive() as alive:
        device_digests([one, *images])
    assert alive.peak < 34 << 20 < 64_000_000
