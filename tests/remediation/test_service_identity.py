"""The identity table, played row by row against the whole service: the gate, the sentence, and no act."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from sdcwatch_remediation.testing.identity import ROWS, Row, play
from sdcwatch_remediation.testing.provider import fleet
from sdcwatch_remediation.testing.rig import make_rig


@pytest.mark.integration
@pytest.mark.parametrize("row", ROWS, ids=[f"{row.between}: {row.what}" for row in ROWS])
def test_a_disagreement_gets_its_refusal_and_no_act(row: Row, tmp_path: Path) -> None:
    """The case ends or waits where the table says, for the reason that it says, and nothing is done outside."""
    outcome = play(row, tmp_path)
    assert outcome.ends == row.ends, outcome
    gate = f"{row.gate}: " if row.gate else ""
    assert outcome.reason.startswith(gate), outcome
    assert row.says in outcome.reason, outcome
    assert outcome.acts == ()


def test_without_a_disagreement_the_same_world_is_acted_on(tmp_path: Path) -> None:
    """The table's refusals come from the disagreement: with none, the node is quarantined and replaced once."""
    with make_rig(tmp_path, fleet(5)) as rig:
        rig.fault(2)
        rig.rounds(3, seconds=2.0)
        assert rig.provider.calls == [fleet(5)[2].instance_id]


def test_the_page_is_written_from_the_rows(repository: Path) -> None:
    """docs/identity.md holds exactly what is played."""
    spec = importlib.util.spec_from_file_location("build_identity", repository / "docs" / "build_identity.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (repository / "docs" / "identity.md").read_text(encoding="utf-8")
    assert page == module.text(page), "run python docs/build_identity.py"
    assert page.count("\n| ") == len(ROWS) + 1
