"""docs/simulator.md says everything that the simulator takes."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path

import pytest
from sdcwatch_remediation.simulator import Call, GroupConfig, NodeConfig, SimulatorConfig, command
from sdcwatch_remediation.simulator.faults import MENU
from sdcwatch_remediation.simulator.shapes import OPERATIONS


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    """The page's text."""
    return (repository / "docs" / "simulator.md").read_text(encoding="utf-8")


def test_every_fault_is_described_as_the_menu_does(page: str) -> None:
    """The table of faults and the menu are the same."""
    assert dict(re.findall(r"^\| `([a-z_]+)` \| (.+) \|$", page, re.MULTILINE)) == MENU


def test_every_argument_is_described(page: str) -> None:
    """Each argument of `simulate` stands on the page."""
    parser = argparse.ArgumentParser(add_help=False)
    command.add_arguments(parser)
    options = [option for action in parser._actions for option in action.option_strings]
    assert [option for option in options if f"`{option}`" not in page] == []


def test_every_configuration_key_is_described(page: str) -> None:
    """Each key of the configuration file stands in the example, so that the example is the reference."""
    keys = {f.name for cls in (SimulatorConfig, GroupConfig, NodeConfig) for f in fields(cls)} - {"groups"}
    assert [key for key in sorted(keys) if not re.search(rf"\b{key} = ", page)] == []


def test_every_operation_and_log_member_is_described(page: str) -> None:
    """Each operation that is answered and each member of the call log stands on the page."""
    assert [name for name in OPERATIONS if f"`{name}`" not in page] == []
    assert [f.name for f in fields(Call) if f'"{f.name}"' not in page] == []


def test_example_configuration_works(page: str, tmp_path: Path) -> None:
    """The example is a configuration that the simulator accepts."""
    example = page.split("All times are in seconds of the virtual clock.")[1].split("Instance ids that are")[0]
    path = tmp_path / "example.toml"
    path.write_text("\n".join(line[4:] for line in example.splitlines()))
    config = SimulatorConfig.from_file(path)
    assert [group.name for group in config.groups] == ["controller", "workers"]
