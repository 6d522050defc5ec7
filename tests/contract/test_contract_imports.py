"""Who may import whom, where import-linter's words (pyproject.toml) do not reach, and what the facade offers."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sdcwatch

ROOT = Path(__file__).resolve().parents[2]
EXPORTER = ROOT / "exporter" / "sdcwatch"
REMEDIATION = ROOT / "remediation" / "sdcwatch_remediation"

#: Words and pure rules that every stage shares: standard library, and each other (tomli: tomllib before Python 3.11).
PLAIN = ("catalog", "errors", "observation", "packed_rows", "settings", "verdict")
PLAIN_MAY_NAME = sys.stdlib_module_names | {"tomli"}


def imported_names(path: Path) -> set[str]:
    """Dotted names that a file imports at any depth, `if TYPE_CHECKING:` blocks apart."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} if node.module != "sdcwatch" else {f"sdcwatch.{alias.name}" for alias in node.names}
        pending += ast.iter_child_nodes(node)
    return names


@pytest.mark.parametrize("module", PLAIN)
def test_the_shared_words_need_the_standard_library_only(module: str) -> None:
    """The words that all stages share import the standard library and one another, nothing else."""
    files = [EXPORTER / f"{module}.py", *(EXPORTER / module).rglob("*.py")]
    names = {name for path in files if path.exists() for name in imported_names(path)}
    assert names, f"sdcwatch.{module} was not found"
    siblings = re.compile(rf"sdcwatch\.({'|'.join(PLAIN)}|_version)(\..*)?")
    strangers = {
        name for name in names if name.partition(".")[0] not in PLAIN_MAY_NAME and not siblings.fullmatch(name)
    }
    assert not strangers


@pytest.mark.parametrize("package", [EXPORTER, REMEDIATION], ids=lambda path: path.name)
def test_imports_name_modules_in_full(package: Path) -> None:
    """No file imports relatively, so that the rules above and a reader's search see every edge."""
    relative = [
        str(path.relative_to(ROOT))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


def test_the_simulator_is_used_by_nothing_that_ships_to_the_service() -> None:
    """Only the command table, the fakes for tests and the simulator may know it: production code never does."""
    users = {
        str(path.relative_to(REMEDIATION))
        for path in REMEDIATION.rglob("*.py")
        if path.relative_to(REMEDIATION).parts[0] not in ("simulator", "testing", "cli.py")
        and any(name.startswith("sdcwatch_remediation.simulator") for name in imported_names(path))
    }
    assert not users


def test_the_facade_is_sorted_and_agrees_with_its_namespace() -> None:
    """Every name of `__all__` exists, `dir` offers nothing else, and no public name is left out of it."""
    assert list(sdcwatch.__all__) == sorted(sdcwatch.__all__)
    assert dir(sdcwatch) == list(sdcwatch.__all__)
    assert not [name for name in sdcwatch.__all__ if not hasattr(sdcwatch, name)]
    own = {
        name
        for name, value in vars(sdcwatch).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "").startswith("sdcwatch")
        and not inspect.ismodule(value)
    }
    assert own <= set(sdcwatch.__all__)


def test_importing_the_facade_and_the_catalogue_loads_no_torch() -> None:
    """`import sdcwatch` and `sdcwatch.catalog` leave torch alone, even where it is installed."""
    code = "import sys, sdcwatch, sdcwatch.catalog, sdcwatch.agent, sdcwatch.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
