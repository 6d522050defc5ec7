"""Read the TOML file into the frozen `settings.Config`, and write a commented one.

What it does: checks every key, type, choice and the rules between settings; resolves relative paths against the
file's own folder; renders the default file and the table in the operator's page from the same declarations.
What it never does: guess. An unknown key is an error, and so is a section that contradicts another.
Its place: `cli` calls it before anything else starts.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import httpx
import tomllib
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from sdcwatch_remediation import preflight, windows
from sdcwatch_remediation.errors import ConfigError
from sdcwatch_remediation.settings import ACTIONS, GIVE_BACK, MODES, Config, Database, GroupModes
from sdcwatch_remediation.states import INITIAL, STATES

T = TypeVar("T")


HIGHEST_PORT = 65_535


def load(path: Path) -> Config:
    """Read and check a configuration file and what it names: token files, certificates, the database's driver.

    Raises:
        ConfigError: the file is missing, is not TOML, or settings are wrong; the message names each, one a line.
    """
    config = _with_url(read(path))
    _raise([*_problems(config), *preflight.problems(config)])
    return config


def read(path: Path) -> Config:
    """Read a configuration file without judging what it says; for those who only talk to the running service.

    Raises:
        ConfigError: the file is missing, is not TOML, or a key or type is wrong.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; `sdcwatch-remediation init --config {path}` writes one") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
    return _resolve_paths(parse(tree), path.resolve().parent)


def parse(tree: dict[str, Any]) -> Config:
    """Turn a parsed TOML tree into a `Config`; unknown keys and wrong types raise `ConfigError`."""
    return _fill(Config, tree, "")


def check(config: Config) -> Config:
    """Check what no single setting shows and return the same configuration.

    Raises:
        ConfigError: a required setting is absent, a value cannot be meant, or two settings contradict each other; one
            sentence a line.
    """
    _raise(list(_problems(config)))
    return config


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


def _problems(config: Config) -> Iterator[str]:
    if not config.cluster.name:
        yield "cluster.name is empty; set it to the cluster's name as the training job reports it"
    if not (config.server.alerts_token_file or config.server.client_ca_file):
        yield "server.alerts_token_file is empty; name a file that holds the token (or set server.client_ca_file)"
    if not config.agents.events_token_file:
        yield "agents.events_token_file is empty; name a file that holds the token"
    for name, port in (("server.port", config.server.port), ("agents.port", config.agents.port)):
        if port > HIGHEST_PORT:
            yield f"{name} must be at most {HIGHEST_PORT}, not {port}"
    yield from _bind_problems(config)
    yield from _mode_problems(config)
    yield from _notify_problems(config)
    if config.actions.replace == "slurm" and config.actions.isolate != "slurm":
        yield "actions.replace is 'slurm', which fails only nodes that were drained: set actions.isolate = 'slurm' too"
    if forbidden := set(config.policy.groups) & set(config.policy.forbidden_groups):
        yield f"policy.groups and policy.forbidden_groups both hold {sorted(forbidden)}; remove it from one"
    if unknown := sorted(set(config.policy.handover_groups) - set(config.policy.groups)):
        yield f"policy.handover_groups holds {unknown[0]!r}, which policy.groups does not: nothing may be done there"
    if config.policy.handover_groups and "slurm" in (config.actions.isolate, config.actions.replace):
        yield "policy.handover_groups needs Kubernetes, and actions.isolate or actions.replace is 'slurm'; drop one"
    if unknown := sorted(set(config.policy.give_back) - set(GIVE_BACK)):
        yield f"policy.give_back: {unknown[0]!r} is none of {', '.join(GIVE_BACK)}"
    for window in config.policy.windows:
        try:
            windows.parse(window)
        except ValueError as error:
            yield f"policy.windows: {error}"
    if config.policy.group_share > 1:
        yield f"policy.group_share is a share and must be at most 1, not {config.policy.group_share}"
    endpoint = config.cluster.endpoint_url
    if endpoint and not is_url(endpoint):
        yield f"cluster.endpoint_url {endpoint!r} is no URL such as http://127.0.0.1:8080"
    try:
        make_url(config.database.url)
    except (ArgumentError, ValueError) as error:
        yield f"database.url is not a SQLAlchemy URL: {error}"


def default_file(known: Mapping[str, object] | None = None) -> str:
    """Return the commented configuration that `init` writes; `known` are settings that it sets (`section.key`)."""
    known = known or {}
    lines = [
        "# Configuration of sdcwatch-remediation. Every setting is shown with its default;",
        "# remove the leading '#' of a line to change it. Paths are relative to this file.",
    ]
    for section in fields(Config):
        lines += ["", f"[{section.name}]"]
        for key, default, help_text, choices in _settings_of(section.name):
            lines.append(
                f"# {help_text}" + (f" One of: {', '.join(c or '(empty)' for c in choices)}." if choices else "")
            )
            name = f"{section.name}.{key}"
            lines.append(f"{key} = {_toml(known[name])}" if name in known else f"# {key} = {_toml(default)}")
    lines += ["", "# Modes of one instance group (quarantine, replace):"]
    lines += ["# [policy.group_modes.workers]", '# quarantine = "auto"', '# replace = "approve"', ""]
    return "\n".join(lines)


def reference_table() -> str:
    """Return the Markdown table of all settings, for the operator's page."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for section in fields(Config):
        for key, default, help_text, _ in _settings_of(section.name):
            rows.append(f"| `{section.name}.{key}` | `{_toml(default)}` | {help_text} |")
    rows.append('| `policy.group_modes.<group>.quarantine`, `.replace` | `""` | Modes of one instance group. |')
    return "\n".join(rows)


def _settings_of(section: str) -> Iterator[tuple[str, Any, str, tuple[str, ...]]]:
    defaults = getattr(Config(), section)
    for item in fields(defaults):
        if item.name != "group_modes":
            yield item.name, getattr(defaults, item.name), item.metadata["help"], item.metadata["choices"]


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(json.dumps(item) for item in value) + "]"
    return json.dumps(value)


def _fill(kind: type[T], tree: dict[str, Any], where: str) -> T:
    hints = get_type_hints(kind)
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(tree) - set(known)):
        name = f"{where}{unknown[0]}"
        raise ConfigError(f"unknown setting {name}; known here: {', '.join(sorted(known))}")
    values: dict[str, Any] = {}
    for key, raw in tree.items():
        name, hint = f"{where}{key}", hints[key]
        if dataclasses.is_dataclass(hint):
            values[key] = _fill(hint, _table(raw, name), f"{name}.")  # type: ignore[arg-type]
        elif key == "group_modes":
            groups = _table(raw, name)
            values[key] = {g: _fill(GroupModes, _table(v, f"{name}.{g}"), f"{name}.{g}.") for g, v in groups.items()}
        else:
            values[key] = _value(raw, hint, name, known[key].metadata)
    return kind(**values)


def _table(raw: Any, name: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ConfigError(f"{name} must be a table ([{name}]), not {raw!r}")
    return raw


def _value(raw: Any, hint: Any, name: str, metadata: Any) -> Any:
    if hint is float and isinstance(raw, int) and not isinstance(raw, bool):
        raw = float(raw)
    if hint == tuple[str, ...]:
        if not isinstance(raw, list) or not all(isinstance(item, str) for item in raw):
            raise ConfigError(f"{name} must be a list of strings, not {raw!r}")
        return tuple(raw)
    if type(raw) is not hint:
        raise ConfigError(f"{name} must be of type {hint.__name__}, not {raw!r}")
    if metadata["choices"] and raw not in metadata["choices"]:
        raise ConfigError(f"{name} must be one of {', '.join(c for c in metadata['choices'] if c)}, not {raw!r}")
    if metadata["minimum"] is not None and not raw >= metadata["minimum"]:
        raise ConfigError(f"{name} must be at least {metadata['minimum']}, not {raw!r}")
    return raw


def _bind_problems(config: Config) -> Iterator[str]:
    server = config.server
    if bool(server.tls_cert_file) != bool(server.tls_key_file):
        yield "server.tls_cert_file and server.tls_key_file go together; set both or neither"
    if bool(server.client_ca_file) != bool(server.client_names):
        yield "server.client_ca_file and server.client_names go together; name an authority, and who of it may deliver"
    elif server.client_ca_file and not server.tls_cert_file:
        yield "server.client_ca_file needs TLS here; set server.tls_cert_file and tls_key_file"
    for name in server.client_names:
        if not name.startswith(("DNS:", "URI:", "CN:")) or not name.partition(":")[2].strip():
            yield f"server.client_names: {name!r} is none of 'DNS:name', 'URI:spiffe://...', 'CN:name'"
    if not (is_loopback(server.host) or server.tls_cert_file or server.behind_proxy):
        yield (
            f"server.host {server.host!r} is not loopback and TLS is off; set server.tls_cert_file and tls_key_file, "
            "or server.behind_proxy = true when something in front ends TLS"
        )


def _mode_problems(config: Config) -> Iterator[str]:
    acts = False
    policy = config.policy
    for group in ("", *policy.group_modes):
        quarantine, replacing = (policy.mode_of(action, group) for action in ACTIONS)
        if MODES.index(replacing) > MODES.index(quarantine):
            yield (
                f"replace is {replacing!r} but quarantine is {quarantine!r}{f' in group {group!r}' if group else ''}; "
                "a node is quarantined before it is replaced, so raise quarantine or lower replace"
            )
        acts = acts or MODES.index(quarantine) >= MODES.index("approve")
    if acts and not config.agents.latch_token_file:
        yield "agents.latch_token_file is empty, but quarantine may act; name a file with the token"


def _notify_problems(config: Config) -> Iterator[str]:
    notify = config.notify
    if notify.url and not is_url(notify.url):
        yield "notify.url is no URL such as https://hooks.example.com/sdcwatch"  # not shown: it may hold a secret
    if notify.url and not notify.secret_file:
        yield "notify.secret_file is empty; name a file with the key by which the receiver knows our notices"
    known = [name for name in STATES if name != INITIAL]
    if unknown := sorted(set(notify.states) - set(known)):
        yield f"notify.states: {unknown[0]!r} is none of {', '.join(known)}"


def is_url(text: str) -> bool:
    """Whether a text is an absolute http or https URL with a host, and nothing after its path."""
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError):
        return False
    clean = not (url.query or url.fragment or any(c.isspace() for c in text))
    return url.scheme in ("http", "https") and bool(url.host) and (url.port or 1) <= HIGHEST_PORT and clean


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_url(config: Config) -> Config:
    """Take the database's URL from its file, where one is named, so that a password stands in a Secret alone."""
    database = config.database
    if not database.url_file:
        return config
    if database.url != type(database)().url:
        raise ConfigError("database.url and database.url_file are both set; keep one")
    try:
        lines = Path(database.url_file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"database.url_file {database.url_file} cannot be read: {error}") from error
    if len(lines) != 1:
        raise ConfigError(f"database.url_file {database.url_file} must hold one line, the database's URL")
    return replace(config, database=_database_in(replace(database, url=lines[0]), Path(database.url_file).parent))


def _resolve_paths(config: Config, folder: Path) -> Config:
    def resolved(section: Any) -> Any:
        names = [item.name for item in fields(section) if item.name == "file" or item.name.endswith(("_file", "_dir"))]
        return replace(section, **{n: str(folder / getattr(section, n)) for n in names if getattr(section, n)})

    database = resolved(config.database)
    if not database.url_file:
        database = _database_in(database, folder)
    return replace(
        config,
        server=resolved(config.server),
        agents=resolved(config.agents),
        actions=resolved(config.actions),
        kill_switch=resolved(config.kill_switch),
        tracing=resolved(config.tracing),
        notify=resolved(config.notify),
        database=database,
    )


def _database_in(database: Database, folder: Path) -> Database:
    """Let a relative SQLite path begin at a folder, and its mark stand beside it."""
    try:
        url = make_url(database.url)
    except (ArgumentError, ValueError):
        return database
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return database
    file = str(folder / str(url.database))
    database = replace(database, url=url.set(database=file).render_as_string(hide_password=False))
    return database if database.mark_file else replace(database, mark_file=f"{file}.mark")
