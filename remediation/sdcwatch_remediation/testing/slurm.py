"""A real Slurm controller with emulated nodes on loopback, for tests: Debian's slurm-wlm as ordinary processes.

What it does: starts munged, slurmctld and one slurmd a node with a configuration, keys and folders of their own, on
free ports of 127.0.0.1; runs Slurm's commands against it; ends everything it started, jobs included.
What it never does: read or touch a Slurm that the machine has, listen beyond loopback, or leave a process behind.
Its place: `needs("slurmctld")` says whether the programs are there (`setup/integrations.sh`).
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sdcwatch_remediation.errors import RemediationError

WAIT_SECONDS = 60.0


class SlurmProblem(RemediationError):
    """A program of Slurm did not do what the test needs; the message holds its own words."""


class SlurmCluster:
    """One controller and some nodes; a context manager.

    Every node is a slurmd of its own on this machine, so jobs on all of them run here.
    """

    def __init__(self, slurmctld: Path, nodes: Sequence[str] = ("n1", "n2", "n3"), *, cpus: int = 4) -> None:
        """Prepare files; nothing runs before `start`.

        Args:
            slurmctld: the program, as installed or as unpacked from Debian's package; the others stand around it.
            nodes: names of the nodes.
            cpus: CPUs that each node claims to have, however many there are.
        """
        root = slurmctld.resolve().parents[2]
        self._sbin, self._bin = root / "usr/sbin", root / "usr/bin"
        self._libraries = [folder for folder in sorted((root / "usr/lib").glob("*-linux-gnu")) if folder.is_dir()]
        self.nodes, self._cpus = tuple(nodes), cpus
        # Unix sockets have short names, and pytest's folders are long.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.conf = self.folder / "slurm.conf"
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        """Variables under which Slurm's commands speak to this cluster."""
        plugins = [str(folder / "slurm-wlm") for folder in self._libraries]
        return {
            **{key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))},
            "SLURM_CONF": str(self.conf),
            "LD_LIBRARY_PATH": ":".join([*map(str, self._libraries), *plugins]),
            "PATH": os.pathsep.join([str(self._bin), os.environ.get("PATH", os.defpath)]),
            "SLURM_TIME_FORMAT": "%s",
        }

    def program(self, name: str) -> str:
        """Return the path of one of Slurm's commands (`scontrol`, `squeue`, ...)."""
        return str(self._bin / name)

    def start(self) -> SlurmCluster:
        """Start everything and wait until every node is idle.

        Raises:
            SlurmProblem: it did not come up; the message holds the logs' last lines.
        """
        ports = _free_ports(1 + len(self.nodes))
        self._write(ports)
        here = self.folder
        self._run_daemon(
            "munged",
            str(self._sbin / "munged"),
            "--force",
            "--foreground",
            "--num-threads=2",
            *(f"--{key}={here / name}" for key, name in _MUNGE_FILES.items()),
        )
        self.wait(lambda: (here / "munge.socket").exists(), "munged has a socket")
        self._run_daemon("slurmctld", str(self._sbin / "slurmctld-wlm"), "-D", "-c", "-f", str(self.conf))
        for node in self.nodes:
            step = str(self._sbin / "slurmstepd-wlm")
            self._run_daemon(f"slurmd-{node}", str(self._sbin / "slurmd-wlm"), "-D", "-N", node, "-d", step)
        self.wait(lambda: all(self.state(node) == {"IDLE"} for node in self.nodes), "every node is idle")
        return self

    def run(self, name: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands against this cluster, at most `WAIT_SECONDS` long."""
        done = subprocess.run(
            [self.program(name), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            cwd=self.folder,
            check=False,
        )
        if check and done.returncode:
            raise SlurmProblem(f"{name} {' '.join(arguments)}: {done.stderr.strip()}{self._last_words()}")
        return done

    def submit(self, script: str, *options: str, name: str = "train") -> str:
        """Submit a shell script as a batch job and return its id; its output goes to `job-<id>.out` in `folder`."""
        path = self.folder / f"script-{secrets.token_hex(4)}.sh"
        path.write_text("#!/bin/sh\n" + script)
        words = self.run("sbatch", "--parsable", "-J", name, "-o", str(self.folder / "job-%j.out"), *options, str(path))
        return words.stdout.strip().partition(";")[0]

    def field(self, kind: str, name: str, key: str) -> str:
        """Return one `Key=value` of `scontrol --oneliner show <kind> <name>`; empty where it has none."""
        line = self.run("scontrol", "--oneliner", "show", kind, name).stdout
        start = line.find(f" {key}=")
        if start < 0:
            return ""
        words = line[start + len(key) + 2 :].split(" ")
        value = [words[0]]
        for word in words[1:]:
            if "=" in word and word.partition("=")[0].isidentifier():
                break
            value.append(word)
        return " ".join(value).strip()

    def state(self, node: str) -> set[str]:
        """Return the state of a node and its flags, such as `{"IDLE", "DRAIN"}`; empty while nobody answers."""
        done = self.run("scontrol", "--oneliner", "show", "node", node, check=False)
        word = done.stdout.partition(" State=")[2].partition(" ")[0]
        return {part.strip("*~#$@") for part in word.split("+") if part}

    def job_state(self, job: str) -> str:
        """Return the state of a job (`RUNNING`, `PENDING`, ...); empty when it is forgotten."""
        done = self.run("scontrol", "--oneliner", "show", "job", job, check=False)
        return done.stdout.partition(" JobState=")[2].partition(" ")[0]

    def start_soon(self, job: str, *changes: str) -> None:
        """Let a requeued job start in two seconds, with changes such as `reqnodelist=n2`; Slurm would take two minutes.

        Not at once: a slurmd refuses the same job within the second in which it ended there ("Job credential
        revoked"), and the controller then ends it for good.
        """
        self.run("scontrol", "update", f"jobid={job}", *changes, "starttime=now+2")

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait until a condition holds, or raise `SlurmProblem` with what was waited for and the logs' last lines."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until or any(process.poll() is not None for process in self._processes):
                raise SlurmProblem(f"not so after {seconds:.0f} s: {what}{self._last_words()}")
            time.sleep(0.05)

    def stop_controller(self) -> None:
        """End slurmctld, as if its machine were gone; the nodes' daemons go on."""
        controller = self._processes.pop(1)
        controller.kill()
        controller.wait(10)

    def close(self) -> None:
        """End all jobs and processes of this cluster, and remove its folder."""
        with contextlib.suppress(subprocess.TimeoutExpired, SlurmProblem, OSError):
            self.run("scancel", "--full", "--signal=KILL", f"--user={getpass.getuser()}", check=False)
        for process in reversed(self._processes):
            process.kill()  # nothing of theirs is kept, and an orderly end takes slurmctld ten seconds
            process.wait(10)
        until = time.monotonic() + WAIT_SECONDS
        while (left := _processes_with(f"SLURM_CONF={self.conf}")) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> SlurmCluster:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_daemon(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self._processes.append(
                subprocess.Popen(words, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            )

    def _write(self, ports: Sequence[int]) -> None:
        here, user, host = self.folder, getpass.getuser(), socket.gethostname().partition(".")[0]
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (here / name).mkdir()
        (here / "munge.key").write_bytes(secrets.token_bytes(128))
        (here / "munge.key").chmod(0o600)
        plugins = ":".join(str(folder / "slurm-wlm") for folder in self._libraries)
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus} State=UNKNOWN"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        )
        self.conf.write_text(
            _CONF.format(here=here, user=user, plugins=plugins, port=ports[0], nodes=nodes, all=",".join(self.nodes))
        )

    def _last_words(self) -> str:
        logs = sorted(self.folder.glob("*.out"))
        return "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-600:]}" for log in logs)


_MUNGE_FILES = {
    "socket": "munge.socket",
    "key-file": "munge.key",
    "pid-file": "munged.pid",
    "log-file": "munged.log",
    "seed-file": "munge.seed",
}

# NoCtldInAddrAny and NoInAddrAny: bind to the addresses named here only. config_overrides: a node may claim more CPUs
# than this machine has.
_CONF = """\
ClusterName=sdcwatch
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={here}/munge.socket
CredType=cred/munge
PluginDir={plugins}
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool-%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,batch_sched_delay=0,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=1
KillWait=2
InactiveLimit=0
{nodes}
PartitionName=main Nodes={all} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _processes_with(variable: str) -> list[int]:
    """Return the processes whose environment holds a variable: what a slurmd of ours started, and its jobs."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable.encode() in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found
