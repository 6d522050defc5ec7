"""A real Prometheus scrapes every agent of a fleet and evaluates all rules as they ship.

One server on loopback answers for all agents, each under a path of its own; one rank carries an event, and after a
while all ranks of its node. The time of an evaluation is Prometheus' own, of a whole group: what it records, every
expression, and the look-ups that each alert's text makes.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RULES = Path(__file__).resolve().parent.parent / "alert_rules"
PAGE = "sdcwatch-mismatch"
#: Seconds between evaluations, as in alert_rules/prometheus.yaml; a group may name an interval of its own.
EVALUATE = 5


class _Agents(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512
    texts: Sequence[bytes] = ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of connections that Prometheus resets when it ends; anything else is an error as ever."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        assert isinstance(self.server, _Agents)
        text = self.server.texts[int(self.path.strip("/"))]
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: thousands of scrapes a minute."""


def scraped(
    texts: Sequence[str], later: str, *, interval: int = 60, evaluations: int = 5, limit: float = 240
) -> dict[str, Any]:
    """Scrapes all agents; seconds of the rule groups' evaluations once every agent was scraped.

    Args:
        texts: what each agent serves.
        later: what the first one serves after the first evaluations; more ranks of it carry an event.
        interval: seconds between scrapes of an agent.
        evaluations: evaluations of the page's group to take the median and the slowest of.
        limit: seconds until it gives up.

    Raises:
        TimeoutError: not every agent was scraped within `limit`.
    """
    server = _Agents(("127.0.0.1", 0), _Answer)
    server.texts = [text.encode() for text in texts]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="sdcwatch-fleet-") as folder:
        port = _write(Path(folder), f"127.0.0.1:{server.server_address[1]}", len(texts), interval)
        command = ["prometheus", f"--config.file={folder}/p.yaml", f"--storage.tsdb.path={folder}/data"]
        command.append(f"--web.listen-address=127.0.0.1:{port}")
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            base = f"http://127.0.0.1:{port}"
            found = _all_up(base, process.pid, len(texts), limit)
            one = _evaluated(base, 1, evaluations, limit)
            server.texts = [later.encode(), *server.texts[1:]]
            node = _evaluated(base, 2, evaluations, limit)
            return {**found, "page_group": [one[PAGE], node[PAGE]], "groups": list(one.values())}
        finally:
            process.terminate()
            process.wait(30)
            server.shutdown()
            server.server_close()


def _write(folder: Path, address: str, agents: int, interval: int) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    groups = [{"targets": [address], "labels": {"__metrics_path__": f"/{n}", "agent": str(n)}} for n in range(agents)]
    (folder / "agents.json").write_text(json.dumps(groups))
    config = {
        "global": {
            "scrape_interval": f"{interval}s",
            "scrape_timeout": f"{min(15, interval)}s",
            "evaluation_interval": f"{EVALUATE}s",
        },
        "rule_files": [str(RULES / "*.rules.yaml")],
        "scrape_configs": [
            {"job_name": "sdcwatch", "file_sd_configs": [{"files": [str(folder / "agents.json")]}]},
        ],
    }
    (folder / "p.yaml").write_text(json.dumps(config))  # JSON is YAML
    return port


def _all_up(base: str, pid: int, agents: int, limit: float) -> dict[str, Any]:
    begin = time.monotonic()
    while (up := _number(base, 'count(up{job="sdcwatch"} == 1)') or 0) < agents:
        if time.monotonic() - begin > limit:
            raise TimeoutError(f"{up:.0f} of {agents} agents were scraped in {limit:.0f} s")
        time.sleep(1)
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {
        "targets": agents,
        "all_scraped_after_s": time.monotonic() - begin,
        "series": _number(base, 'sum(scrape_samples_post_metric_relabeling{job="sdcwatch"})'),
        "prometheus_mb": next(int(line.split()[1]) / 1024 for line in status if "VmRSS" in line),
    }


def _evaluated(base: str, ranks: int, evaluations: int, limit: float) -> dict[str, dict[str, Any]]:
    """Every group by its name, from evaluations with at least so many ranks paged, each seen once."""
    begin = time.monotonic()
    paged = 0.0
    seen: dict[str, dict[str, dict[str, Any]]] = {}
    while (of_page := len(seen.get(PAGE, ()))) <= evaluations:
        if time.monotonic() - begin > limit:
            raise TimeoutError(f"{of_page} of {evaluations} evaluations with {ranks} ranks paged were seen")
        paged = _number(base, 'count(ALERTS{alertname="SDCReplicaMismatch"})') or 0
        for group in _groups(base) if paged >= ranks else ():
            seen.setdefault(group["name"], {})[group["lastEvaluation"]] = group
        time.sleep(1)
    return {name: {**_taken(list(times.values())), "paged": paged} for name, times in seen.items()}


def _taken(evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and slowest of one group's evaluations, and its slowest rule in the last."""
    counted = evaluations[1:] or evaluations  # the first may have been seen with fewer paged
    seconds = sorted(group["evaluationTime"] for group in counted)
    slowest = max(counted[-1]["rules"], key=lambda rule: rule["evaluationTime"])
    return {
        "group": counted[-1]["name"], "seconds": seconds[len(seconds) // 2], "seconds_most": seconds[-1],
        "slowest_rule": slowest["name"], "slowest_rule_seconds": slowest["evaluationTime"],
    }  # fmt: skip


def _groups(base: str) -> list[dict[str, Any]]:
    """The groups that have been evaluated; none where Prometheus does not answer."""
    found = _asked(base, "rules")
    return [group for group in found["groups"] if group["evaluationTime"]] if found else []


def _number(base: str, query: str) -> float | None:
    found = _asked(base, f"query?{urllib.parse.urlencode({'query': query})}")
    return float(found["result"][0]["value"][1]) if found and found["result"] else None


def _asked(base: str, what: str) -> dict[str, Any] | None:
    """What Prometheus says, or None where it does not answer."""
    try:
        with urllib.request.urlopen(f"{base}/api/v1/{what}", timeout=30) as answer:
            data: dict[str, Any] = json.load(answer)["data"]
    except OSError:
        return None
    return data
