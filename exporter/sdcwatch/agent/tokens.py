"""Bearer tokens from files: one secret a purpose, read afresh when the file changes, compared in constant time.

Never logs a token, and treats a file that became blank, unreadable or no printable ASCII as "nobody may".
Standard library only.
"""

from __future__ import annotations

import hmac
from pathlib import Path

from sdcwatch.errors import ConfigurationError

_LONGEST = 4096


class Token:
    """The token in one file.

    Raises:
        ConfigurationError: the file cannot be read, holds nothing, or holds what no HTTP header carries unchanged.
    """

    def __init__(self, path: Path | str, purpose: str) -> None:
        self._path = Path(path)
        self._version: tuple[int, int, int] | None = None
        self._secret = b""
        try:
            self._load()
        except OSError as error:
            raise ConfigurationError(f"{purpose} token file {path}: {error.strerror or error}") from error
        if not _is_printable(self._secret):
            raise ConfigurationError(
                f"{purpose} token file {path} holds more than one line of printable ASCII; write a secret into it: "
                f"openssl rand -hex 32 > {path}"
            )
        if not self._secret:
            raise ConfigurationError(
                f"{purpose} token file {path} is blank; write a secret into it: openssl rand -hex 32 > {path}"
            )

    def admits(self, authorization: str | None) -> bool:
        """True when an Authorization header carries this token as a bearer."""
        try:
            self._load()  # a mounted secret is rotated under a running agent
        except OSError:
            self._secret, self._version = b"", None
        scheme, _, given = (authorization or "").partition(" ")
        offered = given.strip().encode("utf-8", errors="replace")
        same = hmac.compare_digest(offered, self._secret)
        return same and bool(self._secret) and _is_printable(self._secret) and scheme.lower() == "bearer"

    def _load(self) -> None:
        facts = self._path.stat()
        version = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if version != self._version:
            with self._path.open("rb") as stream:
                self._secret = stream.read(_LONGEST).strip()
            self._version = version


def _is_printable(secret: bytes) -> bool:
    return all(0x20 <= byte <= 0x7E for byte in secret)
