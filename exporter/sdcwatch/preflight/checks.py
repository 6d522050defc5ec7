"""The checks of `sdcwatch preflight`: generators whose rounds yield None, or one sentence on what is wrong.

Known answers are products of integer-valued matrices whose every partial sum is exact in the type that holds it, so any
order of summation, any accumulator and TF32 give the same bits. Comparisons are of integer views, never of floats.
Each dtype is held against this host's whole numbers, with fresh inputs every round, and against the answers that stand
in `recorded`. Imported only after torch. Flow: recorded -> **checks** -> command.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from sdcwatch.preflight import recorded

if TYPE_CHECKING:
    import torch

Matmul = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
Rounds = Callable[[], Iterator[str | None]]

#: Rows and columns of the known-answer matrices.
_SIZE = 256
#: dtype -> (nonzeros in a row of A, largest entry): nonzeros * entry**2 stays within the type's exact integers
#: (2**8 for bf16, 2**11 for fp16, 2**24 for fp32; fp64 is given full-size products).
_EXACT = {"float32": (256, 255), "bfloat16": (16, 4), "float16": (32, 8), "float64": (256, 1 << 20)}
_MEMORY_SHARE, _MEMORY_MOST = 0.25, {"cpu": 64 << 20, "cuda": 1 << 30}


def plan(torch: ModuleType, device: torch.device, matmul: Matmul) -> dict[str, Rounds]:
    """All checks of one device by name, each a function that yields one value a round, without end."""
    checks: dict[str, Rounds] = {}
    for name in _EXACT:
        if _supported(torch, device, name):
            checks[f"known_answer_{name}"] = functools.partial(known_answer, torch, device, matmul, name)
            checks[f"recorded_{name}"] = functools.partial(recorded.product, torch, device, matmul, name)
    checks["known_answer_mantissa"] = lambda: full_mantissa(torch, device, matmul)
    checks["repeat_matmul"] = lambda: repeat_matmul(torch, device, matmul)
    checks["recorded_training"] = lambda: recorded.training(torch, device)
    checks["training_step"] = lambda: training_step(torch, device)
    checks["memory_pattern"] = lambda: memory_pattern(torch, device)
    return checks


def _supported(torch: ModuleType, device: torch.device, dtype: str) -> bool:
    """Whether the device multiplies this type at all; an old CPU or GPU that does not is not broken."""
    try:
        probe = torch.ones(2, 2, dtype=getattr(torch, dtype), device=device)
        torch.matmul(probe, probe)
    except (RuntimeError, TypeError):
        return False
    return True


def known_answer(torch: ModuleType, device: torch.device, matmul: Matmul, dtype: str) -> Iterator[str | None]:
    """Integer-valued products against the CPU's int64 arithmetic."""
    nonzeros, largest = _EXACT[dtype]
    generator = torch.Generator().manual_seed(20260101)
    wanted = getattr(torch, dtype)
    while True:
        left = torch.randint(-largest, largest + 1, (_SIZE, _SIZE), generator=generator)
        if nonzeros < _SIZE:
            kept = torch.rand(_SIZE, _SIZE, generator=generator).argsort(dim=1) < nonzeros
            left = left * kept
        right = torch.randint(-largest, largest + 1, (_SIZE, _SIZE), generator=generator)
        exact = left @ right
        result = matmul(left.to(device, wanted), right.to(device, wanted))
        yield _differs(torch, result.cpu().to(torch.float64), exact.to(torch.float64), f"{dtype} matmul")


def full_mantissa(torch: ModuleType, device: torch.device, matmul: Matmul) -> Iterator[str | None]:
    """Products that need all 24 bits of a fp32 mantissa: entries of full width times one power of two a column."""
    generator = torch.Generator().manual_seed(20260102)
    while True:
        left = torch.randint(-(1 << 24), 1 << 24, (_SIZE, _SIZE), generator=generator)
        order = torch.randperm(_SIZE, generator=generator)
        power = torch.randint(0, 16, (_SIZE,), generator=generator)
        right = torch.zeros(_SIZE, _SIZE, dtype=torch.int64)
        right[order, torch.arange(_SIZE)] = 1 << power
        with recorded.full_precision(torch):
            result = matmul(left.to(device, torch.float32), right.to(device, torch.float32))
        yield _differs(torch, result.cpu().to(torch.float64), (left @ right).to(torch.float64), "fp32 matmul")


def _differs(torch: ModuleType, result: torch.Tensor, exact: torch.Tensor, what: str) -> str | None:
    wrong = ~(result == exact)  # a NaN differs from everything
    count = int(wrong.sum())
    if count == 0:
        return None
    row, column = (int(i) for i in wrong.nonzero()[0])
    got, right = float(result[row, column]), float(exact[row, column])
    return f"{what}: {count} of {wrong.numel()} entries wrong, first [{row},{column}] is {got!r}, exactly {right!r}"


def repeat_matmul(torch: ModuleType, device: torch.device, matmul: Matmul) -> Iterator[str | None]:
    """A seeded random product, again and again: the same inputs must give the same bits."""
    generator = torch.Generator().manual_seed(20260103)
    left = torch.randn(_SIZE, _SIZE, generator=generator).to(device)
    right = torch.randn(_SIZE, _SIZE, generator=generator).to(device)
    first = matmul(left, right).view(torch.int32).clone()
    while True:
        for _ in range(4):
            again = matmul(left, right).view(torch.int32)
            if not torch.equal(first, again):
                yield f"fp32 matmul: {int((first != again).sum())} entries changed between two equal calls"
                return
        yield None


def training_step(torch: ModuleType, device: torch.device) -> Iterator[str | None]:
    """Three steps of a small network from one seed, twice: loss and weights must have the same bits."""
    if device.type == "cuda":
        # Only there: every operation below is deterministic on a CPU, and this call imports the compiler (2.5 s).
        torch.use_deterministic_algorithms(True)
    first = _train(torch, device)
    while True:
        again = _train(torch, device)
        changed = sum(not torch.equal(a, b) for a, b in zip(first, again, strict=True))
        yield f"{changed} of {len(first)} tensors differ between two equal trainings" if changed else None


def _train(torch: ModuleType, device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(20260104)
    layers = torch.nn
    model = layers.Sequential(layers.Linear(64, 128), layers.GELU(), layers.LayerNorm(128), layers.Linear(128, 64)).to(
        device
    )
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(20260105)
    losses = []
    for _ in range(3):
        batch = torch.randn(32, 64, generator=generator).to(device)
        loss = layers.functional.mse_loss(model(batch), batch)
        loss.backward()
        with torch.no_grad():  # plain descent: importing torch.optim's compiler hooks takes two seconds
            for parameter in parameters:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        losses.append(loss.detach().view(torch.int32).clone())
    return losses + [p.detach().view(torch.int32).clone() for p in parameters]


def memory_pattern(torch: ModuleType, device: torch.device) -> Iterator[str | None]:
    """Writes 0x55, 0xAA and random words over a buffer (1/4 of what is free, bounded) and reads them back."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _MEMORY_MOST["cpu"] / _MEMORY_SHARE
    words = int(min(free * _MEMORY_SHARE, _MEMORY_MOST.get(device.type, _MEMORY_MOST["cpu"]))) // 8
    buffer = torch.empty(words, dtype=torch.int64, device=device)
    block = torch.empty(min(words, 1 << 20), dtype=torch.int64)
    generator = torch.Generator().manual_seed(20260106)
    while True:
        for name, value in (("0x55", 0x5555555555555555), ("0xAA", ~0x5555555555555555), ("random", None)):
            if value is None:
                block.random_(generator=generator)
            else:
                block.fill_(value)
            pattern = block.to(device)
            pieces = buffer.split(len(block))
            for piece in pieces:
                piece.copy_(pattern[: len(piece)])
            wrong = sum(int((piece != pattern[: len(piece)]).sum()) for piece in pieces)
            if wrong:
                yield f"memory: {wrong} of {words} words read back differently after {name} was written"
                return
        yield None
