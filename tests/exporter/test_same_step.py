"""The same step fails on other hardware: no second node is blamed, the next life begins earlier, a person releases."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
from sdcwatch.checkpoints import manifest as checkpoint
from sdcwatch.identity import Identity
from sdcwatch.latch import files as latches
from sdcwatch.verdict import Verdict
from sdcwatch.watch import same_step


def identity(node: str, instance: str, rank: int) -> Identity:
    return Identity("job", "c", node, instance, node, f"CPU-{instance or node}-0", rank, 0)


#: After the replacement of node-1's machine `i-1`; Slurm gave the new one the old host name.
NOW = (identity("node-0", "i-0", 0), identity("node-1", "i-9", 1), identity("node-2", "i-2", 2))
FORMER = latches.Latch(
    latch_id="sdc-00112233445566aa",
    training_job="job",
    epoch="e1-00000000",
    step=6,
    check="replay",
    kind="attributed",
    time=1_800_000_000.0,
    named=(latches.NamedRank(1, "node-1", "i-1", "GPU-1"),),
    nodes=tuple(latches.LatchNode(f"node-{n}", f"i-{n}") for n in range(3)),
    last_clean_step=3,
    trust_needed="verified",
    checkpoint_dir=None,
    sentence="rank 1 computes wrong gradients",
)
UNNAMED = dataclasses.replace(FORMER, named=(), kind="inconclusive")


def fault(*suspects: int, **changes: Any) -> Verdict:
    values = {"step": 6, "check": "replay", "contains": True, "last_clean_step": 3, "differing": (suspects or (0,))}
    return Verdict(**{**values, "kind": "attributed" if suspects else "inconclusive", "suspects": suspects, **changes})


@pytest.mark.parametrize(
    ("verdict", "former", "repeats"),
    [
        (fault(2), FORMER, True),  # a healthy peer of then
        (fault(1), FORMER, True),  # the replacement, under the old host name
        (fault(), FORMER, True),  # nobody is named, and the machine of then is gone
        (fault(2, step=8, last_clean_step=5), FORMER, True),  # audits fell on other steps: began in 6..8 and 4..6
        (fault(2, step=12, last_clean_step=9), FORMER, False),
        (fault(2, check="weight_checksum"), FORMER, False),
        (fault(2, contains=False), FORMER, False),
        (fault(2, kind="software", suspects=()), FORMER, False),
        (fault(2, last_clean_step=None), FORMER, True),
        (fault(2), UNNAMED, False),  # it was there then, and may have been the cause
        (fault(1), UNNAMED, True),  # the new machine cannot have been
        (fault(), UNNAMED, False),
        (fault(2), dataclasses.replace(FORMER, named=(latches.NamedRank(0, "node-2", "i-2", "G"),)), False),
        (fault(), dataclasses.replace(FORMER, named=(latches.NamedRank(0, "node-2", "i-2", "G"),)), False),
        (fault(2), dataclasses.replace(FORMER, named=(latches.NamedRank(0, "node-2", "", "G"),)), False),
    ],
)
def test_what_repeats_a_former_halt_names_nobody(verdict: Verdict, former: latches.Latch, repeats: bool) -> None:
    """Same check, steps that overlap, and none of the machines accused before: only then the suspects go."""
    found = same_step.judged(verdict, NOW, (former,))
    if not repeats:
        assert found is verdict
        return
    assert (found.kind, found.suspects, found.candidates, found.persistence) == ("inconclusive", (), (), None)
    assert found.contains
    assert found.differing == verdict.differing
    assert found.trust_needed == "verified"
    assert found.evidence["same_step_as"] == FORMER.latch_id
    assert "node-1" in found.sentence


def test_only_this_jobs_released_halts_of_the_last_days_count(tmp_path: Path) -> None:
    """Another job's halt, one that still stands and one of last year say nothing about this run's steps."""
    recent = dataclasses.replace(FORMER, time=time.time())
    for number, latch in enumerate(
        (recent, dataclasses.replace(recent, training_job="other"), dataclasses.replace(recent, time=1.0))
    ):
        given = dataclasses.replace(latch, latch_id=f"sdc-{number}")
        latches.write_latch([tmp_path], given)
        latches.release(tmp_path, given.latch_id, by="ada", reason="ok")
    latches.write_latch([tmp_path], dataclasses.replace(recent, latch_id="sdc-standing"))
    assert [h.latch_id for h in same_step.former_halts([tmp_path], "job")] == ["sdc-0"]


def test_a_latch_of_an_older_build_is_read(tmp_path: Path) -> None:
    """A latch without the new field stands as it did."""
    record = latches.latch_record(FORMER)
    del record["same_step_as"]
    assert latches.parse_latch(record, "x") == FORMER


def test_stepping_back_never_taints_the_last_verified_checkpoint(tmp_path: Path) -> None:
    """The resume lands one verified checkpoint earlier; where none is earlier, nothing is renamed."""
    for step in (2, 4, 5):
        checkpoint.save(
            tmp_path / f"step-{step}.pt", lambda path: path.write_bytes(b"x"), step=step, epoch="e", job="job"
        )
    checkpoint.promote(tmp_path, 5, 4, epoch="e")
    assert [p.name for p in checkpoint.step_back(tmp_path, "why")] == ["step-4.pt.tainted", "step-5.pt.tainted"]
    assert checkpoint.step_back(tmp_path, "why") == ()
    assert checkpoint.last_clean(tmp_path, "verified").step == 2  # type: ignore[union-attr]


def life(rank: int, size: int, root: str, bad: int, instances: dict[int, str]) -> Any:
    """One life: rank `bad` computes wrong from step 7 on; a verified checkpoint every second step."""
    import torch
    from sdcwatch import CorruptionDetected, Monitor
    from sdcwatch.checkpoints.manifest import resume_point
    from sdcwatch.testing import FaultPlan
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    folder = Path(root) / "checkpoints"
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)))
    optimizer = torch.optim.SGD(ddp.parameters(), 1e-2)
    found = resume_point(folder)
    first = found.step + 1 if found else 0
    FaultPlan().fail_at(bad, 7, location="backward", pattern="scale", parameter=2).install(
        ddp, optimizer, first_step=first
    )
    monitor = Monitor(
        ddp, optimizer, loss_fn=_loss, spool_dir=f"{root}/{instances[rank]}", node=f"node-{rank}",
        instance=instances[rank], checkpoint_dir=folder, on_fault="halt", replay_every=2,
    )  # fmt: skip
    event = None
    try:
        for step in range(first, 12):
            generator = torch.Generator().manual_seed(step * 10 + rank)
            with monitor.step(step) as s:
                s.loss((torch.randn(8, 16, generator=generator), torch.zeros(8, dtype=torch.long))).backward()
                optimizer.step()
                optimizer.zero_grad()
            if step % 2:
                monitor.checkpoint(folder / f"step-{step:02d}.pt", lambda path: path.write_bytes(b"x"))
    except CorruptionDetected as error:
        event = error.event_id
    monitor.close()
    return first, event, [(v.kind, v.suspects) for v in monitor.verdicts]


def _loss(model: Any, batch: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_after_a_replacement_the_same_step_accuses_nobody_and_steps_back(ranks: Any, tmp_path: Path) -> None:
    """Life 1 names rank 1's machine. It is replaced, and rank 2 fails at the same step: nobody is named, also in a
    third life, and each of those resumes one verified checkpoint earlier."""
    folder = tmp_path / "checkpoints"
    nodes = {0: "i-0", 1: "i-1", 2: "i-2"}
    first = ranks(life, 3, str(tmp_path), 1, nodes)
    assert {tuple(r[2]) for r in first} == {(("attributed", (1,)),)}
    release(folder, tmp_path)
    nodes[1] = "i-9"
    firsts = []
    for bad in (2, 1):
        found = ranks(life, 3, str(tmp_path), bad, nodes)
        assert {tuple(r[2]) for r in found} == {(("inconclusive", ()),)}
        assert len({r[1] for r in found}) == 1
        standing = latches.read_latch(folder)
        assert standing is not None
        assert standing.same_step_as.startswith("sdc-")
        assert standing.named == ()
        assert "only a person releases" in latches.explain(standing, [folder])
        events = [
            json.loads(line)["event"]
            for path in tmp_path.rglob("*.events.jsonl")
            for line in path.read_text().splitlines()
        ]
        assert all(not e["suspects"] for e in events if e["epoch"] == standing.epoch)
        firsts.append(found[0][0])
        release(folder, tmp_path)
    assert firsts[1] < firsts[0]


def release(folder: Path, root: Path) -> None:
    standing = latches.read_latch(folder)
    assert standing is not None
    for place in [folder, *(p.parent for p in root.rglob("HALTED.json"))]:
        latches.release(place, standing.latch_id, by="ada", reason="replaced")
