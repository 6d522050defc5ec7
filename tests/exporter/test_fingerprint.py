"""Fingerprints: equal content gives equal numbers whatever the layout, and any other content another number."""

from __future__ import annotations

import importlib
import math
import struct
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sdcwatch.fingerprint import Fingerprinter, can_fingerprint, combine, device_digest, digest_bytes, fingerprint
from sdcwatch.fingerprint_device import TILE

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
    torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def host(tensor: torch.Tensor) -> int:
    return fingerprint([tensor])


def device(tensor: torch.Tensor) -> int:
    return int(device_digest(tensor))


FORMS = pytest.mark.parametrize("form", [host, device])
Form = Callable[[torch.Tensor], int]


def content(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Any bit patterns that the dtype allows, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(256, (math.prod(shape) * size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def layouts(value: torch.Tensor) -> list[torch.Tensor]:
    """The same 4-d content in other strides and at other places of a storage, odd ones included."""
    found = [
        value.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        value.to(memory_format=torch.channels_last),
        value.flip(0).flip(0),
    ]
    for offset in (1, 3, 5, 8):
        space = torch.zeros(value.numel() + offset + 2, dtype=value.dtype)
        found.append(space[offset : offset + value.numel()].view(value.shape).copy_(value))
    return found


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_content_is_equal_whatever_stride_and_offset(form: Form, dtype: torch.dtype) -> None:
    """channels_last, permuted, sliced, and every dtype (field case 9)."""
    value = content(dtype, 2, 3, 4, 5)
    for other in layouts(value):
        assert form(other) == form(value)


@FORMS
def test_memory_from_elsewhere_needs_no_alignment(form: Form) -> None:
    """A tensor over a buffer that begins between two words."""
    raw = bytearray(content(torch.uint8, 65).tolist())
    value = torch.frombuffer(raw, dtype=torch.uint8, offset=1)
    assert form(value) == form(value.clone())


@FORMS
def test_views_that_only_promise_content_are_resolved(form: Form) -> None:
    """Expanded, conjugated and negated views equal their written-out content."""
    row = content(torch.float32, 1, 7)
    assert form(row.expand(5, 7)) == form(row.repeat(5, 1))
    value = torch.complex(torch.randn(9), torch.randn(9))
    assert form(value.conj()) == form(value.conj().resolve_conj()) != form(value)
    negated = value.conj().imag
    assert negated.is_neg()
    assert form(negated) == form(-value.imag) != form(value.imag)


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scalars_and_empty_tensors_are_content_too(form: Form, dtype: torch.dtype) -> None:
    """0-d and empty ones never raise; a 0-d tensor equals the 1-element one of the same bytes."""
    scalar = content(dtype)
    assert form(scalar) == form(scalar.view(1)) != form(torch.empty(0, dtype=dtype))
    assert form(torch.empty(0, 4, dtype=dtype)) == form(torch.empty(0, dtype=dtype))


@FORMS
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d is not torch.bool], ids=str)
def test_one_bit_changes_the_number(form: Form, dtype: torch.dtype) -> None:
    """Each bit of an element, in the middle, at the front and in the tail bytes."""
    value = content(dtype, 37)
    clean = form(value)
    raw = value.view(torch.uint8)
    size = value.element_size()
    for byte in [*range(size), raw.numel() // 2, *range(raw.numel() - size, raw.numel())]:
        for bit in range(8):
            raw[byte] ^= 1 << bit
            assert form(value) != clean
            raw[byte] ^= 1 << bit
    assert form(value) == clean


@FORMS
def test_nan_payloads_and_signed_zeros_count(form: Form) -> None:
    """Bits are compared, never floats (field case 6)."""
    nans = [struct.unpack("<f", struct.pack("<I", word))[0] for word in (0x7FC00000,)]
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert math.isnan(nans[0])
    assert form(quiet) == form(torch.tensor(nans)) != form(other)
    assert form(torch.tensor([0.0])) != form(torch.tensor([-0.0]))


def structured(words: torch.Tensor, apart: Sequence[int] = ()) -> list[tuple[str, torch.Tensor]]:
    """Changes that a sum, an XOR or a linear checksum would miss; pairs also as far apart as said."""
    changed: list[tuple[str, torch.Tensor]] = []

    def add(name: str, change: Callable[[torch.Tensor], object]) -> None:
        copy = words.clone()
        change(copy)
        if not torch.equal(copy, words):
            changed.append((name, copy))

    def swap(distance: int, start: int) -> Callable[[torch.Tensor], object]:
        def change(copy: torch.Tensor) -> None:
            copy[start], copy[start + distance] = words[start + distance], words[start]

        return change

    def deltas(distance: int, delta: int) -> Callable[[torch.Tensor], object]:
        def change(copy: torch.Tensor) -> None:
            copy[5] += delta
            copy[5 + distance] -= delta

        return change

    count = words.numel()
    for distance in (*(d for d in apart if d < count - 77), 1, 2, 3, 4, 8, 16, 31, 32, 64, 128, 256, 512, 1024, 2048):
        add(f"swap {distance}", swap(distance, 0))
        add(f"swap {distance} later", swap(distance, 77))
        for shift in (0, 1, 8, 31, 32, 33, 47, 62, 63):
            delta = 1 << shift if shift < 63 else -(1 << 63)
            add(f"delta {shift} at {distance}", deltas(distance, delta))
            add(f"twin flips {shift} at {distance}", lambda c, d=distance, w=delta: c[5 : 6 + d : d].bitwise_xor_(w))
    for length in (1, 8, 64, 256, *(d for d in apart if 2 * d <= count)):
        for to in {length, 3 * length, count - length} - set(range(count - length + 1, 3 * length + 1)):

            def move(copy: torch.Tensor, length: int = length, to: int = to) -> None:
                copy[:length], copy[to : to + length] = words[to : to + length], words[:length]

            add(f"block {length} to {to}", move)
        add(f"zeroed {length}", lambda c, n=length: c[100 : 100 + n].zero_())
    add("reversed", lambda c: c.copy_(words.flip(0)))
    add("rolled", lambda c: c.copy_(words.roll(1)))
    return changed


@FORMS
@pytest.mark.parametrize("kind", ["random", "zero", "ramp", "halves"])
def test_structured_changes_never_collide(form: Form, kind: str) -> None:
    """Swaps, equal and opposite deltas, moved and zeroed blocks: every change has a number of its own."""
    words = {
        "random": content(torch.int64, 4096),
        "zero": torch.zeros(4096, dtype=torch.int64),
        "ramp": torch.arange(4096),
        "halves": torch.arange(4096) << 32,
    }[kind]
    seen = {words.numpy().tobytes(): form(words)}
    for name, changed in structured(words):
        number = form(changed)
        assert number != form(words), name
        seen[changed.numpy().tobytes()] = number
    assert len(set(seen.values())) == len(seen)
    assert kind == "zero" or len(seen) > 250


@FORMS
@pytest.mark.parametrize("kind", ["random", "zero", "ramp", "alike"])
def test_structured_changes_across_parts_never_collide(form: Form, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where each of a pair lies in another tile or piece, the last of which is not full; whole parts as well.

    In `alike` all parts hold the same words: two of them swapped are no change, one changed is one in that place.
    """
    monkeypatch.setattr(importlib.import_module("sdcwatch.fingerprint"), "_PIECE", 8 * TILE)
    count = 3 * TILE + 1030
    words = {
        "random": content(torch.int64, count),
        "zero": torch.zeros(count, dtype=torch.int64),
        "ramp": torch.arange(count),
        "alike": content(torch.int64, TILE).repeat(4)[:count],
    }[kind]
    seen = {words.numpy().tobytes(): form(words)}
    for name, changed in structured(words, (TILE - 1, TILE, TILE + 1, 2 * TILE, 3 * TILE)):
        number = form(changed)
        assert number != form(words), name
        seen[changed.numpy().tobytes()] = number
    assert len(set(seen.values())) == len(seen)
    assert kind == "zero" or len(seen) > 300


@pytest.mark.parametrize("form", ["host", "device"])
@pytest.mark.parametrize("sizes", [(64, 64), (TILE, TILE), (TILE + 5, TILE + 5, 7), (1, 1, 1, 1)], ids=str)
def test_structured_changes_across_tensors_never_collide(
    form: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words swapped between tensors, opposite deltas, twin flips, whole tensors exchanged or cut elsewhere."""
    monkeypatch.setattr(importlib.import_module("sdcwatch.fingerprint"), "on_host", lambda tensor: form == "host")
    tensors = [content(torch.int64, size, seed=n) for n, size in enumerate(sizes)]
    found: list[list[torch.Tensor]] = [tensors]
    for place in {0, min(sizes[:2]) // 2, min(sizes[:2]) - 1}:
        for shift in (0, 31, 32, 62):
            for change in (
                lambda a, b, d: (a + d, b - d),
                lambda a, b, d: (a ^ d, b ^ d),
                lambda a, b, d: (b, a),
            ):
                copies = [tensor.clone() for tensor in tensors]
                first, second = change(tensors[0][place].clone(), tensors[1][place].clone(), 1 << shift)
                copies[0][place], copies[1][place] = first, second
                found.append(copies)
    found += [tensors[::-1], tensors[1:] + tensors[:1], [torch.cat(tensors)], [torch.cat(tensors[:2]), *tensors[2:]]]
    found += [[*tensors, torch.zeros(0, dtype=torch.int64)], [*tensors, torch.zeros(1, dtype=torch.int64)]]
    numbers: dict[tuple[bytes, ...], int] = {}
    for one in found:
        numbers[tuple(tensor.numpy().tobytes() for tensor in one)] = fingerprint(one)
    assert len(set(numbers.values())) == len(numbers) > 12


@FORMS
@settings(max_examples=100, deadline=None)
@given(one=st.binary(max_size=40), other=st.binary(max_size=40))
def test_different_bytes_give_different_numbers(form: Form, one: bytes, other: bytes) -> None:
    """Short contents, lengths that are no multiple of a word, trailing zeros."""
    first, second = (torch.tensor(list(b), dtype=torch.uint8) for b in (one, other))
    if len(one) == len(other):
        assert (form(first) == form(second)) == (one == other)
    assert form(first) == form(first.clone())


def test_large_tensors_are_hashed_the_same_by_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are fixed, so ranks with one and with four threads give one number; and pieces know their place."""
    import importlib

    module = importlib.import_module("sdcwatch.fingerprint")
    monkeypatch.setattr(module, "_PIECE", 4096)
    value = content(torch.uint8, 10 * 4096 + 77)
    found = set()
    for threads in (1, 2, 3, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.add(host(value))
    assert len(found) == 1
    assert host(torch.cat([value[4096:8192], value[:4096], value[8192:]])) not in found


def sequences() -> list[Sequence[torch.Tensor | None]]:
    a, b = content(torch.uint8, 5, seed=1), content(torch.uint8, 3, seed=2)
    named = torch.tensor(list(b"\x00none"), dtype=torch.uint8)
    joined = torch.cat([a, b])
    return [
        [a, b], [b, a], [joined], [joined[:4], joined[4:]], [a], [a, None], [None, a], [a, None, b], [None], [],
        [named], [a, torch.empty(0)], [torch.empty(0), a], [a, torch.empty(2, device="meta")],
    ]  # fmt: skip


def test_the_sequence_counts() -> None:
    """Swapped tensors, a byte that moved to the neighbour, and no gradient are all told apart."""
    numbers = [fingerprint(s) for s in sequences()]
    assert len(set(numbers)) == len(numbers)
    assert numbers == [fingerprint(s) for s in sequences()]
    assert all(0 <= n < 2**64 for n in numbers)


def freed() -> torch.Tensor:
    value = torch.ones(4)
    value.untyped_storage().resize_(0)
    return value


def inside_freed() -> torch.Tensor:
    value = torch.ones(4)
    view = value[2:]
    value.untyped_storage().resize_(0)
    return view


def mapped() -> torch.Tensor:
    kept: list[torch.Tensor] = []
    torch.vmap(lambda row: kept.append(row) or row)(torch.ones(2, 3))
    return kept[0]


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as DTensor and quantized weights are."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: tuple = (), kwargs: object = None) -> object:
        return args[0] if args else NotImplemented


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.ones(3).to_mkldnn(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        freed,
        inside_freed,
        mapped,
        Wrapper,
    ],
    ids=["coo", "csr", "meta", "mkldnn", "nested", "freed", "inside freed", "mapped", "wrapper"],
)
def test_what_is_no_run_of_bytes_is_skipped_and_never_raises(make: Callable[[], torch.Tensor]) -> None:
    """Sparse, meta, nested, freed storage and views of it, vmapped, wrappers; a skip differs from no gradient."""
    value = make()
    assert not can_fingerprint(value)
    assert fingerprint([value]) != fingerprint([None])
    assert fingerprint([value, torch.ones(1)]) == fingerprint([make(), torch.ones(1)])


def test_hashing_reads_only(recwarn: pytest.WarningsRecorder) -> None:
    """Neither the version counter, nor the graph, nor the content moves."""
    value = torch.randn(10, requires_grad=True)
    before = value.detach().clone()
    fingerprint([value])
    device_digest(value)
    assert value._version == 0
    assert value.grad_fn is None
    assert torch.equal(value.detach(), before)
    assert not recwarn.list


def test_combine_is_order_sensitive_over_the_whole_range() -> None:
    """Digests at both ends of uint64."""
    top = 2**64 - 1
    assert len({combine([0, top]), combine([top, 0]), combine([top]), combine([]), combine([0])}) == 5
    assert digest_bytes(b"a") != digest_bytes(b"b")


def test_a_sequence_that_comes_again_is_hashed_by_what_it_is_now() -> None:
    """Remembered places give the number of a first look: after a write, a move, a freeing."""
    values = [torch.nn.Parameter(content(torch.float32, 6, 6, seed=n)) for n in range(3)]
    again = Fingerprinter()

    def put(data: torch.Tensor) -> Callable[[torch.Tensor], object]:
        return lambda value: setattr(value, "data", data)

    changes: list[Callable[[torch.Tensor], object]] = [
        lambda value: value.detach().view(torch.int32)[2].fill_(7),
        put(content(torch.float32, 6, 6, seed=9)),
        lambda value: setattr(value, "data", value.data.t()),
        lambda value: setattr(value, "data", torch._neg_view(value.data.t())),
        lambda value: setattr(value, "data", value.data.resolve_neg()[:3]),
        lambda value: setattr(value, "data", value.data[1:]),
        lambda value: setattr(value, "data", value.data[0].expand(6, 6)),
        put(content(torch.complex64, 5)),
        lambda value: setattr(value, "data", value.data.conj()),
        put(torch.empty(0)),
        put(torch.zeros(4)),
        lambda value: value.untyped_storage().resize_(0),
    ]
    for what in (lambda value: None, *changes):
        what(values[1])
        expected = fingerprint(values)
        assert [again.fingerprint([values]) for _ in range(3)] == [expected] * 3
    mixed: list[torch.Tensor | None] = [values[0], None, torch.ones(3).to_sparse(), values[2]]
    assert again.fingerprint([mixed]) == again.fingerprint([mixed[:2], mixed[2:]]) == fingerprint(mixed)
    assert again.fingerprint([]) == fingerprint([])


def test_a_tensor_is_not_kept_alive_by_its_fingerprints() -> None:
    """What is remembered are numbers: memory of old gradients is free as soon as the loop lets it go."""
    value = torch.ones(1000)
    again = Fingerprinter()
    again.fingerprint([[value]])
    gone = weakref.ref(value)
    del value
    assert gone() is None
