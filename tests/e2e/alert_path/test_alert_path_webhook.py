"""A real Alertmanager against the real service: twins, retries, batches, alerts that come and go; the watchdog."""

from __future__ import annotations

import copy
import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import yaml
from alertpath.programs import fetch, free_port, wait

pytestmark = [pytest.mark.integration, pytest.mark.needs("prometheus", "alertmanager")]
PATIENCE = 45.0


def doorbell(world: Any, member: int, **labels: str) -> dict[str, str]:
    one = world.members[member]
    return {
        "alertname": "SDCReplicaMismatch", "category": "sdc", "severity": "critical", "training_job": "gpt",
        "training_cluster": "demo", "training_node": one.node_name, "training_instance": one.instance_id,
        "gpu_uuid": f"GPU-{one.instance_id}", "rank": str(member), "check": "replay", **labels,
    }  # fmt: skip


def fire(port: int, *alerts: dict[str, str], resolved: bool = False, ago: float = 30.0) -> None:
    now = datetime.now(timezone.utc)
    ends = {"endsAt": (now - timedelta(seconds=1)).isoformat()} if resolved else {}
    starts = {"startsAt": (now - timedelta(seconds=ago)).isoformat()}
    body = [{"labels": labels, "annotations": {"summary": "s"}, **starts, **ends} for labels in alerts]
    assert fetch(f"http://127.0.0.1:{port}/api/v2/alerts", body) is not None


def quick(world: Any) -> Any:
    """The configuration that ships, with an automation route that does not wait."""
    tree = copy.deepcopy(world.tree)
    tree["route"]["routes"][0]["group_interval"] = "1s"
    return tree


def deliveries(world: Any) -> dict[str, float]:
    """Alerts that the service has judged, by result."""
    text = str(fetch(f"{world.service_url}/metrics") or "")
    found = {}
    for line in text.splitlines():
        if line.startswith("sdc_remediation_alerts_total{"):
            found[line.split('result="')[1].split('"')[0]] = float(line.split()[-1])
    return found


def test_firing_resolved_and_firing_again_around_a_reload_is_one_case(world: Any) -> None:
    """Alertmanager tells of each turn; the service has one case for the instance through all of them."""
    port = world.alertmanager_port
    manager = world.new_alertmanager("quick", quick(world), port)
    world.start(manager, world.service)
    bell = doorbell(world, 1)
    fire(port, bell)
    wait("the case is open", world.cases, PATIENCE)
    fire(port, bell, resolved=True)
    wait("the service hears that it resolved", lambda: deliveries(world).get("resolved"), PATIENCE)
    assert fetch(f"http://127.0.0.1:{port}/-/reload", {}) is not None
    fire(port, bell)
    wait("the service hears of it again", lambda: deliveries(world).get("joined"), PATIENCE)
    assert len(world.cases()) == 1


def test_twins_that_do_not_know_of_each_other_are_one_case(world: Any) -> None:
    """Two Alertmanagers without a cluster deliver the same alert twice: accepted once, joined once."""
    ports = [free_port(), free_port()]
    world.start(world.service, *(world.new_alertmanager(f"lone{n}", world.tree, ports[n]) for n in (0, 1)))
    for port in ports:
        fire(port, doorbell(world, 1))
    wait("both were delivered", lambda: sum(deliveries(world).values()) >= 2, PATIENCE)
    assert deliveries(world) | {"joined": 1.0} == deliveries(world)
    assert len(world.cases()) == 1


def test_what_the_service_could_not_take_is_delivered_when_it_can(world: Any) -> None:
    """Alertmanager retries while nobody listens; afterwards each alert is there once."""
    world.start(world.alertmanager)
    fire(world.alertmanager_port, doorbell(world, 1))

    def failed() -> bool:
        text = str(fetch(f"http://127.0.0.1:{world.alertmanager_port}/metrics") or "")
        name = 'alertmanager_notification_requests_failed_total{integration="webhook"}'
        return any(line.startswith(name) and float(line.split()[-1]) > 0 for line in text.splitlines())

    wait("a delivery was refused", failed, PATIENCE)
    assert not world.cases()
    world.start(world.service)
    wait("the alert arrives", world.cases, PATIENCE)
    assert [case["instance_id"] for case in world.cases()] == [world.members[1].instance_id]
    assert deliveries(world)["accepted"] == 1


def test_one_bad_alert_in_a_batch_costs_the_others_nothing(world: Any) -> None:
    """Grouped into one delivery: the second is refused by itself, the others open their cases, nothing is retried."""
    tree = copy.deepcopy(world.tree)
    tree["route"]["routes"][0] |= {"group_by": ["alertname"], "group_wait": "3s"}
    world.start(world.new_alertmanager("batch", tree, world.alertmanager_port), world.service)
    bad = doorbell(world, 2, training_instance="i-nonsense")
    # An alert whose start plus group_wait is over makes Alertmanager deliver at once what it has of the group.
    fire(world.alertmanager_port, doorbell(world, 1), bad, doorbell(world, 3), ago=0)
    wait("two cases are open", lambda: len(world.cases()) == 2, PATIENCE)
    assert {c["instance_id"] for c in world.cases()} == {world.members[n].instance_id for n in (1, 3)}
    began = time.time()
    wait("a retry would have come", lambda: time.time() > began + 4)
    assert deliveries(world)["rejected"] == 1


def test_the_watchdog_goes_through_the_whole_path_to_a_receiver_of_its_own(world: Any) -> None:
    """From the rule in Prometheus to the dead-man's switch, again and again, and nowhere else; its end is silence."""
    tree = copy.deepcopy(world.tree)
    route = next(r for r in tree["route"]["routes"] if r["receiver"] == "watchdog")
    assert yaml.safe_load("5m") == route["repeat_interval"]
    route |= {"group_interval": "1s", "repeat_interval": "1s"}
    manager = world.new_alertmanager("watchdog", tree, world.alertmanager_port)
    world.start(manager, world.prometheus)
    wait("it arrives again and again", lambda: len(world.pager.firing("watchdog", "SDCWatchdog")) >= 3, PATIENCE)
    assert {a.receiver for a in world.pager.arrivals if a.labels["alertname"] == "SDCWatchdog"} == {"watchdog"}
    manager.kill()
    count = len(world.pager.arrivals)
    began = time.time()
    wait("three more times pass", lambda: time.time() > began + 4)
    assert len(world.pager.arrivals) == count, "silence is the alarm"


def test_slow_evaluations_see_an_agent_that_was_there_for_one_scrape(world: Any) -> None:
    """Four Prometheis that evaluate 1, 2, 5 and 12 times slower than they scrape; then every rank and agent is gone."""
    ratios = (1, 2, 5, 12)
    folder = world.folder / "rules"
    folder.mkdir()
    page = yaml.safe_load((world.rules / "mismatch.rules.yaml").read_text())
    ports = [free_port() for _ in ratios]
    made = []
    for ratio, port in zip(ratios, ports, strict=True):
        tree = copy.deepcopy(page)
        for rule in (rule for group in tree["groups"] for rule in group["rules"] if "alert" in rule):
            rule["labels"]["ratio"] = str(ratio)
        path = folder / f"ratio{ratio}.rules.yaml"
        path.write_text(yaml.safe_dump(tree))
        made.append(
            world.new_prometheus(
                f"ratio{ratio}", port, [world.alertmanager_port], evaluation=f"{ratio}s", rules=str(path)
            )
        )
    # Grouped by instance the four would be one page, and what joins a group after its first page waits a minute.
    tree = copy.deepcopy(world.tree)
    route = next(r for r in tree["route"]["routes"] if r["receiver"] == "page")
    route["group_by"] = [*route["group_by"], "ratio"]
    manager = world.new_alertmanager("by-ratio", tree, world.alertmanager_port)
    world.start(*(n.agent for n in world.nodes), manager, *made)
    job = world.event(after=6.0)
    seen = f"/api/v1/query?query=max(sdc_last_mismatch_timestamp_seconds)%3E={job.event.time - 1:.0f}"
    for port in ports:
        wait("each has scraped the event", lambda port=port: "'value'" in str(fetch(f"http://127.0.0.1:{port}{seen}")))
    for one in world.nodes:
        one.agent.kill()
    for ratio in ratios:
        wait(f"the page at 1:{ratio}", lambda ratio=ratio: world.pager.firing("page", ratio=str(ratio)), PATIENCE)


def test_an_alert_that_outlives_the_replacement_opens_nothing(world: Any) -> None:
    """The page fires for an hour, and a second check may name the same GPU late: the retired instance is refused."""
    world.start()
    world.scraped()
    world.event()
    world.case("replaced", PATIENCE)
    wait("the page arrives", lambda: world.pager.firing("page"), PATIENCE)
    fire(world.alertmanager_port, doorbell(world, 2, check="weight_checksum"))
    wait("the service refuses the retired instance", lambda: deliveries(world).get("rejected"), PATIENCE)
    assert (world.replacements(), len(world.cases())) == (1, 1)
