"""Evidence of a replay verdict: kept by real ranks, run again elsewhere, weighed; and whatever is not ours refused."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sdcwatch.cli import main
from sdcwatch.evidence import again, explain, facts, form
from sdcwatch.evidence.values import Reader, Unkeepable, Writer
from sdcwatch.spool.rank import Spool
from torch import nn

CPU = torch.device("cpu")
MODEL = """
import torch
from torch import nn

def loss(module, batch):
    return nn.functional.cross_entropy(module(batch[0]), batch[1])

def make():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8)), loss
"""


def train(rank: int, size: int, root: str, fault: dict[str, Any] | None, settings: dict[str, Any]) -> list[Any]:
    """A small model under DDP; `fault` as of `Fault`, or `"random"` for a model that stops to repeat itself."""
    import os

    from sdcwatch import CorruptionDetected, Monitor
    from sdcwatch.testing import Fault, FaultPlan
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    unrepeatable = fault == {"random": True}
    if fault and not unrepeatable:
        FaultPlan((Fault(**fault),)).install(ddp, optimizer, first_step=0)
    now = [0]

    def loss(module: Any, batch: Any) -> torch.Tensor:
        value = nn.functional.cross_entropy(module(batch[0]), batch[1])
        return value * (1 + os.urandom(1)[0] / 1000) if unrepeatable and now[0] >= 3 else value

    monitor = None
    if not settings.pop("unwatched", False):
        monitor = Monitor(
            ddp, optimizer, loss_fn=loss, spool_dir=f"{root}/node-{rank}", node=f"node-{rank}", replay_every=2,
            **settings,
        )  # fmt: skip
    generator = torch.Generator().manual_seed(rank)
    try:
        for step in range(6):
            now[0] = step
            with monitor.step(step) if monitor else contextlib.nullcontext() as s:
                batch = torch.randn(8, 16, generator=generator), torch.randint(8, (8,), generator=generator)
                (s.loss(batch) if s else loss(ddp, batch)).backward()
                optimizer.step()
                optimizer.zero_grad()
    except CorruptionDetected:
        pass
    final = b"".join(p.detach().numpy().tobytes() for p in ddp.parameters())
    Path(root, f"final-{rank}").write_bytes(final + bytes(torch.get_rng_state().tolist()))
    if monitor is None:
        return []
    found = [(v.check, v.kind, v.suspects) for v in monitor.verdicts]
    monitor.close()
    return found


BAD = {"location": "backward", "step": 3, "rank": 1, "pattern": "scale", "parameter": 2}


def files(root: Path) -> dict[int, form.EvidenceFile]:
    found = [form.read(path) for path in sorted(root.rglob("*.evidence"))]
    return {file.manifest["holder"]["rank"]: file for file in found}


def test_a_kept_micro_batch_gives_the_honest_gradient_elsewhere(
    ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a wrong backward on rank 1 to files on it and its partners, to a replay here, to hardware as first rival."""
    results = ranks(train, 4, str(tmp_path), BAD, {"on_fault": "halt", "evidence_data": "weights"})
    assert results == [[("replay", "attributed", (1,))]] * 4
    kept = files(tmp_path)
    assert {rank: file.manifest["owner"] for rank, file in kept.items()} == {0: 0, 1: 1, 2: 1}
    (tmp_path / "evidence_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    for file in kept.values():
        found = again.run(file, model="evidence_model:make")
        assert found.outcome == "majority", found
        assert 1 not in found.ranks
        assert main(["evidence", "replay", str(file.path), "--model", "evidence_model:make", "--json"]) == 0
    result = tmp_path / "result.json"
    result.write_text(capsys.readouterr().out.splitlines()[-1])
    last = kept[max(kept)]
    assert main(["evidence", "show", str(last.path), "--replayed", str(result), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["explanations"][0]["name"] == "hardware"
    assert any("preflight" in text for text in shown["unproven"])
    assert main(["evidence", "show", str(last.path)]) == 0
    assert "Why this is no proof" in capsys.readouterr().out
    line = json.loads(next(tmp_path.rglob("*.events.jsonl")).read_text().splitlines()[0])
    assert {entry["file"] for entry in line["detail"]["evidence"]} == {file.path.name for file in kept.values()}
    del sys.modules["evidence_model"]


@pytest.mark.parametrize("fault", [None, BAD], ids=["healthy", "a rank computes wrong"])
def test_what_is_kept_changes_no_weight(ranks: Any, tmp_path: Path, fault: dict[str, Any] | None) -> None:
    """Batch and weights go into files while training goes on, or nothing does: the bits are those of no monitor."""
    finals = []
    for name, settings in (("plain", {"unwatched": True}), ("kept", {"evidence_data": "weights"})):
        (tmp_path / name).mkdir()
        ranks(train, 3, str(tmp_path / name), fault, settings)
        finals.append([(tmp_path / name / f"final-{rank}").read_bytes() for rank in range(3)])
    assert finals[0] == finals[1]
    assert len(files(tmp_path)) == (3 if fault else 0)


def test_a_full_spool_costs_the_file_and_neither_verdict_nor_event(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The quota has room for journals and metrics; the verdict is the same, the log says what to raise."""
    opened = Spool.open
    monkeypatch.setattr(Spool, "open", lambda *a, **k: opened(*a, **k | {"quota_bytes": 40_000}))
    results = ranks(train, 3, str(tmp_path), BAD, {"evidence_data": "weights"})
    assert results == [[("replay", "attributed", (1,))]] * 3
    assert not files(tmp_path)
    assert not list(tmp_path.rglob("*.partial"))
    events = [json.loads(line) for path in tmp_path.rglob("*.events.jsonl") for line in path.read_text().splitlines()]
    assert {event["event"]["check"] for event in events} == {"replay"}
    said = capfd.readouterr().err
    assert "is not kept: " in said
    assert "raise SDCWATCH_SPOOL_QUOTA_MB" in said


@pytest.mark.integration
def test_without_consent_no_training_data_is_kept(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a file has fingerprints, rows, environment and random state, no batch and no weights."""
    ranks(train, 4, str(tmp_path), BAD, {})
    (tmp_path / "evidence_plain.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    for file in files(tmp_path).values():
        assert (file.manifest["batch"], file.manifest["weights"]) == (None, None)
        assert file.manifest["environment"]["torch"] == torch.__version__
        assert file.manifest["rows"]["num_rows"] == 4
        state = Reader(file.sections, CPU).read(file.manifest["step"])
        assert "float32(8, 16)" in state["batches"][0]["shape"]
        found = again.run(file, model="evidence_plain:make")
        assert (found.outcome, "evidence_data" in found.detail) == ("unknown", True)
    assert len(files(tmp_path)) == 3
    del sys.modules["evidence_plain"]


@pytest.mark.integration
def test_a_model_that_stops_to_repeat_itself_is_weighed_as_nondeterminism(ranks: Any, tmp_path: Path) -> None:
    """Every replay fails, in no pattern that one node explains."""
    results = ranks(train, 3, str(tmp_path), {"random": True}, {})
    assert all(not suspects for _, _, suspects in results[0])
    kept = files(tmp_path)
    assert kept
    weighed = explain.weigh(kept[min(kept)].manifest)
    assert weighed.explanations[0].name == "nondeterminism"


@pytest.mark.integration
def test_nothing_is_written_by_a_healthy_run_or_where_evidence_is_off(ranks: Any, tmp_path: Path) -> None:
    """No file where nothing was found, nor where `evidence_mb` is 0."""
    assert ranks(train, 3, str(tmp_path / "a"), None, {"evidence_data": "weights"}) == [[]] * 3
    ranks(train, 3, str(tmp_path / "b"), BAD, {"evidence_mb": 0})
    assert list(tmp_path.rglob("*.evidence")) == []


def manifest_of(sections: list[bytes] | None = None, **more: Any) -> bytes:
    return b"".join(bytes(part) for part in form.encode({"event": {}, **more}, sections or []))


class Bomb:
    """What a pickle of it would do when it is loaded."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('executed')",))


def sealed(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()


WHOLE = manifest_of([b"abc", b"defg"])
HOSTILE = {
    "empty": b"",
    "foreign": b"PK\x03\x04" + bytes(200),
    "pickle bomb": pickle.dumps(Bomb()),
    "truncated": WHOLE[:-40],
    "one byte more": WHOLE + b"x",
    "manifest that lies about its length": sealed(form.MAGIC + (1 << 63).to_bytes(8, "little") + b"{}"),
    "manifest that is no JSON": sealed(form.MAGIC + (2).to_bytes(8, "little") + b"{]"),
    "deep JSON": sealed(form.MAGIC + (200000).to_bytes(8, "little") + b"[" * 200000),
    "another schema": sealed(form.MAGIC + (12).to_bytes(8, "little") + b'{"schema":9}'),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_evidence_is_refused_in_words(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1 from show and 3 from replay, one sentence, and nothing in the file is run."""
    path = tmp_path / "x.evidence"
    path.write_bytes(HOSTILE[kind])
    assert main(["evidence", "show", str(path)]) == 1
    assert main(["evidence", "replay", str(path), "--model", "nowhere:make"]) == 3
    assert capsys.readouterr().err.count("sdcwatch evidence: ") == 2


def test_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    """Wherever it lies: in the first line, the manifest, a section or the digest."""
    path = tmp_path / "x.evidence"
    path.write_bytes(WHOLE)
    assert [bytes(s) for s in form.read(path).sections] == [b"abc", b"defg"]
    for position in range(len(WHOLE)):
        wrong = bytearray(WHOLE)
        wrong[position] ^= 1 << position % 8
        path.write_bytes(wrong)
        with pytest.raises(form.EvidenceError):
            form.read(path)


def test_values_come_back_bit_for_bit_and_objects_are_refused() -> None:
    """Strides, dtypes, NaN bits, numbers and structure; a class of the user's is refused by its name."""
    values = {
        "views": torch.randn(4, 6)[:, ::2], "bf16": torch.randn(3).bfloat16(), "bool": torch.tensor([True, False]),
        "nan": torch.tensor([float("nan"), -0.0]), "empty": torch.empty(0, 3), "none": None, "list": [1, -2.5, b"x"],
        "tuple": (True, "text", torch.float16), "scalar": torch.tensor(7), "expanded": torch.ones(1).expand(5),
    }  # fmt: skip
    writer = Writer(1 << 20)
    form_of = json.loads(json.dumps(writer.write(values)))
    back = Reader([memoryview(s) for s in writer.sections], CPU).read(form_of)
    assert repr(back) == repr(values)
    assert back["views"].stride() == values["views"].stride()  # type: ignore[union-attr]
    with pytest.raises(Unkeepable, match="Bomb"):
        writer.write([Bomb()])
    with pytest.raises(Unkeepable, match="evidence_mb"):
        Writer(10).write(torch.ones(100))
    for forged in (
        ["object", 1],
        ["tensor", {}],
        ["tensor", {"section": 99}],
        7,
        ["int", "9" * 5000],
        ["dtype", "exec"],
    ):
        with pytest.raises(form.EvidenceError):
            Reader([memoryview(b"abc")], CPU).read(forged)


@pytest.mark.parametrize(
    ("suspects", "runs", "roles"),
    [
        ([1], {"original": "a", "self": "a", "served": "b"}, {"a": "suspect", "b": "majority"}),
        ([2], {"original": "a", "self": "a", "served": "b"}, {"a": "majority", "b": "suspect"}),
        ([], {"original": "a", "self": "a", "served": "b"}, {"a": "", "b": ""}),
        ([], {"original": "a", "self": "b", "served": "b"}, {"a": "suspect", "b": "majority"}),
        ([], {"self": "b", "served": "b"}, {"b": ""}),
    ],
)
def test_the_majority_is_by_nodes_or_of_those_not_named(
    suspects: list[int], runs: dict[str, str], roles: dict[str, str]
) -> None:
    """O and S of one node are one witness; without a majority no side is called one."""
    rank = {"original": 1, "self": 1, "served": 2}
    gradients = [{"run": n, "rank": rank[n], "node": f"n{rank[n]}", "digest": d} for n, d in runs.items()]
    known = {"event": {"suspects": suspects}, "calibration": {"original_shown": True}, "gradients": gradients}
    assert {side.digest: side.role for side in facts.sides(known)} == roles
