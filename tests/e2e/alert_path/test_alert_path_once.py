"""The campaign of the once-only event, in small: `make campaign-alerts` plays all twenty runs."""

from __future__ import annotations

from pathlib import Path

import campaign
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.needs("prometheus", "alertmanager")]


def test_every_rank_dies_after_the_event_and_the_page_arrives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three jobs, scraped before and born with their event, at 5 s scrape and evaluation: under 12 s to the webhook."""
    assert campaign.main(["--runs", "3", "--folder", str(tmp_path)]) == 0, capsys.readouterr().out
