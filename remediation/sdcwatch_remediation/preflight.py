"""Look at what the configuration names outside itself: token files, certificates, the database's driver and folder.

What it does: tries each as the service will, and says everything that does not fit, one sentence each.
What it never does: listen, connect, create a file, or remember a secret.
Its place: `config.load` asks it last; the commands that only talk to a running service do not.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from sdcwatch_remediation import tokens
from sdcwatch_remediation.errors import ConfigError
from sdcwatch_remediation.settings import Agents, Config, Notify, Server, Tracing


def problems(config: Config) -> Iterator[str]:
    """Yield one sentence for each thing outside the file that the service could not work with."""
    yield from _tls(config.server)
    yield from tokens.problems(config.server)
    yield from agent_problems(config.agents)
    yield from _database(config.database.url)
    yield from _tracing(config.tracing)
    yield from _notify(config.notify)


def _tls(server: Server) -> Iterator[str]:
    if server.client_ca_file:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=server.client_ca_file)
        except (OSError, ValueError) as error:
            yield f"server.client_ca_file {server.client_ca_file} cannot be read as PEM certificates: {error}"
    if not (server.tls_cert_file and server.tls_key_file):
        return
    missing = False
    for name, path in (("tls_cert_file", server.tls_cert_file), ("tls_key_file", server.tls_key_file)):
        if problem := _unreadable(path):
            missing = True
            yield f"server.{name} {path} cannot be read: {problem}; name a PEM file"
    if missing:
        return
    try:
        # Without a password of its own an encrypted key would make OpenSSL ask at the terminal.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(server.tls_cert_file, server.tls_key_file, password=lambda: "")
    except (OSError, ValueError) as error:
        yield (
            f"server.tls_cert_file {server.tls_cert_file} and server.tls_key_file {server.tls_key_file} are not a PEM "
            f"certificate chain and its unencrypted key: {error}"
        )


def agent_problems(agents: Agents) -> Iterator[str]:
    """Yield one sentence for each file of `[agents]` that could not be used."""
    for name in ("events_token_file", "latch_token_file"):
        if (path := getattr(agents, name)) and (problem := _token_problem(path)):
            yield f"agents.{name} {path} {problem}; write the agents' token into it"
    if agents.ca_file:
        try:
            ssl.create_default_context(cafile=agents.ca_file)
        except (OSError, ValueError) as error:
            yield f"agents.ca_file {agents.ca_file} cannot be read as PEM certificates: {error}"


def _token_problem(path: str) -> str:
    if problem := _unreadable(path):
        return f"cannot be read: {problem}"
    words = Path(path).read_bytes().split()
    if not words:
        return "holds no token"
    return "" if tokens.fits_header(words[0]) else "does not begin with printable ASCII"


def _unreadable(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def _database(text: str) -> Iterator[str]:
    try:
        url = make_url(text)
        dialect = url.get_dialect()
    except NoSuchModuleError:
        yield f"database.url names the database {url.drivername!r}, which SQLAlchemy does not know; try sqlite:///..."
        return
    except (ArgumentError, ValueError):
        return  # `config` has said so
    try:
        dialect.import_dbapi()
    except ImportError as error:
        yield f"database.url {url.drivername!r} needs a driver that is not installed ({error}); pip install it"
        return
    if dialect.is_async:
        yield f"database.url {url.drivername!r} is an asynchronous driver; name a synchronous one"
    name = url.database or ""
    if dialect.name == "sqlite" and name not in ("", ":memory:") and not name.startswith("file:"):
        if not Path(name).parent.is_dir():
            yield f"database.url: the folder {Path(name).parent} does not exist; create it"
        elif Path(name).is_dir():
            yield f"database.url: {name} is a folder; name a file"


def _tracing(settings: Tracing) -> Iterator[str]:
    if not settings.endpoint:
        return
    # Imported only when asked for: it needs the extra `otlp`, and the store.
    from sdcwatch_remediation import trace_export

    try:
        trace_export.check(settings)
    except ConfigError as error:
        yield str(error)


def _notify(settings: Notify) -> Iterator[str]:
    from sdcwatch_remediation import notify

    yield from notify.problems(settings)
