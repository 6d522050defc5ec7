"""Secrets from files: bearer tokens and one scrape user's password, read afresh when a file changes.

One rule for every such file, the same as the remediation service's (docs/contracts.md, Token files): one secret a line,
two at once while rotating, printable ASCII without blanks. A file that cannot be used stops the start; one that cannot
be used later changes nothing, since a file that is being rewritten must not lock everybody out. Comparisons take
constant time, and no secret is ever logged. Standard library only. Flow: command -> **tokens** -> handler.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import threading
from pathlib import Path
from typing import Protocol

from sdcwatch.errors import ConfigurationError

_LONGEST = 4096


class Credential(Protocol):
    """What admits a request."""

    def admits(self, authorization: str | None) -> bool:
        """True when this Authorization header carries it."""


class SecretFile:
    """The one or two secrets in one file; safe to ask from several threads.

    Raises:
        ConfigurationError: the file cannot be read, or holds none, more than two, or what no HTTP header carries.
    """

    def __init__(self, path: Path | str, purpose: str) -> None:
        self._path = Path(path)
        self._what = f"{purpose} file {path}"
        self._lock = threading.Lock()
        try:
            self._stamp, self._secrets = self._look(), self._read()
        except OSError as error:
            raise ConfigurationError(f"{self._what}: {error.strerror or error}") from error

    def holds(self, offered: bytes) -> bool:
        """Whether one of the secrets is this one."""
        # A mounted secret is rotated under a running agent.
        with self._lock, contextlib.suppress(OSError, ConfigurationError):
            stamp = self._look()
            if stamp != self._stamp:
                self._secrets, self._stamp = self._read(), stamp
        same = [hmac.compare_digest(offered, secret) for secret in self._secrets]
        return any(same)

    def first(self) -> str:
        """The secret to send to somebody else."""
        return self._secrets[0].decode("ascii")

    def _look(self) -> tuple[int, int, int]:
        facts = self._path.stat()
        return facts.st_ino, facts.st_size, facts.st_mtime_ns

    def _read(self) -> tuple[bytes, ...]:
        with self._path.open("rb") as stream:
            found = tuple(stream.read(_LONGEST).split())
        if not found:
            raise ConfigurationError(
                f"{self._what} is blank; write a secret into it: openssl rand -hex 32 > {self._path}"
            )
        if not all(0x21 <= byte <= 0x7E for secret in found for byte in secret):
            raise ConfigurationError(
                f"{self._what} holds something else than printable ASCII, which no client could send; write a secret "
                f"into it: openssl rand -hex 32 > {self._path}"
            )
        if len(found) > 2:
            raise ConfigurationError(
                f"{self._what} holds {len(found)} secrets; write one a line, two at once while rotating"
            )
        return found


class Token:
    """A bearer token.

    Raises:
        ConfigurationError: as `SecretFile`.
    """

    def __init__(self, path: Path | str, purpose: str) -> None:
        self._file = SecretFile(path, f"{purpose} token")

    def admits(self, authorization: str | None) -> bool:
        """True when an Authorization header carries this token as a bearer."""
        scheme, _, given = (authorization or "").partition(" ")
        same = self._file.holds(given.strip().encode("utf-8", errors="replace"))
        return same and scheme.lower() == "bearer"


class Password:
    """One user with a password (HTTP basic authentication), for scrapers that know nothing else.

    Raises:
        ConfigurationError: as `SecretFile`, or the user's name cannot stand in a header.
    """

    def __init__(self, user: str, path: Path | str) -> None:
        if not user or ":" in user or not (user.isascii() and user.isprintable()):
            raise ConfigurationError(f"--metrics-user {user!r}: write a name of printable ASCII without a colon")
        self._user = user.encode("ascii")
        self._file = SecretFile(path, "metrics password")

    def admits(self, authorization: str | None) -> bool:
        """True when an Authorization header carries this user and password."""
        scheme, _, given = (authorization or "").partition(" ")
        try:
            user, _, password = base64.b64decode(given.strip(), validate=True).partition(b":")
        except (binascii.Error, ValueError):
            user = password = b""
        # Both are compared whatever the other says, so that the time taken tells nothing.
        known, right = hmac.compare_digest(user, self._user), self._file.holds(password)
        return known and right and scheme.lower() == "basic"
