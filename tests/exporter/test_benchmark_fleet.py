"""The fleet benchmark: a real Prometheus scrapes every simulated agent, and the page rule pages for the faulty node."""

from __future__ import annotations

import pytest

from benchmarks.fleet import fleet


@pytest.mark.integration
@pytest.mark.needs("prometheus", "promtool")
@pytest.mark.timeout(300)
def test_every_agent_is_scraped_and_one_rank_then_one_node_is_paged() -> None:
    """All four agents are scraped, who has an event is paged, and the group has a time of its own each time."""
    found = fleet(agents=4, repeats=1, interval=2)
    scraped = found["scraped"]
    assert scraped["targets"] == 4
    assert scraped["series"] == found["series"] + 1
    assert [group["paged"] for group in scraped["page_group"]] == [1, 8]
    for group in scraped["page_group"]:
        assert 0 < group["seconds"] <= group["seconds_most"] < 30
