"""kill -9 of each program of the path in its worst moment: the page arrives at least once, the service acts once."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from alertpath.programs import wait
from sdcwatch.spool.folders import user_root

pytestmark = [pytest.mark.integration, pytest.mark.needs("prometheus", "alertmanager")]
#: What the path is given for the rest of its work, on a busy machine.
PATIENCE = 45.0


def paged(world: Any, **labels: str) -> list[Any]:
    return list(wait("the page arrives", lambda: world.pager.firing("page", training_job="gpt", **labels), PATIENCE))


def acted_once(world: Any) -> None:
    """One case, replaced, by one call; and it stays at that while the alert goes on firing."""
    case = world.case("replaced")
    assert world.replacements() == 1, world.service.tail()
    # Six more evaluations, and two more times that Prometheus sends the alert.
    until = time.time() + 6
    wait("six seconds pass", lambda: time.time() > until)
    assert world.replacements() == 1
    assert [one["id"] for one in world.cases()] == [case["id"]]


def scraped_since(world: Any, node: int, when: float) -> bool:
    path = user_root(world.nodes[node].root) / "agent.json"
    return any(scrape > when for scrape in json.loads(path.read_text())["scrapes"])


def test_a_suspect_that_dies_before_it_has_written_a_word(world: Any) -> None:
    """The ranks of two other nodes have the event; the suspect's own rank is gone, and its agent with it."""
    world.start()
    world.scraped()
    job = world.event(silent=[2])
    wait("the event is due", lambda: time.time() >= job.event.time, PATIENCE, 0.01)
    world.nodes[2].agent.kill()
    assert paged(world)[0].annotations["event_time"] == f"{job.event.time:.3f}"
    acted_once(world)


def test_every_rank_that_dies_before_its_journal_has_the_event(world: Any) -> None:
    """The metrics are written first, so a person is paged; without a proof the service touches nothing."""
    world.start()
    world.scraped()
    world.event(torn=True)
    paged(world)
    wait("the doorbell opened a case", world.cases, PATIENCE)
    until = time.time() + 6
    wait("six seconds pass", lambda: time.time() > until)
    assert world.replacements() == 0
    assert [case["state"] for case in world.cases()] in (["proving"], ["unproven"])


def test_an_agent_that_is_killed_between_the_event_and_its_scrape(world: Any) -> None:
    """A witness's agent loses nothing: it is started again, reads the spool, and the second proof is there."""
    world.start()
    world.scraped()
    job = world.event()
    wait("the event is due", lambda: time.time() >= job.event.time, PATIENCE, 0.01)
    for witness in (0, 1):
        world.nodes[witness].agent.kill()
    # With both witnesses gone nobody can prove anything yet: rung, and not acted upon.
    paged(world)
    wait("the doorbell opened a case", world.cases, PATIENCE)
    assert world.replacements() == 0
    for witness in (0, 1):
        world.start(world.nodes[witness].agent)
    acted_once(world)


def test_prometheus_killed_after_its_only_scrape_of_the_event(world: Any) -> None:
    """It comes back on the same storage with every agent gone: the one sample in its log is enough to page."""
    world.prometheus = world.new_prometheus("slow", world.prometheus_port, [world.alertmanager_port], evaluation="6s")
    world.start()
    world.scraped()
    job = world.event(after=3.0)
    wait("one scrape has the event", lambda: scraped_since(world, 0, job.event.time + 0.05), PATIENCE, 0.01)
    world.prometheus.kill()
    for one in world.nodes:
        one.agent.kill()
    rung = bool(world.pager.firing("page"))
    world.start(world.prometheus)
    paged(world)
    for one in world.nodes:
        world.start(one.agent)
    acted_once(world)
    assert not rung, "the evaluation came before the kill: the moment was missed"


def test_alertmanager_killed_while_nobody_takes_its_notification(world: Any) -> None:
    """It forgets what it had not delivered; Prometheus sends the firing alert again, and it is delivered then."""
    world.pager.answer = 503
    world.start(*(one.agent for one in world.nodes), world.alertmanager, world.prometheus)
    world.scraped()
    world.event()
    wait("Alertmanager tries and is refused", lambda: world.pager.asked, PATIENCE)
    world.alertmanager.kill()
    world.pager.answer = 200
    world.start(world.alertmanager, world.service)
    paged(world)
    acted_once(world)


# A call whose answer nobody recorded is looked into only when it can no longer be under way: 60 s.
@pytest.mark.timeout(240)
@pytest.mark.parametrize("moment", ["once it has the doorbell", "once the provider has the call"])
def test_the_service_killed_around_its_act(world: Any, moment: str) -> None:
    """Started again it goes on where its database stands: one call, one case."""
    world.start()
    world.scraped()
    world.event()
    if moment == "once it has the doorbell":
        wait("the doorbell is durable", world.cases, PATIENCE, 0.01)
    else:
        wait("the provider has the call", world.replacements, PATIENCE, 0.002)
    world.service.kill()
    world.start(world.service)
    paged(world)
    acted_once(world)
