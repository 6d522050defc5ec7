"""What the commands show: ids in one piece at any width, no unwanted colour, nothing that a terminal obeys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sdcwatch_remediation import cli, display
from sdcwatch_remediation.testing import Rig, fleet, make_rig

MEMBERS = fleet(4)
ESCAPE = "\x1b[2J\x1b]0;owned\x07 [bold]no markup[/] \r\n line \u202e"


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A service with one case that waits for a person; the commands reach it without a socket."""
    with make_rig(tmp_path, MEMBERS, mode="approve") as made:
        made.fault(2)
        made.rounds(3)

        def send(self: Any, method: str, path: str, body: Any) -> Any:
            from sdcwatch_remediation.errors import ServiceError

            answer = made.send(method, path, token=None, headers=dict(self._http.headers), json=body)
            if answer.status_code != 200:
                raise ServiceError(f"{answer.status_code}: {answer.json()['error']}")
            return answer.json()

        monkeypatch.setattr("sdcwatch_remediation.client.Client._send", send)
        yield made


def words(rig: Rig, role: str) -> list[str]:
    return ["--url", "http://127.0.0.1:1", "--token-file", getattr(rig.config.server, f"{role}_token_file")]


@pytest.mark.parametrize("width", [20, 60, 80, 120, 250])
def test_no_id_is_ever_broken(rig: Rig, width: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the terminal's width, each id, digest and path can be copied from one line."""
    found = rig.send("GET", "/v1/cases", token="cases").json()["cases"]
    whole = rig.send("GET", f"/v1/cases/{found[0]['id']}", token="cases").json()
    out = Console(width=width, force_terminal=True, no_color=True, highlight=False)
    display.cases(out, found)
    display.case(out, whole)
    text = capsys.readouterr().out
    for value in (found[0]["id"], found[0]["instance_id"], whole["request_sha256"], found[0]["gpu_uuid"]):
        assert value in text
    for gate in whole["gates"]:
        assert gate["reason"] in text


def test_away_from_a_terminal_a_case_is_one_line(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    """`cases | grep` finds the whole row."""
    assert cli.main(["cases", *words(rig, "cases")]) == 0
    case = rig.case()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if case["id"] in line]
    assert case["instance_id"] in line
    assert case["reason"] in line


@pytest.mark.parametrize(("variable", "coloured"), [("", True), ("1", False)])
def test_no_color_is_kept(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, coloured: bool
) -> None:
    """On a terminal states have a colour, and with NO_COLOR none; the words are the same."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", variable)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    out = Console(width=200, force_terminal=True, highlight=False)
    display.cases(out, rig.send("GET", "/v1/cases", token="cases").json()["cases"])
    text = capsys.readouterr().out
    assert ("\x1b[33m" in text) is coloured
    assert "awaiting_approval" in text


def test_a_hostile_text_is_shown_and_not_obeyed(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    """Escape sequences, markup, line ends and direction marks from an agent or an alert arrive as visible text."""
    found = {**rig.case(), "reason": ESCAPE, "node_name": ESCAPE}
    out = display.console()
    display.cases(out, [found])
    display.case(out, {**found, "gates": [{"name": "x", "action": "y", "passed": False, "reason": ESCAPE}]})
    display.findings(out, [{"name": "x", "status": "fail", "detail": ESCAPE, "fix": ESCAPE}])
    text = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(text)
    assert r"\x1b[2J" in text
    assert "[bold]no markup[/]" in text


def test_cancel_ends_the_case_where_it_stands(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command, with a name and a reason: nothing is done any more, nothing is released, and it is on record."""
    case = rig.case()
    line = ["cancel", case["id"], *words(rig, "approve"), "--by", "Ada", "--reason", "wrong job"]
    assert cli.main(line) == 0
    assert f"{case['id']} is cancelled" in capsys.readouterr().out
    assert cli.main(line) == 1
    assert "is cancelled and cannot become cancelled" in capsys.readouterr().err
    rig.rounds(3)
    ended = rig.case()
    assert (ended["state"], ended["outcome"], ended["reason"]) == ("cancelled", "cancelled", "wrong job")
    assert ended["timeline"][-1]["detail"]["by"] == "Ada"
    assert rig.provider.calls == []
    assert all(agent.latch and not agent.released for agent in rig.agents.agents.values())


def test_cancel_by_instance_and_its_permissions(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    """The page names the instance, so that is enough; the tokens of other roles are refused, and nothing changes."""
    instance = MEMBERS[2].instance_id
    for role in ("alerts", "cases", "admin"):
        assert cli.main(["cancel", rig.case()["id"], *words(rig, role), "--by", "Ada"]) == 1
        assert "may not use approve" in capsys.readouterr().err
    assert rig.case()["state"] == "awaiting_approval"
    assert cli.main(["cancel", "--instance", instance, *words(rig, "approve"), "--by", "Ada", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "cancelled"


@pytest.mark.parametrize(
    ("command", "role", "after"),
    [
        (["approve", "CASE", "--yes"], "approve", "containing"),
        (["reject", "CASE"], "approve", "rejected"),
        (["hold", "CASE"], "approve", "awaiting_approval"),
        (["unhold", "CASE"], "approve", "awaiting_approval"),
        (["cancel", "CASE"], "approve", "cancelled"),
        (["show", "CASE"], "cases", "awaiting_approval"),
    ],
)
def test_json_of_every_decision_is_one_object(
    rig: Rig, capsys: pytest.CaptureFixture[str], command: list[str], role: str, after: str
) -> None:
    """Nothing else goes to standard output, so a script can read it."""
    line = [word.replace("CASE", rig.case()["id"]) for word in command]
    by = [] if command[0] == "show" else ["--by", "Ada"]
    assert cli.main([*line, *words(rig, role), *by, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == after


def test_approve_as_json_asks_nobody_silently(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    """With `--json` and without `--yes` nothing is approved, and nothing is printed that is no JSON."""
    assert cli.main(["approve", rig.case()["id"], *words(rig, "approve"), "--by", "Ada", "--json"]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert "--yes" in out.err
    assert rig.case()["state"] == "awaiting_approval"


def test_pause_and_resume_say_what_still_stops_it(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    """Where something else stops the service too, the end of the pause says so."""
    assert cli.main(["pause", *words(rig, "admin"), "--by", "Ada", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["paused"] is True
    object.__setattr__(rig.service.context, "frozen", "another database")
    assert cli.main(["resume", *words(rig, "admin"), "--by", "Ada"]) == 0
    assert "paused: False; still stopped: frozen: another database" in capsys.readouterr().out
