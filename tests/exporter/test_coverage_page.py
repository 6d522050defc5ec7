"""docs/coverage.md says what real runs do: every row can be made again, and none has a cell without an outcome."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_coverage", DOCS / "build_coverage.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load()


def test_the_page_has_every_way_to_train_and_an_outcome_in_each_cell() -> None:
    """No fault that a check is meant for goes unseen without a reason."""
    page = (DOCS / "coverage.md").read_text(encoding="utf-8")
    assert page.startswith(build.HEAD)
    rows = build.read(page)
    assert list(rows) == list(build.ROWS)
    words = {cell.partition(": ")[0] for row in rows.values() for cell in row.values()}
    assert words == {"accuses", "detects", "hints", "off"}
    assert all(row[check] != "accuses" for row in rows.values() for check in ("gradient_norm", "gradient_checksum"))


# torch warns of its own code here (Dynamo in a hook, decorators under its ZeRO): no error, as in a build of the page.
@pytest.mark.filterwarnings("default")
@pytest.mark.integration
@pytest.mark.timeout(240)
@pytest.mark.parametrize("row", build.ROWS)
def test_the_row_is_what_real_ranks_do(row: str) -> None:
    """All faults of one row on real ranks: the page says the same, and no healthy rank is named."""
    page = (DOCS / "coverage.md").read_text(encoding="utf-8")
    found = build.run(row)
    assert build.read(page)[row] == build.cells(row, found), "run python docs/build_coverage.py"
    enabled, _, covered, uncovered = found[0]["none"]["coverage"]["weight_checksum"]
    assert f"| {row} | {build.ROWS[row][1]} | {covered if enabled else 0} | {uncovered} |" in page
