"""What cannot work is said before it is tried, one sentence each; no command ends in a traceback."""

from __future__ import annotations

import getpass
import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from sdcwatch_remediation import cli, config
from sdcwatch_remediation.database import Database
from sdcwatch_remediation.errors import ConfigError
from sdcwatch_remediation.server import _bind
from sdcwatch_remediation.settings import Server

FILES = {"alerts": b"a-1\n", "cases": b"c-1\n", "events": b"e-1\n", "latch": b"l-1\n", "junk": b"not PEM\n"}


def write(folder: Path, **changes: dict[str, Any]) -> Path:
    """Write a configuration that works but for the changes, and the files it names."""
    tree: dict[str, dict[str, Any]] = {
        "cluster": {"name": "demo"},
        "server": {"alerts_token_file": "alerts", "cases_token_file": "cases"},
        "agents": {"events_token_file": "events", "latch_token_file": "latch"},
    }
    for section, values in changes.items():
        tree.setdefault(section, {}).update(values)
    lines = [f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in t.items()) for name, t in tree.items()]
    (folder / "service.toml").write_text("".join(lines))
    for name, content in FILES.items():
        if not (folder / name).exists():
            (folder / name).write_bytes(content)
    return folder / "service.toml"


BROKEN: list[tuple[dict[str, Any], dict[str, bytes], str]] = [
    ({"server": {"port": 99999}}, {}, "server.port must be at most 65535"),
    ({"server": {"tls_cert_file": "none", "tls_key_file": "junk"}}, {}, "server.tls_cert_file"),
    ({"server": {"tls_cert_file": "junk", "tls_key_file": "none"}}, {}, "server.tls_key_file"),
    ({"server": {"tls_cert_file": "junk", "tls_key_file": "junk"}}, {}, "are not a PEM certificate chain"),
    ({"database": {"url": "oracel://host/name"}}, {}, "'oracel', which SQLAlchemy does not know"),
    ({"database": {"url": "postgresql+psycopg2://host/name"}}, {}, "needs a driver that is not installed"),
    ({"database": {"url": "sqlite:///none/x.sqlite3"}}, {}, "does not exist; create it"),
    ({"server": {"alerts_token_file": "none"}}, {}, "server.alerts_token_file: token file"),
    ({}, {"alerts": b" \n"}, "holds 0 tokens"),
    ({}, {"alerts": b"a\nb\nc\n"}, "holds 3 tokens"),
    ({}, {"alerts": "schlüssel".encode()}, "not printable ASCII"),
    ({}, {"alerts": b"one", "cases": b"one"}, "the alerts and cases token files share a token"),
    ({"agents": {"events_token_file": "none"}}, {}, "agents.events_token_file"),
    ({}, {"events": b"\n"}, "agents.events_token_file"),
    ({"agents": {"latch_token_file": "none"}}, {}, "agents.latch_token_file"),
    ({}, {"events": b"\xff\xfe\x00"}, "does not begin with printable ASCII"),
    ({"agents": {"ca_file": "junk"}}, {}, "agents.ca_file"),
    ({"cluster": {"endpoint_url": "not a url"}}, {}, "cluster.endpoint_url"),
    ({"cluster": {"name": "no/such name"}}, {}, "cluster.name"),
    ({"policy": {"group_share": 2.0}}, {}, "policy.group_share"),
    ({"tracing": {"endpoint": "127.0.0.1:4318"}}, {}, "tracing.endpoint"),
]


@pytest.mark.parametrize(("changes", "files", "sentence"), BROKEN)
@pytest.mark.parametrize("check", [["--check"], []], ids=["check", "serve"])
def test_what_cannot_work_is_said_before_it_is_tried(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    files: dict[str, bytes],
    sentence: str,
    check: list[str],
) -> None:
    """`serve --check` and `serve` both end with status 2 and one line that names the setting."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert cli.main(["serve", *check, "--config", str(write(tmp_path, **changes))]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert sentence in lines[0]


def test_one_look_finds_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody has to start five times to learn of five mistakes."""
    path = write(
        tmp_path,
        server={"port": 70000, "alerts_token_file": "none"},
        policy={"group_share": 2.0},
        cluster={"endpoint_url": "x"},
        agents={"events_token_file": "none"},
    )
    assert cli.main(["serve", "--check", "--config", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 5


def test_a_configuration_that_works_is_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The check refuses nothing that can be served, and creates no database."""
    path = write(tmp_path, tracing={"endpoint": "http://127.0.0.1:4318"}, cluster={"endpoint_url": "http://[::1]:1/"})
    assert cli.main(["serve", "--check", "--config", str(path)]) == 0
    assert "is fine: cluster demo" in capsys.readouterr().out
    assert not (tmp_path / "remediation.sqlite3").exists()


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 65536), ("x" * 70, 0), ("a\0b", 0), ("::zz", 0)])
def test_an_address_that_cannot_be_bound_is_one_sentence(host: str, port: int) -> None:
    """Whatever Python raises for it, the service says which settings to change."""
    with pytest.raises(ConfigError, match=r"set server\.host and server\.port"):
        _bind(Server(host=host, port=port))


@pytest.mark.parametrize("words", [[], ["c-1", "--instance", "i-1"]])
def test_show_takes_a_case_or_an_instance(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    """Neither and both are wrong use, and the message says which two there are."""
    assert cli.main(["show", *words, *where(tmp_path)]) == 2
    assert "--instance" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["oracel://h/n", "postgresql+psycopg2://h/n", "sqlite:///{}/x?timeout=abc", "h:p"])
def test_a_database_that_cannot_be_opened_is_one_sentence(tmp_path: Path, url: str) -> None:
    """A wrong URL names its setting, and the lock is given back."""
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"database\.url"):
            Database(url.format(tmp_path))


class Stand(BaseHTTPRequestHandler):
    """Answers everything with what the test has put on the server."""

    def do_GET(self) -> None:
        status, body = self.server.answer  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""


@pytest.fixture
def stand() -> Iterator[Any]:
    with HTTPServer(("127.0.0.1", 0), Stand) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(5)


def where(folder: Path, port: int = 1) -> list[str]:
    (folder / "token").write_text("token\n")
    return ["--url", f"http://127.0.0.1:{port}", "--token-file", str(folder / "token")]


@pytest.mark.parametrize(
    ("command", "status", "body", "sentence"),
    [
        (["cases"], 200, b"<html>", "did not answer as this service does"),
        (["cases"], 200, b"[1]", "did not answer as this service does"),
        (["cases"], 200, b"[" * 100_000, "did not answer as this service does"),
        (["cases"], 200, b"\xff\xfe\x00", "did not answer as this service does"),
        (["cases"], 200, b"{}", "not one of this service"),
        (["cases"], 200, b'{"cases": [1]}', "not one of this service"),
        (["show", "c-1"], 200, b'{"id": "c-1"}', "not one of this service"),
        (["show", "--instance", "i-1"], 200, b'{"cases": []}', "no case names the instance i-1"),
        (["show", "--instance", "i-1"], 200, b'{"cases": [{}]}', "not one of this service"),
        (["approve", "c-1", "--by", "Ada", "--yes"], 200, b"{}", "not one of this service"),
        (["cases"], 500, b'["no"]', '500: ["no"]'),
        (["cases"], 404, b"\xff", "404: "),
        (["cases"], 503, b'{"error": "later"}', "503: later"),
    ],
)
def test_an_answer_of_something_else_is_one_sentence(
    tmp_path: Path,
    stand: Any,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    status: int,
    body: bytes,
    sentence: str,
) -> None:
    """Whatever answers at the URL, the command ends with status 1 and says so."""
    stand.answer = (status, body)
    assert cli.main([*command, *where(tmp_path, stand.server_port)]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["nonsense", "ftp://127.0.0.1", "http://", "http://h:99999", "http://[::1", "http://a b"]
)
def test_a_url_that_is_none_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str) -> None:
    """Status 2, and an example of a URL."""
    assert cli.main(["cases", *where(tmp_path), "--url", url]) == 2
    assert "--url" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read"),
        (b"", "holds no token"),
        (b"\x80\x81\xff", "printable ASCII"),
        ("schlüssel".encode(), "printable ASCII"),
    ],
)
def test_a_token_file_that_holds_none_is_wrong_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, sentence: str
) -> None:
    """Status 2 and the option to give, whether the file is missing, empty, binary or not ASCII."""
    words = where(tmp_path)
    (tmp_path / "token").unlink()
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    assert cli.main(["cases", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "--token-file" in error


@pytest.mark.parametrize("name", ["none", "junk", "."])
def test_authorities_that_cannot_be_read_are_wrong_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A missing file, one without a certificate, or a folder."""
    (tmp_path / "junk").write_text("not PEM")
    assert cli.main(["cases", *where(tmp_path), "--ca-file", str(tmp_path / name)]) == 2
    assert "cannot be read as PEM certificates" in capsys.readouterr().err


def test_the_client_needs_no_file_but_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who may only read cases need not be able to read the service's other secrets."""
    path = write(tmp_path, server={"alerts_token_file": "none", "port": 1})
    assert config.read(path).server.port == 1
    assert cli.main(["cases", "--config", str(path)]) == 1
    assert "is `serve` running there?" in capsys.readouterr().err


@pytest.mark.parametrize("stdin", [io.StringIO(""), None, "closed", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8")])
def test_approve_without_anybody_to_ask_approves_nothing(
    tmp_path: Path, stand: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stdin: Any
) -> None:
    """At the end of standard input, or without any, the command says which option it needs."""
    if stdin == "closed":
        stdin = io.StringIO("y\n")
        stdin.close()
    monkeypatch.setattr(sys, "stdin", stdin)
    stand.answer = (200, json.dumps({"request": {}, "node_name": "n", "request_sha256": "0"}).encode())
    assert cli.main(["approve", "c-1", "--by", "Ada", *where(tmp_path, stand.server_port)]) == 1
    assert "not approved; use --yes" in capsys.readouterr().out


@pytest.mark.parametrize("error", [KeyError("uid 12345"), ImportError("pwd"), OSError("no name")])
def test_a_uid_without_a_name_needs_by_only_where_a_person_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """In a container whose uid is in no password database everything works but an unnamed decision."""

    def nameless() -> str:
        raise error

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert cli.main(["serve", "--check", "--config", str(write(tmp_path))]) == 0
    assert cli.main(["pause", *where(tmp_path)]) == 2
    assert "give a name with --by" in capsys.readouterr().err
    assert cli.main(["pause", *where(tmp_path), "--by", "Ada"]) == 1  # nothing listens there
