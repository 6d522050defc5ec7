"""Types every command of every runbook against the demo's stack, as the person who was woken would.

Real agents, Prometheus, Alertmanager, service and simulator answer. It stands in a folder of its own that holds what
docs/alerting.md ("The commands of the runbooks") says such a folder holds, puts this run's values in the place of the
placeholders, prints what each command gave, and writes `$DEMO_OUT/runbooks.json`. Exit status 1 where one did not work.

    python demo/main.py --then "python tests/e2e/runbook_play.py"
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNBOOKS = sorted((ROOT / "alert_rules" / "runbooks").glob("*.md"))
#: Programs that are installed wherever the demo runs, and those that this machine does not have, by design.
PROGRAMS = ("sdcwatch", "sdcwatch-remediation", "promtool", "amtool", "curl")
ELSEWHERE = ("chronyc", "timedatectl", "nvidia-smi", "py-spy", "kubectl", "scontrol")
SECONDS = 120
#: An address of its own for an agent with TLS, which the demo does not have.
TLS_ADDRESS = "127.0.1.9"


@dataclass(frozen=True, slots=True)
class Given:
    """What one command gave. `status` is None where it was not run; `gave` is the beginning of what it printed."""

    runbook: str
    command: str
    ok: bool
    status: int | None
    gave: str


def commands() -> list[tuple[str, str]]:
    """(alert, command) of every code span that begins with a program, in order."""
    return [
        (path.stem, span)
        for path in RUNBOOKS
        for span in re.findall(r"`([^`\n]+)`", path.read_text())
        if span.split()[0] in PROGRAMS + ELSEWHERE
    ]


class Desk:
    """The folder and the values of the person on call."""

    def __init__(self, out: Path) -> None:
        self.out = out
        names = ("agent", "remediation", "prometheus", "alertmanager")
        self.ports = {name: int(os.environ[f"DEMO_{name.upper()}_PORT"]) for name in names}
        self.folder = out / "desk"
        (self.folder / "home").mkdir(parents=True)
        # curl ends with status 0 on a 401 unless it is told otherwise.
        (self.folder / "home" / ".curlrc").write_text("fail\nsilent\nshow-error\n")
        config, secrets = out / "config", out / "config" / "secrets"
        for name in ("events", "latch"):
            (self.folder / f"{name}.token").symlink_to(secrets / f"{name}.token")
        (self.folder / "metrics.token").write_text("of-this-run\n")
        (self.folder / "alertmanager.yaml").symlink_to(config / "alertmanager.yaml")
        (self.folder / "sdcwatch-remediation.toml").symlink_to(config / "remediation.toml")
        self.checkpoints = self.folder / "checkpoints"
        shutil.copytree(out / "checkpoints", self.checkpoints)
        # The latch as it stood while the job was halted.
        (released,) = self.checkpoints.glob("HALTED-*.released.json")
        latch = json.loads(released.read_text())
        latch.pop("released")
        released.unlink()
        (self.checkpoints / "HALTED.json").write_text(json.dumps(latch))
        (suspect,) = latch["named"]
        self.gpu, self.instance, self.latch = suspect["gpu_uuid"], suspect["instance"], latch["latch_id"]
        node = json.loads(next(out.glob("nodes/*/spool/*/node.json")).read_text())
        self.spool = out / "nodes" / node["instance"] / "spool"
        self.node = node
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SDCWATCH_", "AWS_", "SLURM", "KUBERNETES"))},
            "PATH": f"{Path(sys.executable).parent}:{ROOT / '.tools' / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.folder / "home"),
            "CURL_HOME": str(self.folder / "home"),
            "SDCWATCH_SPOOL_DIR": str(self.spool),
            "COLUMNS": "200",
        }
        self._await_watchdog()
        self.case = self._newest_case(self.instance)
        self.doubtful = self._ring(node)

    def _await_watchdog(self) -> None:
        """Prometheus may send before it has found its Alertmanager, and sends again after a minute only."""
        alerts = f"http://127.0.0.1:{self.ports['alertmanager']}/api/v2/alerts?filter=alertname%3DSDCWatchdog"
        deadline = time.monotonic() + 2 * SECONDS
        while True:
            with urllib.request.urlopen(alerts, timeout=10) as answer:
                if json.load(answer):
                    return
            assert time.monotonic() < deadline, "Alertmanager never had SDCWatchdog"
            time.sleep(0.5)

    def _newest_case(self, instance: str) -> str:
        shown = self.run(f"sdcwatch-remediation show --instance {instance} --json")
        return str(json.loads(shown.stdout)["id"])

    def _ring(self, node: dict[str, str]) -> str:
        """Rings the doorbell for a healthy node, as a forger would; returns the case, which nobody will prove."""
        labels = {
            "alertname": "SDCReplicaMismatch", "category": "sdc", "severity": "critical", "training_job": "bytegpt",
            "training_cluster": node["cluster"], "training_node": node["node"], "training_instance": node["instance"],
            "gpu_uuid": "CPU-0", "rank": "0", "check": "replay",
        }  # fmt: skip
        alert = {
            "status": "firing", "labels": labels, "annotations": {"event_time": f"{time.time():.3f}"},
            "startsAt": "2026-01-01T00:00:00Z", "endsAt": "0001-01-01T00:00:00Z", "fingerprint": "f",
        }  # fmt: skip
        body = {"version": "4", "status": "firing", "groupKey": "g", "receiver": "r", "alerts": [alert]}
        token = (self.out / "config" / "secrets" / "webhook.token").read_text().strip()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports['remediation']}/v1/alerts",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.status == 200
        return self._newest_case(node["instance"])

    def run(self, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """One command in a shell, as typed."""
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], cwd=self.folder, env={**self.environment, **environment},
            input="y\n", capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip

    def filled(self, command: str) -> str:
        """The command with this run's values in the placeholders' place, and this run's ports."""
        case = self.doubtful if " reject " in command else self.case
        values = {
            "ADDRESS": TLS_ADDRESS, "CASE": case, "INSTANCE": self.instance, "GPU": self.gpu, "ID": self.latch,
            "CHECKPOINT_DIR": str(self.checkpoints), "YOU": "ada", "WHY": "'the runbook said so'", "JOB": "bytegpt",
            "CHECK": "replay", "PID": "1",
        }  # fmt: skip
        text = re.sub(r"\b(" + "|".join(values) + r")\b", lambda match: values[match.group(1)], command)
        for default, name in ((9478, "agent"), (9479, "remediation"), (9090, "prometheus"), (9093, "alertmanager")):
            text = re.sub(rf":{default}\b", f":{self.ports[name]}", text)
        return text


def tls_agent(desk: Desk) -> subprocess.Popen[str]:
    """An agent with TLS and a metrics token, over a copy of one node's spool."""
    spool = desk.folder / "tls-spool"
    shutil.copytree(desk.spool, spool, ignore=shutil.ignore_patterns("agent.lock", "agent.json"))
    cert, key = desk.folder / "ca.crt", desk.folder / "tls.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-days", "2", "-subj", "/CN=sdcwatch-agent", "-addext", "subjectAltName=DNS:sdcwatch-agent"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    command = (
        f"exec sdcwatch agent --spool-dir {spool} --host {TLS_ADDRESS} --port {desk.ports['agent']} "
        f"--tls-cert {cert} --tls-key {key} --events-token-file events.token --metrics-token-file metrics.token "
        f"--node {desk.node['node']} --instance {desk.node['instance']} --cluster {desk.node['cluster']}"
    )
    return serving(desk, command)


def serving(desk: Desk, command: str, **environment: str) -> subprocess.Popen[str]:
    """A started agent that has said that it serves."""
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=desk.folder, env={**desk.environment, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert " serves node " in line, line + process.stdout.read()
    return process


def try_agent(desk: Desk, name: str, command: str) -> Given:
    """`sdcwatch agent` runs until it is ended: it works when it serves, and ends cleanly."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"SDCWATCH_SPOOL_DIR": str(desk.folder / "own-spool"), "SDCWATCH_AGENT_PORT": str(port)}
    process = serving(desk, f"exec {command}", **place)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as answer:
        alive = answer.status == 200
    process.terminate()
    process.communicate(timeout=30)
    return Given(name, command, alive and process.returncode == 0, process.returncode, "serves, then ends cleanly")


def works(command: str, done: subprocess.CompletedProcess[str]) -> bool:
    """Whether the command did what the runbook says it does."""
    # The demo's service acts by itself, so its case is over when somebody looks, and the service says so.
    over = {" approve ": "does not wait for an approval (state closed)", "hold ": "is over: there is nothing to hold"}
    for word, said in over.items():
        if word in command:
            return done.returncode == 1 and said in done.stderr
    return done.returncode == 0


def play(desk: Desk) -> list[Given]:
    """Every command once, in the order of the runbooks."""
    found: list[Given] = []
    seen: dict[str, Given] = {}
    for name, command in commands():
        if command in seen:
            found.append(Given(name, *(getattr(seen[command], field) for field in ("command", "ok", "status", "gave"))))
            continue
        text = desk.filled(command)
        if command.split()[0] in ELSEWHERE:
            parsed = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True, timeout=20)
            given = Given(name, command, parsed.returncode == 0, None, "not here: its syntax was checked")
        elif command == "sdcwatch agent":
            given = try_agent(desk, name, command)
        elif command.startswith("sdcwatch preflight"):
            done = desk.run(f"{text} --seconds 2")
            given = Given(name, command, works(command, done), done.returncode, _first(done))
        else:
            done = desk.run(text)
            given = Given(name, command, works(command, done), done.returncode, _first(done))
        seen[command] = given
        found.append(given)
    return found


def _first(done: subprocess.CompletedProcess[str]) -> str:
    """The beginning of what it printed; all of it, from both streams, where it did not work."""
    if done.returncode != 0:
        return f"{done.stderr.rstrip()}\n{done.stdout.rstrip()}".strip()
    text = " ".join(done.stdout.split())
    return text[:160] if text else "(nothing: no such series)"


def main() -> int:
    """0: every command worked."""
    desk = Desk(Path(os.environ["DEMO_OUT"]))
    secure = tls_agent(desk)
    try:
        found = play(desk)
    finally:
        secure.terminate()
        secure.communicate(timeout=30)
    for given in found:
        status = "-" if given.status is None else given.status
        print(f"{'ok ' if given.ok else 'BAD'} [{status}] {given.runbook}: {given.command}\n        {given.gave}")
    bad = [given for given in found if not given.ok]
    ran = sum(given.status is not None for given in found)
    books = len({given.runbook for given in found})
    print(f"{len(found)} commands of {books} runbooks: {ran} run, {len(found) - ran} not here, {len(bad)} failed")
    for given in bad:
        print(f"BAD [{given.status}] {given.runbook}: {given.command}\n        {given.gave}", file=sys.stderr)
    (desk.out / "runbooks.json").write_text(json.dumps([asdict(given) for given in found], indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
