"""Who is signed in: a cookie that a token signs, so that nothing is kept and a token that is rotated out ends its
sessions.

What it does: makes and reads the cookie `role.issued.name.nonce.signature`, and the value that each form must send
back.
What it never does: put a token into a cookie, or accept one that reports alerts.
Its place: `pages` asks it before it shows anything.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from sdcwatch_remediation.tokens import SCOPES, Tokens

COOKIE = "sdcwatch_session"
LASTS_SECONDS = 8 * 3600.0
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@+-]{0,127}", re.ASCII)
"""The same form that `POST /v1/cases/{id}/approve` asks of `by`."""


@dataclass(frozen=True, slots=True)
class Session:
    """One signed-in person."""

    role: str
    by: str
    csrf: str
    """What a form of this session must carry; another site cannot know it."""

    def may(self, scope: str) -> bool:
        """Whether this session's token has a scope."""
        return scope in SCOPES[self.role]


def sign_in(tokens: Tokens, token: str, by: str, now: float) -> str | None:
    """Return the cookie for a token that may at least read cases, or None."""
    role = tokens.role(token)
    if role is None or "cases" not in SCOPES[role] or NAME.fullmatch(by) is None:
        return None
    name = base64.urlsafe_b64encode(by.encode()).decode().rstrip("=")
    payload = f"{role}.{int(now)}.{name}.{secrets.token_urlsafe(12)}"
    return f"{payload}.{_sign(token.encode(), payload)}"


def read(tokens: Tokens, cookie: str, now: float) -> Session | None:
    """Return the session of a cookie, or None where it is none, too old, or its token is no longer valid."""
    payload, _, signature = cookie.rpartition(".")
    words = payload.split(".")
    if (
        len(cookie) > 1024
        or not cookie.isascii()
        or len(words) != 4
        or words[0] not in SCOPES
        or not words[1].isdecimal()
    ):
        return None
    if not 0 <= now - float(words[1]) + 60 <= LASTS_SECONDS + 60:
        return None
    for token in tokens.of(words[0]):
        if hmac.compare_digest(_sign(token, payload), signature):
            try:
                by = base64.urlsafe_b64decode(words[2] + "=" * (-len(words[2]) % 4)).decode()
            except (binascii.Error, UnicodeDecodeError):
                return None
            return Session(words[0], by, _sign(token, f"csrf {payload}"))
    return None


def _sign(token: bytes, text: str) -> str:
    return hmac.new(token, b"sdcwatch session " + text.encode(), hashlib.sha256).hexdigest()
