"""Small JSON requests to the demo's own programs on loopback; an answer that does not come is None."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get_json(url: str, token: str | None = None, **query: str) -> Any:
    """GET; None when nobody answers, or not with JSON and 200."""
    if query:
        url += "?" + urllib.parse.urlencode(query)
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with _OPENER.open(request, timeout=3) as answer:
            return json.load(answer)
    except (OSError, ValueError, urllib.error.HTTPError):
        return None


def is_up(url: str) -> bool:
    """Whether anything answers 200 there."""
    try:
        with _OPENER.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.HTTPError):
        return False
