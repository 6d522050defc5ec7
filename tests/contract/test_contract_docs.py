"""No alert, metric, setting, command or option without documentation; no document that names one that is not there."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from sdcwatch import catalog as exported
from sdcwatch.settings import RESERVED, Settings
from sdcwatch_remediation import catalog as service
from sdcwatch_remediation.actions.handover import CONDITION
from sdcwatch_remediation.settings import Config

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "alert_rules/runbooks/*.md", "*/README.md")
    for path in ROOT.glob(pattern)
    if path.name != "CLAUDE.md"
)
#: Beginnings of lines in logs, and what tests alone set: no settings, and documented as what they are.
NO_VARIABLES = {"SDCWATCH_VERDICT", "SDCWATCH_TESTING_FAULT"}
#: What stands for a family of names.
FAMILIES = {"SDCWATCH_"}


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILDER = _load("build_commands")
PARSERS = BUILDER.parsers()


def documents() -> Iterator[tuple[str, str]]:
    for path in DOCUMENTS:
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def alerts() -> set[str]:
    return {
        rule["alert"]
        for path in (ROOT / "alert_rules").glob("*.rules.yaml")
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }


def service_keys() -> set[str]:
    """Every `section.key` of the service's configuration."""
    made = Config()
    return {
        f"{section.name}.{key.name}"
        for section in dataclasses.fields(Config)
        if dataclasses.is_dataclass(value := getattr(made, section.name))
        for key in dataclasses.fields(value)
    }


def code(text: str) -> list[str]:
    """Code spans, and the lines of indented and fenced blocks, of one document."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL)
    rest = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [line.strip() for line in rest.splitlines() if line.startswith("    ")]
    lines += [line.strip() for block in blocks for line in block.splitlines()]
    return [*re.findall(r"`([^`\n]+)`", rest), *lines]


def test_docs_of_the_commands_are_what_the_programs_say() -> None:
    """Every command and option of both programs stands in docs/commands.md, as its own parser has it."""
    assert BUILDER.TARGET.read_text(encoding="utf-8") == BUILDER.text(), "run python docs/build_commands.py"


def test_every_alert_metric_and_setting_is_documented() -> None:
    """An alert has a runbook, a metric and a setting a line in the table of its own document."""
    assert {path.stem for path in (ROOT / "alert_rules" / "runbooks").glob("*.md")} == alerts()
    metrics, settings, remediation = (
        (ROOT / "docs" / f"{name}.md").read_text() for name in ("metrics", "settings", "remediation")
    )
    assert [m for m in exported.METRICS if f"| `{m}` |" not in metrics] == []
    assert [m.name for m in service.CATALOG if f"| `{m.name}` |" not in remediation] == []
    fields = [field.name for field in dataclasses.fields(Settings)]
    assert [f for f in fields if f"| `{f}` | `SDCWATCH_{f.upper()}` |" not in settings] == []
    assert [name for name in RESERVED if f"`{name}" not in settings] == []
    keys = service_keys()
    assert len(keys) > 40
    assert [key for key in keys if f"| `{key}`" not in remediation and f"`[{key}." not in remediation] == []


@pytest.mark.parametrize(("name", "text"), list(documents()), ids=lambda value: value if len(value) < 60 else "")
def test_no_document_names_what_is_not(name: str, text: str) -> None:
    """Alerts, variables, keys of the service, commands and options in a document are ones that there are."""
    known = alerts() | {CONDITION}
    assert {word for word in re.findall(r"\bSDC[A-Z][a-z]\w+", text) if word not in known} == set()

    variables = {f"SDCWATCH_{field.name.upper()}" for field in dataclasses.fields(Settings)}
    variables |= RESERVED | NO_VARIABLES | FAMILIES
    assert set(re.findall(r"\bSDCWATCH_[A-Z_]*", text)) <= variables

    keys = service_keys()
    sections = "|".join(sorted({key.partition(".")[0] for key in keys}))
    named = set(re.findall(rf"`((?:{sections})\.[a-z_]+)`", text))
    assert {key for key in named - keys if not key.endswith((".py", ".decide"))} == set()

    for line in code(text):
        if re.match(r"sdcwatch(-remediation)? (?!(trace|span) <)[a-z-]+(?![a-z:-])", line):  # those two are hashed
            check_command(name, line)


def check_command(name: str, line: str) -> None:
    """One command line of a document, by the parser of the command that it names."""
    try:
        words = shlex.split(re.split(r"\s(?:#|>)\s|\s{2,}#", line)[0])
    except ValueError:
        words = line.split()
    if "|" in words:  # a list of words that may stand there: `cases | show CASE | ...`
        return
    length = next((n for n in (3, 2) if " ".join(words[:n]) in PARSERS), 0)
    assert length, f"{name}: {line}: no such command"
    parser = PARSERS[" ".join(words[:length])]
    end = words.index("--") if "--" in words else len(words)
    options = {option for action in parser._actions for option in action.option_strings}
    for word in words[length:end]:
        if word.startswith("--"):
            assert word.partition("=")[0].rstrip(",.;:") in options, f"{name}: {line}: no such option"
