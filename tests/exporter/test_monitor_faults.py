"""A wrong number on one real rank becomes the right verdict on every rank, and a healthy rank is never named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def faulty(
    rank: int, size: int, root: str, fault: dict[str, Any], settings: dict[str, Any], steps: int = 12
) -> dict[str, Any]:
    """Trains with one fault installed; returns the verdicts and where the run ended."""
    import torch
    from sdcwatch import CorruptionDetected, Monitor
    from sdcwatch.testing import Fault, FaultPlan
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    FaultPlan((Fault(**fault),) if fault else ()).install(ddp, optimizer, first_step=0)
    per_node = settings.pop("ranks_per_node", 1)
    monitor = Monitor(
        ddp,
        optimizer,
        loss_fn=lambda module, batch: nn.functional.cross_entropy(module(batch[0]), batch[1]),
        spool_dir=f"{root}/node-{rank // per_node}",
        node=f"node-{rank // per_node}",
        replay_every=3,
        **settings,
    )
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(100 + rank)
    done, stopped = 0, None
    try:
        for step in range(steps):
            with monitor.step(step) as s:
                batch = (torch.randn(8, 16, generator=generator), torch.randint(8, (8,), generator=generator))
                s.loss(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            done = step + 1
    except CorruptionDetected as error:
        stopped = error.step
    verdicts = [
        {
            "step": v.step,
            "check": v.check,
            "kind": v.kind,
            "suspects": list(v.suspects),
            "differing": list(v.differing),
            "candidates": list(v.candidates),
            "persistence": v.persistence,
            "path": v.path,
            "last_clean": v.last_clean_step,
            "sentence": v.sentence,
        }
        for v in monitor.verdicts
    ]
    monitor.close()
    return {"verdicts": verdicts, "done": done, "stopped": stopped}


def journal(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Event lines by node folder."""
    return {
        folder.name: [
            json.loads(line)
            for file in sorted(folder.rglob("*.events.jsonl"))
            for line in file.read_text().splitlines()
        ]
        for folder in sorted(root.glob("node-*"))
    }


def one_verdict(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The single verdict on which all ranks agree."""
    assert all(r["verdicts"] == results[0]["verdicts"] for r in results), [r["verdicts"] for r in results]
    assert len(results[0]["verdicts"]) == 1, results[0]["verdicts"]
    verdict: dict[str, Any] = results[0]["verdicts"][0]
    return verdict


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("location", ["optimizer_weight", "optimizer_state"])
def test_a_wrong_optimizer_step_is_named_in_the_next_exchange(
    ranks: Any, tmp_path: Path, location: str, bad: int
) -> None:
    """Equal before, different after: the minority of one is attributed, rank 0 included; no further step is taken."""
    fault = {"location": location, "step": 4, "rank": bad, "pattern": "bit_flip", "parameter": 1}
    results = ranks(faulty, 3, str(tmp_path), fault, {"on_fault": "halt"})
    verdict = one_verdict(results)
    assert (verdict["check"], verdict["kind"], verdict["suspects"]) == ("weight_checksum", "attributed", [bad])
    assert verdict["path"] == "optimizer compute"
    assert verdict["step"] == 5
    assert verdict["last_clean"] == 3
    assert [r["stopped"] for r in results] == [5, 5, 5]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_persistent_compute_fault_is_named_by_the_next_audit(ranks: Any, tmp_path: Path, bad: int) -> None:
    """One block of one layer's gradient is off by 2^-10 on one rank from step 4: audit 6 names it, persistent."""
    fault = {"location": "backward", "step": 4, "rank": bad, "pattern": "scale", "parameter": 2}
    results = ranks(faulty, 4, str(tmp_path), fault, {"on_fault": "halt"})
    verdict = one_verdict(results)
    assert (verdict["check"], verdict["kind"], verdict["suspects"]) == ("replay", "attributed", [bad])
    assert verdict["persistence"] == "persistent"
    assert verdict["path"] == "backward compute"
    assert verdict["step"] == 6
    assert verdict["last_clean"] == 3
    assert [r["stopped"] for r in results] == [6] * 4


def test_a_wrong_reduced_gradient_halts_before_the_weights_and_names_nobody(ranks: Any, tmp_path: Path) -> None:
    """The rank that differs is said, apart from the candidates; the fault never reaches the weights."""
    fault = {
        "location": "reduced_gradient", "step": 5, "rank": 2, "pattern": "ulp", "mode": "transient", "parameter": 1,
    }  # fmt: skip
    results = ranks(faulty, 4, str(tmp_path), fault, {"on_fault": "halt"})
    verdict = one_verdict(results)
    assert (verdict["check"], verdict["kind"], verdict["suspects"]) == ("gradient_checksum", "inconclusive", [])
    assert verdict["differing"] == [2]
    assert set(verdict["candidates"]) >= {1, 2}
    assert (verdict["path"], verdict["step"], verdict["last_clean"]) == ("reduce", 5, 4)
    assert [r["stopped"] for r in results] == [5] * 4
    assert [r["done"] for r in results] == [5] * 4


def test_weights_that_change_at_rest_are_seen_before_the_next_step_and_name_nobody(ranks: Any, tmp_path: Path) -> None:
    """Memory: candidates only, since code on that rank could have done it too."""
    fault = {
        "location": "weights_at_rest", "step": 5, "rank": 1, "pattern": "bit_flip", "mode": "transient", "parameter": 3,
    }  # fmt: skip
    results = ranks(faulty, 3, str(tmp_path), fault, {"on_fault": "halt"})
    verdict = one_verdict(results)
    assert (verdict["check"], verdict["kind"]) == ("weight_checksum", "inconclusive")
    assert (verdict["path"], verdict["candidates"], verdict["suspects"]) == ("weights at rest", [1], [])
    assert verdict["step"] == 5


@pytest.mark.parametrize("location", ["optimizer_weight", "backward"])
def test_two_replicas_never_name_anybody(ranks: Any, tmp_path: Path, location: str) -> None:
    """Without a majority the state is contained and the suspect stays unknown."""
    fault = {"location": location, "step": 4, "rank": 0, "pattern": "scale", "parameter": 2}
    results = ranks(faulty, 2, str(tmp_path), fault, {"on_fault": "halt"})
    verdict = one_verdict(results)
    assert (verdict["kind"], verdict["suspects"]) == ("inconclusive", [])


def test_observe_reports_once_and_trains_on(ranks: Any, tmp_path: Path) -> None:
    """A difference that lasts is one event; training goes to its end."""
    fault = {"location": "optimizer_weight", "step": 4, "rank": 1, "pattern": "bit_flip", "mode": "transient"}
    results = ranks(faulty, 3, str(tmp_path), fault, {"on_fault": "observe"})
    weight = [v for v in results[0]["verdicts"] if v["check"] == "weight_checksum"]
    assert len(weight) == 1
    assert weight[0]["suspects"] == [1]
    assert [r["done"] for r in results] == [12] * 3


def test_the_event_is_durable_on_the_suspects_node_and_on_two_others_with_one_content(
    ranks: Any, tmp_path: Path
) -> None:
    """What the service will compare: same id, same bytes, from three nodes; the fourth wrote nothing."""
    fault = {"location": "optimizer_weight", "step": 4, "rank": 3, "pattern": "bit_flip"}
    ranks(faulty, 4, str(tmp_path), fault, {"on_fault": "halt"})
    lines = journal(tmp_path)
    writers = [node for node, found in lines.items() if found]
    assert writers == ["node-0", "node-1", "node-3"]
    events = {json.dumps(found[0]["event"], sort_keys=True) for found in lines.values() if found}
    assert len(events) == 1
    event = json.loads(events.pop())
    assert event["suspects"] == [3]
    assert event["action"] == "halt"
    assert [r["node"] for r in event["ranks"]] == ["node-0", "node-1", "node-2", "node-3"]
    assert (tmp_path / "node-2").rglob("HALTED.json")


def test_a_bad_node_of_two_ranks_is_named_by_one_bad_rank_only(ranks: Any, tmp_path: Path) -> None:
    """Three nodes of two ranks, one rank wrong in its optimizer step: that rank is named, its healthy twin is not."""
    fault = {"location": "optimizer_weight", "step": 4, "rank": 3, "pattern": "multi_bit"}
    results = ranks(faulty, 6, str(tmp_path), fault, {"on_fault": "halt", "ranks_per_node": 2}, 8)
    verdict = one_verdict(results)
    assert verdict["suspects"] == [3]
