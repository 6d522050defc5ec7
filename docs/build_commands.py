"""Writes docs/commands.md from the programs' own parsers; `--check` says whether it is up to date (status 1: not)."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from sdcwatch.cli import COMMANDS
from sdcwatch_remediation import cli as service
from sdcwatch_remediation.simulator import command as simulator

TARGET = Path(__file__).with_name("commands.md")
_HEAD = """# Commands

Generated from the programs' own parsers by `python docs/build_commands.py`; do not edit. Exit statuses stand in
[contracts.md](contracts.md#exit-statuses). A setting that an option leaves out comes from the environment or a file:
[settings.md](settings.md).
"""


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Every command with its parser, by the words that one types; those with words of their own below them too."""
    found: dict[str, argparse.ArgumentParser] = {}
    for name, (module, text) in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"sdcwatch {name}", description=text)
        importlib.import_module(module).add_arguments(parser)
        found |= _with_words(f"sdcwatch {name}", parser)
    simulate = argparse.ArgumentParser(description="Run the HyperPod simulator on loopback.")
    simulator.add_arguments(simulate)
    for words, parser in _with_words("sdcwatch-remediation", service._parser()).items():
        found[words] = simulate if words == "sdcwatch-remediation simulate" else parser
    del found["sdcwatch-remediation"]
    return found


def _with_words(words: str, parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = {words: parser}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help for choice in action._choices_actions}
            for name, child in action.choices.items():
                child.description = child.description or helps.get(name)
                found |= _with_words(f"{words} {name}", child)
    return found


def _rows(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
            continue
        value = "" if action.nargs == 0 else f" {_value(action)}"
        names = ", ".join(f"{name}{value}" for name in action.option_strings) or _value(action)
        meaning = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
        needed = " (required)" if action.required and action.option_strings else ""
        yield f"| `{names.replace('|', chr(92) + '|')}` | {meaning.replace('|', chr(92) + '|')}{needed} |"


def _value(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper().replace("-", "_")


def text() -> str:
    """The whole file."""
    parts = [_HEAD]
    for words, parser in parsers().items():
        rows = list(_rows(parser))
        table = ["", "| option | meaning |", "|---|---|", *rows] if rows else []
        description = (parser.description or "").strip().splitlines()
        parts.append("\n".join([f"## `{words}`", "", *(description or [""]), *table]) + "\n")
    return "\n".join(parts)


def main() -> int:
    """Writes or checks the file."""
    if "--check" in sys.argv[1:]:
        if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text():
            return 0
        print(f"{TARGET} is out of date: run python docs/build_commands.py", file=sys.stderr)
        return 1
    TARGET.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
