"""Every query of every dashboard gets data from a real Prometheus that scrapes real agents after a fault."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.needs("prometheus")]

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "dashboards").glob("*.json"))
NAMED = "CPU-i-0de30000000000003-0"
#: The job in which a GPU was named, and the one that had all other events.
JOBS = ("bytegpt", "second")


def look(world: Any, ask: ModuleType, document: Mapping[str, Any], job: str) -> tuple[Any, dict[str, str]]:
    """The world as one dashboard shows it to somebody who chose this job."""
    source = ask.Source(world.url, world.started - 1, time.time())
    given = {"gpu": NAMED} | ({"job": job} if "training-job" in str(document["uid"]) else {})
    return source, source.variables(document, given)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_query_of_every_panel_returns_a_series(
    path: Path, world: Any, ask: ModuleType, queries: ModuleType
) -> None:
    """A panel that nothing fills even after every kind of event is a typing error."""
    document = queries.load(path)
    found: dict[tuple[str, str], int] = {}
    for job in JOBS:
        source, variables = look(world, ask, document, job)
        for target in queries.targets(document, variables):
            key = (target.panel, target.ref)
            found[key] = max(found.get(key, 0), len(source.lines(target)))
    assert [key for key, count in found.items() if count == 0] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_annotation_marks_something(path: Path, world: Any, ask: ModuleType, queries: ModuleType) -> None:
    """Faults stand at the event's own time; heals, replacements and alerts in the minute in which they came."""
    document = queries.load(path)
    marked: set[str] = set()
    for job in JOBS:
        source, variables = look(world, ask, document, job)
        marked |= {target.panel for target in queries.marks(document, variables) if source.lines(target)}
        for mark in source.marks(document, variables):
            assert world.started - 1 <= mark.time <= time.time()
    assert marked == {annotation["name"] for annotation in document["annotations"]["list"]}


@pytest.mark.timeout(600)
@pytest.mark.needs("module:matplotlib")
def test_the_preview_draws_every_dashboard_and_finds_none_empty(world: Any, tmp_path: Path) -> None:
    """One picture a dashboard, worth looking at; a GPU that nobody knows is said panel by panel."""
    command = [sys.executable, ROOT / "dashboards" / "preview.py", world.url, "--strict", "--out", tmp_path]
    command += ["--start", str(world.started), "--end", str(time.time())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in FILES:
        picture = tmp_path / f"{path.stem}.png"
        assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert picture.stat().st_size > 20_000

    unknown = subprocess.run([*command, "--var", "gpu=nobody"], capture_output=True, text=True, timeout=250)
    assert unknown.returncode == 1
    assert "no data: Where it ran" in unknown.stderr
    assert "empty: Power: no such DCGM series for this GPU" in unknown.stdout
