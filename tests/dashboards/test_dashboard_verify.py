"""`dashboards/verify.sh` against a small Grafana on loopback: what it asks, what it says, and that nothing stays.

The stand-in knows the few requests of Grafana's HTTP API that the script makes, and refuses all others. It runs queries
against a real Prometheus where it is given one. No Grafana could be had where these tests run.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

VERIFY = Path(__file__).parents[2] / "dashboards" / "verify.sh"
TOKEN = "glsa_loopback"

pytestmark = pytest.mark.needs("jq", "curl")


class Grafana:
    """What a scratch import touches: folders and dashboards, and a Prometheus behind one data source."""

    def __init__(self) -> None:
        self.folders: set[str] = set()
        self.dashboards: dict[str, str] = {"sdcwatch-fleet": "kept"}  # uid -> folder; one of the user's own
        self.requests: list[tuple[str, str]] = []
        self.expressions: list[str] = []
        self.prometheus = ""
        self.answer: Callable[[dict[str, Any]], dict[str, Any]] = lambda query: self.frames([[1.0], [2.0]])
        self.refuse_delete = False
        self.asked = threading.Event()
        self.url = ""

    @staticmethod
    def frames(values: list[list[float]]) -> dict[str, Any]:
        return {"status": 200, "frames": [{"schema": {"fields": []}, "data": {"values": values}}]}

    def handle(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.requests.append((method, path))
        address = urllib.parse.urlsplit(path)
        if (method, path) == ("GET", "/api/datasources"):
            other = {"uid": "loki", "type": "loki", "isDefault": True}
            return 200, [other, {"uid": "prom", "type": "prometheus", "isDefault": False}]
        if (method, path) == ("POST", "/api/folders"):
            self.folders.add(body["uid"])
            return 200, {"uid": body["uid"]}
        if (method, path) == ("POST", "/api/dashboards/db"):
            return self._import(body)
        if (method, path) == ("POST", "/api/ds/query"):
            return self._query(body)
        if method == "DELETE" and address.path.startswith("/api/folders/"):
            return self._delete(address.path.rpartition("/")[2])
        if method == "GET" and address.path.startswith("/api/datasources/uid/prom/resources/api/v1/label/"):
            return 200, self._values(address)
        return 501, {"message": f"the stand-in has no {method} {path}"}

    def _import(self, body: Any) -> tuple[int, Any]:
        dashboard = body["dashboard"]
        known = dashboard["uid"] in self.dashboards or len(dashboard["uid"]) > 40
        if dashboard["id"] is not None or body["overwrite"] or known or body["folderUid"] not in self.folders:
            return 412, {"message": "would touch a dashboard that is not the script's own"}
        self.dashboards[dashboard["uid"]] = body["folderUid"]
        return 200, {"uid": dashboard["uid"]}

    def _query(self, body: Any) -> tuple[int, Any]:
        self.asked.set()
        results = {}
        for query in body["queries"]:
            assert query["datasource"] == {"type": "prometheus", "uid": "prom"}
            self.expressions.append(query["expr"])
            results[query["refId"]] = self._through(body, query) if self.prometheus else self.answer(query)
        return (400 if any("error" in r for r in results.values()) else 200), {"results": results}

    def _through(self, body: Any, query: Any) -> dict[str, Any]:
        start, end = int(body["from"]) / 1000, int(body["to"]) / 1000
        built_in = {"__range_s": f"{int(end - start)}", "__range": f"{int(end - start)}s", "__rate_interval": "30s"}
        expr = re.sub(r"\$(\w+)", lambda match: built_in[match[1]], query["expr"])
        path = "query" if query["instant"] else "query_range"
        when = {"time": end} if query["instant"] else {"start": start, "end": end, "step": 1}
        address = f"{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode({'query': expr, **when})}"
        with urllib.request.urlopen(address, timeout=20) as answer:
            found = json.load(answer)["data"]["result"]
        return {"status": 200, "frames": [{"data": {"values": [[1.0], [2.0]]}} for _ in found]}

    def _values(self, address: urllib.parse.SplitResult) -> Any:
        if not self.prometheus:
            return {"status": "success", "data": ["one"]}
        path = address.path.partition("/resources")[2]
        with urllib.request.urlopen(f"{self.prometheus}{path}?{address.query}", timeout=20) as answer:
            return json.load(answer)

    def _delete(self, uid: str) -> tuple[int, Any]:
        if self.refuse_delete:
            return 403, {"message": "no right to delete"}
        if uid not in self.folders:
            return 404, {"message": "folder not found"}
        self.folders.discard(uid)
        self.dashboards = {name: folder for name, folder in self.dashboards.items() if folder != uid}
        return 200, {}


@pytest.fixture
def grafana() -> Iterator[Grafana]:
    state = Grafana()

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"null")
            allowed = self.headers["Authorization"] == f"Bearer {TOKEN}"
            status, answer = state.handle(self.command, self.path, body) if allowed else (401, {"message": "no"})
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_DELETE = _answer

        def log_message(self, format: str, *args: object) -> None:
            """Requests are kept in `requests`."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield state
    server.shutdown()
    server.server_close()
    thread.join(30)


def start(grafana: Grafana, folder: Path, token: str = TOKEN, **environment: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        # A shell cannot trap what was ignored as it began, and a run in the background begins with SIGINT ignored.
        ["env", "--default-signal=INT,HUP,TERM", VERIFY, grafana.url, token],
        env={**os.environ, "TMPDIR": str(folder), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def one_dashboard(tmp_path: Path) -> Path:
    """The script beside the smallest dashboard alone: the same road in a fraction of the time."""
    folder = tmp_path / "dashboards"
    folder.mkdir()
    shutil.copy(VERIFY, folder)
    document = json.loads((VERIFY.parent / "training-job.json").read_text())
    document["panels"] = document["panels"][:4]
    (folder / "training-job.json").write_text(json.dumps(document))
    return folder / "verify.sh"


def short(grafana: Grafana, tmp_path: Path, token: str = TOKEN, **environment: str) -> subprocess.CompletedProcess[str]:
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        [one_dashboard(tmp_path), grafana.url, token], env={**os.environ, "TMPDIR": str(work), **environment},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert list(work.iterdir()) == [], "temporary files stayed behind"
    return done


@pytest.mark.integration
def test_a_full_grafana_passes_and_keeps_nothing(grafana: Grafana, tmp_path: Path) -> None:
    """Variables are filled in, and afterwards only the dashboard that was there before is there."""
    done = short(grafana, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "panels: 4 with data, 0 rightly empty, 0 EMPTY, 0 FAILED" in done.stdout
    assert 'max by (state) (sdc_training_state{training_job="one"}) == 1' in grafana.expressions
    assert grafana.folders == set()
    assert grafana.dashboards == {"sdcwatch-fleet": "kept"}
    assert TOKEN not in done.stdout + done.stderr


def test_empty_panels_are_reported_with_their_reason(grafana: Grafana, tmp_path: Path) -> None:
    """A panel that may be empty says why; one that must not be makes the run fail."""
    grafana.answer = lambda query: (
        grafana.frames([]) if "sdc_training_state" not in query["expr"] else grafana.frames([[]])
    )
    done = short(grafana, tmp_path)
    assert done.returncode == 1
    assert "empty   Newest verdict that names a rank (no rank was named)" in done.stdout
    assert "EMPTY   State" in done.stdout
    assert grafana.folders == set()


@pytest.mark.integration
def test_a_query_that_fails_is_told_with_grafanas_words(grafana: Grafana, tmp_path: Path) -> None:
    """A refusal of the data source is not taken for an empty panel."""
    grafana.answer = lambda query: {"status": 400, "error": "parse error at char 7"}
    done = short(grafana, tmp_path)
    assert done.returncode == 1
    assert "4 FAILED" in done.stdout
    assert "parse error at char 7" in done.stdout + done.stderr
    assert grafana.folders == set()


def test_a_wrong_token_makes_nothing(grafana: Grafana, tmp_path: Path) -> None:
    """Refused at the first request: a sentence, and no folder."""
    done = short(grafana, tmp_path, token="wrong")
    assert done.returncode == 2
    assert "cannot list data sources" in done.stderr
    assert grafana.requests == []


def test_a_folder_that_cannot_be_removed_is_named(grafana: Grafana, tmp_path: Path) -> None:
    """The script cannot clean up: it says what to delete, and does not end as if all were well."""
    grafana.refuse_delete = True
    done = short(grafana, tmp_path)
    assert done.returncode == 1
    assert f"folder {next(iter(grafana.folders))} is still there" in done.stderr


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.integration),
        pytest.param(signal.SIGHUP, marks=pytest.mark.integration),
    ],
)
def test_a_run_that_is_interrupted_removes_its_folder(grafana: Grafana, tmp_path: Path, number: int) -> None:
    """Ended amid the queries, it still leaves nothing."""
    running = start(grafana, tmp_path / "work")
    assert grafana.asked.wait(30)
    assert grafana.folders
    running.send_signal(number)
    running.communicate(timeout=30)
    assert running.returncode == 128 + number
    assert grafana.folders == set()
    assert grafana.dashboards == {"sdcwatch-fleet": "kept"}
    assert list((tmp_path / "work").iterdir()) == []


def test_shellcheck_has_nothing_to_say(require: Callable[[str], Path]) -> None:
    """Quoting and traps as they should be."""
    installed = Path(sys.executable).with_name("shellcheck")
    program = installed if installed.exists() else require("shellcheck")
    done = subprocess.run([program, VERIFY], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.integration
@pytest.mark.needs("prometheus")
def test_all_dashboards_pass_against_a_real_prometheus(grafana: Grafana, world: Any, tmp_path: Path) -> None:
    """Every panel of every dashboard, through the script and the stand-in, to a Prometheus that scraped a fault."""
    grafana.prometheus = world.url
    span = {"FROM": str(int(world.started * 1000) - 1000), "TO": str(int(time.time() * 1000))}
    running = start(grafana, tmp_path / "work", **span, VAR_job="bytegpt")
    out, err = running.communicate(timeout=110)
    assert running.returncode == 0, out + err
    assert "0 EMPTY, 0 FAILED" in out
    assert len(grafana.expressions) > 80
    assert grafana.folders == set()
