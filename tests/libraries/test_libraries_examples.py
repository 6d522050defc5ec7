"""Each example on the real library, on three ranks: clean without a fault, and with one the right rank is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sdcwatch.checkpoints import manifest as checkpoint
from sdcwatch.run_report import facts

ROOT = Path(__file__).resolve().parents[2]
#: Example -> (its library, whether replay runs).
EXAMPLES = {
    "hf_trainer.py": ("transformers", True),
    "accelerate_loop.py": ("accelerate", True),
    "lightning_trainer.py": ("pytorch_lightning", True),
    "plain_loop.py": ("torch", True),
    "compiled_loop.py": ("torch", True),
    "hsdp_loop.py": ("torch", False),
}
Require = Callable[[str], Path]
pytestmark = [pytest.mark.libraries, pytest.mark.timeout(300)]


def launch(example: str, folder: Path, fault_rank: str, status: int = 0, **variables: str) -> str:
    """Runs an example on three ranks, `folder` being the working directory, to this status of torchrun; its stderr."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SDCWATCH_", "SLURM_"))} | {
        "SDCWATCH_JOB": "library", "SDCWATCH_AGENT": "off", "SDCWATCH_MAX_OVERHEAD": "0",
        "TEST_SPOOLS": str(folder), "TEST_FAULT_RANK": fault_rank,
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
        **variables,
    }  # fmt: skip
    words = ["-m", "torch.distributed.run", "--nproc-per-node=3", "--master-addr=127.0.0.1", "--master-port=0"]
    done = subprocess.run(
        [sys.executable, *words, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1",
         str(ROOT / "tests/libraries/one_rank.py"), str(ROOT / "examples" / example)],
        env=environment, capture_output=True, text=True, timeout=280, cwd=folder,
    )  # fmt: skip
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stderr


def run(example: str, folder: Path, fault_rank: str) -> tuple[facts.RunFacts, list[Any]]:
    stderr = launch(example, folder, fault_rank)
    found = facts.jobs([folder])
    assert list(found) == ["library"]
    verdicts = [
        json.loads(line.partition("SDCWATCH_VERDICT ")[2])["event"]
        for line in stderr.splitlines()
        if "SDCWATCH_VERDICT " in line
    ]
    return facts.read("library", found["library"], None), verdicts


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_clean_run_is_watched_and_nobody_is_told(example: str, tmp_path: Path, require: Require) -> None:
    """Every step is checked, replay audits where it can, there is no event, the weights are those without it, and
    no DDP model outlives its process group: torch may hang where one does."""
    library, replays = EXAMPLES[example]
    require(f"module:{library}")
    (bare := tmp_path / "bare").mkdir()
    launch(example, bare, "", SDCWATCH_DISABLE="1", TEST_SPOOLS=str(bare))
    seen, verdicts = run(example, tmp_path, "")
    assert verdicts == []
    ran = {check.name: check.ran for check in seen.checks}
    assert ran["gradient_checksum"] >= 6
    assert ran["weight_checksum"] >= 6
    assert bool(ran["replay"]) == replays, seen.checks
    assert seen.state == "finished"
    finals = {path.read_text() for folder in (tmp_path, bare) for path in folder.glob("final-*")}
    assert len(finals) == 1
    outlived = [path.read_text() for folder in (tmp_path, bare) for path in folder.glob("outlived-*")]
    assert outlived == ["0"] * 6


@pytest.mark.parametrize("example", ["hf_trainer.py", "lightning_trainer.py"])
def test_what_the_trainer_saved_is_trusted_although_it_rotates(example: str, tmp_path: Path, require: Require) -> None:
    """Both keep one checkpoint; the last verified one is found all the same, and its bytes are intact."""
    require(f"module:{EXAMPLES[example][0]}")
    run(example, tmp_path, "")
    folder = tmp_path / "checkpoints"
    own = [r for r in checkpoint.list_checkpoints(folder) if not r.pending]
    assert [r.step for r in own] == [8]
    assert checkpoint.verify(own[0].path).state is not None
    found = checkpoint.last_clean(folder, "verified")
    assert found is not None
    assert found.step >= 6


@pytest.mark.parametrize("example", ["hf_trainer.py", "lightning_trainer.py"])
def test_a_halt_ends_the_trainer_and_leaves_a_clean_checkpoint(example: str, tmp_path: Path, require: Require) -> None:
    """It comes right after a save: the run ends all the same, and a resume finds what was verified before."""
    require(f"module:{EXAMPLES[example][0]}")
    stderr = launch(example, tmp_path, "1", status=1, SDCWATCH_ON_FAULT="halt")
    assert "CorruptionDetected" in stderr
    found = checkpoint.resume_point(tmp_path / "checkpoints")
    assert found is not None
    assert found.step in (2, 4)


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_flipped_bit_is_caught(example: str, tmp_path: Path, require: Require) -> None:
    """Memory of rank 1 changes one bit of one weight: the event names rank 1 as the one that differs, at once."""
    library, _ = EXAMPLES[example]
    require(f"module:{library}")
    seen, verdicts = run(example, tmp_path, "1")
    assert verdicts
    first = verdicts[0]
    assert (first["check"], first["differing"], first["kind"]) == ("weight_checksum", [1], "inconclusive")
    assert seen.events
