"""Write a first configuration and its secrets: what `init` does.

What it does: writes the commented configuration with the token files' names and a database id set, and one file with a
random token for each role, readable by its owner alone; says what comes next.
What it never does: overwrite anything (a configuration when told to, a secret never), or show a token.
Its place: `cli` calls it once, before there is a service.
"""

from __future__ import annotations

import os
import secrets
import uuid
from pathlib import Path

from sdcwatch_remediation.config import default_file
from sdcwatch_remediation.errors import ConfigError

TOKENS = {
    "server.alerts_token_file": "alerts.token",
    "server.cases_token_file": "cases.token",
    "server.approve_token_file": "approve.token",
    "server.admin_token_file": "admin.token",
    "agents.events_token_file": "events.token",
    "agents.latch_token_file": "latch.token",
}
"""The file beside the configuration that each of these settings names."""
TOKEN_BYTES = 32


def install(config: Path, *, cluster: str = "", force: bool = False) -> str:
    """Write everything and return the next steps.

    Args:
        config: where the configuration goes; the secrets lie beside it.
        cluster: the cluster's name, if it is known already.
        force: overwrite the configuration; secrets that are there stay.

    Raises:
        ConfigError: something is there already, or cannot be written; then nothing was overwritten.
    """
    secrets_of = {name: config.parent / file for name, file in TOKENS.items()}
    if not force:
        there = [str(path) for path in (config, *secrets_of.values()) if os.path.lexists(path)]
        if there:
            raise ConfigError(
                f"{', '.join(there)} exists and is not overwritten; use another --config, or --force to write the "
                "configuration anew and keep the token files"
            )
    known: dict[str, object] = {**TOKENS, "database.id": uuid.uuid4().hex}
    if cluster:
        known["cluster.name"] = cluster
    kept = [path.name for path in secrets_of.values() if not _new(path, secrets.token_urlsafe(TOKEN_BYTES) + "\n")]
    try:
        if force:
            config.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{config} cannot be overwritten: {error.strerror}") from error
    if not _new(config, default_file(known)):
        raise ConfigError(f"{config} appeared meanwhile and is not overwritten")
    return _next_steps(config, cluster, kept)


def _new(path: Path, text: str) -> bool:
    """Write a file that nobody else may read; False where one is there already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    with open(descriptor, "w", encoding="utf-8") as file:
        # The process's umask may have taken bits away, and never adds any.
        os.fchmod(descriptor, 0o600)
        file.write(text)
    return True


def _next_steps(config: Path, cluster: str, kept: list[str]) -> str:
    option = f"--config {config}"
    steps = [
        *([] if cluster else [f"set cluster.name in {config}"]),
        f"sdcwatch-remediation migrate {option}   (makes the database under the id that the file pins)",
        "give events.token and latch.token to the node agents (--events-token-file, --latch-token-file)",
        "give alerts.token to Alertmanager (http_config.authorization.credentials_file)",
        f"sdcwatch-remediation serve {option} --check, then without --check; it only observes",
        f"sdcwatch-remediation doctor {option}   (tells what is still missing before anything would be done)",
    ]
    lines = [f"wrote {config} and its token files beside it, all for their owner alone (0600)"]
    if kept:
        lines.append(f"kept what was there: {', '.join(kept)}")
    return "\n".join([*lines, "next:", *(f"  {number}. {step}" for number, step in enumerate(steps, 1))])
