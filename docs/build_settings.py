"""Writes docs/settings.md from `Settings`; `--check` says whether it is up to date (exit status 1: it is not)."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path

from sdcwatch.settings import PREFIX, Settings

TARGET = Path(__file__).with_name("settings.md")

INTRODUCTION = """\
# Settings of the exporter

Generated from `exporter/sdcwatch/settings.py` by `python docs/build_settings.py`; do not edit.

Each setting can be passed to `Monitor(...)`, stand in the environment, or stand in a TOML file. Precedence: argument >
environment > file > default. The file is `sdcwatch.toml` in the working folder, or what `SDCWATCH_CONFIG` names. An
unknown key is an error in all three places. `on_fault`, `heal_window`, `check_every`,
`conservation_every` and `replay_every` must be equal on all ranks.

Three more variables are no settings: `SDCWATCH_CONFIG` names the file, `SDCWATCH_DISABLE=1` turns the monitor off
without a code change (on one rank: on all), and `SDCWATCH_TESTING_FAULT` holds the faults of `sdcwatch.testing`, which
the product never reads. Variables that Kubernetes makes for a Service called `sdcwatch-...` are passed over.

| setting | variable | default | meaning |
|---|---|---|---|
"""


def descriptions() -> dict[str, str]:
    """Setting -> its line in the docstring of `Settings` (one line may describe several)."""
    found: dict[str, str] = {}
    section = (inspect.getdoc(Settings) or "").partition("Attributes:\n")[2]
    for entry in re.split(r"\n(?=    \S)", section.rstrip()):
        names, _, meaning = entry.strip().partition(": ")
        found |= {name.strip(): " ".join(meaning.split()) for name in names.split(",")}
    return found


def text() -> str:
    """The whole file.

    Raises:
        KeyError: a setting that the docstring does not describe.
    """
    meanings = descriptions()
    lines = [
        f"| `{f.name}` | `{PREFIX}{f.name.upper()}` | {'none' if f.default is None else f'`{f.default!r}`'} "
        f"| {meanings[f.name]} |\n"
        for f in dataclasses.fields(Settings)
    ]
    return INTRODUCTION + "".join(lines)


def main() -> int:
    """Writes or checks the file."""
    if "--check" in sys.argv[1:]:
        if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text():
            return 0
        print(f"{TARGET} is out of date: run python docs/build_settings.py", file=sys.stderr)
        return 1
    TARGET.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
