"""SIGKILL, without a word, as soon as a doomed rank is inside of what the case names; the others die with it.

Flow: life -> **traps**. It replaces functions of the product in this forked process only.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sdcwatch.heal import healer, overwrite
from sdcwatch.watch.contain import Halt
from sdcwatch.watch.exchange import Exchange


class Trap:
    """What kills this rank.

    Args:
        kill: `{"during", "ranks", "step"}`: where, who dies (all at once, when the first of them gets there), and from
            which step on.
        root: where each rank of this life left its process id.
        rank: this rank.

    Attributes:
        step: the step that runs now; the loop sets it.
    """

    def __init__(self, kill: dict[str, Any] | None, root: Path, rank: int) -> None:
        self.step = 0
        self._kill = kill
        self._root = root
        self._rank = rank
        (root / f"pid-{rank}").write_text(str(os.getpid()))
        if kill is None or rank not in kill["ranks"]:
            return
        during = kill["during"]
        if during == "check":
            Exchange.rows = self._before(Exchange.rows)  # type: ignore[method-assign]
        elif during == "heal":
            healer.recompute = self._before(healer.recompute)  # type: ignore[attr-defined]
        elif during == "heal that overwrites":  # the bytes are written, nobody has looked at them
            overwrite._move = self._after(overwrite._move)  # type: ignore[attr-defined]
        elif during == "halt, before its latch":
            Halt._latch = self._before(Halt._latch)  # type: ignore[method-assign]
        elif during == "halt, before it taints":
            Halt.taint = self._before(Halt.taint)  # type: ignore[method-assign]
        else:
            assert during == "checkpoint write", during

    def _before(self, original: Callable[..., Any]) -> Any:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            self._spring()
            return original(*arguments, **named)

        return wrapped

    def _after(self, original: Callable[..., Any]) -> Any:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            result = original(*arguments, **named)
            self._spring()
            return result

        return wrapped

    def written(self, path: Path) -> None:
        """A checkpoint's bytes are on disk, its manifest is not: cut, where that is what the case is about."""
        if self._kill is None or self._kill["during"] != "checkpoint write" or self.step < self._kill["step"]:
            return
        path.write_bytes(path.read_bytes()[:100])
        self._spring()

    def _spring(self) -> None:
        assert self._kill is not None
        if self.step < self._kill["step"]:
            return
        others = [r for r in self._kill["ranks"] if r != self._rank]
        for pid in [*(int((self._root / f"pid-{r}").read_text()) for r in others), os.getpid()]:
            os.kill(pid, signal.SIGKILL)
