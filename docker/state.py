"""Lays out the shared /state volume before anything else starts: folders and fresh tokens, all of one user.

Runs as root, once; a second run keeps what is there. It never prints a token.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

OWNER = 65534
TOKENS = ("webhook", "cases", "approve", "admin", "events", "latch")
FOLDERS = ("secrets", "spool", "job", "remediation")


def lay_out(state: Path, owner: int = OWNER) -> None:
    """Makes folders and tokens below `state`, owned by `owner`."""
    for name in FOLDERS:
        folder = state / name
        folder.mkdir(mode=0o700, exist_ok=True)
        os.chown(folder, owner, owner)
    for name in TOKENS:
        path = state / "secrets" / f"{name}.token"
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(24) + "\n")
        os.chown(path, owner, owner)


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]))
