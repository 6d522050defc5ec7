"""The command line's way to the running service: the HTTP API, with a token from a file.

What it does: one call each for listing, showing, deciding and pausing.
What it never does: open the database; the service alone does.
Its place: `cli` uses it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from sdcwatch_remediation.errors import ServiceError


class Client:
    """Calls one running service; a context manager that closes its connections."""

    def __init__(self, url: str, token_file: str, *, ca_file: str | None = None) -> None:
        """Take the service's base URL and the file whose first token is used.

        Raises:
            ServiceError: the token file cannot be read.
        """
        try:
            words = Path(token_file).read_text(encoding="utf-8").split() if token_file else []
        except OSError as error:
            raise ServiceError(
                f"token file {token_file} cannot be read: {error.strerror}; name one with --token-file"
            ) from error
        if not words:
            raise ServiceError("no token: name a file that holds one with --token-file, or set it in the configuration")
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {words[0]}"},
            timeout=30.0,
            trust_env=False,
            verify=ca_file or True,
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
        except ValueError:
            tree = {}
        if answer.status_code != 200:
            raise ServiceError(f"{answer.status_code}: {tree.get('error', answer.text[:200])}")
        return dict(tree)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
