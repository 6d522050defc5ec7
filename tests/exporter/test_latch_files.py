"""The latch on disk: one winner, no second halt, a release that counts everywhere, and a start that is refused."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sdcwatch.cli import main
from sdcwatch.errors import SpoolError
from sdcwatch.latch import files as latches

LATCH = latches.Latch(
    latch_id="sdc-00112233445566aa",
    training_job="job",
    epoch="e1-00000000",
    step=20,
    check="replay",
    kind="attributed",
    time=1_800_000_000.0,
    named=(latches.NamedRank(2, "node-3", "i-3", "CPU-i-3-0"),),
    nodes=(latches.LatchNode("node-1", "i-1"), latches.LatchNode("node-3", "i-3")),
    last_clean_step=10,
    trust_needed="verified",
    checkpoint_dir=None,
    sentence="rank 2 computes wrong gradients",
)
UNNAMED = dataclasses.replace(LATCH, latch_id="sdc-00112233445566bb", named=(), kind="inconclusive")


def test_latch_is_the_contract_record(tmp_path: Path) -> None:
    """What lies on disk has exactly the keys of docs/contracts.md, and reads back as the same record."""
    latches.write_latch([tmp_path / "spool", tmp_path / "shared"], LATCH)
    record = json.loads((tmp_path / "spool" / "HALTED.json").read_text())
    assert set(record) == {
        "schema", "latch_id", "training_job", "epoch", "step", "check", "kind", "time", "named", "nodes",
        "last_clean_step", "trust_needed", "checkpoint_dir", "sentence", "same_step_as",
    }  # fmt: skip
    assert set(record["named"][0]) == {"rank", "node", "instance", "gpu_uuid"}
    assert set(record["nodes"][0]) == {"node", "instance"}
    assert latches.read_latch(tmp_path / "shared") == LATCH
    assert [p.name for p in (tmp_path / "spool").iterdir()] == ["HALTED.json"]


def test_first_writer_wins_and_equal_writers_change_nothing(tmp_path: Path) -> None:
    """A second verdict under a standing latch, or the same from another rank, leaves the first one in place."""
    latches.write_latch([tmp_path], LATCH)
    before = (tmp_path / "HALTED.json").stat().st_ino
    latches.write_latch([tmp_path], LATCH)
    latches.write_latch([tmp_path], UNNAMED)
    assert (tmp_path / "HALTED.json").stat().st_ino == before
    assert latches.read_latch(tmp_path) == LATCH


def test_exactly_one_of_many_releasers_wins(tmp_path: Path) -> None:
    """Agents, people and the job may release at once: one gets `released`, the rest learn that it was done."""
    latches.write_latch([tmp_path], LATCH)
    results: list[str] = []
    gate = threading.Barrier(8)

    def go(number: int) -> None:
        gate.wait(10)
        results.append(latches.release(tmp_path, LATCH.latch_id, by=f"agent-{number}", reason="replaced"))

    threads = [threading.Thread(target=go, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(10)
    assert results.count("released") == 1
    assert results.count("already_released") == 7
    assert latches.read_latch(tmp_path) is None
    assert [p.name for p in tmp_path.iterdir()] == [f"HALTED-{LATCH.latch_id}.released.json"]
    assert json.loads(next(tmp_path.iterdir()).read_text())["released"]["reason"] == "replaced"


def test_release_touches_only_the_latch_it_names(tmp_path: Path) -> None:
    """A stale id, a path, and an id of nothing release nothing."""
    latches.write_latch([tmp_path], LATCH)
    for wrong in (UNNAMED.latch_id, "../HALTED", "", "a/b", ".", "x" * 400):
        assert latches.release(tmp_path, wrong, by="a", reason="b") == "absent"
    assert latches.read_latch(tmp_path) == LATCH
    assert latches.release(tmp_path / "nothing", LATCH.latch_id, by="a", reason="b") == "absent"


def test_released_latch_is_not_written_again_but_a_new_one_is(tmp_path: Path) -> None:
    """A late rank cannot halt the job a second time for the same event; the next event can."""
    latches.write_latch([tmp_path], LATCH)
    latches.release(tmp_path, LATCH.latch_id, by="a", reason="b")
    latches.write_latch([tmp_path], LATCH)
    assert latches.read_latch(tmp_path) is None
    latches.write_latch([tmp_path], UNNAMED)
    assert latches.read_latch(tmp_path) == UNNAMED


def test_release_killed_between_its_two_steps_is_a_release(tmp_path: Path) -> None:
    """With the released file written and the old one still there, nothing stands and a new latch takes the place."""
    latches.write_latch([tmp_path], LATCH)
    leftover = (tmp_path / "HALTED.json").read_bytes()
    latches.release(tmp_path, LATCH.latch_id, by="a", reason="b")
    (tmp_path / "HALTED.json").write_bytes(leftover)
    assert latches.read_latch(tmp_path) is None
    assert latches.release(tmp_path, LATCH.latch_id, by="c", reason="d") == "already_released"
    latches.write_latch([tmp_path], UNNAMED)
    assert latches.read_latch(tmp_path) == UNNAMED


def test_release_in_the_shared_folder_counts_for_every_spool(tmp_path: Path) -> None:
    """A spool's own copy stands for nothing once the checkpoint folder it names holds the release."""
    shared, spool = tmp_path / "shared", tmp_path / "spool"
    latch = dataclasses.replace(LATCH, checkpoint_dir=str(shared))
    latches.write_latch([shared, spool], latch)
    assert latches.standing([spool]) == latch
    latches.release(shared, latch.latch_id, by="a", reason="b")
    assert latches.standing([spool]) is None
    assert latches.spread_release([spool], latch.latch_id)
    assert not (spool / "HALTED.json").exists()
    assert latches.read_release(spool, latch.latch_id).by == "a"  # type: ignore[union-attr]


def test_recent_unnamed_counts_only_young_latches_that_name_nobody(tmp_path: Path) -> None:
    """The 24 h rule looks at the halt's own time and at whether somebody was named."""
    for number, (named, age) in enumerate([((), 10.0), ((), 90_000.0), (LATCH.named, 10.0)]):
        latch = dataclasses.replace(LATCH, latch_id=f"sdc-{number}", named=named, time=time.time() - age)
        latches.write_latch([tmp_path], latch)
        latches.release(tmp_path, latch.latch_id, by="a", reason="b")
    assert [e.latch.latch_id for e in latches.recent_unnamed(tmp_path, 86_400)] == ["sdc-0"]
    assert next(e.latch.latch_id for e in latches.released_latches(tmp_path)) == "sdc-1"
    assert len(latches.released_latches(tmp_path)) == 3


def test_quarantine_means_one_instance_only(tmp_path: Path) -> None:
    """A mark for another instance (a re-used disk) and a node without an instance id are free to train."""
    latches.write_quarantine(tmp_path, "i-3", "case-1", "service")
    assert latches.quarantined(tmp_path, "i-3").case_id == "case-1"  # type: ignore[union-attr]
    assert latches.quarantined(tmp_path, "i-4") is None
    assert latches.quarantined(tmp_path, "") is None
    with pytest.raises(ValueError, match="instance id"):
        latches.write_quarantine(tmp_path, "", "case-1", "service")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema": 1}', b'{"schema": 2}', b"\xff\xfe"])
def test_unreadable_latch_counts_as_standing(tmp_path: Path, content: bytes) -> None:
    """Half a file, another schema or rubbish under the latch's name keeps the job stopped and says which file."""
    (tmp_path / "HALTED.json").write_bytes(content)
    with pytest.raises(SpoolError, match=r"HALTED\.json"):
        latches.read_latch(tmp_path)
    said = io.StringIO()
    with pytest.raises(SystemExit) as end:
        latches.refuse_start([tmp_path], uid_root=tmp_path / "uid", instance="i-1", stream=said)
    assert end.value.code == 86
    assert "HALTED.json" in said.getvalue()


def test_symlink_is_not_followed(tmp_path: Path) -> None:
    """Nobody can put another file's content in the latch's place by a link."""
    (tmp_path / "elsewhere.json").write_text("{}")
    os.symlink(tmp_path / "elsewhere.json", tmp_path / "HALTED.json")
    with pytest.raises(SpoolError):
        latches.read_latch(tmp_path)


def test_start_is_refused_even_inside_a_wrapper_that_catches_every_exception(tmp_path: Path) -> None:
    """`except Exception` around the whole program does not turn the refusal into a start; the block says what to do."""
    latches.write_latch([tmp_path], LATCH)
    program = (
        "import sys\nfrom sdcwatch.latch.files import refuse_start\n"
        "try:\n    refuse_start([sys.argv[1]], uid_root=sys.argv[1], instance='i-1')\n"
        "except Exception:\n    pass\nprint('trained')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 86
    assert "trained" not in done.stdout
    assert f"sdcwatch latch release --dir {tmp_path} --latch-id {LATCH.latch_id}" in done.stderr
    assert "node-3" in done.stderr


def test_quarantined_instance_is_refused_without_a_latch(tmp_path: Path) -> None:
    """After the latch is released for the others, the bad node alone stays out."""
    latches.write_quarantine(tmp_path, "i-3", "case-1", "service")
    with pytest.raises(SystemExit):
        latches.refuse_start([tmp_path], uid_root=tmp_path, instance="i-3", stream=io.StringIO())
    latches.refuse_start([tmp_path], uid_root=tmp_path, instance="i-4", stream=io.StringIO())


def test_command_shows_and_releases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`show` is 1 while a latch stands and 0 after; `release` needs the id, is 1 for one that is not there."""
    latches.write_latch([tmp_path], LATCH)
    folder = ["--dir", str(tmp_path)]
    assert main(["latch", "show", *folder]) == 1
    assert LATCH.sentence in capsys.readouterr().out
    release = ["latch", "release", *folder, "--by", "ada", "--reason", "checked by hand", "--latch-id"]
    assert main([*release, "sdc-other"]) == 1
    assert main([*release, LATCH.latch_id]) == 0
    capsys.readouterr()
    assert main(["latch", "show", *folder, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["standing"] is None
    assert shown["released"][0]["by"] == "ada"
    assert main(["latch", "show", "--dir", str(tmp_path / "none")]) == 2
    assert main([*release, " "]) == 2
    assert "latch show" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", '{"schema": 99}'])
def test_command_says_what_to_do_about_an_unreadable_latch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    """It stands, so `show` is 1; `release` frees the readable folders, is 1 too, and leaves the file as it is."""
    broken, fine = tmp_path / "broken", tmp_path / "fine"
    broken.mkdir()
    latches.write_latch([fine], dataclasses.replace(LATCH, checkpoint_dir=None))
    (broken / latches.LATCH_FILE).write_text(content)
    folders = ["--dir", str(broken), "--dir", str(fine)]
    assert main(["latch", "show", *folders]) == 1
    assert "move it away" in capsys.readouterr().err
    who = ["--by", "ada", "--reason", "checked"]
    released = main(["latch", "release", *folders, "--latch-id", LATCH.latch_id, *who])
    assert latches.read_latch(fine) is None
    assert (broken / latches.LATCH_FILE).read_text() == content
    said = capsys.readouterr()
    assert f"{fine}: released" in said.out
    assert released == 1
    assert "move it away" in said.err
