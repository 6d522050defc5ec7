"""Real Prometheus, Alertmanager, agents and service as processes that can be killed and started again.

Each program writes its own log, is ended by its own process id, and keeps its folder over a restart, as a service
manager's would.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[4]
RULES = ROOT / "alert_rules"
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def tool(name: str) -> str:
    """Path of a monitoring program, from `make setup` or PATH."""
    own = ROOT / ".tools" / "bin" / name
    return str(own) if own.exists() else name


def free_port(*addresses: str) -> int:
    """A port that is free on every one of these addresses (TCP and UDP)."""
    for _ in range(50):
        with contextlib.ExitStack() as held:
            port = 0
            try:
                for address in addresses or ("127.0.0.1",):
                    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                        probe = held.enter_context(socket.socket(socket.AF_INET, kind))
                        probe.bind((address, port))
                        port = probe.getsockname()[1]
            except OSError:
                continue
            return port
    raise AssertionError("no free port found")


def wait(what: str, condition: Callable[[], Any], seconds: float = 30.0, pause: float = 0.05) -> Any:
    """The first true value of a condition; an AssertionError that names `what` when it does not come."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, f"not within {seconds:g} s: {what}"
        time.sleep(pause)
    return found


def fetch(url: str, body: Any = None, token: str = "") -> Any:
    """GET, or POST of JSON; the parsed answer, its text where it is no JSON, None where nobody answers."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    data = None if body is None else json.dumps(body).encode()
    try:
        with _OPENER.open(urllib.request.Request(url, data, headers), timeout=5) as answer:
            text = answer.read().decode()
    except OSError:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text or "ok"


class Program:
    """One process with its command, so that it can be killed and started again in the same place."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, ready: Callable[[], Any], **variables: str
    ) -> None:
        self.name, self.command, self.log, self.ready = name, list(command), log, ready
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("SDCWATCH_", "SLURM", "KUBERNETES"))}
        self.environment = {**keep, "SDCWATCH_MAX_OVERHEAD": "0", **variables}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, await_ready: bool = True) -> Program:
        with open(self.log, "ab") as stream:
            self.process = subprocess.Popen(
                self.command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, env=self.environment
            )
        if await_ready:
            self.await_ready()
        return self

    def await_ready(self) -> Program:
        wait(f"{self.name} is ready; its log ends:\n{self.tail()}", self._is_ready, 60)
        return self

    def _is_ready(self) -> Any:
        assert self.process is not None
        assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}:\n{self.tail()}"
        return self.ready()

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)

    def end(self) -> None:
        """SIGTERM, and SIGKILL after five seconds."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-1500:] if self.log.exists() else ""


def alertmanager_tree(receivers: Mapping[str, str], token: Path | None = None) -> dict[str, Any]:
    """The configuration that ships, its receivers pointed at the given base URLs (`service` and `pager`)."""
    tree: dict[str, Any] = yaml.safe_load((RULES / "alertmanager.yaml").read_text())
    for receiver in tree["receivers"]:
        for hook in receiver["webhook_configs"]:
            base = receivers["service" if receiver["name"] == "automation" else "pager"]
            hook["url"] = base + "/" + hook["url"].split("/", 3)[3]
            if "http_config" in hook:
                hook.pop("http_config")
                if token is not None:
                    authorization = {"type": "Bearer", "credentials_file": str(token)}
                    hook["http_config"] = {"authorization": authorization}
    return tree


def alertmanager(
    folder: Path,
    name: str,
    tree: Any,
    *,
    port: int,
    cluster: int = 0,
    peers: Iterable[int] = (),
    more: Iterable[str] = (),
) -> Program:
    """An Alertmanager; `cluster` and `peers` are gossip ports (0: alone)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(tree, sort_keys=False))
    gossip = f"127.0.0.1:{cluster}" if cluster else ""
    command = [
        tool("alertmanager"), f"--config.file={config}", f"--storage.path={folder / name}", "--log.level=warn",
        f"--web.listen-address=127.0.0.1:{port}", f"--cluster.listen-address={gossip}",
        *([f"--cluster.advertise-address={gossip}"] if gossip else []),
        *(f"--cluster.peer=127.0.0.1:{peer}" for peer in peers), *more,
    ]  # fmt: skip
    return Program(name, command, folder / f"{name}.log", lambda: fetch(f"http://127.0.0.1:{port}/-/ready"))


def prometheus(
    folder: Path,
    name: str,
    *,
    port: int,
    agents: Iterable[str],
    alertmanagers: Iterable[int],
    scrape: str = "5s",
    evaluation: str = "5s",
    labels: Mapping[str, str] | None = None,
    rules: str = str(RULES / "*.rules.yaml"),
    more: Iterable[str] = (),
) -> Program:
    """A Prometheus with the rules that ship. External labels are dropped before they reach Alertmanager."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = {
        "global": {
            "scrape_interval": scrape,
            "scrape_timeout": min("4s", scrape, key=lambda text: float(text[:-1])),
            "evaluation_interval": evaluation,
            "external_labels": dict(labels or {}),
        },
        "rule_files": [rules],
        "alerting": {
            # Two Prometheis must send the same alert, or Alertmanager takes it for two.
            "alert_relabel_configs": [{"action": "labeldrop", "regex": "prometheus_replica"}],
            "alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{one}" for one in alertmanagers]}]}],
        },
        "scrape_configs": [{"job_name": "sdcwatch", "static_configs": [{"targets": list(agents)}]}],
    }
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(tree, sort_keys=False))
    command = [
        tool("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / name}", "--log.level=warn",
        f"--web.listen-address=127.0.0.1:{port}", *more,
    ]  # fmt: skip
    return Program(name, command, folder / f"{name}.log", lambda: fetch(f"http://127.0.0.1:{port}/-/ready"))
