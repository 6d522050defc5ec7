"""Notices to a webhook: signed, bounded, recorded, never in a case's way, and none without a configuration."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from sdcwatch_remediation import notify
from sdcwatch_remediation.config import check, load
from sdcwatch_remediation.errors import ConfigError
from sdcwatch_remediation.settings import Notify
from sdcwatch_remediation.testing.provider import fleet
from sdcwatch_remediation.testing.rig import Rig, make_rig

SECRET = b"between-us"


class Receiver:
    """A webhook on loopback; `script` says how it answers, the last entry for ever."""

    def __init__(self) -> None:
        self.script: list[Any] = [200]
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.release = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                """Keep quiet."""

            def do_GET(self) -> None:
                outer.got.append(({"method": "GET"}, b""))
                self.send_response(200)
                self.end_headers()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {key.lower(): value for key, value in self.headers.items()}
                outer.got.append(({**headers, "path": self.path}, body))
                answer = outer.script.pop(0) if len(outer.script) > 1 else outer.script[0]
                if answer == "lost":
                    self.close_connection = True
                    return
                if answer == "slow":
                    outer.release.wait(20)
                    return
                if answer == "dribbles":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                    while not outer.release.wait(0.05):
                        try:
                            self.wfile.write(b"x-a: b\r\n")
                        except OSError:
                            return
                    return
                self.send_response(answer)
                if answer == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/hook"

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def rig(tmp_path: Path, receiver: Receiver) -> Iterator[Rig]:
    with make_rig(tmp_path, fleet(4), mode="approve") as made:
        set_notify(made, tmp_path, url=receiver.url)
        yield made


def set_notify(rig: Rig, folder: Path, **changes: Any) -> None:
    (folder / "notify.secret").write_bytes(SECRET + b"\n")
    values: dict[str, Any] = {"secret_file": str(folder / "notify.secret"), "states": ("awaiting_approval", "closed")}
    settings = Notify(**{**values, "timeout_seconds": 2.0, **changes})
    rig.config = check(dataclasses.replace(rig.config, notify=settings))
    rig.restart()


def send(rig: Rig, rounds: int = 1, *, seconds: float = 0.0) -> None:
    assert rig.service.notices is not None
    for _ in range(rounds):
        rig.clock.now += seconds
        rig.service.notices.round()


def notes(rig: Rig) -> list[tuple[str, int, bool]]:
    lines = [line for line in rig.case()["timeline"] if line["step"].startswith("notify_")]
    return [(line["step"], line["detail"]["attempt"], line["detail"]["last"]) for line in lines]


def test_a_listed_state_is_told_once_signed_and_recorded(rig: Rig, receiver: Receiver) -> None:
    """One POST for the move, with a signature that the receiver can check; `proving` was not listed, so not told."""
    rig.fault(2)
    rig.rounds(4, seconds=1)
    send(rig, 3)
    assert len(receiver.got) == 1
    headers, body = receiver.got[0]
    told = json.loads(body)
    case = rig.case()
    assert (told["case"], told["state"], told["from"]) == (case["id"], "awaiting_approval", "settling")
    assert (told["node"], told["cluster"], told["event"]) == ("node-2", "demo", case["event_id"])
    expected = hmac.new(SECRET, headers["x-sdcwatch-timestamp"].encode() + b"." + body, hashlib.sha256).hexdigest()
    assert headers["x-sdcwatch-signature"] == f"sha256={expected}"
    assert headers["x-sdcwatch-delivery"] == told["id"]
    assert (headers["path"], headers["content-type"]) == ("/hook", "application/json")
    assert notes(rig) == [(notify.DELIVERED, 1, True)]


def test_a_broken_receiver_is_tried_a_bounded_number_of_times(rig: Rig, receiver: Receiver) -> None:
    """500, with growing pauses, six times; then it is recorded as failed for good and never sent again."""
    receiver.script = [500]
    rig.fault(2)
    rig.rounds(4, seconds=1)
    send(rig, 2)
    assert len(receiver.got) == 1  # the second attempt is not due yet
    for _ in range(12):
        rig.service.context.lease.hold()  # as the worker does
        send(rig, 2, seconds=10)
    assert len(receiver.got) == 6
    assert notes(rig) == [(notify.FAILED, n, n == 6) for n in range(1, 7)]
    assert len({headers["x-sdcwatch-delivery"] for headers, _ in receiver.got}) == 1
    metric = rig.service.telemetry.registry.get_sample_value("sdc_remediation_errors_total", {"where": "notify"})
    assert metric == 6


def test_a_lost_answer_is_repeated_under_the_same_id_also_after_a_crash(rig: Rig, receiver: Receiver) -> None:
    """The receiver may have it already: the id tells. The count of attempts survives the restart."""
    receiver.script = ["lost", 200]
    rig.fault(2)
    rig.rounds(4, seconds=1)
    send(rig)
    rig.restart()
    rig.rounds(1)
    send(rig, 2, seconds=5)
    first, second = (headers["x-sdcwatch-delivery"] for headers, _ in receiver.got)
    assert first == second
    assert notes(rig) == [(notify.FAILED, 1, False), (notify.DELIVERED, 2, True)]


@pytest.mark.parametrize(("status", "why"), [(302, "redirect"), (404, "status 404")])
def test_a_redirect_is_not_followed_and_a_definite_no_is_not_repeated(
    rig: Rig, receiver: Receiver, status: int, why: str
) -> None:
    """One request in all, and the reason in the audit log."""
    receiver.script = [status]
    rig.fault(2)
    rig.rounds(4, seconds=1)
    send(rig, 20, seconds=5)
    assert [headers.get("path") for headers, _ in receiver.got] == ["/hook"]
    assert notes(rig) == [(notify.FAILED, 1, True)]
    line = next(line for line in rig.case()["timeline"] if line["step"] == notify.FAILED)
    assert why in line["detail"]["problem"]


@pytest.mark.parametrize("how", ["slow", "dribbles"])
def test_a_slow_receiver_holds_up_no_case(rig: Rig, receiver: Receiver, tmp_path: Path, how: str) -> None:
    """While a notice waits for its answer the worker decides and replaces; the notice itself ends in time."""
    receiver.script = [how]
    set_notify(rig, tmp_path, url=receiver.url, states=("proving",), timeout_seconds=1.0)
    rig.restart(mode="auto")
    rig.fault(2)
    rig.rounds(1)
    notices = rig.service.notices
    assert notices is not None
    thread = threading.Thread(target=notices.round, daemon=True)
    began = time.monotonic()
    thread.start()
    until = began + 10
    while not receiver.got and time.monotonic() < until:
        receiver.release.wait(0.01)
    rig.rounds(5, seconds=1)
    assert rig.provider.calls == [rig.provider.members[2].instance_id]
    thread.join(15)
    assert not thread.is_alive()
    assert time.monotonic() - began < 10
    assert notes(rig)[0][:2] == (notify.FAILED, 1)


def test_nothing_is_called_without_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default configuration makes no sender, and no case opens a connection of its own."""

    def never(*_: object, **__: object) -> Any:
        raise AssertionError("a call without a configuration")

    with make_rig(tmp_path, fleet(4), mode="approve") as rig:
        assert rig.service.notices is None
        monkeypatch.setattr(notify.Notifier, "__init__", never)
        monkeypatch.setattr(httpx, "post", never)
        rig.restart()
        rig.fault(2)
        rig.rounds(4, seconds=1)
        assert rig.case()["state"] == "awaiting_approval"
        assert notes(rig) == []


def test_old_moves_are_not_told_and_a_process_without_the_lease_tells_nothing(rig: Rig, receiver: Receiver) -> None:
    """After a long outage the log says what was not told; a standby does not double the notices."""
    rig.fault(2)
    rig.rounds(4, seconds=1)
    assert rig.service.notices is not None
    rig.service.context.lease.give_up()
    send(rig)
    assert (receiver.got, notes(rig)) == ([], [])
    rig.clock.now += 3700
    assert rig.service.context.lease.hold()
    send(rig)
    assert (receiver.got, notes(rig)) == ([], [(notify.FAILED, 0, True)])


def test_a_wrong_configuration_is_told_at_start(rig: Rig, tmp_path: Path) -> None:
    """A URL that is none, a missing key and a state that does not exist; the URL itself is not repeated."""
    for wrong, words in (
        ({"url": "ftp://hooks.example.com/T0K3N"}, r"notify\.url"),
        ({"secret_file": ""}, r"notify\.secret_file"),
        ({"states": ("replaced",)}, r"notify\.states: 'replaced'"),
    ):
        settings = dataclasses.replace(rig.config.notify, **wrong)
        with pytest.raises(ConfigError, match=words) as caught:
            check(dataclasses.replace(rig.config, notify=settings))
        assert "T0K3N" not in str(caught.value)
    file = tmp_path / "remediation.toml"
    file.write_text('[notify]\nurl = "https://hooks.example.com/x"\nsecret_file = "no.secret"\n')
    with pytest.raises(ConfigError, match=r"notify\.secret_file .*no\.secret cannot be read"):
        load(file)
