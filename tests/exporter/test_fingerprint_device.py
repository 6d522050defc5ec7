"""The device form: kernel and torch operations give the same bits, and the fall-back is said once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from sdcwatch import fingerprint_device
from sdcwatch.fingerprint_device import TILE, device_digests, tile_digests

SAME = """
import torch
from sdcwatch.fingerprint_device import TILE, device_digests
from sdcwatch.fingerprint_triton import digests
generator = torch.Generator().manual_seed(0)
sizes = [0, 1, 7, 8, 9, 8 * TILE - 1, 8 * TILE, 8 * TILE + 3, 24 * TILE + 16]
values = [torch.randint(256, (n,), dtype=torch.uint8, generator=generator) for n in sizes]
values += [torch.zeros(100), torch.full((50,), -1, dtype=torch.int64), torch.randn(33, 7).to(torch.bfloat16)]
found = digests(values)
assert torch.equal(found, device_digests(values)), (found, device_digests(values))
assert len(set(found.tolist())) == len(values)
print("same", len(values))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="pip install triton (a wheel of 285 MB)")
def test_the_kernel_gives_the_bits_of_the_torch_operations() -> None:
    """Triton's interpreter runs the kernel on a CPU: whole tiles, tails, one tensor beside another, empty ones."""
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SAME], env=environ, capture_output=True, text=True, timeout=100)
    assert "same 12" in done.stdout, done.stderr[-2000:]


def test_a_tensor_is_the_sum_of_its_tiles_and_tiles_know_their_place() -> None:
    """Equal tiles at two places have two digests, and where torch operations cut for memory does not show."""
    value = torch.arange(TILE).repeat(3)
    tiles = tile_digests(value)
    assert len(set(tiles.tolist())) == 3
    assert int(device_digests([value])) == int(tiles.sum())
    assert int(device_digests([torch.cat([value[TILE:], value[:TILE]])])) == int(tiles.sum())
    assert int(device_digests([torch.cat([value + 1, value])])) != int(device_digests([torch.cat([value, value + 1])]))


def test_where_operations_cut_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporaries are bounded by taking some tiles at a time; the number is the same."""
    value = torch.randint(256, (8 * TILE * 5 + 13,), dtype=torch.uint8)
    whole = int(device_digests([value]))
    monkeypatch.setattr(fingerprint_device, "_AT_ONCE", 2)
    assert int(device_digests([value])) == whole


def test_a_missing_kernel_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without Triton, torch operations go on, with one line in the log."""
    monkeypatch.setattr(fingerprint_device._Kernel, "usable", None)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not fingerprint_device._Kernel.runs()
    assert not fingerprint_device._Kernel.runs()
    fingerprint_device._Kernel.failed("again")
    assert [record.getMessage().count("torch operations") for record in caplog.records] == [1]
