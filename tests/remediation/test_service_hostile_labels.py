"""Label text reaches no command: an audit hook of Python watches a service that may drain with real processes."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sdcwatch_remediation.settings import Actions
from sdcwatch_remediation.testing.events import alert
from sdcwatch_remediation.testing.provider import fleet
from sdcwatch_remediation.testing.rig import Rig, make_rig

PROCESS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty"}
NETWORK = {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"}
HOSTILE = (
    "all", "ALL", "n[1-64]", "a,b", "-h", "--help", "x;reboot", "$(touch pwned)", "`touch pwned`", "x|touch pwned",
    "x&touch pwned", "../x", "n1\n", "n1\x00", "n" * 512, "nоde-1", "http://169.254.169.254/latest", "n1/../n2",
    "%s%n", "\u202en1", "{{7*7}}", "'; drop table cases; --",
)  # fmt: skip
LABELS = ("training_node", "training_instance", "training_cluster", "training_job", "gpu_uuid", "rank", "check")


class Watched:
    """What the process did while it was armed; a hook cannot be taken away again, so it looks at `armed`."""

    def __init__(self) -> None:
        self.armed = False
        self.seen: list[tuple[str, tuple[Any, ...]]] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, words: tuple[Any, ...]) -> None:
        if self.armed and event in PROCESS | NETWORK:
            self.seen.append((event, words))

    def argvs(self) -> list[list[str]]:
        """Return the argument vectors of all processes that were started."""
        return [[str(word) for word in words[1]] for event, words in self.seen if event == "subprocess.Popen"]


@pytest.fixture(scope="module")
def hook() -> Watched:
    return Watched()


@pytest.fixture
def watched(hook: Watched) -> Iterator[Watched]:
    hook.seen.clear()
    hook.armed = True
    yield hook
    hook.armed = False


@contextmanager
def draining(folder: Path) -> Iterator[Rig]:
    """A service in mode auto that drains through commands of Slurm's names, which do nothing."""
    commands = folder / "bin"
    commands.mkdir()
    for name in ("scontrol", "squeue", "scancel"):
        path = commands / name
        path.write_text("#!/bin/sh\nexit 0\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    with make_rig(folder, fleet(4), actions=Actions(isolate="slurm", slurm_bin_dir=str(commands))) as rig:
        yield rig


def test_no_label_starts_a_process_or_opens_a_connection(tmp_path: Path, hook: Watched) -> None:
    """Each label with each hostile text, through the door and three rounds: refused, and nothing left the process."""
    with draining(tmp_path) as rig:
        hook.seen.clear()
        hook.armed = True
        try:
            alerts = [alert(fleet(4)[1], 1, **{label: text}) for label in LABELS for text in HOSTILE]
            results = rig.ring(*alerts)
            rig.rounds(3, seconds=1)
        finally:
            hook.armed = False
        let_in = [a["labels"] for a, result in zip(alerts, results, strict=True) if result["result"] != "rejected"]
        # Names of jobs and checks are free within a plain alphabet; such an alert opens a case about the true node.
        accepted = {(label, labels[label]) for labels in let_in for label in LABELS if labels[label] in HOSTILE}
        assert {label for label, _ in accepted} <= {"training_job", "check"}
        assert all(text.isascii() and text.strip("-").isalpha() for _, text in accepted)
        agents = {(agent.address, rig.config.agents.port) for agent in rig.provider.members}
        assert {words[1] for event, words in hook.seen if event == "socket.connect"} <= agents
        assert [event for event, _ in hook.seen if event in PROCESS] == []
        assert [event for event, _ in hook.seen if event in NETWORK - {"socket.connect", "socket.getaddrinfo"}] == []
        hosts = {str(words[0]) for event, words in hook.seen if event == "socket.getaddrinfo"}
        assert hosts <= {address for address, _ in agents}
        assert rig.provider.calls == []
    assert not list(Path.cwd().glob("pwned"))


@pytest.mark.parametrize(
    "job", ["x;touch pwned", "$(touch pwned)", "-w all", "a,b", "train\nnodename=all", "../x", "all"]
)
def test_a_hostile_job_name_of_a_proven_event_reaches_no_command(
    tmp_path: Path, watched: Watched, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two agents attest an event whose job is called so: commands are vectors of words, none of them a job's name."""
    monkeypatch.chdir(tmp_path)
    with draining(tmp_path) as rig:
        rig.fault(1, training_job=job)
        rig.rounds(5, seconds=1)
        found = watched.argvs()
        assert found, "the hook sees the commands that Slurm is asked with"
        assert {Path(argv[0]).name for argv in found} <= {"scontrol", "squeue"}
        assert [word for argv in found for word in argv if job in word] == []
        assert {"/bin/sh", "sh", "bash"}.isdisjoint(Path(argv[0]).name for argv in found)
    assert not (tmp_path / "pwned").exists()
