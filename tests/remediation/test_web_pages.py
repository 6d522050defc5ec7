"""The web page: who may see and decide, forgery, escaping, and what it says, through the real ASGI application."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sdcwatch_remediation import schema
from sdcwatch_remediation.testing.provider import fleet
from sdcwatch_remediation.testing.rig import Rig, make_rig
from sdcwatch_remediation.web import session
from sqlalchemy import update

FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with make_rig(tmp_path, fleet(4), mode="approve") as made:
        made.fault(2, sentence='rank 2 <script>alert("x")</script> differs')
        made.rounds(4)
        assert made.case()["state"] == "awaiting_approval"
        yield made


class Browser:
    """A client with a cookie jar of one."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.cookie = rig, ""

    def send(self, method: str, path: str, content: bytes | None = None, **headers: str) -> httpx.Response:
        headers = {**headers, **({"Cookie": self.cookie} if self.cookie else {})}
        return self.rig.send(method, path, token=None, content=content, headers={**headers, **FORM})

    def get(self, path: str) -> str:
        return self.send("GET", path).text

    def login(self, role: str, by: str = "Ada") -> httpx.Response:
        answer = self.send("POST", "/ui/login", f"token={role}-token&by={by}".encode())
        self.cookie = answer.headers.get("set-cookie", "").partition(";")[0]
        return answer

    def fields(self, path: str) -> dict[str, str]:
        found = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', self.get(path).partition("<main")[2])
        return dict(found)

    def submit(self, path: str, fields: dict[str, str], **headers: str) -> httpx.Response:
        return self.send("POST", path, "&".join(f"{k}={v}" for k, v in fields.items()).encode(), **headers)


def path_of(rig: Rig) -> str:
    return f"/ui/cases/{rig.case()['id']}"


def test_nothing_is_shown_without_a_session_and_alerts_tokens_get_none(rig: Rig) -> None:
    """Every page leads to the sign-in; a token that reports cannot sign in."""
    browser = Browser(rig)
    for path in ("/ui", path_of(rig), path_of(rig) + "/approve"):
        answer = browser.send("GET", path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/login")
    assert browser.login("alerts").status_code == 401
    assert browser.login("nobody").status_code == 401
    assert browser.login("cases", by="%3Cb%3E").status_code == 401
    assert browser.cookie == ""


def test_the_cookie_is_closed_to_scripts_and_other_sites_and_holds_no_token(rig: Rig) -> None:
    """HttpOnly, SameSite=Strict, this path only; the token itself is not in it."""
    header = Browser(rig).login("approve").headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/ui"} <= {part.strip() for part in header.split(";")}
    assert "approve-token" not in header


def test_a_case_shows_evidence_gates_outlook_and_nothing_of_it_becomes_markup(rig: Rig) -> None:
    """Who said it, each gate's reason, what is lost and what silence means; an agent's text stays text."""
    browser = Browser(rig)
    browser.login("cases")
    page = browser.send("GET", path_of(rig))
    assert "script-src" not in page.headers["content-security-policy"]
    assert page.headers["content-security-policy"].startswith(
        "default-src 'none'; style-src 'self'; form-action 'self'"
    )
    for words in ("node-0", "one_member", "destroys every volume", "If nobody answers", "the node is not touched"):
        assert words in page.text
    assert "&lt;script&gt;alert(" in page.text
    assert "<script" not in page.text
    assert "Approve…" not in page.text  # this token may only read


def test_a_handed_over_case_says_who_is_waited_for(rig: Rig) -> None:
    """Neither "nobody answers" nor "the service goes on": somebody else's machinery has the next word."""
    with rig.service.database.write() as connection:
        connection.execute(update(schema.cases).values(state="handed_over", quarantined_at=rig.clock()))
    browser = Browser(rig)
    browser.login("approve")
    page = browser.send("GET", path_of(rig)).text
    assert "Its owner replaces the node. If no other instance runs in its place by" in page
    assert "handed over" in page
    assert "Reject…" in page
    assert "Approve…" not in page


def test_approve_takes_the_request_that_was_shown_once_and_names_the_person(rig: Rig) -> None:
    """A page, a confirmation with the exact request, and then the ledger's own approval."""
    browser = Browser(rig)
    browser.login("approve", by="Ada+Lovelace")
    assert "Approve…" in browser.get(path_of(rig))
    confirm = browser.get(path_of(rig) + "/approve")
    assert "&#34;NodeIds&#34;" in confirm
    fields = browser.fields(path_of(rig) + "/approve")
    assert browser.submit(path_of(rig) + "/approve", fields).status_code == 303
    assert rig.case()["approved_by"] == "Ada Lovelace"
    again = browser.submit(path_of(rig) + "/approve", fields)
    assert again.status_code == 409
    assert "Not taken" in again.text
    rig.rounds(4)
    assert len(rig.provider.calls) == 1


def test_reject_from_the_page_replaces_nothing(rig: Rig) -> None:
    """The case ends as rejected, by the person of the session."""
    browser = Browser(rig)
    browser.login("approve")
    fields = browser.fields(path_of(rig) + "/reject")
    assert browser.submit(path_of(rig) + "/reject", {**fields, "reason": "known+bad+build"}).status_code == 303
    rig.rounds(3)
    assert rig.case()["outcome"] == "rejected"
    assert rig.provider.calls == []


@pytest.mark.parametrize(
    "forge",
    [
        lambda fields: ({**fields, "csrf": "0" * 64}, {}),
        lambda fields: ({k: v for k, v in fields.items() if k != "csrf"}, {}),
        lambda fields: (fields, {"Origin": "https://evil.example"}),
        lambda fields: (fields, {"Origin": "null"}),
        lambda fields: (fields, {"Sec-Fetch-Site": "cross-site"}),
        lambda fields: ({**fields, "x": "y" * 20_000}, {}),
    ],
)
def test_a_forged_form_decides_nothing(rig: Rig, forge: Any) -> None:
    """Without the session's own value, from another site, or too large: refused, and the case stays."""
    browser = Browser(rig)
    browser.login("approve")
    fields, headers = forge(browser.fields(path_of(rig) + "/approve"))
    assert browser.submit(path_of(rig) + "/approve", fields, **headers).status_code == 403
    assert rig.case()["state"] == "awaiting_approval"


def test_another_request_than_the_one_shown_is_not_approved(rig: Rig) -> None:
    """The digest travels with the form; where it no longer fits, the person looks again."""
    browser = Browser(rig)
    browser.login("approve")
    fields = {**browser.fields(path_of(rig) + "/approve"), "request_sha256": "f" * 64}
    assert browser.submit(path_of(rig) + "/approve", fields).status_code == 409
    assert rig.case()["state"] == "awaiting_approval"


@pytest.mark.parametrize("role", ["cases", "admin"])
def test_a_session_that_may_only_read_cannot_decide(rig: Rig, role: str) -> None:
    """Even with a correct form value of its own."""
    browser = Browser(rig)
    browser.login(role)
    csrf = re.search(r'name="csrf" value="(\w+)"', browser.get("/ui"))
    assert csrf is not None
    fields = {"csrf": csrf[1], "request_sha256": rig.case()["request_sha256"]}
    assert browser.submit(path_of(rig) + "/approve", fields).status_code == 403
    assert rig.case()["state"] == "awaiting_approval"


def test_a_session_ends_with_its_token_its_time_and_any_change(rig: Rig, tmp_path: Path) -> None:
    """A rotated-out token, eight hours, or one changed letter: no session."""
    tokens, now = rig.service.tokens, time.time()
    cookie = session.sign_in(tokens, "approve-token", "Ada", now)
    assert cookie is not None
    assert session.read(tokens, cookie, now) is not None
    assert session.read(tokens, cookie, now + session.LASTS_SECONDS + 1) is None
    assert session.read(tokens, cookie.replace("approve", "admin", 1), now) is None
    for wrong in ("", "a.b", cookie[:-1] + ("0" if cookie[-1] != "0" else "1"), "ü" * 40, cookie + "x" * 2000):
        assert session.read(tokens, wrong, now) is None
    Path(rig.config.server.approve_token_file).write_text("another-token-altogether\n")
    assert session.read(tokens, cookie, now) is None


def test_pages_stay_outside_of_the_api_description(rig: Rig) -> None:
    """`/openapi.json` is for programs."""
    assert not [path for path in rig.send("GET", "/openapi.json").json()["paths"] if path.startswith("/ui")]
