"""Two Prometheis and two Alertmanagers in one cluster: one of each is killed, the page comes, and there is one case."""

from __future__ import annotations

import time
from typing import Any

import pytest
from alertpath.programs import Program, fetch, free_port, wait

pytestmark = [pytest.mark.integration, pytest.mark.needs("prometheus", "alertmanager")]
PATIENCE = 45.0
#: How long the second Alertmanager waits for the first to notify; the default is 15 s.
PEER_TIMEOUT = 3.0


class Pair:
    """Two of each; every Prometheus sends to both Alertmanagers."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.ports = [free_port(), free_port()]
        gossip = [free_port(), free_port()]
        self.alertmanagers: list[Program] = [
            world.new_alertmanager(
                f"am{n}", world.tree, self.ports[n], cluster=gossip[n], peers=[gossip[1 - n]],
                more=[f"--cluster.peer-timeout={PEER_TIMEOUT:g}s", "--cluster.settle-timeout=5s"],
            )
            for n in (0, 1)
        ]  # fmt: skip
        self.webs = [free_port(), free_port()]
        self.prometheis: list[Program] = [
            world.new_prometheus(f"prometheus{n}", self.webs[n], self.ports, labels={"prometheus_replica": f"r{n}"})
            for n in (0, 1)
        ]

    def start(self) -> None:
        self.world.start(*(n.agent for n in self.world.nodes), self.world.service, *self.alertmanagers)
        wait("the two Alertmanagers have met", lambda: all(self.peers(n) == 2 for n in (0, 1)), PATIENCE)
        self.world.start(*self.prometheis)
        for web in self.webs:
            url = f"http://127.0.0.1:{web}/api/v1/query?query=sum(up)"
            wait("every agent is scraped", lambda url=url: "'4'" in str(fetch(url)), PATIENCE)

    def peers(self, number: int) -> int:
        status = fetch(f"http://127.0.0.1:{self.ports[number]}/api/v2/status")
        cluster = status["cluster"] if isinstance(status, dict) else {}
        return len(cluster["peers"]) if cluster.get("status") == "ready" else 0


def pages(world: Any, job: str) -> int:
    """Notifications of the page's receiver that hold this job's event."""
    return len({a.delivery for a in world.pager.firing("page", training_job=job)})


def settle(seconds: float) -> None:
    until = time.time() + seconds
    wait("the other Alertmanager had its chance", lambda: time.time() > until, seconds + 5)


@pytest.mark.parametrize("killed", ["nothing", "a prometheus", "an alertmanager", "one of each"])
def test_one_page_and_one_case_whichever_half_is_gone(world: Any, killed: str) -> None:
    """The event comes after the kill: whatever is left delivers it, once."""
    pair = Pair(world)
    pair.start()
    if killed in ("a prometheus", "one of each"):
        pair.prometheis[0].kill()
    if killed in ("an alertmanager", "one of each"):
        pair.alertmanagers[0].kill()
    world.event()
    wait("the page arrives", lambda: pages(world, "gpt"), PATIENCE)
    world.case("replaced", PATIENCE)
    settle(2 * PEER_TIMEOUT + 6)
    assert pages(world, "gpt") == 1
    assert (world.replacements(), len(world.cases())) == (1, 1)


def test_a_second_page_comes_only_from_an_alertmanager_that_forgot_the_first(world: Any) -> None:
    """One is killed right after its page. The other knows that it went out; with both gone, nobody does."""
    pair = Pair(world)
    pair.start()
    world.event()
    wait("the page arrives", lambda: pages(world, "gpt"), PATIENCE)
    world.case("replaced", PATIENCE)
    settle(2.0)  # gossip of the delivery: its interval is 0.2 s
    pair.alertmanagers[0].kill()
    settle(2 * PEER_TIMEOUT + 4)
    assert pages(world, "gpt") == 1, "the one that is left paged again"
    world.start(pair.alertmanagers[0])
    settle(PEER_TIMEOUT + 6)
    assert pages(world, "gpt") == 1, "the one that came back paged again"
    for one in pair.alertmanagers:
        one.kill()
    world.start(*pair.alertmanagers)
    wait("the page comes a second time", lambda: pages(world, "gpt") == 2, PATIENCE)
    settle(PEER_TIMEOUT + 4)
    assert (world.replacements(), len(world.cases())) == (1, 1), "a second page is no second case"
