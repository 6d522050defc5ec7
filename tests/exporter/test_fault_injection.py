"""The injector beyond single strikes: modes, replays, simulated collectives, files, and never by accident."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sdcwatch.errors import ConfigurationError
from sdcwatch.testing import PATTERNS, Fault, FaultPlan, corrupt_file
from sdcwatch.testing.simulated_reduce import ring, ring_sends, tree, tree_sends
from sdcwatch.testing.trigger import Trigger
from torch import nn


def fired(fault: Fault, steps: int = 12, passes: int = 3) -> list[tuple[int, int]]:
    """(step, pass) at which a fault fires."""
    trigger, found = Trigger(fault, 0), []
    for step in range(steps):
        found += [(step, number) for number in range(passes) if trigger.fires()]
        trigger.advance()
    return found


def test_persistent_hits_every_pass_from_its_step_on() -> None:
    """A broken unit is wrong whatever it runs."""
    hits = fired(Fault(rank=0, step=3, location="forward"), steps=5)
    assert hits == [(3, 0), (3, 1), (3, 2), (4, 0), (4, 1), (4, 2)]


def test_transient_hits_one_step_and_where_asked_one_run_of_it() -> None:
    """`call` chooses between training, the rank's own replay and the one for another rank."""
    assert fired(Fault(rank=0, step=3, location="forward", mode="transient")) == [(3, 0), (3, 1), (3, 2)]
    assert fired(Fault(rank=0, step=3, location="forward", mode="transient", call=1)) == [(3, 1)]


def test_intermittent_begins_at_its_step_and_comes_and_goes_as_the_seed_says() -> None:
    """The first pass always, then about half; another seed, another half."""
    one = fired(Fault(rank=0, step=3, location="forward", mode="intermittent", seed=1), steps=103)
    other = fired(Fault(rank=0, step=3, location="forward", mode="intermittent", seed=2), steps=103)
    assert one[0] == other[0] == (3, 0)
    assert 100 < len(one) < 200
    assert one != other


def test_a_paused_fault_neither_fires_nor_counts() -> None:
    """What a rank would compute without its fault can be asked for without moving the fault."""
    trigger = Trigger(Fault(rank=0, step=0, location="forward", mode="transient", call=1), 0)
    assert not trigger.fires()
    with trigger.pause():
        assert not trigger.fires()
    assert trigger.fires()


@pytest.mark.parametrize(
    "fault",
    [
        {"rank": 0, "step": 1, "location": "optimizer_weight", "call": 1},
        {"instance": "i-1", "step": 1, "location": "ring_forward"},
        {"rank": 0, "step": 1, "location": "forward", "mode": "sometimes"},
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(fault: dict[str, Any]) -> None:
    """Before anything is installed."""
    with pytest.raises(ConfigurationError):
        Fault(**fault)


def collectives(size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(24, generator=generator) for _ in range(size)]


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("reduce", [ring, tree])
def test_a_simulated_reduce_without_a_fault_is_the_sum_on_every_rank(reduce: Any, size: int) -> None:
    """Bit for bit the same everywhere."""
    values = collectives(size)
    held = reduce(values, lambda *_: None)
    assert all(torch.equal(h, held[0]) for h in held)
    torch.testing.assert_close(held[0], torch.stack(values).sum(0))


@pytest.mark.parametrize("size", [3, 5, 8])
def test_a_ring_forwarder_that_errs_late_keeps_the_right_chunk_and_the_ranks_behind_it_do_not(size: int) -> None:
    """Why differing is not guilty: at its first send of the all-gather all others hold its error, at its last one."""
    values = collectives(size)
    right = ring(values, lambda *_: None)[0]
    for hop in range(ring_sends(size)):

        def wire(sender: int, made: int, sent: torch.Tensor, hop: int = hop) -> None:
            if (sender, made) == (1, hop):
                sent += 1

        wrong = [r for r, held in enumerate(ring(values, wire)) if not torch.equal(held, right)]
        # in the reduce-scatter the error is added up and handed to all alike
        behind = size if hop < size - 1 else size - 1 - (hop - (size - 1))
        assert len(wrong) == behind
        assert (1 in wrong) == (hop < size - 1)


def test_a_tree_parent_that_errs_reaches_its_own_branch_only() -> None:
    """Rank 1 of seven sends up once, then down to 3 and 4."""
    values = collectives(7)
    right = tree(values, lambda *_: None)[0]
    reached = []
    for hop in range(tree_sends(7, 1)):

        def wire(sender: int, made: int, sent: torch.Tensor, hop: int = hop) -> None:
            if (sender, made) == (1, hop):
                sent += 1

        reached.append([r for r, held in enumerate(tree(values, wire)) if not torch.equal(held, right)])
    assert reached == [[0, 1, 2, 3, 4, 5, 6], [3], [4]]


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_a_file_rots_at_its_length_and_as_the_seed_says(tmp_path: Path, pattern: str) -> None:
    """Some bytes differ, none is added, and the same seed does the same."""
    content = bytes(range(256)) * 8
    found = []
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(content)
        assert corrupt_file(tmp_path / name, pattern=pattern, seed=7) > 0
        found.append((tmp_path / name).read_bytes())
    assert found[0] == found[1] != content
    assert len(found[0]) == len(content)
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty"):
        corrupt_file(tmp_path / "empty")


def replayed(rank: int, size: int, fault: dict[str, Any]) -> tuple[list[bool], int, int]:
    """Whether the live gradient, two further runs, and a paused one are right; strikes; hooks after removal."""
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in ddp.modules())
    installed = FaultPlan((Fault(**fault),)).install(ddp, optimizer, first_step=0)
    batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))

    def gradient() -> torch.Tensor:
        return torch.autograd.grad(ddp.module(batch).square().sum(), list(ddp.parameters()))[0]

    with installed.pause():
        right = gradient()
    runs = [torch.equal(gradient(), right) for _ in range(3)]
    installed.remove()
    left = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in ddp.modules()) - hooks
    return [*runs, torch.equal(gradient(), right)], len(installed.strikes), left


@pytest.mark.parametrize("location", ["forward", "backward"])
def test_a_compute_fault_is_in_replays_too_or_in_the_one_asked_for(ranks: Any, location: str) -> None:
    """The device is wrong, not the step; a removed fault leaves nothing behind."""
    fault = {"rank": 1, "step": 0, "location": location, "pattern": "percent"}
    assert ranks(replayed, 2, fault) == [([True] * 4, 0, 0), ([False] * 3 + [True], 3, 0)]
    once = {**fault, "mode": "transient", "call": 1}
    assert ranks(replayed, 2, once)[1] == ([True, False, True, True], 1, 0)


def unasked(rank: int, size: int, root: str) -> tuple[int, bool]:
    from sdcwatch import Monitor

    os.environ["SDCWATCH_TESTING_FAULT"] = json.dumps({"rank": 0, "step": 1, "location": "optimizer_weight"})
    for name in [name for name in sys.modules if name.startswith("sdcwatch.testing")]:
        del sys.modules[name]
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    monitor = Monitor(ddp, optimizer, spool_dir=f"{root}/{rank}", node=f"n{rank}")
    for step in range(4):
        with monitor.step(step):
            ddp(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    monitor.close()
    return len(monitor.verdicts), any(name.startswith("sdcwatch.testing") for name in sys.modules)


def test_a_fault_in_the_environment_is_nothing_to_a_monitor(ranks: Any, tmp_path: Path) -> None:
    """A variable that leaked into production injects nothing: only a script that imports the injector reads it."""
    assert ranks(unasked, 2, str(tmp_path)) == [(0, False)] * 2


def test_no_module_of_the_product_loads_the_injector() -> None:
    """Every module in a fresh interpreter, but the injector's own and the trials that are asked for by name."""
    code = (
        "import importlib, pathlib, sys, sdcwatch\n"
        "root = pathlib.Path(sdcwatch.__file__).parent\n"
        "for file in sorted(root.rglob('*.py')):\n"
        "    parts = file.relative_to(root).with_suffix('').parts\n"
        "    if parts[0] not in ('testing', 'acceptance') and parts[-1] not in ('__init__', '__main__'):\n"
        "        absent = ('triton',) if parts[-1] == 'fingerprint_triton' else ()\n"
        "        try:\n"
        "            importlib.import_module('.'.join(('sdcwatch', *parts)))\n"
        "        except ModuleNotFoundError as error:\n"
        "            assert error.name in absent, error\n"
        "print([name for name in ('faults', 'places', 'trigger') if f'sdcwatch.testing.{name}' in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
