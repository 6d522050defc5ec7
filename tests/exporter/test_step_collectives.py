"""What a step sends, counted where every collective passes: torch's dispatcher, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.overhead import Plain, Watched, square_loss

WIDTHS = (8, 64)
STEPS = 12


class Collectives(TorchDispatchMode):
    """Operation and bytes of each collective since `taken`, those that DDP's reducer issues among them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.seen.append((func.overloadpacket.__name__, sum(tensor.nbytes for tensor in tensors)))
        return func(*args, **(kwargs or {}))

    def taken(self) -> list[tuple[str, int]]:
        seen, self.seen = self.seen, []
        return seen


def sent(rank: int, size: int, root: str, width: int, settings: dict[str, Any] | None) -> list[list[tuple[str, int]]]:
    """The collectives of each step of a small loop; without settings, of the loop alone."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8))
    watched = None
    if settings is not None:
        watched = Watched(
            module, loss=square_loss, spool_dir=f"{root}/{width}-{rank}", node=f"node-{rank}", max_overhead=0.0,
            metrics_interval=0.0, on_fault="halt", **settings,
        )  # fmt: skip
    run = watched or Plain(module)
    collectives, found = Collectives(), []
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        batch = torch.randn(4, width, generator=generator)
        with collectives:
            run.step(square_loss, batch)
        found.append(collectives.taken())
    if watched is not None:
        assert not watched.monitor.verdicts
        watched.monitor.close()
    return found


def beyond(watched: list[tuple[str, int]], alone: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """What a step sent more; what it sends by itself must be there, unchanged and in order."""
    rest = list(watched)
    for one in alone:
        rest.remove(one)
    return rest


def test_a_checked_step_sends_two_collectives_of_fixed_size_and_others_none(ranks: Any, tmp_path: Path) -> None:
    """All checks but replay, on models of other sizes: rows and agreement on the cadence; off it DDP's own reduce."""
    size, every = 3, 3
    settings = {"check_every": every, "conservation_every": 2 * every, "replay_every": 0}
    kinds = set()
    for width in WIDTHS:
        alone = ranks(sent, size, str(tmp_path), width, None)
        watched = ranks(sent, size, str(tmp_path), width, settings)
        for rank in range(size):
            more = [beyond(*pair) for pair in zip(watched[rank], alone[rank], strict=True)]
            print(f"rank {rank}, width {width}:", more)
            assert [len(one) for one in more] == [0 if step % every else 2 for step in range(STEPS)]
            kinds |= {tuple(one) for one in more if one}
    assert len(kinds) == 1, kinds
    ((rows, agreement),) = kinds
    assert rows[1] < 4096
    assert agreement[1] < 256


def test_only_an_audited_step_sends_more(ranks: Any, tmp_path: Path) -> None:
    """Agreements before and after, micro-batches once, the replays' rows; other steps send as without replay."""
    settings = {"check_every": 2, "conservation_every": 2, "replay_every": 4}
    alone = ranks(sent, 3, str(tmp_path), WIDTHS[0], None)
    watched = ranks(sent, 3, str(tmp_path), WIDTHS[0], settings)
    for of_watched, of_alone in zip(watched, alone, strict=True):
        more = [[name for name, _ in beyond(*pair)] for pair in zip(of_watched, of_alone, strict=True)]
        checked = ["_allgather_base_", "allreduce_"]
        audited = [
            "_allgather_base_", "allreduce_", "allreduce_", "alltoall_base_", "_allgather_base_", "allreduce_",
            "allreduce_",
        ]  # fmt: skip
        assert more == [[] if step % 2 else checked if step % 4 else audited for step in range(STEPS)]
