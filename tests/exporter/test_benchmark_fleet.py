"""The fleet benchmark: a real Prometheus scrapes every simulated agent, and the page rule pages for the faulty node."""

from __future__ import annotations

import pytest

from benchmarks.fleet import fleet


@pytest.mark.integration
@pytest.mark.needs("prometheus", "promtool")
@pytest.mark.timeout(300)
def test_every_agent_is_scraped_and_one_node_is_paged() -> None:
    """All four agents are scraped, the eight ranks with an event are paged, and the group has a time of its own."""
    found = fleet(agents=4, repeats=1, interval=2)
    scraped = found["scraped"]
    assert (scraped["targets"], scraped["paged_ranks"]) == (4, 8)
    assert scraped["series"] == found["series"] + 8
    assert 0 < scraped["page_group_seconds"] <= scraped["page_group_seconds_most"] < 30
