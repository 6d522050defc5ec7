"""Who may ask what: bearer tokens from files, compared in constant time.

What it does: reads each scope's token file (one token a line, two at once while rotating), notices a changed file, and
answers 401 for no or an unknown token and 403 for one of another scope.
What it never does: start with a blank file, or let the credential that reports alerts approve anything.
Its place: `app` asks it before it reads a body.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterator
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
        self._files: dict[str, _TokenFile] = {}
        if found := list(_open(server, self._files)):
            raise ConfigError("\n".join(found))

    def refuse(self, authorization: str | None, scope: str, *, reporter: bool = False) -> Refusal | None:
        """Return why a request with this `Authorization` header may not use `scope`, or None when it may.

        Args:
            authorization: the header, or None.
            scope: a key of `SCOPES`.
            reporter: the connection has the certificate of one that reports alerts; that outweighs every token.
        """
        if reporter:
            return None if scope == "alerts" else Refusal(403, f"a certificate that reports may not use {scope}")
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

    def role(self, token: str) -> str | None:
        """Return whose token this is (a key of `SCOPES`), or None; every file is compared with."""
        presented = token.encode("utf-8", "surrogateescape")
        matched = [role for role, file in self._files.items() if presented and file.holds(presented)]
        return "alerts" if "alerts" in matched else next(iter(matched), None)

    def of(self, role: str) -> tuple[bytes, ...]:
        """Return the tokens that are valid for a role now, for checking what one of them signed."""
        return self._files[role].tokens() if role in self._files else ()


def problems(server: Server) -> list[str]:
    """Return one sentence for each token file that `Tokens` would refuse."""
    return list(_open(server, {}))


def fits_header(token: bytes) -> bool:
    """Whether a token can travel in an HTTP header: printable ASCII without blanks."""
    return all(0x21 <= code <= 0x7E for code in token)


def _open(server: Server, files: dict[str, _TokenFile]) -> Iterator[str]:
    # Fills `files` and yields what is wrong, so that one look finds everything.
    for role in SCOPES:
        if path := getattr(server, f"{role}_token_file"):
            try:
                files[role] = _TokenFile(path)
            except ConfigError as error:
                yield f"server.{role}_token_file: {error}"
    seen: dict[bytes, str] = {}
    for role, file in files.items():
        shared = {seen[token] for token in file.tokens() if seen.setdefault(token, role) != role}
        for other in sorted(shared):
            yield (
                f"the {other} and {role} token files share a token; give each its own, so that "
                "whoever reports an alert cannot also approve what it leads to"
            )


class _TokenFile:
    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._stamp, self._tokens = _stamp(path), _read(path)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"token file {path} cannot be read: {why}; write one token a line") from error

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
    if not all(map(fits_header, tokens)):
        raise ConfigError(f"token file {path} holds a token that is not printable ASCII; no client could send it")
    return tokens
