"""What a fault does to numbers: shapes that broken hardware was seen to leave (arXiv 2605.04213), never only NaN.

Each pattern writes in place into raw memory (`.data`), so version counters do not move, and leaves bits that differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_flip(values: torch.Tensor, generator: torch.Generator) -> None:
    """Flips one random bit of one random element."""
    _flip(values, generator, bits=1)


def multi_bit(values: torch.Tensor, generator: torch.Generator) -> None:
    """Flips two to four random bits of one random element."""
    _flip(values, generator, bits=int(torch.randint(2, 5, (), generator=generator)))


def ulp(values: torch.Tensor, generator: torch.Generator) -> None:
    """Moves one random element by one unit in the last place."""
    index = _index(values, generator)
    words = values.view(_INTEGER[values.element_size()])
    words[index] ^= 1


def scale(values: torch.Tensor, generator: torch.Generator, *, factor: float = 1 + 2**-10) -> None:
    """Scales a block of a sixteenth of the elements (at least one) by `factor`; too small for any norm."""
    start, length = _block(values, generator)
    block = values[start : start + length]
    words = block.view(_INTEGER[block.element_size()])
    before = words.clone()
    # integers and the 8-bit floats have no product in place
    if block.is_floating_point() and block.element_size() > 1:
        block.mul_(factor)
    if torch.equal(before, words):
        _flip(block, generator, bits=1)


def percent(values: torch.Tensor, generator: torch.Generator) -> None:
    """Scales a block of a sixteenth of the elements (at least one) by 1 %."""
    scale(values, generator, factor=1.01)


def stuck_at(values: torch.Tensor, generator: torch.Generator) -> None:
    """Holds one bit of every element of a block at one value, as a broken line does; flips it where all had it so."""
    start, length = _block(values, generator)
    words = values[start : start + length].view(_INTEGER[values.element_size()])
    width = values.element_size() * 8
    bit = 1 << int(torch.randint(0, width - 2 if values.is_floating_point() else width - 1, (), generator=generator))
    high = bool(torch.randint(0, 2, (), generator=generator))
    before = words.clone()
    if high:
        words |= bit
    else:
        words &= ~bit
    if torch.equal(before, words):
        words ^= bit


def zero_block(values: torch.Tensor, generator: torch.Generator) -> None:
    """Zeroes a block of a sixteenth of the elements; flips a bit where it was zero already."""
    start, length = _block(values, generator)
    block = values[start : start + length]
    if bool((block == 0).all()):
        _flip(block, generator, bits=1)
    else:
        block.zero_()


def strided(values: torch.Tensor, generator: torch.Generator) -> None:
    """Flips the same mantissa bit of every 32nd element, as one lane of each warp would."""
    words = values.view(_INTEGER[values.element_size()])
    lane = int(torch.randint(0, min(32, words.numel()), (), generator=generator))
    words[lane::32] ^= 1 << (values.element_size() * 2)


PATTERNS: dict[str, Callable[[torch.Tensor, torch.Generator], None]] = {
    "bit_flip": bit_flip,
    "multi_bit": multi_bit,
    "percent": percent,
    "scale": scale,
    "strided": strided,
    "stuck_at": stuck_at,
    "ulp": ulp,
    "zero_block": zero_block,
}


def apply(pattern: str, tensor: torch.Tensor, seed: int) -> None:
    """Applies a pattern to a tensor in place; the same seed always hits the same place.

    Raises:
        KeyError: an unknown pattern.
        ValueError: an empty or non-contiguous tensor, into which nothing can be written.
    """
    if not tensor.numel() or not tensor.is_contiguous():
        raise ValueError("a fault needs a contiguous tensor with elements")
    generator = torch.Generator().manual_seed(seed)
    data = tensor.data.resolve_conj()
    PATTERNS[pattern]((torch.view_as_real(data) if data.is_complex() else data).view(-1), generator)


def _index(values: torch.Tensor, generator: torch.Generator) -> int:
    return int(torch.randint(0, values.numel(), (), generator=generator))


def _block(values: torch.Tensor, generator: torch.Generator) -> tuple[int, int]:
    length = max(1, values.numel() // 16)
    return int(torch.randint(0, values.numel() - length + 1, (), generator=generator)), length


def _flip(values: torch.Tensor, generator: torch.Generator, *, bits: int) -> None:
    width = values.element_size() * 8
    # The two highest bits of a float are sign and top exponent: they give Inf and NaN, which hardware rarely does.
    usable = width - 2 if values.is_floating_point() else width - 1
    chosen = torch.randperm(usable, generator=generator)[:bits].tolist()
    words = values.view(_INTEGER[values.element_size()])
    words[_index(values, generator)] ^= sum(1 << bit for bit in chosen)
