"""A resume on real ranks: what was loaded is the checkpoint on every rank, or nothing is trained and it is said why."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdcwatch.checkpoints import agree_on_resume, resume_point
from sdcwatch.checkpoints.record import StateDigests
from sdcwatch.checkpoints.state import difference, measure
from sdcwatch.errors import CheckpointError
from sdcwatch.event import canonical, parse_line
from sdcwatch.monitor import Monitor
from torch.nn.parallel import DistributedDataParallel

SIZE = 3


def build() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    ddp = DistributedDataParallel(model)
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-2)


def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def watch(root: str, folder: str, ddp: Any, optimizer: Any, rank: int, resumed_from: Any = None) -> Monitor:
    """Each rank is a node of its own."""
    return Monitor(
        ddp, optimizer, loss_fn=loss_fn, resumed_from=resumed_from, checkpoint_dir=folder, replay_every=1,
        spool_dir=f"{root}/{rank}", node=f"n{rank}",
    )  # fmt: skip


def train(monitor: Monitor, ddp: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        with monitor.step(step) as s:
            s.loss(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).backward()
            optimizer.step()
            optimizer.zero_grad()


def first_life(rank: int, size: int, root: str, folder: str) -> None:
    """Trains six steps, saves after the second and the fourth."""
    ddp, optimizer = build()
    monitor = watch(root, folder, ddp, optimizer, rank)
    for start in (1, 3, 5):
        train(monitor, ddp, optimizer, range(start, start + 2))
        state = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
        if start < 5:
            monitor.checkpoint(Path(folder) / f"step-{start + 1}.pt", lambda p, s=state: torch.save(s, p))
    monitor.close()


def second_life(rank: int, size: int, root: str, folder: str, how: str) -> Any:
    """Resumes as `how` says; gives the error that refused it, or the step it went on from."""
    ddp, optimizer = build()
    found = agree_on_resume(folder)
    assert found is not None
    state = torch.load(found.path, weights_only=True)
    lost = how in ("rank 0 only", "no optimizer on rank 2") and rank > (0 if how == "rank 0 only" else 1)
    if not (lost and how == "rank 0 only"):
        ddp.module.load_state_dict(state["model"])
    if not lost:
        optimizer.load_state_dict(state["optimizer"])
    if how == "bad donor" and rank == 1:
        with torch.no_grad():
            ddp.module[2].weight.view(torch.int32)[0, 3] ^= 1
    resumed: Any = found
    if how == "another step" and rank == 2:
        resumed = found.path.with_name("step-2.pt")
    if how == "a path that rots":
        resumed = found.path
        dist.barrier()
        if rank == 0:
            found.path.write_bytes(found.path.read_bytes()[:-1])
        dist.barrier()
    try:
        monitor = watch(root, folder, ddp, optimizer, rank, resumed)
    except CheckpointError as error:
        return str(error)
    monitor.verify_resume(found)
    train(monitor, ddp, optimizer, range(found.step + 1, found.step + 3))
    verdicts = [v.kind for v in monitor.verdicts]
    monitor.close()
    return found.step, found.trust, verdicts


@pytest.fixture
def lived(ranks: Any, tmp_path: Path) -> tuple[str, str]:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    ranks(first_life, SIZE, str(tmp_path / "spool"), str(folder))
    return str(tmp_path / "spool"), str(folder)


def test_a_resume_that_loaded_the_checkpoint_trains_on(ranks: Any, lived: tuple[str, str]) -> None:
    """All ranks hold step 4, verified; no verdict, and its manifest says which fingerprints it has."""
    assert ranks(second_life, SIZE, *lived, "as it should be") == [(4, "verified", [])] * SIZE
    record = resume_point(lived[1])
    assert record is not None
    assert record.state is not None
    assert list(record.state.parameters) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert record.state.optimizer.keys() == record.state.parameters.keys()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("rank 0 only", ["rank 1: parameters: 4 of 4 differ, first 0.weight", "rank 2: parameters"]),
        ("no optimizer on rank 2", ["rank 2: it holds no optimizer state"]),
        ("bad donor", ["rank 1: parameters: 1 of 4 differ, first 2.weight"]),
        ("another step", ["rank 2 from step-2.pt (step 2"]),
        ("a path that rots", ["rank 0: ", "step-4.pt differs from its manifest"]),
    ],
)
def test_a_resume_that_is_none_is_refused_on_every_rank(
    ranks: Any, lived: tuple[str, str], how: str, said: list[str]
) -> None:
    """The same words everywhere, naming the rank and what differs; no healthy rank is in them, nothing is trained."""
    refusals = ranks(second_life, SIZE, *lived, how)
    assert len({str(text) for text in refusals}) == 1
    assert all(part in refusals[0] for part in [*said, "No step was trained"]), refusals[0]
    named = {number for number in range(SIZE) if f"rank {number}" in refusals[0]}
    assert named == {int(part.split()[1].rstrip(":")) for part in said if part.startswith("rank")}
    events = [line for path in Path(lived[0]).rglob("*.events.jsonl") for line in path.read_text().splitlines()]
    told = [parse_line(line)[0] for line in events]
    assert len({canonical(event) for event in told}) == 1, "reporters must write the same event"
    assert (told[0].check, told[0].suspects, told[0].action) == ("checkpoint", (), "observe")
    assert told[0].kind == ("inconclusive" if "rots" in how else "software")


def other_form(rank: int, size: int, root: str, folder: str) -> Any:
    import dataclasses

    ddp, optimizer = build()
    found = resume_point(folder)
    assert found is not None
    assert found.state is not None
    foreign = dataclasses.replace(found, state=StateDigests("cuda-0", found.state.parameters, found.state.optimizer))
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sdcwatch").addHandler(handler)
    watch(root, folder, ddp, optimizer, rank, foreign).close()
    return messages


def test_digests_of_another_kind_of_device_are_not_compared(ranks: Any, lived: tuple[str, str]) -> None:
    """Saved on a GPU, resumed on a CPU: nobody is refused for it, and the log says that nothing was proven."""
    for messages in ranks(other_form, SIZE, *lived):
        assert any("was not compared with its checkpoint" in m and "cuda-0" in m for m in messages)


def test_the_state_is_told_apart_bit_by_bit_and_not_by_where_small_numbers_live() -> None:
    """One bit of one moment is seen; an optimizer's step count may be a tensor or a number of the same value."""
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(5)
    optimizer.step()
    saved = measure([("w", parameter)], optimizer)
    assert difference(saved, measure([("w", parameter)], optimizer)) is None
    optimizer.state[parameter]["exp_avg"].view(torch.int32)[4] ^= 1
    assert difference(saved, measure([("w", parameter)], optimizer)) == "optimizer state: 1 of 1 differ, first w"
    other = torch.nn.Parameter(torch.ones(5))
    held = measure([("v", other)], torch.optim.Adam([other]))
    assert "names are not the same" in str(difference(saved, held))


def test_neighbours_share_a_digest_in_a_model_of_very_many_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest stays readable: at most so many digests, each change still seen."""
    monkeypatch.setattr("sdcwatch.checkpoints.state.MOST_DIGESTS", 3)
    named = [(f"p{n}", torch.nn.Parameter(torch.full((2,), float(n)))) for n in range(8)]
    optimizer = torch.optim.SGD([p for _, p in named])
    saved = measure(named, optimizer)
    assert list(saved.parameters) == ["p0", "p3", "p6"]
    named[7][1].data[1] = 9
    assert difference(saved, measure(named, optimizer)) == "parameters: 1 of 3 differ, first p6"
