"""The agent's server: who may ask what, and clients that mean no good."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sdcwatch.agent.server import MAX_WORKERS
from sdcwatch.spool.folders import user_root

Make = Callable[..., Any]
ROADS = [("GET", "/events"), ("POST", "/latch/release"), ("GET", "/metrics")]


@pytest.fixture
def guarded(agent: Make, token_file: Make) -> Any:
    """An agent with a token of its own for each road."""
    return agent(
        "--events-token-file", token_file("events", "e-secret"), "--latch-token-file", token_file("latch", "l-secret"),
        "--metrics-token-file", token_file("metrics", "m-secret"),
    )  # fmt: skip


WRONG = [
    {},
    {"Authorization": "Bearer wrong"},
    {"Authorization": "Bearer "},
    {"Authorization": "Basic e-secret"},
    {"Authorization": "e-secret"},
    {"Authorization": "Bearer \u00e9"},
]


def test_a_missing_or_wrong_token_is_401(guarded: Any) -> None:
    """On each road, and the answer says nothing of what lies behind."""
    for method, path in ROADS:
        for headers in WRONG:
            status, body = guarded.ask(method, path, headers=headers)
            assert status == 401, (path, headers)
            assert json.loads(body).keys() == {"error"}


def test_one_roads_token_opens_no_other(guarded: Any) -> None:
    """The scraper cannot release a latch, and the service's events token cannot either."""
    for method, path in ROADS:
        own = path.strip("/")[0] + "-secret"
        for secret in {"e-secret", "l-secret", "m-secret"} - {own}:
            assert guarded.ask(method, path, token=secret)[0] == 401, (path, secret)
        assert guarded.ask(method, path, {}, token=own)[0] == (400 if method == "POST" else 200)


def test_refusals_are_counted_and_healthz_is_open(guarded: Any) -> None:
    """Somebody trying tokens shows on a dashboard."""
    guarded.ask("GET", "/events", token="x")
    assert guarded.ask("GET", "/healthz")[0] == 200
    text = guarded.ask("GET", "/metrics", token="m-secret")[1]
    assert 'reason="token"} 1\n' in text


def test_a_road_without_a_token_is_closed(agent: Make) -> None:
    """Not open: an agent that was started without secrets gives no events away and releases nothing."""
    running = agent()
    assert running.ask("GET", "/events")[0] == 403
    status, body = running.ask("POST", "/latch/release", {})
    assert status == 403
    assert "--latch-token-file" in body


def test_a_rotated_token_is_taken_up(agent: Make, token_file: Make) -> None:
    """A mounted secret changes under a running agent; one that is being rewritten goes on as it was last read."""
    running = agent("--events-token-file", token_file("events", "old"))
    assert running.ask("GET", "/events", token="old")[0] == 200
    token_file("events", "newer")
    assert running.ask("GET", "/events", token="old")[0] == 401
    assert running.ask("GET", "/events", token="newer")[0] == 200
    token_file("events", "")
    assert running.ask("GET", "/events", headers={"Authorization": "Bearer "})[0] == 401
    assert running.ask("GET", "/events", token="newer")[0] == 200
    token_file("events", "newest\nnewer")
    assert [running.ask("GET", "/events", token=t)[0] for t in ("newest", "newer", "old")] == [200, 200, 401]


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}


def test_a_scraper_with_a_password_gets_the_metrics_and_nothing_else(agent: Make, token_file: Make) -> None:
    """User and password both must fit, a rotated password is taken up, and the other roads stay closed to them."""
    options = ("--metrics-user", "prometheus", "--metrics-password-file", token_file("password", "p-secret"))
    running = agent(*options, "--events-token-file", token_file("events", "e-secret"))
    assert "sdc_build_info" in running.metrics(**basic("prometheus", "p-secret"))
    wrong = [*WRONG, basic("prometheus", "x"), basic("x", "p-secret"), basic("", ""), {"Authorization": "Basic %"}]
    wrong += [{"Authorization": "Bearer p-secret"}, {"Authorization": "Basic p-secret"}]
    for headers in wrong:
        assert running.ask("GET", "/metrics", headers=headers)[0] == 401, headers
    assert running.ask("GET", "/events", headers=basic("prometheus", "p-secret"))[0] == 401
    token_file("password", "another")
    assert running.ask("GET", "/metrics", headers=basic("prometheus", "p-secret"))[0] == 401
    assert running.ask("GET", "/metrics", headers=basic("prometheus", "another"))[0] == 200


def test_a_token_and_a_password_admit_side_by_side(agent: Make, token_file: Make) -> None:
    """While one scraper still has the token, another may come with the password."""
    running = agent(
        "--metrics-token-file", token_file("metrics", "m-secret"),
        "--metrics-user", "prometheus", "--metrics-password-file", token_file("password", "p-secret"),
    )  # fmt: skip
    assert running.ask("GET", "/metrics", token="m-secret")[0] == 200
    assert running.ask("GET", "/metrics", headers=basic("prometheus", "p-secret"))[0] == 200
    assert running.ask("GET", "/metrics")[0] == 401


def test_a_since_that_is_no_time_is_400(guarded: Any) -> None:
    """A filter that cannot be read must not silently filter nothing."""
    for since in ("nan", "inf", "yesterday"):
        assert guarded.ask("GET", f"/events?since={since}", token="e-secret")[0] == 400


def test_other_requests_are_refused(guarded: Any) -> None:
    """Four requests are all there is."""
    for method, path, status in (
        ("GET", "/", 404),
        ("GET", "/../etc/passwd", 404),
        ("POST", "/metrics", 404),
        ("GET", "/latch/release", 405),
        ("DELETE", "/metrics", 501),
    ):
        assert guarded.ask(method, path)[0] == status, path


def release(**changes: Any) -> dict[str, Any]:
    return {"latch_id": "sdc-1", "decision": "release", "instance": "i-9", "case_id": "case-1", "by": "ops", **changes}


BODIES: list[Any] = [
    b"nonsense",
    b"[]",
    b"\xff\xfe",
    release(latch_id="../x"),
    release(latch_id=""),
    release(latch_id=5),
    release(decision="burn"),
    release(by=""),
    release(by="x" * 201),
    release(case_id=None),
    {"latch_id": "sdc-1"},
]


def test_a_body_that_is_no_request_is_400(guarded: Any) -> None:
    """Nothing is released on a guess."""
    for body in BODIES:
        assert guarded.ask("POST", "/latch/release", body, token="l-secret")[0] == 400, body


def test_a_body_without_bounds_is_not_read(guarded: Any) -> None:
    """A token holder by mistake, or a broken proxy, cannot fill the memory."""
    too_long = {"Content-Length": str(1 << 30), "Authorization": "Bearer l-secret"}
    assert guarded.ask("POST", "/latch/release", b"", too_long)[0] == 413
    chunked = {"Transfer-Encoding": "chunked", "Authorization": "Bearer l-secret"}
    assert guarded.ask("POST", "/latch/release", b"0\r\n\r\n", chunked)[0] == 411


def test_silent_clients_do_not_keep_a_scrape_waiting(agent: Make) -> None:
    """Connections that say nothing, or half a request, cost a worker for seconds and a scrape nothing."""
    running = agent()
    silent = []
    try:
        for number in range(MAX_WORKERS - 2):
            silent.append(socket.create_connection(("127.0.0.1", running.port), timeout=10))
            if number % 2:
                silent[-1].sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        began = time.monotonic()
        assert running.metrics()
        assert time.monotonic() - began < 2
    finally:
        for connection in silent:
            connection.close()


def test_more_clients_than_workers_are_turned_away_and_the_server_recovers(agent: Make) -> None:
    """A flood costs the flood; the threads are bounded, and after it a scrape works again."""
    running = agent()
    flood = [socket.create_connection(("127.0.0.1", running.port), timeout=10) for _ in range(MAX_WORKERS + 8)]
    try:
        turned_away = 0
        for connection in reversed(flood[-8:]):
            try:
                turned_away += connection.recv(1) == b""
            except ConnectionResetError:
                turned_away += 1
        assert turned_away == 8
        threads = int(Path(f"/proc/{running.process.pid}/status").read_text().split("Threads:")[1].split()[0])
        assert threads <= MAX_WORKERS + 2
    finally:
        for connection in flood:
            connection.close()
    deadline = time.monotonic() + 20
    while True:
        try:
            assert running.metrics()
            break
        except OSError:
            assert time.monotonic() < deadline


@pytest.fixture
def certificate(tmp_path: Path, require: Callable[[str], Path]) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, made here."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=agent"]
    name = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([require("openssl"), "req", "-x509", *kind, *name], check=True, capture_output=True, timeout=60)
    return cert, key


def test_a_client_silent_in_the_tls_handshake_does_not_keep_a_scrape_waiting(
    agent: Make, certificate: tuple[Path, Path]
) -> None:
    """The handshake happens in a worker; the accept loop goes on."""
    context = ssl.create_default_context(cafile=str(certificate[0]))
    running = agent("--tls-cert", certificate[0], "--tls-key", certificate[1], context=context)
    silent = [socket.create_connection(("127.0.0.1", running.port), timeout=10) for _ in range(4)]
    try:
        silent[0].sendall(b"\x16\x03\x01\x02\x00")  # the beginning of a ClientHello
        silent[1].sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        began = time.monotonic()
        assert running.metrics()
        assert time.monotonic() - began < 2
    finally:
        for connection in silent:
            connection.close()


def latch(root: Path, rank: Any, latch_id: str = "sdc-1", checkpoint_dir: Path | None = None) -> Path:
    record = {
        "schema": 1, "latch_id": latch_id, "training_job": "gpt", "epoch": rank.spool.directory.name, "step": 5,
        "check": "replay", "kind": "attributed", "time": 5.0,
        "named": [{"rank": 1, "node": "n9", "instance": "i-9", "gpu_uuid": "GPU-9"}],
        "nodes": [{"node": "n0", "instance": "i-0"}], "last_clean_step": 4, "trust_needed": "verified",
        "checkpoint_dir": str(checkpoint_dir) if checkpoint_dir else None, "sentence": "rank 1 is wrong",
    }  # fmt: skip
    for folder in filter(None, (rank.spool.job_directory, checkpoint_dir)):
        (folder / "HALTED.json").write_text(json.dumps(record))
    return rank.spool.job_directory / "HALTED.json"


def test_a_latch_is_released_here_and_beside_the_checkpoints_once(
    guarded: Any, rank: Make, root: Path, tmp_path: Path
) -> None:
    """The renamed file says who did it; a repeated call says that it was done."""
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    standing = latch(root, rank(0), checkpoint_dir=checkpoints)
    assert json.loads(guarded.ask("POST", "/latch/release", release(), token="l-secret")[1]) == {
        "schema": 1,
        "result": "released",
    }
    for folder in (standing.parent, checkpoints):
        assert not (folder / "HALTED.json").exists()
        done = json.loads((folder / "HALTED-sdc-1.released.json").read_text())
        assert done["released"]["by"] == "ops"
        assert "case-1" in done["released"]["reason"]
    again = guarded.ask("POST", "/latch/release", release(), token="l-secret")
    assert (again[0], json.loads(again[1])["result"]) == (200, "already_released")


def test_a_latch_of_another_id_stays(guarded: Any, rank: Make, root: Path) -> None:
    """An answer to an old case must not release a new halt."""
    standing = latch(root, rank(0), "sdc-2")
    assert guarded.ask("POST", "/latch/release", release(), token="l-secret")[0] == 404
    assert standing.exists()


def test_a_latch_elsewhere_is_not_touched(guarded: Any, rank: Make, root: Path, tmp_path: Path) -> None:
    """A checkpoint folder whose file is not ours, or another latch's, is left alone."""
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    latch(root, rank(0), checkpoint_dir=checkpoints)
    (checkpoints / "HALTED.json").unlink()
    (checkpoints / "HALTED.json").symlink_to(tmp_path / "elsewhere.json")
    (tmp_path / "elsewhere.json").write_text("{}")
    assert guarded.ask("POST", "/latch/release", release(), token="l-secret")[0] == 200
    assert (tmp_path / "elsewhere.json").read_text() == "{}"


def test_leave_keeps_this_node_out_and_no_other(guarded: Any, root: Path) -> None:
    """QUARANTINE.json is written for this instance alone; a request for another one is a conflict."""
    mark = user_root(root) / "QUARANTINE.json"
    assert guarded.ask("POST", "/latch/release", release(decision="leave"), token="l-secret")[0] == 409
    assert not mark.exists()
    done = guarded.ask("POST", "/latch/release", release(decision="leave", instance="i-0"), token="l-secret")
    assert json.loads(done[1])["result"] == "quarantined"
    said = json.loads(mark.read_text())
    assert (said["instance"], said["case_id"], said["by"]) == ("i-0", "case-1", "ops")


def test_a_node_without_an_instance_id_cannot_be_kept_out(agent: Make, token_file: Make) -> None:
    """An empty id would mean every machine without one."""
    running = agent("--instance", "", "--latch-token-file", token_file("latch", "l-secret"))
    body = release(decision="leave", instance="")
    assert running.ask("POST", "/latch/release", body, token="l-secret")[0] == 409
