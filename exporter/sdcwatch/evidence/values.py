"""Batches, random states and weights as tagged JSON and raw bytes, and back. Reading one runs no code of the file's.

Only plain data has a form here: tensors, numpy arrays, numbers, text, bytes, None, dict, list, tuple. An object of any
other class would need its own code to come back, so it is refused by name. Flow: keep -> **values** -> form; form ->
**values** -> replay.
"""

from __future__ import annotations

import base64
import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import torch

from sdcwatch.evidence.form import EvidenceError, Section

_DEPTH = 64
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Unkeepable(ValueError):
    """A value that has no form without running code; the message names its class."""


class Writer:
    """Turns values into JSON and collects the bytes of their tensors.

    Args:
        limit: most bytes of all sections together.

    Raises:
        Unkeepable: from `write`, for a class that has no form, or beyond the limit.
    """

    def __init__(self, limit: int) -> None:
        self.sections: list[Section] = []
        self._left = limit

    def write(self, value: Any, depth: int = 0) -> Any:
        """The JSON form of a value."""
        if depth > _DEPTH:
            raise Unkeepable(f"it is nested more than {_DEPTH} deep")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return ["int", str(value)]
        if kind is float:
            return ["float", value.hex()]
        if kind is str:
            return ["text", value]
        if kind is bytes:
            return ["bytes", base64.b64encode(value).decode()]
        if kind in (list, tuple):
            return [kind.__name__, [self.write(item, depth + 1) for item in value]]
        if kind is dict:
            return ["dict", [[self.write(k, depth + 1), self.write(v, depth + 1)] for k, v in value.items()]]
        if isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        return self._numbers(value)

    def mark(self) -> tuple[int, int]:
        """Where the sections end now, for `back_to`."""
        return len(self.sections), self._left

    def back_to(self, mark: tuple[int, int]) -> None:
        """Forgets what was written since `mark`."""
        length, self._left = mark
        del self.sections[length:]

    def _numbers(self, value: Any) -> Any:
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            plain = value.detach()
            if plain.is_neg() or plain.is_conj():
                plain = plain.resolve_conj().resolve_neg()
            span = _span(plain.size(), plain.stride())
            # the strides stay: they decide which kernel runs
            flat = plain.as_strided((span,), (1,)).cpu().contiguous() if plain.numel() else plain.new_empty(0).cpu()
            return [
                "tensor",
                {
                    "dtype": str(plain.dtype).removeprefix("torch."),
                    "shape": list(plain.shape),
                    "stride": list(plain.stride()),
                    "device": plain.device.type,
                    "requires_grad": bool(value.requires_grad),
                    "section": self._section(_memory(flat)),
                },
            ]
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in "biufc":
            data = numpy.ascontiguousarray(value).tobytes()
            return ["array", {"dtype": value.dtype.str, "shape": list(value.shape), "section": self._section(data)}]
        if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
            return self.write(value.item())
        raise Unkeepable(f"{type(value).__module__}.{type(value).__qualname__} has no form that runs no code")

    def _section(self, data: Section) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise Unkeepable("it is larger than evidence_mb allows")
        self.sections.append(data)
        return len(self.sections) - 1


class Reader:
    """Turns the JSON form back into values.

    Args:
        sections: of the same file.
        device: where the tensors of a rank's device go; those in host memory stay there.
    """

    def __init__(self, sections: Sequence[memoryview], device: torch.device) -> None:
        self._sections = sections
        self._device = device

    def read(self, form: Any, depth: int = 0) -> Any:
        """The value.

        Raises:
            EvidenceError: not a form that `Writer` gives.
        """
        try:
            return self._read(form, depth)
        except EvidenceError:
            raise
        except Exception as error:  # whatever a forged form makes Python or torch say
            raise EvidenceError(
                f"a value in the file has no form that is known here: {type(error).__name__}"
            ) from error

    def _read(self, form: Any, depth: int) -> Any:
        if form is None or isinstance(form, bool):
            return form
        tag, content = form
        if depth > _DEPTH:
            raise EvidenceError(f"a value in the file is nested more than {_DEPTH} deep")
        if tag == "int":
            if len(content) > 1000:
                raise EvidenceError("a whole number in the file has more than 1000 digits")
            return int(content)
        if tag == "float":
            return float.fromhex(content)
        if tag == "text":
            return str(content)
        if tag == "bytes":
            return base64.b64decode(content, validate=True)
        if tag in ("list", "tuple"):
            items = [self._read(item, depth + 1) for item in content]
            return items if tag == "list" else tuple(items)
        if tag == "dict":
            return {self._read(k, depth + 1): self._read(v, depth + 1) for k, v in content}
        if tag == "dtype":
            return _DTYPES[content]
        if tag == "tensor":
            return self._tensor(content)
        if tag == "array":
            return self._array(content)
        raise EvidenceError(f"a value in the file is tagged {str(tag)[:40]!r}, which is no tag of this build")

    def _tensor(self, facts: dict[str, Any]) -> torch.Tensor:
        dtype, shape, stride = _DTYPES[facts["dtype"]], _counts(facts["shape"]), _counts(facts["stride"])
        data = self._sections[facts["section"]]
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
        numbers = flat.view(dtype)
        if _span(shape, stride) != numbers.numel() or len(shape) != len(stride):
            raise EvidenceError("a tensor in the file has another size than its bytes")
        tensor = numbers.as_strided(shape, stride) if numbers.numel() else torch.empty(shape, dtype=dtype)
        if facts["device"] != "cpu":
            tensor = tensor.to(self._device)
        return tensor.requires_grad_(bool(facts["requires_grad"]))

    def _array(self, facts: dict[str, Any]) -> Any:
        import numpy

        dtype = numpy.dtype(str(facts["dtype"]))
        if dtype.kind not in "biufc":
            raise EvidenceError(f"an array in the file is of dtype {dtype}, which may hold objects")
        return numpy.frombuffer(bytes(self._sections[facts["section"]]), dtype).reshape(_counts(facts["shape"])).copy()


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(v) is not int or not 0 <= v < 1 << 62 for v in values):
        raise EvidenceError("a shape in the file is no list of counts")
    return tuple(values)


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements between the first and the last of a tensor, both included."""
    if not all(shape):
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _memory(flat: torch.Tensor) -> Section:
    # numpy is no dependency, and a view of the memory saves a copy; it keeps the tensor alive only as bytes do
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""
