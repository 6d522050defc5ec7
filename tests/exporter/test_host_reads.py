"""What a checked step reads to the host, counted with tensors of host memory that are treated as a device's."""

from __future__ import annotations

import dataclasses
import math
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sdcwatch.checks.gradients import stacked
from sdcwatch.fingerprint import combine, combine_unread, fingerprint, read_digests, unread_fingerprint
from sdcwatch.observation import AuditRow, ErrorCode, Row, RowError, pack, unpack
from sdcwatch.watch.draft import Draft

CPU = torch.device("cpu")


def as_device(monkeypatch: Any = None) -> None:
    """From now on tensors (but for states of generators) are hashed and summed as a device's would be: unread."""
    import sdcwatch.checks.gradients
    import sdcwatch.fingerprint
    import sdcwatch.watch.draft

    for module in (sdcwatch.fingerprint, sdcwatch.checks.gradients, sdcwatch.watch.draft):
        on_device: Any = lambda tensor: tensor.dtype is torch.uint8  # noqa: E731
        monkeypatch.setattr(module, "on_host", on_device) if monkeypatch else setattr(module, "on_host", on_device)


def filled(kind: Any, seed: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Values of all fields of a row, and those of every second one as a tensor."""
    values: dict[str, Any] = {}
    unread: dict[str, torch.Tensor] = {}
    for n, field in enumerate(dataclasses.fields(kind)):
        code = field.metadata["code"]
        odd: Any = {"d": (math.nan, -0.0, 1e300, 0.1), "q": (-1, 0, 5, -(2**63)), "Q": (2**64 - 1, 0, 7, 2**63)}[code]
        values[field.name] = odd[(n + seed) % 4]
        if (n + seed) % 2:
            value = values[field.name]
            unread[field.name] = torch.tensor(
                value if code == "d" else value - 2**64 if value >= 2**63 else value,
                dtype=torch.float64 if code == "d" else torch.int64,
            )
    return values, unread


@pytest.mark.parametrize("kind", [Row, AuditRow])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("device", [True, False], ids=["device", "host"])
def test_a_draft_packs_to_the_bytes_of_its_row(
    kind: Any, seed: int, device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words, presence and CRC are what `pack` gives for the same values, and settle to the same row."""
    if device:
        as_device(monkeypatch)
    values, unread = filled(kind, seed)
    draft: Draft[Any] = Draft.of(kind, values | unread)
    expected = pack(kind(**values))
    data = struct.pack(f"<{len(expected) // 8}q", *draft.words(CPU).tolist())
    assert data == expected
    draft.settle(data)
    assert pack(draft.row) == expected
    assert pack(Draft.of(kind, values | unread).row) == expected


def test_a_float32_on_a_device_is_the_float64_of_its_value() -> None:
    """A loss scale, or norms of several types, arrive as the numbers they are."""
    row = Draft.of(Row, {"loss_scale": torch.tensor(0.1), "local_norm": torch.tensor(2.5, dtype=torch.float64)}).row
    assert (row.loss_scale, row.local_norm) == (float(torch.tensor(0.1)), 2.5)
    assert stacked([torch.tensor(1.5), torch.tensor(2.5, dtype=torch.float64)]).tolist() == [1.5, 2.5]


def test_a_row_that_its_device_packed_wrongly_is_void_here_and_unreadable_to_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One flipped bit in the packed words: a transport fault, and an error row on the rank itself; nothing raises."""
    as_device(monkeypatch)
    draft: Draft[Row] = Draft.of(Row, {"rank": 3, "reduced": torch.tensor(5)})
    words = draft.words(CPU)
    words[9] ^= 4
    data = struct.pack(f"<{words.numel()}q", *words.tolist())
    with pytest.raises(RowError):
        unpack(Row, data)
    draft.settle(data)
    assert (draft.row.rank, draft.row.reduced, draft.row.error) == (3, None, ErrorCode.CHECK)


def test_unread_digests_see_what_numbers_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes, order, absence and sizes count on a device as well; a digest that was read is the same one."""
    as_device(monkeypatch)
    a, b = torch.randn(5000), torch.randn(7)
    contents: list[list[torch.Tensor | None]] = [
        [a, b], [b, a], [a, None, b], [a], [torch.cat([a, b])], [a, b + 1e-6], [a, b, torch.zeros(0)],
    ]  # fmt: skip
    found = [unread_fingerprint(tensors) for tensors in contents]
    assert all(isinstance(digest, torch.Tensor) for digest in found)
    numbers = read_digests(dict(enumerate(found)))
    assert list(numbers.values()) == [fingerprint(tensors) for tensors in contents]
    assert len(set(numbers.values())) == len(contents)
    joins = [combine_unread(values) for values in ([found[0], 1], [1, found[0]], [found[0], 2], [found[1], 1])]
    assert len(set(read_digests(dict(enumerate(joins))).values())) == 4
    assert combine_unread([1, 2]) == combine([1, 2])


class Reads(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts what would wait for a device: `count`, what our code calls; `hidden`, operations that wait."""

    NAMES = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "cpu", "numpy")
    WAITING = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "unique", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.hidden: list[str] = []
        for name in self.NAMES:
            setattr(torch.Tensor, name, self._counting(getattr(torch.Tensor, name)))

    def _counting(self, original: Any) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            self.count += ours()
            return original(*args, **kwargs)

        return read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.WAITING and ours():
            self.hidden.append(name)
        return func(*args, **(kwargs or {}))


def ours() -> bool:
    """Whether sdcwatch is on the stack."""
    frame: Any = sys._getframe(2)
    while frame is not None and "/sdcwatch/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


def counted(rank: int, size: int, root: str, device: bool) -> tuple[list[tuple[int, int]], list[str]]:
    """Host reads of steps 2 to 5, every second of which is checked, and what waited without being asked to."""
    from sdcwatch import Monitor
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    if device:
        as_device()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=torch.tensor(1e-2), foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    monitor = Monitor(
        ddp, optimizer, scaler=scaler, spool_dir=f"{root}/node-{rank}", node=f"node-{rank}", check_every=2,
        conservation_every=2, metrics_interval=3600.0, max_overhead=0.0, on_fault="halt",
    )  # fmt: skip
    reads, counts = Reads(), []
    for step in range(8):
        before = reads.count
        with reads, monitor.step(step):
            scaler.scale(ddp(torch.randn(4, 16)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        counts.append((step, reads.count - before))
    ran = [
        monitor._epoch.reporter.metrics.get("sdc_checks_total", check=c)
        for c in ("gradient_checksum", "allreduce_conservation")
    ]
    assert ran == [4, 4], ran
    assert not monitor.verdicts
    monitor.close()
    return counts[2:], reads.hidden


@pytest.mark.parametrize(("device", "expected"), [(True, 2), (False, 4)], ids=["device", "host"])
def test_a_checked_step_reads_twice_and_others_never(ranks: Any, tmp_path: Path, device: bool, expected: int) -> None:
    """All checks, a loss scale and a learning rate on the device: the rows, and what the ranks make of them."""
    # In host memory, where nobody waits, it is also asked whether sums are finite, and the row is packed there.
    counts, hidden = ranks(counted, 2, str(tmp_path), device)[0]
    print("host reads by step:", counts, hidden)
    assert counts == [(step, 0 if step % 2 else expected) for step in range(2, 8)]
    assert hidden == ([] if device else hidden)


def trained(rank: int, size: int, root: str, device: bool, watched: bool, fault: bool) -> tuple[int, Any]:
    """Eight steps; the weights' fingerprint, and what was found."""
    from sdcwatch import Monitor
    from sdcwatch.testing import FaultPlan
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8)))
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    if fault:
        FaultPlan().fail_at(2, 3, location="optimizer_weight", pattern="bit_flip").install(ddp, optimizer, first_step=0)
    weights, found = 0, []
    if device:
        as_device()

    def loss_fn(model: Any, batch: Any) -> Any:
        return model(batch).square().mean()

    monitor = (
        Monitor(
            ddp, optimizer, loss_fn=loss_fn, spool_dir=f"{root}/{device}-{rank}", node=f"node-{rank}", replay_every=2,
            on_fault="observe",
        )
        if watched
        else None
    )  # fmt: skip
    generator = torch.Generator().manual_seed(rank)
    for step in range(8):
        batch = torch.randn(4, 16, generator=generator)
        if monitor is None:
            loss_fn(ddp, batch).backward()
            optimizer.step()
        else:
            with monitor.step(step) as s:
                s.loss(batch).backward()
                optimizer.step()
        optimizer.zero_grad()
    if monitor is not None:
        found = [(v.check, v.kind, v.suspects, v.step, v.path) for v in monitor.verdicts]
        monitor.close()
    import sdcwatch.fingerprint

    sdcwatch.fingerprint.on_host = lambda tensor: True
    weights = fingerprint(ddp.parameters())
    return weights, found


def test_unread_rows_find_what_read_ones_find_and_change_no_bit(ranks: Any, tmp_path: Path) -> None:
    """A flipped weight of rank 2 gives the same verdicts in both forms; a healthy run's weights are those without."""
    faulty = [ranks(trained, 3, str(tmp_path / "fault"), device, True, True) for device in (False, True)]
    assert faulty[0] == faulty[1]
    assert faulty[0][0][1][0][:3] == ("weight_checksum", "attributed", (2,))
    plain = ranks(trained, 3, str(tmp_path / "plain"), False, False, False)
    assert ranks(trained, 3, str(tmp_path / "healthy"), True, True, False) == plain
