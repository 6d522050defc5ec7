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
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tomllib
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from sdcwatch_remediation.errors import ConfigError
from sdcwatch_remediation.settings import ACTIONS, MODES, Config, GroupModes

T = TypeVar("T")


def load(path: Path) -> Config:
    """Read and check a configuration file.

    Raises:
        ConfigError: the file is missing, is not TOML, or a setting is wrong; the message names it.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; `sdcwatch-remediation init --config {path}` writes one") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
    return check(_resolve_paths(parse(tree), path.resolve().parent))


def parse(tree: dict[str, Any]) -> Config:
    """Turn a parsed TOML tree into a `Config`; unknown keys and wrong types raise `ConfigError`."""
    return _fill(Config, tree, "")


def check(config: Config) -> Config:
    """Check what no single setting shows and return the same configuration.

    Raises:
        ConfigError: a required setting is absent or two settings contradict each other.
    """
    if not config.cluster.name:
        raise ConfigError("cluster.name is empty; set it to the cluster's name as the training job reports it")
    for name in ("server.alerts_token_file", "agents.events_token_file"):
        section, key = name.split(".")
        if not getattr(getattr(config, section), key):
            raise ConfigError(f"{name} is empty; name a file that holds the token")
    _check_bind(config)
    _check_modes(config)
    if forbidden := set(config.policy.groups) & set(config.policy.forbidden_groups):
        raise ConfigError(
            f"policy.groups and policy.forbidden_groups both hold {sorted(forbidden)}; remove it from one"
        )
    try:
        make_url(config.database.url)
    except ArgumentError as error:
        raise ConfigError(f"database.url is not a SQLAlchemy URL: {error}") from error
    return config


def default_file() -> str:
    """Return the commented default configuration that `init` writes."""
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
            lines.append(f"# {key} = {_toml(default)}")
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


def _check_bind(config: Config) -> None:
    server = config.server
    if bool(server.tls_cert_file) != bool(server.tls_key_file):
        raise ConfigError("server.tls_cert_file and server.tls_key_file go together; set both or neither")
    if not (is_loopback(server.host) or server.tls_cert_file or server.behind_proxy):
        raise ConfigError(
            f"server.host {server.host!r} is not loopback and TLS is off; set server.tls_cert_file and tls_key_file, "
            "or server.behind_proxy = true when something in front ends TLS"
        )


def _check_modes(config: Config) -> None:
    policy = config.policy
    for group in ("", *policy.group_modes):
        quarantine, replacing = (policy.mode_of(action, group) for action in ACTIONS)
        if MODES.index(replacing) > MODES.index(quarantine):
            raise ConfigError(
                f"replace is {replacing!r} but quarantine is {quarantine!r}{f' in group {group!r}' if group else ''}; "
                "a node is quarantined before it is replaced, so raise quarantine or lower replace"
            )
        if MODES.index(quarantine) >= MODES.index("approve") and not config.agents.latch_token_file:
            raise ConfigError("agents.latch_token_file is empty, but quarantine may act; name a file with the token")


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _resolve_paths(config: Config, folder: Path) -> Config:
    def resolved(section: Any) -> Any:
        names = [item.name for item in fields(section) if item.name == "file" or item.name.endswith("_file")]
        return replace(section, **{n: str(folder / getattr(section, n)) for n in names if getattr(section, n)})

    database = config.database
    try:
        url = make_url(database.url)
    except ArgumentError:
        url = None
    if url is not None and url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:"):
        database = replace(
            database, url=url.set(database=str(folder / str(url.database))).render_as_string(hide_password=False)
        )
    return replace(
        config,
        server=resolved(config.server),
        agents=resolved(config.agents),
        kill_switch=resolved(config.kill_switch),
        tracing=resolved(config.tracing),
        database=database,
    )
