"""Real ranks, agents, Prometheus, Alertmanager and service in one run: a wrong bit ends as a replaced node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alertpath.programs import free_port, wait

TRAIN = Path(__file__).parent / "alertpath" / "train.py"
BAD = 2


@pytest.mark.needs("prometheus", "alertmanager", "module:torch")
@pytest.mark.timeout(300)
def test_a_wrong_optimizer_step_of_one_real_rank_ends_as_one_replaced_node(world: Any) -> None:
    """Every rank halts, the page comes, one node is quarantined and replaced, and the others' latch is released."""
    world.start()
    world.scraped()
    port = free_port()
    ranks = [
        subprocess.Popen([sys.executable, str(TRAIN), *map(str, (r, len(world.nodes), port, node.root, BAD))])
        for r, node in enumerate(world.nodes)
    ]
    try:
        statuses = [rank.wait(120) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    assert statuses == [86] * len(ranks)
    case = world.case("replaced")
    bad = world.nodes[BAD]
    assert (case["instance_id"], world.replacements()) == (bad.instance, 1)
    wait("the page arrives", lambda: world.pager.firing("page", training_instance=bad.instance), 60)
    mark = next(bad.root.rglob("QUARANTINE.json"), None)
    assert mark is not None, "the bad node was not quarantined"
    assert json.loads(mark.read_text())["instance"] == bad.instance
    for node in world.nodes:
        if node is not bad:
            assert list(node.root.rglob("HALTED-*.released.json")), f"the latch of {node.name} still stands"
            assert not list(node.root.rglob("HALTED.json"))
