"""Faults in files: a checkpoint whose bytes rot on disk. It writes only to the path that it is given."""

from __future__ import annotations

from pathlib import Path

import torch

from sdcwatch.testing.patterns import apply


def corrupt_file(path: Path | str, *, pattern: str = "bit_flip", seed: int = 0) -> int:
    """Applies a pattern to a file's bytes in place; its length stays.

    Args:
        path: a file that is not empty.
        pattern: a name of `sdcwatch.testing.patterns.PATTERNS`.
        seed: decides the bytes and bits.

    Returns:
        How many bytes differ now (at least one).

    Raises:
        KeyError: an unknown pattern.
        ValueError: an empty file.
        OSError: it cannot be read or written.
    """
    path = Path(path)
    before = path.read_bytes()
    if not before:
        raise ValueError(f"{path} is empty: no byte of it can be wrong")
    values = torch.frombuffer(bytearray(before), dtype=torch.uint8)
    apply(pattern, values, seed)
    after = bytes(values.tolist())
    path.write_bytes(after)
    return sum(a != b for a, b in zip(before, after, strict=True))
