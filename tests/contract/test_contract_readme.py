"""What the top-level documents tell a reader to do or open exists: commands, make targets, links, modules, settings."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sdcwatch.cli import COMMANDS
from sdcwatch.settings import RESERVED, Settings

ROOT = Path(__file__).resolve().parents[2]
ROOMS = "exporter|remediation|alert_rules|dashboards|tests|docs|setup|demo|benchmarks"
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/architecture.md",
    "docs/decisions.md",
)
SERVICE = "sdcwatch-remediation"


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def code_of(document: str) -> list[str]:
    """What stands in code spans and fenced blocks, line by line."""
    text = text_of(document)
    blocks = re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return spans + [line.strip() for block in blocks for line in block.splitlines()]


def subcommands(command: str) -> set[str]:
    """The words that may follow `sdcwatch` or `sdcwatch-remediation`, from the programs themselves."""
    if command == "sdcwatch":
        return set(COMMANDS)
    done = subprocess.run(
        [Path(sys.executable).with_name(SERVICE), "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    return set(re.findall(r"^ {4}(\w[\w-]*)", done.stdout, flags=re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_target_a_document_names_exists(document: str) -> None:
    """`make x` in a document is a target of the Makefile, and a variable given to it is one that the Makefile reads."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    variables = set(re.findall(r"^([A-Z_0-9]+) \?=", makefile, flags=re.MULTILINE))
    for line in code_of(document):
        if not re.match(r"make( |$)", line):
            continue
        for word in line.split()[1:]:
            name, assigned, _ = word.partition("=")
            assert name in (variables if assigned else targets), f"{document}: {line}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_a_document_names_exists(document: str) -> None:
    """`sdcwatch x` and `sdcwatch-remediation x` are commands that the installed programs offer."""
    for line in code_of(document):
        words = line.split()
        if len(words) < 2 or words[0] not in ("sdcwatch", SERVICE) or words[1].startswith("-"):
            continue
        assert words[1] in subcommands(words[0]), f"{document}: {line}"


def test_the_second_words_of_commands_exist() -> None:
    """`sdcwatch latch release` and its like: the command module offers that word."""
    for line in code_of("README.md"):
        words = line.split()
        if len(words) != 3 or words[0] != "sdcwatch" or words[2].startswith("-"):
            continue
        parser = argparse.ArgumentParser()
        importlib.import_module(COMMANDS[words[1]][0]).add_arguments(parser)
        assert words[2] in parser.format_help(), line


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document: str) -> None:
    """Relative links and pictures of a document exist in the tree."""
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text_of(document)):
        if "://" not in target:
            assert (ROOT / document).parent.joinpath(target).exists(), f"{document}: {target}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_and_module_named_exists(document: str) -> None:
    """Paths of the tree and dotted module names in code spans are there."""
    for word in (word.rstrip(":,") for line in code_of(document) for word in line.split()):
        if re.fullmatch(
            r"(exporter|remediation|alert_rules|dashboards|tests|docs|setup|demo|benchmarks)/[\w./-]*", word
        ):
            assert (ROOT / word).exists(), f"{document}: {word}"
        if re.fullmatch(r"sdcwatch(_remediation)?(\.[a-z_]+)+", word):
            assert importlib.util.find_spec(word) is not None, f"{document}: {word}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_setting_named_exists(document: str) -> None:
    """`SDCWATCH_X` in a document is a setting, or one of the few variables that are none."""
    known = {f"SDCWATCH_{name.upper()}" for name in Settings.__dataclass_fields__} | RESERVED
    for variable in re.findall(r"SDCWATCH_[A-Z_]+", text_of(document)):
        assert variable in known, f"{document}: {variable}"


def test_the_python_example_of_the_readme_uses_the_real_names() -> None:
    """Each keyword that the example gives `Monitor` is a parameter of it or a setting, and the example compiles."""
    (example,) = re.findall(r"```python\n(.*?)```", text_of("README.md"), flags=re.DOTALL)
    compile(example, "README.md", "exec")
    monitor = importlib.import_module("sdcwatch").Monitor
    named = set(re.findall(r"(\w+)=", re.findall(r"Monitor\((.*?)\)", example)[0]))
    varnames = monitor.__init__.__code__.co_varnames
    assert named <= set(varnames) | set(Settings.__dataclass_fields__)
    assert all(hasattr(monitor, name) for name in re.findall(r"monitor\.(\w+)", example))
