"""The configuration: unknown keys, wrong values and contradictions are said in one sentence; the page is generated."""

from __future__ import annotations

import importlib.util
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from sdcwatch_remediation import catalog, cli, config, settings, states
from sdcwatch_remediation.errors import ConfigError
from sdcwatch_remediation.telemetry import Telemetry

MINIMAL: dict[str, Any] = {
    "cluster": {"name": "demo"},
    "server": {"alerts_token_file": "alerts"},
    "agents": {"events_token_file": "events", "latch_token_file": "latch"},
}


def built(**sections: dict[str, Any]) -> settings.Config:
    tree = {name: {**MINIMAL.get(name, {}), **sections.get(name, {})} for name in {**MINIMAL, **sections}}
    return config.check(config.parse(tree))


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"polcy": {}}, "unknown setting polcy"),
        ({"policy": {"setle_seconds": 1}}, "unknown setting policy.setle_seconds"),
        ({"policy": {"mode": "yolo"}}, "policy.mode must be one of"),
        ({"policy": {"handover_groups": ["w"]}}, "policy.handover_groups holds 'w', which policy.groups does not"),
        (
            {"policy": {"groups": ["w"], "handover_groups": ["w"]}, "actions": {"isolate": "slurm"}},
            "policy.handover_groups needs Kubernetes",
        ),
        ({"policy": {"per_day": "2"}}, "policy.per_day must be of type int"),
        ({"policy": {"per_day": -1}}, "at least 0"),
        ({"policy": {"per_day": True}}, "must be of type int"),
        ({"policy": {"groups": "workers"}}, "must be a list of strings"),
        ({"policy": {"mode": "observe", "replace": "auto"}}, "raise quarantine or lower replace"),
        ({"policy": {"group_modes": {"w": {"replace": "auto"}}}}, "in group 'w'"),
        ({"policy": {"group_modes": {"w": {"reboot": "auto"}}}}, "unknown setting policy.group_modes.w.reboot"),
        ({"policy": {"groups": ["controller"]}}, "both hold"),
        ({"policy": {"mode": "auto"}, "agents": {"latch_token_file": ""}}, "latch_token_file is empty"),
        ({"cluster": {"name": ""}}, "cluster.name is empty"),
        ({"server": {"alerts_token_file": ""}}, "server.alerts_token_file is empty"),
        ({"agents": {"events_token_file": ""}}, "agents.events_token_file is empty"),
        ({"server": {"host": "0.0.0.0"}}, "is not loopback and TLS is off"),
        ({"server": {"tls_cert_file": "cert"}}, "go together"),
        ({"server": {"client_ca_file": "ca"}}, "client_names go together"),
        ({"server": {"client_names": ["DNS:a"]}}, "client_names go together"),
        ({"server": {"client_ca_file": "ca", "client_names": ["DNS:a"]}}, "client_ca_file needs TLS"),
        ({"server": {"client_names": ["a"]}}, "is none of 'DNS:name'"),
        ({"server": {"client_names": ["DNS: "]}}, "is none of 'DNS:name'"),
        ({"database": {"url": "nonsense"}}, "not a SQLAlchemy URL"),
        ({"database": {"url": "postgresql://host:port/name"}}, "not a SQLAlchemy URL"),
        ({"server": {"port": 65536}}, "server.port must be at most 65535"),
        ({"agents": {"port": 70000}}, "agents.port must be at most 65535"),
        ({"policy": {"group_share": 1.5}}, "policy.group_share is a share"),
        ({"cluster": {"endpoint_url": "localhost:8080"}}, "cluster.endpoint_url 'localhost:8080' is no URL"),
        ({"cluster": {"endpoint_url": "http://host:99999"}}, "cluster.endpoint_url .* is no URL"),
    ],
)
def test_a_wrong_setting_is_named_with_what_to_do(sections: dict[str, Any], sentence: str) -> None:
    """Each wrong setting refuses the start and its sentence names the key."""
    with pytest.raises(ConfigError, match=sentence):
        built(**sections)


def test_wider_than_loopback_needs_tls_or_a_proxy() -> None:
    """The same address is accepted once TLS is on, or something in front ends it."""
    assert built(server={"host": "0.0.0.0", "tls_cert_file": "c", "tls_key_file": "k"}).server.host == "0.0.0.0"
    assert built(server={"host": "0.0.0.0", "behind_proxy": True}).server.behind_proxy


def test_group_modes_override_action_modes_override_the_mode() -> None:
    """The nearest setting counts, per action."""
    policy = built(
        policy={
            "mode": "auto",
            "replace": "approve",
            "group_modes": {"spot": {"quarantine": "observe", "replace": "observe"}},
        }
    ).policy
    assert [policy.mode_of(a, "workers") for a in ("quarantine", "replace")] == ["auto", "approve"]
    assert [policy.mode_of(a, "spot") for a in ("quarantine", "replace")] == ["observe", "observe"]


def test_the_default_file_reads_back_as_the_defaults() -> None:
    """Uncommenting any line of the written file is valid TOML with the same default value."""
    lines = config.default_file().splitlines()
    settings_lines = [line[2:] if line.startswith("# ") and " = " in line else line for line in lines]
    import tomllib

    tree = tomllib.loads("\n".join(line for line in settings_lines[:-5] if not line.startswith("#")))
    assert config.parse(tree) == settings.Config()


def test_init_writes_a_configuration_that_serves_and_secrets_nobody_else_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every role has its own random token (0600), the database's id is pinned, and `migrate` makes it under that id."""
    from sdcwatch_remediation.database import Database
    from sdcwatch_remediation.install import TOKENS

    path = tmp_path / "made.toml"
    old = os.umask(0)
    try:
        assert cli.main(["init", "--config", str(path), "--cluster", "demo"]) == 0
    finally:
        os.umask(old)
    said = capsys.readouterr().out
    files = [tmp_path / name for name in TOKENS.values()]
    tokens = [file.read_text().strip() for file in files]
    assert len(set(tokens)) == len(TOKENS) == 6
    assert all(len(token) >= 43 for token in tokens)
    assert not any(token in said for token in tokens)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (path, *files)} == {0o600}
    made = config.load(path)
    assert (made.policy.mode, made.cluster.name) == ("observe", "demo")
    assert cli.main(["migrate", "--config", str(path)]) == 0
    database = Database(made.database.url)
    assert database.id == made.database.id != ""
    database.close()


@pytest.mark.parametrize("there", ["made.toml", "approve.token", "link"])
def test_init_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], there: str) -> None:
    """A configuration, a secret or a dangling link in the way: status 2, the file is named, nothing is written."""
    if there == "link":
        there = "latch.token"
        (tmp_path / there).symlink_to(tmp_path / "nowhere")
    else:
        (tmp_path / there).write_text("mine")
    assert cli.main(["init", "--config", str(tmp_path / "made.toml")]) == 2
    assert str(tmp_path / there) in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == [there]


def test_init_by_force_keeps_the_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The configuration is written anew; a token that others use already stays what it is."""
    path = tmp_path / "made.toml"
    path.write_text("mine")
    (tmp_path / "alerts.token").write_text("in-use\n")
    assert cli.main(["init", "--force", "--config", str(path)]) == 0
    assert "kept what was there: alerts.token" in capsys.readouterr().out
    assert (tmp_path / "alerts.token").read_text() == "in-use\n"
    assert config.read(path).database.id


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service may be started from any folder."""
    path = tmp_path / "here.toml"
    path.write_text('[cluster]\nname="demo"\n[server]\nalerts_token_file="a"\n[agents]\nevents_token_file="e"\n')
    for name in ("a", "e"):
        (tmp_path / name).write_text(f"token-{name}\n")
    monkeypatch.chdir("/")
    loaded = config.load(path)
    assert loaded.server.alerts_token_file == str(tmp_path / "a")
    assert loaded.database.url == f"sqlite:///{tmp_path / 'remediation.sqlite3'}"
    assert loaded.kill_switch.file == ""


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("", "holds 0 tokens"), (" \n\n", "holds 0 tokens"), ("a\nb\nc", "holds 3 tokens"), (None, "cannot be read")],
)
def test_a_blank_secret_refuses_to_start(tmp_path: Path, content: str | None, sentence: str) -> None:
    """A token file without a token never means `everybody`."""
    from sdcwatch_remediation.tokens import Tokens

    path = tmp_path / "alerts"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        Tokens(settings.Server(alerts_token_file=str(path)))


def test_the_credential_that_reports_can_never_approve(tmp_path: Path) -> None:
    """One token in two files refuses to start; one that slips in later still only delivers alerts."""
    from sdcwatch_remediation.tokens import Tokens

    (tmp_path / "alerts").write_text("same\n")
    (tmp_path / "approve").write_text("same\n")
    server = settings.Server(alerts_token_file=str(tmp_path / "alerts"), approve_token_file=str(tmp_path / "approve"))
    with pytest.raises(ConfigError, match="share a token"):
        Tokens(server)
    (tmp_path / "approve").write_text("other\n")
    tokens = Tokens(server)
    assert tokens.refuse("Bearer other", "approve") is None
    (tmp_path / "approve").write_text("same\nother\n")
    refusal = tokens.refuse("Bearer same", "approve")
    assert refusal is not None
    assert refusal.status == 403


def test_the_states_are_sound() -> None:
    """Every target exists, every state is reachable and has a way out, and every open state has a deadline."""
    reached, todo = set(), [states.INITIAL]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += states.STATES[name].next
    assert reached == set(states.STATES)
    for state in states.STATES.values():
        if state.kind == "terminal":
            assert (state.next, state.deadline) == ((), None)
        else:
            assert state.overdue in state.next
            assert (state.seconds(settings.Policy()) or 0) > 0


def test_every_state_that_works_has_a_step() -> None:
    """The worker knows what to do in each state that does not wait for a person alone."""
    from sdcwatch_remediation.worker import STEPS

    assert set(STEPS) == {s.name for s in states.STATES.values() if s.kind != "terminal" and s.name != "frozen"}


def test_the_operators_page_is_up_to_date(repository: Path) -> None:
    """The diagram, states, settings and metrics in docs/remediation.md are those of the code."""
    path = repository / "docs" / "build_remediation.py"
    spec = importlib.util.spec_from_file_location("build_remediation", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (repository / "docs" / "remediation.md").read_text(encoding="utf-8")
    assert page == module.text(page), "run python docs/build_remediation.py"
    assert set(module.PARTS) == {part for part in module.PARTS if f"generated: {part} -->" in page}


def test_the_page_names_every_gate(repository: Path) -> None:
    """Nobody has to read code to learn why a case is held."""
    import re

    source = (repository / "remediation" / "sdcwatch_remediation" / "policy.py").read_text(encoding="utf-8")
    gates = set(re.findall(r"Gate\(\s*\"(\w+)\"", source))
    page = (repository / "docs" / "remediation.md").read_text(encoding="utf-8")
    assert len(gates) >= 18
    assert [gate for gate in sorted(gates) if f"`{gate}`" not in page] == []


def test_the_catalogue_is_sound() -> None:
    """Names have the prefix, counters end in _total, gauges do not, and a registry takes them all."""
    names = [metric.name for metric in catalog.CATALOG]
    assert len(set(names)) == len(names)
    for metric in catalog.CATALOG:
        assert metric.name.startswith("sdc_remediation_")
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert metric.help.endswith(".")
    Telemetry()


def test_counters_are_one_series_each() -> None:
    """No `_created` twin: a second series a counter would be stored and read by nobody."""
    from prometheus_client import generate_latest
    from sdcwatch_remediation.telemetry import Telemetry

    telemetry = Telemetry()
    telemetry.count("sdc_remediation_errors_total", "case")
    text = generate_latest(telemetry.registry).decode()
    assert "sdc_remediation_errors_total{" in text
    assert "_created" not in text


def test_the_databases_url_may_stand_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Its password then is in a Secret alone; a relative SQLite path starts at that file, with its mark beside it."""
    for name in ("alerts", "events"):
        (tmp_path / name).write_text(f"{name}-token\n")
    (tmp_path / "secret").mkdir()
    url = tmp_path / "secret" / "url"
    url.write_text("sqlite:///cases.sqlite3\n")
    file = tmp_path / "remediation.toml"
    text = (
        '[cluster]\nname = "demo"\n[server]\nalerts_token_file = "alerts"\n'
        '[agents]\nevents_token_file = "events"\n[database]\nurl_file = "secret/url"\n'
    )
    file.write_text(text)
    database = config.load(file).database
    assert database.url == f"sqlite:///{tmp_path}/secret/cases.sqlite3"
    assert database.mark_file == f"{tmp_path}/secret/cases.sqlite3.mark"
    for content, sentence in (("", "must hold one line"), ("a\nb\n", "must hold one line"), (None, "cannot be read")):
        url.unlink()
        if content is not None:
            url.write_text(content)
        else:
            url.mkdir()
        with pytest.raises(ConfigError, match=sentence):
            config.load(file)
    file.write_text(text + 'url = "sqlite:///other.sqlite3"\n')
    with pytest.raises(ConfigError, match="both set"):
        config.load(file)
