"""Settings: one precedence, no unknown key, and values of the right kind, wherever they come from."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sdcwatch.errors import ConfigurationError
from sdcwatch.settings import Settings, disabled


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`load(arguments, environ, file)` with nothing else in reach."""
    monkeypatch.chdir(tmp_path)

    def call(arguments: Any = None, environ: Any = None, file: str | None = None) -> Settings:
        if file is not None:
            (tmp_path / "sdcwatch.toml").write_text(file, encoding="utf-8")
        return Settings.load(arguments, environ or {})

    return call


def test_argument_beats_environment_beats_file_beats_default(load: Any) -> None:
    """One setting in every place, taken away one by one."""
    file, environ, arguments = "verdicts_kept = 2", {"SDCWATCH_VERDICTS_KEPT": "3"}, {"verdicts_kept": 4}
    assert load().verdicts_kept == 1000
    assert load(file=file).verdicts_kept == 2
    assert load(environ=environ, file=file).verdicts_kept == 3
    assert load(arguments, environ, file).verdicts_kept == 4


def test_an_argument_of_none_counts_as_not_passed(load: Any) -> None:
    """The caller's own defaults of None leave the environment in force."""
    assert load({"job": None}, {"SDCWATCH_JOB": "a"}).job == "a"


def test_every_setting_can_be_given_in_every_place(load: Any, tmp_path: Path) -> None:
    """No field is forgotten by one of the three readers."""
    for field in dataclasses.fields(Settings):
        kind = str(field.type)
        value: Any = 200 if kind == "int" else 0.5 if kind == "float" else "some-text"
        value = {"on_fault": "halt", "agent": "off", "evidence_data": "batch"}.get(field.name, value)
        text = f'{field.name} = "{value}"' if isinstance(value, str) else f"{field.name} = {value}"
        assert getattr(load({field.name: value}, file=""), field.name) == value
        assert getattr(load(environ={f"SDCWATCH_{field.name.upper()}": str(value)}), field.name) == value
        assert getattr(load(file=text), field.name) == value


def test_paths_are_accepted_as_text(load: Any, tmp_path: Path) -> None:
    """`checkpoint_dir=Path(...)` is what people write."""
    assert load({"checkpoint_dir": tmp_path}).checkpoint_dir == str(tmp_path)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"arguments": {"replay_evry": 5}}, r"argument.*did you mean replay_every\?"),
        ({"arguments": {"replay_evry": None}}, r"argument.*did you mean replay_every\?"),
        ({"environ": {"SDCWATCH_REPLAY_EVRY": "5"}}, r"SDCWATCH_REPLAY_EVRY.*did you mean SDCWATCH_REPLAY_EVERY\?"),
        ({"file": "replay_evry = 5"}, r"sdcwatch\.toml.*did you mean replay_every\?"),
        ({"arguments": {"zzzz": 5}}, "unknown setting 'zzzz' .argument.$"),
        ({"file": "[replay_every]\nx = 1"}, "whole number"),
        ({"environ": {"SDCWATCH_replay_every": "5"}}, "write SDCWATCH_REPLAY_EVERY"),
        ({"environ": {"SDCWATCH_": "5"}}, "unknown setting"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_its_place(load: Any, given: Any, hint: str) -> None:
    """A typing mistake in any of the three places, with the nearest name."""
    with pytest.raises(ConfigurationError, match=hint):
        load(**given)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("replay_every", "often", "whole number"),
        ("replay_every", "", "whole number"),
        ("replay_every", 0.5, "whole number"),
        ("replay_every", True, "whole number"),
        ("replay_every", [1], "whole number"),
        ("replay_every", float("inf"), "whole number"),
        ("replay_every", -1, "at least 0"),
        ("check_every", 0, "at least 1"),
        ("agent_port", 65536, "at most 65535"),
        ("halt_grace_seconds", "nan", "number"),
        ("halt_grace_seconds", float("inf"), "number"),
        ("halt_grace_seconds", 10**400, "number"),
        ("metrics_interval", -0.5, "at least 0"),
        ("job", 5, "text"),
        ("job", False, "text"),
        ("on_fault", "ignore", "observe, halt"),
        ("agent", "maybe", "auto, external, off"),
        ("spool_dir", "", "leave it out"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(load: Any, key: str, value: Any, message: str) -> None:
    """The error names the setting and says what it must be."""
    with pytest.raises(ConfigurationError, match=f"{key} is .*{message}"):
        load({key: value})


def test_whole_numbers_are_read_whatever_their_form(load: Any) -> None:
    """Text from the environment, and a float without a fraction from a file."""
    assert load(environ={"SDCWATCH_REPLAY_EVERY": " 50 "}).replay_every == 50
    found = load(file="replay_every = 100.0").replay_every
    assert (found, type(found)) == (100, int)


def test_audits_fall_on_checked_steps(load: Any) -> None:
    """Cadences are rounded up to checked backwards, and 0 turns a check off."""
    settings = load({"check_every": 3, "replay_every": 200})
    assert [settings.cadence(every) for every in (0, 1, 3, 10, 200)] == [0, 3, 3, 12, 201]
    assert load({"check_every": 3, "replay_every": 0}).replay_every == 0


def test_reserved_variables_are_no_settings(load: Any, tmp_path: Path) -> None:
    """The off switch, the file's place, and fault injection's own variables."""
    (tmp_path / "other.toml").write_text('job = "from-other"', encoding="utf-8")
    environ = {
        "SDCWATCH_DISABLE": "0",
        "SDCWATCH_CONFIG": str(tmp_path / "other.toml"),
        "SDCWATCH_TESTING_FAULT": "{}",
        "SDCWATCHER": "x",
        "PATH": "/bin",
    }
    assert load(environ=environ, file='job = "from-default"').job == "from-other"
    for name in ("disable", "config"):
        with pytest.raises(ConfigurationError, match="unknown setting"):
            load({name: "1"})


def test_a_kubernetes_service_of_our_name_is_no_setting(load: Any) -> None:
    """Kubernetes gives every pod variables of each Service of its namespace; `sdcwatch-agent` collides with ours."""
    environ = {
        "SDCWATCH_AGENT_SERVICE_HOST": "10.0.0.1",
        "SDCWATCH_AGENT_SERVICE_PORT": "9478",
        "SDCWATCH_AGENT_SERVICE_PORT_METRICS": "9478",
        "SDCWATCH_AGENT_PORT": "tcp://10.0.0.1:9478",
        "SDCWATCH_AGENT_PORT_9478_TCP": "tcp://10.0.0.1:9478",
        "SDCWATCH_AGENT_PORT_9478_TCP_PROTO": "tcp",
        "SDCWATCH_AGENT_PORT_9478_TCP_PORT": "9478",
        "SDCWATCH_AGENT_PORT_9478_TCP_ADDR": "10.0.0.1",
    }
    assert load(environ=environ) == Settings()
    assert load(environ={"SDCWATCH_AGENT_PORT": "9500"}).agent_port == 9500


@pytest.mark.parametrize("content", [b"job = ", b"\xff\xfe", b"job"])
def test_a_file_that_is_no_toml_is_named(load: Any, tmp_path: Path, content: bytes) -> None:
    """Syntax and encoding alike."""
    (tmp_path / "sdcwatch.toml").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"sdcwatch\.toml cannot be read as TOML"):
        load()


def test_a_named_file_that_is_missing_is_an_error(load: Any, tmp_path: Path) -> None:
    """The default file may be missing, one that was asked for may not."""
    with pytest.raises(ConfigurationError, match=r"nowhere\.toml, which is no file"):
        load(environ={"SDCWATCH_CONFIG": str(tmp_path / "nowhere.toml")})


@pytest.mark.parametrize(("value", "off"), [("1", True), (" TRUE ", True), ("on", True), ("0", False), ("", False)])
def test_the_off_switch(value: str, off: bool) -> None:
    """`SDCWATCH_DISABLE=0` and an empty one leave the monitor on."""
    assert disabled({"SDCWATCH_DISABLE": value}) is off


def test_the_settings_page_is_what_the_code_says(repository: Path) -> None:
    """docs/settings.md is generated; every field stands there with its variable."""
    result = subprocess.run(
        [sys.executable, repository / "docs/build_settings.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    page = (repository / "docs/settings.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(Settings):
        assert f"`{field.name}` | `SDCWATCH_{field.name.upper()}`" in page
