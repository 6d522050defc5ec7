"""The spool as a rank uses it: claims, durability, quotas, and what a shared /tmp may try."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sdcwatch.errors import SpoolError
from sdcwatch.spool.folders import job_folder_name, job_of_folder, job_root, prepare_user_root, user_root
from sdcwatch.spool.rank import Spool, iter_ranks, read_events

EPOCH = "e1764600000000-00c0ffee"
NEXT = "e1764600000001-00c0ffee"
IDENTITY = {
    "training_job": "gpt", "training_cluster": "", "training_node": "n0", "training_instance": "i-0",
    "gpu_uuid": "GPU-0", "rank": "0",
}  # fmt: skip


def line(time: float = 5.0, **event: object) -> dict[str, object]:
    return {"schema": 1, "event": {"id": "sdc-1", "time": time, "ranks": [{"instance": "i-0"}], **event}}


def claim(root: Path, epoch: str = EPOCH, rank: int = 0, **more: object) -> Spool:
    return Spool.open(root, "gpt", epoch, rank, 0, {**IDENTITY, "rank": str(rank)}, **more)  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def spool(root: Path) -> Iterator[Spool]:
    spool = claim(root)
    yield spool
    spool.close()


def child(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    """A second real process that opens rank 0's spool as `spool` in `root`, then runs `code`."""
    opening = (
        "import sys, os\nfrom sdcwatch.spool.rank import Spool\n"
        f"spool = Spool.open(sys.argv[1], 'gpt', sys.argv[2], 0, 0, {IDENTITY!r})\n"
    )
    words = [sys.executable, "-c", opening + code, *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_folders_are_0700_and_files_0600(root: Path, spool: Spool) -> None:
    """Nobody else on the node can read events or plant files; only the root is shared, and sticky."""
    spool.write_metrics("x 1\n")
    spool.append_event(line())
    assert root.stat().st_mode & 0o7777 == 0o1777
    for folder in (user_root(root), spool.job_directory, spool.directory):
        assert folder.stat().st_mode & 0o777 == 0o700
    files = sorted(spool.directory.iterdir())
    assert [f.name for f in files] == ["rank-0.events.jsonl", "rank-0.json", "rank-0.prom"]
    assert {f.stat().st_mode & 0o777 for f in files} == {0o600}
    assert spool.job_directory == job_root(root, "gpt")


def test_metrics_are_replaced_whole(spool: Spool) -> None:
    """A reader sees the old file or the new one, through its own open file, never a mixture."""
    assert spool.write_metrics("first 1\n" * 100)
    with open(spool.directory / "rank-0.prom") as reader:
        assert spool.write_metrics("second 2\n")
        assert reader.read() == "first 1\n" * 100
    assert (spool.directory / "rank-0.prom").read_text() == "second 2\n"


def test_an_appended_event_survives_sigkill(root: Path) -> None:
    """What append_event returned True for is there after the process was killed at once."""
    process = child(
        f"print(spool.append_event({line()!r}), flush=True)\nsys.stdin.read()\nos.kill(os.getpid(), 9)", root, EPOCH
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"True\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    assert [e["event"]["id"] for e in read_events(user_root(root))[0]] == ["sdc-1"]


def test_a_second_process_cannot_be_the_same_rank(root: Path, spool: Spool) -> None:
    """The refusal names the process that has the claim, and what to do."""
    process = child("print('got it')", root, EPOCH)
    out, err = process.communicate(timeout=20)
    assert out == b""
    assert f"already claimed by process {os.getpid()}".encode() in err
    assert b"SDCWATCH_JOB" in err


def test_a_claim_ends_with_its_process(root: Path) -> None:
    """After a SIGKILL the rank can be claimed again; nobody has to clean up."""
    process = child("print('up', flush=True)\nimport time\ntime.sleep(60)", root, EPOCH)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    assert [files.alive for files in iter_ranks(user_root(root))] == [True]
    process.kill()
    process.communicate(timeout=20)
    assert [files.alive for files in iter_ranks(user_root(root))] == [False]
    claim(root).close()


def test_close_says_that_the_rank_ended_by_itself(root: Path) -> None:
    """A reader can tell an end from a death; closing twice is harmless, writing after it does nothing."""
    spool = claim(root)
    spool.close()
    spool.close()
    (files,) = iter_ranks(user_root(root))
    assert not files.alive
    assert files.claim()["closed"] > 0
    assert not spool.write_metrics("x 1\n")
    assert not spool.append_event(line())


def test_a_forked_child_writes_nothing_and_holds_no_claim(root: Path) -> None:
    """A DataLoader worker inherits the monitor; it must not write as the rank, nor keep its claim alive."""
    spool = claim(root)
    spool.write_metrics("parent 1\n")
    go, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        wrote = spool.write_metrics("child 1\n") or spool.append_event(line())
        os.write(done[1], b"w" if wrote else b".")
        os.read(go[0], 1)
        os._exit(0)
    try:
        assert os.read(done[0], 1) == b"."
        assert (spool.directory / "rank-0.prom").read_text() == "parent 1\n"
        assert not (spool.directory / "rank-0.events.jsonl").exists()
        spool.close()
        claim(root).close()  # while the child still lives
    finally:
        os.write(go[1], b"x")
        os.waitpid(pid, 0)
        for descriptor in (*go, *done):
            os.close(descriptor)


def test_a_forked_child_that_closes_does_not_end_the_rank(spool: Spool, root: Path) -> None:
    """The monitor's exit hooks also run in a child that exits normally."""
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        spool.close()
        os._exit(0)
    os.waitpid(pid, 0)
    (files,) = iter_ranks(user_root(root))
    assert files.alive
    assert "closed" not in files.claim()
    assert spool.write_metrics("x 1\n")


def test_counters_of_the_newest_older_epoch_of_the_same_identity_are_found(root: Path) -> None:
    """A restarted rank goes on from its own last file, not from a newer one of other hardware."""
    for epoch, gpu, text in (
        ("e100-00000000", "GPU-0", "oldest 1\n"),
        ("e200-00000000", "GPU-0", "old 1\n"),
        ("e300-00000000", "GPU-7", "other gpu 1\n"),
        ("e9000000000000-00000000", "GPU-0", "newer 1\n"),
    ):
        earlier = Spool.open(root, "gpt", epoch, 0, 0, {**IDENTITY, "gpu_uuid": gpu})
        earlier.write_metrics(text)
        earlier.close()
    spool = claim(root)
    assert spool.previous_metrics() == "old 1\n"
    spool.close()
    first = claim(root, "e50-00000000")
    assert first.previous_metrics() is None
    first.close()


def test_a_quota_refuses_and_counts_and_never_raises(root: Path) -> None:
    """A full spool costs records, not the training run."""
    spool = claim(root, quota_bytes=4096)
    assert spool.append_event(line(sentence="x" * 1000))
    assert not spool.append_event(line(sentence="x" * 4000))
    assert not spool.write_metrics("y" * 4000)
    assert spool.refused == 2
    assert "quota is 4096" in spool.last_refusal
    assert spool.append_event(line())
    assert len(read_events(user_root(root))[0]) == 2
    spool.close()


def test_evidence_leaves_half_of_the_quota_to_journals(root: Path) -> None:
    """A file that would take more is refused whole, with what to raise, and leaves nothing behind."""
    spool = claim(root, quota_bytes=8192)
    assert not spool.write_evidence("sdc-1.rank-0.evidence", [b"x" * 3000, b"y" * 3000])
    assert "raise SDCWATCH_SPOOL_QUOTA_MB" in spool.last_refusal
    assert spool.refused == 1
    assert not list(root.rglob("*evidence*"))
    assert spool.write_evidence("sdc-2.rank-0.evidence", [b"x" * 1500, b"y" * 1500])
    assert not spool.write_evidence("sdc-3.rank-0.evidence", [b"x" * 1500])
    assert spool.append_event(line(sentence="x" * 3000))
    (kept,) = root.rglob("*.evidence*")
    assert kept.read_bytes() == b"x" * 1500 + b"y" * 1500
    spool.close()


def test_the_quota_is_the_jobs_not_the_ranks(root: Path) -> None:
    """Old epochs and other ranks of the same job count."""
    with_old = claim(root, "e100-00000000", quota_bytes=8192)
    with_old.append_event(line(sentence="x" * 6000))
    with_old.close()
    spool = claim(root, quota_bytes=8192)
    assert not spool.append_event(line(sentence="x" * 3000))
    spool.close()


@pytest.mark.parametrize("bad", [{"time": float("nan")}, {"x": object()}])
def test_a_line_that_is_not_json_is_refused(spool: Spool, bad: dict[str, object]) -> None:
    """A journal that others parse holds JSON only."""
    assert not spool.append_event(bad)
    assert spool.refused == 1


def test_a_folder_that_vanished_is_a_refusal(spool: Spool) -> None:
    """An operator who removes the spool under a run costs records only."""
    for path in spool.directory.iterdir():
        path.unlink()
    spool.directory.rmdir()
    assert not spool.write_metrics("x 1\n")
    assert not spool.append_event(line())
    assert spool.refused == 2


def test_a_partial_last_line_is_no_line_and_the_next_one_is(root: Path, spool: Spool) -> None:
    """A crash within a write loses that line alone."""
    spool.append_event(line(1.0))
    journal = spool.directory / "rank-0.events.jsonl"
    with journal.open("ab") as stream:
        stream.write(b'{"schema":1,"event":{"time":2.0')
    assert [e["event"]["time"] for e in read_events(user_root(root))[0]] == [1.0]
    spool.append_event(line(3.0))
    assert [e["event"]["time"] for e in read_events(user_root(root))[0]] == [1.0, 3.0]


def test_events_are_filtered_sorted_and_cut_visibly(root: Path) -> None:
    """All epochs are read; the oldest come first and a cut is said."""
    for epoch, times in ((NEXT, (4.0, 1.0)), (EPOCH, (3.0, 2.0))):
        spool = claim(root, epoch)
        for when in times:
            spool.append_event(line(when))
        spool.append_event(line(9.0, ranks=[{"instance": "i-other"}]))
        spool.append_event({"schema": 1, "event": "odd"})
        spool.close()
    own = user_root(root)
    assert [e["event"]["time"] for e in read_events(own, instance="i-0")[0]] == [1.0, 2.0, 3.0, 4.0]
    assert [e["event"]["time"] for e in read_events(own, instance="i-0", since=3.0)[0]] == [3.0, 4.0]
    lines, cut = read_events(own, instance="i-0", limit=3)
    assert ([e["event"]["time"] for e in lines], cut) == ([1.0, 2.0, 3.0], True)


@pytest.mark.parametrize("depth", ["root", "user", "job", "epoch"])
def test_a_symlink_anywhere_in_the_spool_is_refused(tmp_path: Path, root: Path, depth: str) -> None:
    """Someone who plants a link in /tmp must not make us write elsewhere."""
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    link = {
        "root": root,
        "user": user_root(root),
        "job": job_root(root, "gpt"),
        "epoch": job_root(root, "gpt") / EPOCH,
    }[depth]
    link.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    link.symlink_to(target)
    with pytest.raises(SpoolError, match="symlink"):
        claim(root)
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("name", ["rank-0.json", "rank-0.events.jsonl", ".rank-0.prom.partial"])
def test_a_symlink_in_place_of_a_file_is_not_followed(tmp_path: Path, root: Path, name: str) -> None:
    """Not even by the writer whose folder it is in."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    claim(root).close()
    place = job_root(root, "gpt") / EPOCH / name
    place.unlink(missing_ok=True)
    place.symlink_to(victim)
    try:
        spool = claim(root)
    except SpoolError:
        assert name == "rank-0.json"
    else:
        spool.write_metrics("x 1\n")
        spool.append_event(line())
        assert spool.refused == 1
        spool.close()
    assert victim.read_text() == "precious"


def test_a_spool_of_another_owner_is_refused(root: Path) -> None:
    """The folder of our own number may have been made by somebody else."""
    if os.geteuid() != 0:
        pytest.skip("needs root to give a folder away")
    prepare_user_root(root)
    os.chown(user_root(root), 12345, -1)
    with pytest.raises(SpoolError, match="belongs to user 12345"):
        claim(root)


def test_a_root_that_others_can_rearrange_is_refused(root: Path) -> None:
    """World-writable without the sticky bit means that anyone may swap our folder."""
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(SpoolError, match=r"chmod \+t"):
        claim(root)


def test_a_place_that_cannot_be_a_folder_is_a_clear_error(tmp_path: Path) -> None:
    """The message names the place and the setting."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolError, match="SDCWATCH_SPOOL_DIR"):
        claim(tmp_path / "file" / "spool")


@pytest.mark.parametrize("job", ["", "x" * 201, "a\0b", "\ud800", "é" * 200])
def test_a_job_name_that_no_folder_can_hold_is_refused(root: Path, job: str) -> None:
    """At the start, with the setting that changes it."""
    with pytest.raises(SpoolError, match="SDCWATCH_JOB"):
        Spool.open(root, job, EPOCH, 0, 0, IDENTITY)


@pytest.mark.parametrize(
    "job", ["..", ".", "../../etc", "/abs", "a/b", "node.json", "agent.lock", "x.partial", "%2e%2e"]
)
def test_an_odd_job_name_stays_inside_and_apart(root: Path, job: str) -> None:
    """No name leaves the user's folder or takes the place of one of the agent's files."""
    spool = Spool.open(root, job, EPOCH, 0, 0, IDENTITY)
    assert spool.job_directory.parent == user_root(root)
    assert spool.job_directory.name not in (".", "..", "node.json", "agent.lock", job)
    assert [files.job for files in iter_ranks(user_root(root))] == [job]
    spool.close()


@given(st.text(min_size=1, max_size=30), st.text(min_size=1, max_size=30))
def test_folder_names_are_reversible_and_never_collide(one: str, two: str) -> None:
    """Two jobs never share a folder."""
    names = []
    for job in (one, two):
        try:
            name = job_folder_name(job)
        except SpoolError:
            return
        assert job_of_folder(name) == job
        assert "/" not in name
        names.append(name)
    assert (names[0] == names[1]) == (one == two)


@pytest.mark.parametrize("epoch", ["", "..", "e1", "e1-xyz", "e1-00000000/..", "e1-00000000\n"])
def test_an_epoch_with_an_odd_name_is_refused(root: Path, epoch: str) -> None:
    """An epoch becomes a folder, so it is checked."""
    with pytest.raises(SpoolError, match="epoch"):
        claim(root, epoch)
