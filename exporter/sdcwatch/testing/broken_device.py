"""`BrokenDevice`: while it is entered, what this process computes with chosen operators of torch comes out wrong.

For code that runs outside a training loop, such as preflight: there is no model to hang a fault on, only operators. It
changes what operators return and nothing else, and strikes only this thread, only while it is entered.
Flow: patterns (what) -> **broken_device**.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sdcwatch.errors import ConfigurationError
from sdcwatch.testing.patterns import PATTERNS, apply


class BrokenDevice(TorchDispatchMode):
    """A context in which operators give wrong results.

    Args:
        operators: names of torch's own operators (`mm`, `addmm`, `copy_`, `native_layer_norm`, ...).
        pattern: a name of `sdcwatch.testing.patterns.PATTERNS`.
        seed: decides the elements and bits; the same at every strike, as a broken unit errs.
        first: number of the first call that is struck, of all calls of these operators (0: the first).
        every: each how manieth call from there on (1: all; 2: every other).
        least: results with fewer elements are passed on as they are.

    Attributes:
        strikes: results that were changed so far.

    Raises:
        ConfigurationError: an operator or a pattern that there is none of.
    """

    def __init__(
        self,
        operators: Collection[str],
        *,
        pattern: str = "ulp",
        seed: int = 0,
        first: int = 0,
        every: int = 1,
        least: int = 1,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        for name in operators:
            if not hasattr(torch.ops.aten, name):
                raise ConfigurationError(f"torch has no operator {name!r}; name one of torch.ops.aten, such as mm")
        if pattern not in PATTERNS:
            raise ConfigurationError(f"pattern is {pattern!r}, none of {', '.join(PATTERNS)}")
        self.strikes = 0
        self._operators, self._pattern, self._seed = frozenset(operators), pattern, seed
        self._first, self._every, self._least = first, every, least
        self._calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self._operators:
            call, self._calls = self._calls - self._first, self._calls + 1
            if call >= 0 and call % self._every == 0:
                self._strike(result)
        return result

    def _strike(self, result: Any) -> None:
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor) and value.numel() >= self._least and value.is_contiguous():
                apply(self._pattern, value, self._seed)
                self.strikes += 1
                return
