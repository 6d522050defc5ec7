"""The web page in a real Chromium with scripts off: a decision by keyboard alone, and what a screen reader is told."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from sdcwatch_remediation.app import make_app
from sdcwatch_remediation.testing.provider import fleet
from sdcwatch_remediation.testing.rig import Rig, make_rig
from sdcwatch_remediation.web import session

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--remote-debugging-pipe")
KEYS = {"Tab": 9, "Enter": 13}


class Between(Exception):
    """The page is on its way to another document."""


class Browser:
    """One page of Chromium, driven through its debugging pipe."""

    def __init__(self, chromium: Path, profile: Path) -> None:
        out, self._to = os.pipe()
        self._from, back = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4.
        line = f'exec "$0" "$@" 3<&{out} 4>&{back}'
        words = ["/bin/bash", "-c", line, str(chromium), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            words, pass_fds=(out, back), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(out)
        os.close(back)
        self._rest, self._number, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Emulation.setScriptExecutionDisabled", value=True)

    def close(self) -> None:
        """End Chromium."""
        os.close(self._to)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._from)

    def _message(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], max(0.0, until - time.monotonic()))[0]:
                raise AssertionError("Chromium did not answer in time")
            self._rest += os.read(self._from, 1 << 16)
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + 60
        while True:
            answer = self._message(until)
            if answer.get("id") == self._number:
                if "Not attached to an active page" in str(answer.get("error", "")):
                    raise Between
                assert "error" not in answer, answer
                return dict(answer["result"])

    def go(self, url: str) -> None:
        """Open a page and wait until it is there."""
        self.call("Page.navigate", url=url)
        self.at(url)

    def at(self, url: str) -> None:
        """Wait until the page of this address is shown whole, with its main landmark."""
        until, here = time.monotonic() + 60, ""
        while True:
            try:
                history = self.call("Page.getNavigationHistory")
                here = history["entries"][history["currentIndex"]]["url"]
                if here == url and any(role == "main" for role, _, _ in self.tree()):
                    return
            except Between:
                pass  # between two documents there is nothing to ask
            assert time.monotonic() < until, f"still at {here}"

    def press(self, key: str) -> None:
        """Press and release one key."""
        text = {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def tree(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Return role, name and properties of everything that assistive technology is shown."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (
                str(node["role"]["value"]),
                str(node.get("name", {}).get("value", "")),
                {each["name"]: each["value"].get("value") for each in node.get("properties", ())},
            )
            for node in nodes
            if not node.get("ignored")
        ]

    def tab_to(self, name: str, *, at_most: int = 30) -> list[str]:
        """Press Tab until an element of this name has the focus; return what had it on the way."""
        passed: list[str] = []
        for _ in range(at_most):
            self.press("Tab")
            focused = [n for role, n, p in self.tree() if p.get("focused") and role != "RootWebArea"]
            passed += focused[-1:] or ["nothing"]
            if passed[-1] == name:
                return passed
        raise AssertionError(f"{name} cannot be reached by keyboard; passed {passed}")


class Site:
    """A service with one case that waits for a person, and a browser with a real session."""

    def __init__(self, rig: Rig, url: str, browser: Browser) -> None:
        self.rig, self.url, self.browser = rig, url, browser
        self.case = f"{url}/ui/cases/{rig.case()['id']}"


@pytest.fixture
def site(tmp_path: Path, require: Callable[[str], Path]) -> Iterator[Site]:
    chromium = require("chromium")
    with make_rig(tmp_path, fleet(4), mode="approve") as rig:
        rig.fault(2, sentence="rank 2 computes gradients that differ from those of two other nodes")
        rig.rounds(4)
        config = uvicorn.Config(make_app(rig.service), host="127.0.0.1", port=0, log_level="warning", lifespan="off")
        server, listener = uvicorn.Server(config), config.bind_socket()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        browser = Browser(chromium, tmp_path / "profile")
        try:
            cookie = session.sign_in(rig.service.tokens, "approve-token", "Ada Lovelace", time.time())
            browser.call("Network.setCookie", name=session.COOKIE, value=cookie, url=url + "/ui", httpOnly=True)
            yield Site(rig, url, browser)
        finally:
            browser.close()
            server.should_exit = True
            thread.join(15)
            listener.close()


@pytest.mark.integration
@pytest.mark.needs("chromium")
@pytest.mark.timeout(300)
def test_a_case_is_approved_by_keyboard_without_scripts(site: Site) -> None:
    """Tab reaches the skip link first and then every control; Enter opens the confirmation, and Enter there decides."""
    browser = site.browser
    browser.go(site.case)
    passed = browser.tab_to("Approve…")
    assert passed[0] == "Skip to the content"
    browser.press("Enter")
    browser.at(site.case + "/approve")
    assert site.rig.case()["approved_by"] == "", "the first press only asks"
    passed = browser.tab_to("Approve this request")
    assert "The exact request" in passed, "what is approved can be reached and scrolled before the button"
    browser.press("Enter")
    browser.at(site.case)
    assert site.rig.case()["approved_by"] == "Ada Lovelace"


@pytest.mark.integration
@pytest.mark.needs("chromium")
@pytest.mark.timeout(300)
def test_a_person_signs_in_by_keyboard_without_scripts(site: Site) -> None:
    """The form that a real browser sends is taken: name, token, Enter, and the list of cases is there."""
    browser = site.browser
    browser.call("Network.clearBrowserCookies")
    browser.go(site.url + "/ui/login")
    for field, text in (("Your name", "Grace Hopper"), ("Token", "approve-token")):
        browser.tab_to(field)
        browser.call("Input.insertText", text=text)
    browser.press("Enter")
    browser.at(site.url + "/ui")
    assert "Grace Hopper" in {name for _, name, _ in browser.tree()}


@pytest.mark.integration
@pytest.mark.needs("chromium")
@pytest.mark.timeout(300)
def test_a_screen_reader_is_told_where_it_is_and_what_each_control_does(site: Site) -> None:
    """On every page: one banner, one main landmark, one first heading, a language, and a name for each control."""
    browser = site.browser
    for path in (site.url + "/ui", site.case, site.case + "/approve", site.case + "/reject", site.url + "/ui/login"):
        browser.go(path)
        tree = browser.tree()
        roles = [role for role, _, _ in tree]
        assert (roles.count("banner"), roles.count("main")) == (1, 1), path
        assert sum(role == "heading" and shown.get("level") == 1 for role, _, shown in tree) == 1, path
        nameless = [role for role, name, _ in tree if role in ("link", "button", "textbox", "region") and not name]
        assert nameless == [], path
        assert next(name for role, name, _ in tree if role == "RootWebArea").endswith("sdcwatch"), path
    browser.go(site.case)
    tree = browser.tree()
    headers = {name for role, name, _ in tree if role == "columnheader"}
    assert {"Gate", "Result", "Reason", "Event", "Said by the agent of"} <= headers
    assert {"proven", "one_member"} <= {name for role, name, _ in tree if role == "rowheader"}
    assert {name for role, name, shown in tree if role == "heading" and shown.get("level") == 2} == {
        *("What it is about", "What comes next", "Evidence", "Gates", "Timeline")
    }


def _contrast(one: str, two: str) -> float:
    """The contrast ratio of WCAG 2.1 for two colours as `#rrggbb`."""

    def luminance(colour: str) -> float:
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_every_text_has_the_contrast_that_people_need_dark_and_light() -> None:
    """At least 4.5 to 1 for each colour of text on each ground it stands on, in both schemes (WCAG AA)."""
    style = files("sdcwatch_remediation.web").joinpath("style.css").read_text(encoding="utf-8")
    schemes = [dict(re.findall(r"--(\w+):(#\w+)", block)) for block in re.findall(r":root\{([^}]*)\}", style)]
    assert len(schemes) == 2
    for scheme in schemes:
        colours = {k: v if len(v) == 7 else "#" + "".join(c * 2 for c in v[1:]) for k, v in scheme.items()}
        pairs = [(text, ground) for text in ("ink", "soft", "link", "good", "bad") for ground in ("bg", "card")]
        for text, ground in [*pairs, ("warn", "warnbg"), ("onmain", "main"), ("bg", "bad")]:
            assert _contrast(colours[text], colours[ground]) >= 4.5, (text, ground, colours)
