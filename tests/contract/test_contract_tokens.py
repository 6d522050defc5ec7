"""One rule for every file with a secret: the agent, the doctor, the service and its commands read them alike."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import pytest
from sdcwatch.agent.tokens import Password, Token
from sdcwatch.doctor.http import Client as Doctor
from sdcwatch.errors import ConfigurationError
from sdcwatch_remediation.agents import _first_line
from sdcwatch_remediation.client import _token
from sdcwatch_remediation.errors import ConfigError
from sdcwatch_remediation.settings import Server
from sdcwatch_remediation.tokens import Tokens

Admits = Callable[[str], bool]


def agent(path: Path) -> Admits:
    token = Token(path, "events")
    return lambda secret: token.admits(f"Bearer {secret}")


def scraper(path: Path) -> Admits:
    password = Password("prometheus", path)
    return lambda secret: password.admits(
        "Basic " + base64.b64encode(f"prometheus:{secret}".encode("utf-8", "surrogateescape")).decode()
    )


def service(path: Path) -> Admits:
    tokens = Tokens(Server(alerts_token_file=str(path)))
    return lambda secret: tokens.refuse(f"Bearer {secret}", "alerts") is None


READERS = pytest.mark.parametrize("reader", [agent, scraper, service], ids=lambda reader: reader.__name__)
#: What is in the file, and which secrets it admits; None: the start is refused.
FILES: list[tuple[bytes, tuple[str, ...] | None]] = [
    (b"one", ("one",)),
    (b"one\n", ("one",)),
    (b"  one \r\n", ("one",)),
    (b"one\ntwo\n", ("one", "two")),
    (b"one two", ("one", "two")),
    (b"a:b=c/d+e~", ("a:b=c/d+e~",)),
    (b"one\ntwo\nthree\n", None),
    (b"", None),
    (b" \n\t\n", None),
    (b"\xff\xfe", None),
    ("schl\u00fcssel".encode(), None),
    (b"a\x00b", None),
    (b"\xef\xbb\xbfone", None),
]


@READERS
@pytest.mark.parametrize(("content", "admitted"), FILES)
def test_a_file_means_the_same_to_everybody(
    reader: Callable[[Path], Admits], content: bytes, admitted: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """The same files are refused at the start, and the same secrets are admitted."""
    path = tmp_path / "secret"
    path.write_bytes(content)
    if admitted is None:
        with pytest.raises((ConfigurationError, ConfigError), match="secret"):
            reader(path)
        return
    admits = reader(path)
    for offered in ("one", "two", "a:b=c/d+e~", "onetwo", "one two", "On", "", "x"):
        assert admits(offered) == (offered in admitted), offered


@READERS
def test_a_changed_file_is_taken_up_and_an_unusable_one_changes_nothing(
    reader: Callable[[Path], Admits], tmp_path: Path
) -> None:
    """A rotation needs no restart, and a file that is being rewritten, or is gone, locks nobody out."""
    path = tmp_path / "secret"
    path.write_bytes(b"one")
    admits = reader(path)
    path.write_bytes(b"two-new\none")
    assert [admits(secret) for secret in ("one", "two-new")] == [True, True]
    path.write_bytes(b"two-new")
    assert [admits(secret) for secret in ("one", "two-new")] == [False, True]
    for broken in (b"", b"\xff", b"a b c"):
        path.write_bytes(broken)
        assert [admits(secret) for secret in ("two-new", "a", "")] == [True, False, False], broken
    path.unlink()
    assert admits("two-new")


@READERS
def test_a_missing_file_stops_the_start(reader: Callable[[Path], Admits], tmp_path: Path) -> None:
    """An agent or a service without its secret would be closed, or open, to everybody."""
    with pytest.raises((ConfigurationError, ConfigError), match="secret"):
        reader(tmp_path / "secret")


def test_whoever_sends_a_secret_sends_the_first_of_its_file(tmp_path: Path) -> None:
    """During a rotation the file holds two; the doctor, the commands and the service's questions send one of them."""
    path = tmp_path / "secret"
    path.write_bytes(b"new\nold\n")
    assert Doctor("http://127.0.0.1:1", str(path))._headers["Authorization"] == "Bearer new"
    assert Doctor("http://127.0.0.1:1", str(path), user="prometheus")._headers["Authorization"] == "Basic " + (
        base64.b64encode(b"prometheus:new").decode()
    )
    assert _token(str(path)) == "new"
    assert _first_line(str(path)) == "new"
