"""The web page in a real Chromium, without JavaScript: what it draws, dark and light, wide and narrow."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from PIL import Image
from sdcwatch_remediation.app import make_app
from sdcwatch_remediation.testing.provider import fleet
from sdcwatch_remediation.testing.rig import make_rig
from sdcwatch_remediation.web import pages, session

pytestmark = [pytest.mark.integration, pytest.mark.needs("chromium"), pytest.mark.timeout(300)]

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars")


class Site:
    """A service with one case that waits for a person, and a browser that is signed in by name."""

    def __init__(self, url: str, case: str, chromium: Path, folder: Path) -> None:
        self.url, self.case, self._chromium, self.folder = url, case, chromium, folder

    def browse(self, path: str, *flags: str) -> str:
        """Open a page once and return what Chromium printed."""
        words = [str(self._chromium), *FLAGS, f"--user-data-dir={self.folder / 'profile'}", *flags, self.url + path]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout

    def picture(self, path: str, width: int, height: int, *, dark: bool) -> Image.Image:
        """Return a screenshot."""
        file = self.folder / f"{path.strip('/').replace('/', '-')}-{width}-{'dark' if dark else 'light'}.png"
        scheme = "--blink-settings=preferredColorScheme=" + ("0" if dark else "1")
        self.browse(path, f"--screenshot={file}", f"--window-size={width},{height}", scheme)
        with Image.open(file) as image:
            return image.convert("L")


@pytest.fixture
def site(tmp_path: Path, require: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Serve on loopback; every request counts as the session of a person who may approve."""
    with make_rig(tmp_path, fleet(4), mode="approve") as rig:
        rig.fault(2, sentence="rank 2 computes gradients that differ from those of two other nodes")
        rig.rounds(4)
        cookie = session.sign_in(rig.service.tokens, "approve-token", "Ada Lovelace", 1e9)
        assert cookie is not None
        who = session.read(rig.service.tokens, cookie, 1e9)
        # Headless Chromium takes no cookie on its command line; that the cookie guards is shown by test_web_pages.py.
        monkeypatch.setattr(pages.Pages, "who", lambda self, request: who)
        server = uvicorn.Server(uvicorn.Config(make_app(rig.service), port=0, log_level="warning", lifespan="off"))
        listener = uvicorn.Config(make_app(rig.service), host="127.0.0.1", port=0).bind_socket()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            yield Site(url, f"/ui/cases/{rig.case()['id']}", require("chromium"), tmp_path)
        finally:
            server.should_exit = True
            thread.join(10)
            listener.close()


def test_a_real_browser_draws_the_case_with_its_style_under_the_strict_policy(site: Site) -> None:
    """The document holds the evidence and both ways to answer; dark and light differ; nothing is wider than a phone."""
    text = site.browse(site.case, "--dump-dom")
    assert "Approve…" in text
    assert "one_member" in text
    dark = site.picture(site.case, 1280, 1700, dark=True).resize((1, 1)).getpixel((0, 0))
    light = site.picture(site.case, 1280, 1700, dark=False).resize((1, 1)).getpixel((0, 0))
    assert isinstance(dark, int)
    assert isinstance(light, int)
    assert dark < 60 < 200 < light  # the style sheet was loaded and follows the reader's scheme
    narrow = site.picture(site.case, 500, 3600, dark=False)
    right = narrow.crop((496, 100, 500, 3600))
    assert right.getextrema() == (right.getpixel((0, 0)), right.getpixel((0, 0)))  # a plain margin: nothing runs over


def test_the_confirmation_shows_the_exact_request(site: Site) -> None:
    """What a person approves is on the page, and a second press is needed."""
    text = site.browse(site.case + "/approve", "--dump-dom")
    assert "NodeIds" in text
    assert "Approve this request" in text
    site.picture(site.case + "/approve", 1280, 1000, dark=True)
    site.picture("/ui", 1280, 700, dark=False)
    site.picture("/ui/login", 500, 700, dark=False)
