"""Answers that stand in this source: what no part of the machine under test had a hand in.

A device that is held only against its own host misses what both get wrong alike, and repeating finds only what changes.
So here inputs come out of SHAKE-128, whose bytes are fixed by a standard, and answers are digests worked out once with
whole numbers. Only answers that every correct machine gives are recorded: each product and each partial sum, in
whatever order and whatever accumulator, fits the significand of the type that holds it (TF32 for fp32's products as
well), and no product is a zero, whose sign may depend on the order. Bits that depend on the order of a summation are
never recorded: they would accuse a healthy machine whose library adds up otherwise. It uses none of torch's random
numbers, and is imported only after torch. Flow: **recorded** -> checks (the plan) -> command.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Matmul = Callable[[Tensor, Tensor], Tensor]

#: Rows and columns of the matrices.
SIZE = 256
_BYTES_AN_ENTRY = 3
_SIGN = 1 << 23
#: Bytes of a value -> type code of `array`, name of torch's integer type.
_INTEGERS = {2: ("h", "int16"), 4: ("i", "int32"), 8: ("q", "int64")}


@dataclass(frozen=True, slots=True)
class Answer:
    """One recorded product.

    Attributes:
        terms: how many entries in a row of the left matrix are not zero; odd.
        bits: entries are odd, of either sign, and below 2**(bits + 1). As many odd products are odd, so never zero;
            terms * (2**(bits + 1) - 1)**2 stays within the integers that the type holds exactly.
        inputs, product: first half of SHA-256 over both inputs as int64, and over the product in the type's own bits,
            row by row, little-endian.
    """

    terms: int
    bits: int
    inputs: str
    product: str


ANSWERS = {
    "float32": Answer(255, 7, "dd8e1c7525cd4b067f113a11c7e38f40", "14d3ef552b114de76891bbeb0a88c70e"),
    "bfloat16": Answer(15, 1, "a3b28c6e4a3da1fef9283fdf259eaa7d", "aeb9b776ce348b6c315ac8204fd02e1a"),
    "float16": Answer(31, 2, "65e2b707c600e6bcd4a9e234c85def47", "315ee07dee06f6df92be1eded165950c"),
    "float64": Answer(255, 19, "8c237644127411cf8a262ae498f1651e", "3f88c58638f08128f29108f2e1638d9f"),
}

#: Of the training below: batch, width, steps; the learning rate is 2**-LOG_RATE.
BATCH, WIDTH, STEPS, LOG_RATE = 8, 16, 2, 8
#: Digests of its inputs as int64, and of all that `train` returns in fp32.
TRAINING_INPUTS = "c172d2a0addef7d48a99534c51b6297b"
TRAINING = "4c46780c897492a1808014139fe3417b"


def inputs(torch: ModuleType, dtype: str) -> tuple[Tensor, Tensor]:
    """The matrices of one recorded product: int64 of shape (SIZE, SIZE), on the CPU."""
    answer = ANSWERS[dtype]
    left = entries(torch, f"{dtype} left", (SIZE, SIZE), answer.bits)
    columns = torch.arange(SIZE)
    # 17 is odd, so each row gets as many different columns as it has terms
    kept = torch.zeros(SIZE, SIZE, dtype=torch.int64)
    for term in range(answer.terms):
        kept[columns, (7 * columns + 17 * term) % SIZE] = 1
    return left * kept, entries(torch, f"{dtype} right", (SIZE, SIZE), answer.bits)


def entries(torch: ModuleType, name: str, shape: tuple[int, int], bits: int) -> Tensor:
    """Odd int64 numbers below 2**(bits + 1) of either sign, three bytes of SHAKE-128 each."""
    raw = hashlib.shake_128(f"sdcwatch {name}".encode()).digest(shape[0] * shape[1] * _BYTES_AN_ENTRY)
    low, middle, high = (list(raw[start::_BYTES_AN_ENTRY]) for start in range(_BYTES_AN_ENTRY))
    numbers = [a + (b << 8) + (c << 16) for a, b, c in zip(low, middle, high, strict=True)]
    signed = [(2 * (n & ((1 << bits) - 1)) + 1) * (-1 if n & _SIGN else 1) for n in numbers]
    made: Tensor = torch.tensor(signed, dtype=torch.int64).view(shape)
    return made


def digest(torch: ModuleType, *tensors: Tensor) -> str:
    """First half of SHA-256 over the bits of CPU tensors, little-endian on every machine."""
    state = hashlib.sha256()
    for tensor in tensors:
        code, integer = _INTEGERS[tensor.element_size()]
        words = array.array(code, tensor.contiguous().view(getattr(torch, integer)).flatten().tolist())
        if sys.byteorder == "big":
            words.byteswap()
        state.update(words.tobytes())
    return state.hexdigest()[:32]


def product(torch: ModuleType, device: torch.device, matmul: Matmul, dtype: str) -> Iterator[str | None]:
    """One product against its recorded bits, round after round."""
    answer, wanted = ANSWERS[dtype], getattr(torch, dtype)
    left, right = inputs(torch, dtype)
    _vouch(torch, answer.inputs, left, right)
    here, there = left.to(device, wanted), right.to(device, wanted)
    while True:
        result = matmul(here, there).cpu()
        if digest(torch, result) == answer.product:
            yield None
            continue
        wrong = int((result.to(torch.float64) != (left @ right).to(torch.float64)).sum())
        also = f"{wrong} entries differ from this host's integers" if wrong else "this host's integers are wrong alike"
        yield f"{dtype} matmul: not the recorded bits ({also})"


def training(torch: ModuleType, device: torch.device) -> Iterator[str | None]:
    """Two steps of a network in exact numbers: forward, backward and descent against the recorded bits."""
    batch, *start = training_inputs(torch)
    _vouch(torch, TRAINING_INPUTS, batch, *start)
    while True:
        with full_precision(torch):
            passed = train(torch, *(tensor.to(device, torch.float32) for tensor in (batch, *start)))
        # a zero may have either sign here, as the order decides: adding one makes all of them positive
        same = digest(torch, *(tensor.cpu() + 0.0 for tensor in passed)) == TRAINING
        yield None if same else "fp32 training: activations, gradients or weights do not have the recorded bits"


def training_inputs(torch: ModuleType) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batch, the weights of the loss, and both layers' weights before the first step: int64, +-1 and +-3."""
    return (
        entries(torch, "batch", (BATCH, WIDTH), 1),
        entries(torch, "target", (BATCH, WIDTH), 0),
        entries(torch, "first layer", (WIDTH, WIDTH), 1),
        entries(torch, "last layer", (WIDTH, WIDTH), 0),
    )


def train(torch: ModuleType, batch: Tensor, target: Tensor, first: Tensor, last: Tensor) -> list[Tensor]:
    """Plain descent on `sum(last(relu(first(batch))) * target)`.

    The loss is linear in the output, so no rounded number reaches a gradient: every partial sum of what is returned
    takes fewer than the 24 bits of fp32. Output and loss may take more, and are not returned.

    Returns:
        Hidden activations and both gradients of each step, then both weights.
    """
    weights = [first.clone().requires_grad_(), last.clone().requires_grad_()]
    linear, rate = torch.nn.functional.linear, 2.0**-LOG_RATE
    passed = []
    for _ in range(STEPS):
        hidden = torch.relu(linear(batch, weights[0]))
        gradients = torch.autograd.grad((linear(hidden, weights[1]) * target).sum(), weights)
        passed += [hidden.detach(), *gradients]
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= rate * gradient
    return passed + [weight.detach() for weight in weights]


@contextlib.contextmanager
def full_precision(torch: ModuleType) -> Iterator[None]:
    """fp32 products with all of fp32: TF32 keeps 10 bits, right for it and wrong for the question asked here."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _vouch(torch: ModuleType, recorded: str, *tensors: Tensor) -> None:
    """Refuses inputs that are not those of the record: then the answer is another one, and proves nothing."""
    if digest(torch, *tensors) != recorded:
        raise RuntimeError("the inputs made on this host are not the recorded ones, so their answer is not known")
