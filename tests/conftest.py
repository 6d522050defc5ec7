"""What a test needs from the machine: programs in .tools/bin or on PATH, and Python modules.

A part that is missing is a skip that names it on a laptop, and a failure where `CI=true`: a green run there means that
everything ran. Use the fixture when the test wants the path, the marker when it only needs the part to exist:

    def test_rules_parse(require): subprocess.run([require("promtool"), "check", "rules", ...])

    @pytest.mark.needs("alertmanager", "module:torch")
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_TOOLS = ROOT / ".tools" / "bin"
# Models of a few kilobytes: in their own budget their checks would be stretched apart, at a time that no test knows.
os.environ["SDCWATCH_MAX_OVERHEAD"] = "0"


def _find(part: str) -> Path | None:
    """Where `part` is: a program's path, or for `module:name` the module's file; None where it is missing."""
    kind, _, name = part.rpartition(":")
    if kind == "module":
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # a parent package of `name` is missing
            return None
        return Path(spec.origin) if spec is not None and spec.origin else None
    found = shutil.which(name, path=os.pathsep.join([str(_TOOLS), os.environ.get("PATH", "")]))
    return Path(found) if found else None


def _require(part: str) -> Path:
    path = _find(part)
    if path is not None:
        return path
    message = f"{part} is missing: run `make setup`"
    if os.environ.get("CI") == "true":
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Honours `needs` before any fixture of the test is built."""
    for marker in item.iter_markers("needs"):
        for part in marker.args:
            _require(part)


@pytest.fixture(scope="session")
def require() -> Callable[[str], Path]:
    """`require("promtool")` gives its path; `require("module:torch")` the module's file; else skips (fails in CI)."""
    return _require


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the working tree."""
    return ROOT
