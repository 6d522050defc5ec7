"""Environment: what decides a rank's bits is in it, what legitimately differs between ranks is not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch
from sdcwatch.environment import VARIABLES, describe, digest

CPU = torch.device("cpu")


def test_the_same_process_has_the_same_digest() -> None:
    """No clock, id or address in it; all of it is text."""
    facts = describe(CPU)
    assert digest(facts) == digest(describe(CPU))
    assert 0 <= digest(facts) < 2**64
    assert all(isinstance(v, str) for v in facts.values())
    assert list(facts) == sorted(facts)


def test_nothing_of_one_rank_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank, port, host and process differ between healthy ranks."""
    before = describe(CPU)
    for name, value in {"RANK": "77123", "LOCAL_RANK": "77124", "MASTER_PORT": "77125", "HOSTNAME": "77126"}.items():
        monkeypatch.setenv(name, value)
    facts = describe(CPU)
    assert facts == before
    assert socket.gethostname() not in facts.values()
    assert str(os.getpid()) not in facts.values()


@pytest.mark.parametrize("variable", VARIABLES)
def test_each_variable_that_changes_numbers_changes_the_digest(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """A rank on which somebody set one of them is software, not a broken machine."""
    monkeypatch.delenv(variable, raising=False)
    before = digest(describe(CPU))
    monkeypatch.setenv(variable, "1")
    assert digest(describe(CPU)) != before


def test_switches_of_torch_change_the_digest() -> None:
    """Determinism, matmul precision, and the number of threads."""
    before = digest(describe(CPU))
    seen = {before}
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        torch.set_deterministic_debug_mode("warn")
        seen.add(digest(describe(CPU)))
        torch.set_deterministic_debug_mode("default")
        torch.set_num_threads(threads + 1)
        seen.add(digest(describe(CPU)))
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("medium")
        seen.add(digest(describe(CPU)))
    finally:
        torch.set_deterministic_debug_mode("default")
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
    assert len(seen) == 4


def test_new_precision_switches_neither_raise_nor_hide() -> None:
    """torch refuses to read the old switches once a new one was set; the start must not fail for that."""
    script = (
        "import torch; from sdcwatch.environment import describe, digest; cpu = torch.device('cpu');"
        "a = digest(describe(cpu)); torch.backends.fp32_precision = 'tf32'; b = digest(describe(cpu));"
        "torch.backends.cuda.matmul.fp32_precision = 'ieee'; c = digest(describe(cpu)); print(len({a, b, c}))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stdout.strip()) == (0, "3"), result.stderr
