"""Who may ask what: bearer tokens from files, compared in constant time.

What it does: reads each scope's token file (one token a line, two at once while rotating), notices a changed file, and
answers 401 for no or an unknown token and 403 for one of another scope.
What it never does: start with a blank file, or let the credential that reports alerts approve anything.
Its place: `app` asks it before it reads a body.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass
from pathlib import Path

from sdcwatch_remediation.errors import ConfigError
from sdcwatch_remediation.settings import Server

# Which scopes a token of one file has; `alerts` has no other, whatever is configured.
SCOPES: dict[str, tuple[str, ...]] = {
    "alerts": ("alerts",),
    "cases": ("cases",),
    "approve": ("approve", "cases"),
    "admin": ("admin", "cases"),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is refused."""

    status: int
    """401 or 403."""
    reason: str


class Tokens:
    """The token files of all scopes; safe to use from several threads."""

    def __init__(self, server: Server) -> None:
        """Read every configured file.

        Raises:
            ConfigError: a file is missing, blank, holds more than two tokens, or one token stands in two files.
        """
        paths = {
            "alerts": server.alerts_token_file,
            "cases": server.cases_token_file,
            "approve": server.approve_token_file,
            "admin": server.admin_token_file,
        }
        self._files = {role: _TokenFile(path) for role, path in paths.items() if path}
        seen: dict[bytes, str] = {}
        for role, file in self._files.items():
            for token in file.tokens():
                if seen.setdefault(token, role) != role:
                    raise ConfigError(
                        f"the {seen[token]} and {role} token files share a token; give each its own, so that "
                        "whoever reports an alert cannot also approve what it leads to"
                    )

    def refuse(self, authorization: str | None, scope: str) -> Refusal | None:
        """Return why a request with this `Authorization` header may not use `scope`, or None when it may."""
        kind, _, token = (authorization or "").partition(" ")
        presented = token.strip().encode("utf-8", "surrogateescape")
        if kind.lower() != "bearer" or not presented:
            return Refusal(401, "no bearer token")
        # Every file is compared with, so that the time taken says nothing about which one matched.
        matched = [role for role, file in self._files.items() if file.holds(presented)]
        if "alerts" in matched:
            matched = ["alerts"]
        if not matched:
            return Refusal(401, "unknown token")
        if not any(scope in SCOPES[role] for role in matched):
            return Refusal(403, f"this token may not use {scope}")
        return None


class _TokenFile:
    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._stamp, self._tokens = _stamp(path), _read(path)
        except OSError as error:
            raise ConfigError(f"token file {path} cannot be read: {error.strerror}; write one token a line") from error

    def tokens(self) -> tuple[bytes, ...]:
        try:
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._tokens, self._stamp = _read(self._path), stamp
        except (OSError, ConfigError):
            # A file that is being rewritten must not lock everybody out: what was last read goes on.
            pass
        return self._tokens

    def holds(self, presented: bytes) -> bool:
        matches = [hmac.compare_digest(presented, token) for token in self.tokens()]
        return any(matches)


def _stamp(path: str) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: str) -> tuple[bytes, ...]:
    tokens = tuple(Path(path).read_bytes().split())
    if not 1 <= len(tokens) <= 2:
        raise ConfigError(f"token file {path} holds {len(tokens)} tokens; write one a line, two while rotating")
    return tokens
