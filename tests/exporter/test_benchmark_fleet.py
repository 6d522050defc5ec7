"""The fleet benchmark: a real Prometheus scrapes every simulated agent, and the page rule pages for the faulty node."""

from __future__ import annotations

import pytest
import yaml

from benchmarks.fleet import fleet
from benchmarks.fleet_scrape import RULES


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
    shipped = {
        group["name"] for path in RULES.glob("*.rules.yaml") for group in yaml.safe_load(path.read_text())["groups"]
    }
    assert {group["group"] for group in scraped["groups"]} <= shipped
    assert {"sdcwatch-mismatch", "sdcwatch-hints", "sdcwatch-path"} <= {group["group"] for group in scraped["groups"]}
    for group in (*scraped["page_group"], *scraped["groups"]):
        assert 0 < group["seconds"] <= group["seconds_most"] < 30
