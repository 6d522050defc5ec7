"""The command line's way to the running service: the HTTP API, with a token from a file.

What it does: one call each for listing, showing, deciding and pausing.
What it never does: open the database; the service alone does.
Its place: `cli` uses it.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import httpx

from sdcwatch_remediation.config import is_url
from sdcwatch_remediation.errors import ConfigError, ServiceError
from sdcwatch_remediation.tokens import fits_header


class Client:
    """Calls one running service; a context manager that closes its connections."""

    def __init__(self, url: str, token_file: str, *, ca_file: str | None = None) -> None:
        """Take the service's base URL and the file whose first token is used.

        Raises:
            ConfigError: the URL, the token file or the file of authorities cannot be used.
        """
        if not is_url(url):
            raise ConfigError(f"{url!r} is no URL of the service such as http://127.0.0.1:9479; give one with --url")
        token = _token(token_file)
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=30.0,
            trust_env=False,
            verify=_authorities(ca_file) if ca_file else True,
        )

    def get(self, path: str) -> dict[str, Any]:
        """Send a GET and return the answer; an error answer raises `ServiceError` with the service's sentence."""
        return self._send("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a POST and return the answer; errors as in `get`."""
        return self._send("POST", path, body)

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ServiceError(f"{self._http.base_url} does not answer ({error}); is `serve` running there?") from error
        try:
            tree = answer.json()
        except (ValueError, RecursionError):
            tree = None
        if answer.status_code != 200:
            said = tree.get("error") if isinstance(tree, dict) else None
            raise ServiceError(f"{answer.status_code}: {said or answer.text[:200]}")
        if not isinstance(tree, dict):
            raise ServiceError(f"{self._http.base_url} did not answer as this service does; check --url")
        return tree

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()


def _token(path: str) -> str:
    if not path:
        raise ConfigError("no token: name a file that holds one with --token-file, or set it in the configuration")
    try:
        words = Path(path).read_bytes().split()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"token file {path} cannot be read: {why}; name one with --token-file") from error
    if not words:
        raise ConfigError(f"token file {path} holds no token; name one that does with --token-file")
    if not fits_header(words[0]):
        raise ConfigError(f"token file {path} does not begin with printable ASCII; name a token's with --token-file")
    return words[0].decode("ascii")


def _authorities(path: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--ca-file {path} cannot be read as PEM certificates: {error}") from error
