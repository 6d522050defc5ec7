"""A drill: one synthetic event, written as a rank writes a real one, and followed through this installation.

The event says `drill: true`; its metric and alert are the drill's own (`sdc_drill_timestamp_seconds`, `SDCDrill`), so
nothing pages and every action refuses it. It names this node, and no other agent attests it. Standard library only.
Flow: command -> **drill** -> spool -> agent ~> Prometheus ~> Alertmanager ~> service; then it asks each of them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from sdcwatch import event as events
from sdcwatch.agent.state import read_state
from sdcwatch.doctor.finding import Finding
from sdcwatch.doctor.http import Client, Unreachable
from sdcwatch.doctor.node_checks import NodeView
from sdcwatch.errors import SpoolError
from sdcwatch.exposition import Sample, lines, parse, series
from sdcwatch.settings import Settings
from sdcwatch.spool.rank import Spool

#: The job in whose name drills are written.
JOB = "sdcwatch-drill"
METRIC = "sdc_drill_timestamp_seconds"
ALERT = "SDCDrill"
ARRIVED = "sdc_remediation_drill_timestamp_seconds"
_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Drill:
    """One drill that was written.

    Attributes:
        id: 8 hex digits, the value of the label `drill`.
        event_id: id of its event in the journal.
        time: unix seconds, before the first byte was written.
        written: seconds until event and metric were durable in the spool.
    """

    id: str
    event_id: str
    time: float
    written: float


@dataclass(frozen=True, slots=True)
class Way:
    """Whom to ask on the way; None: nobody told us its address."""

    view: NodeView
    prometheus: Client | None
    alertmanager: Client | None
    service: Client | None
    service_cases: bool


_Question = Callable[[], str | None]


def send(settings: Settings, view: NodeView) -> Drill:
    """Writes event and metric into this user's spool.

    Raises:
        SpoolError: the spool refused one of them.
    """
    now = time.time()
    started = time.monotonic()
    drill_id = secrets.token_hex(4)
    epoch = f"e{int(now * 1000)}-{drill_id}"
    node = view.node
    gpu = f"CPU-{node.instance or node.node}-0"
    identity = {"training_job": JOB, **node.labels(), "gpu_uuid": gpu, "rank": "0"}
    event = _event(view, epoch, gpu, round(now, 3))
    line = events.journal_line(event, events.Reporter(0, node.node, node.instance, gpu), {"drill": drill_id})
    labels = (("training_job", JOB), *node.labels().items(), ("drill", drill_id))
    spool = Spool.open(settings.spool_dir, JOB, epoch, 0, 0, identity, quota_bytes=settings.spool_quota_mb << 20)
    try:
        # The journal first, as a rank does: whoever sees the metric finds the event.
        text = lines([(series(METRIC, _in_order(dict(labels))), round(now, 3))])
        if not (spool.append_event(line) and spool.write_metrics(text)):
            raise SpoolError(f"the drill was not sent: {spool.last_refusal}")
    finally:
        spool.close()
    return Drill(drill_id, event.id, now, time.monotonic() - started)


def follow(drill: Drill, way: Way, limit: float) -> list[Finding]:
    """Asks every hop again and again until it has seen the drill.

    Args:
        limit: seconds after which a hop that has not seen it has failed.
    """
    questions = _questions(drill, way)
    found = {"spool": Finding("drill_spool", "pass", f"event {drill.event_id} is durable", "", drill.written)}
    problems: dict[str, str] = {}
    started = time.monotonic()
    while len(found) <= len(questions):
        for name, (question, _) in questions.items():
            if name in found:
                continue
            try:
                detail = question()
            except Unreachable as error:
                problems[name] = str(error)
                continue
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                problems[name] = f"the answer is not understood: {error!r}"
                continue
            problems.pop(name, None)
            if detail is not None:
                found[name] = Finding(f"drill_{name}", "pass", detail, "", time.time() - drill.time)
        if time.monotonic() - started > limit or len(found) > len(questions):
            break
        time.sleep(_POLL_SECONDS)
    for name, (_, fix) in questions.items():
        if name not in found:
            why = problems.get(name, f"has not seen the drill after {limit:.0f} s")
            found[name] = Finding(f"drill_{name}", "fail", why, fix)
    hops = ("spool", "agent", "scrape", "prometheus", "alert", "alertmanager", "service", "refused")
    return [found[name] if name in found else _not_asked(name) for name in hops]


def _questions(drill: Drill, way: Way) -> dict[str, tuple[_Question, str]]:
    asked: dict[str, tuple[_Question, str]] = {}
    agent, prometheus, alertmanager, service = way.view.client, way.prometheus, way.alertmanager, way.service
    if agent is not None:
        asked["agent"] = (
            lambda: _on_agent(drill, agent),
            "see the agent's log; --metrics-token-file if it asks for one",
        )
        asked["scrape"] = (lambda: _scraped(drill, way.view), "see the finding `scrape` above")
    if prometheus is not None:
        asked["prometheus"] = (lambda: _in_prometheus(drill, prometheus), "see the finding `target` above")
        asked["alert"] = (
            lambda: _alert(drill, prometheus),
            "see the finding `rules` above; is this node's clock right?",
        )
    if alertmanager is not None:
        asked["alertmanager"] = (lambda: _in_alertmanager(drill, alertmanager), "see the finding `alertmanagers` above")
    if service is not None:
        asked["service"] = (
            lambda: _at_service(drill, service),
            "see the finding `drill_route` above, and the notifications in Alertmanager's log (401: its token)",
        )
        if way.service_cases:
            asked["refused"] = (lambda: _refused(drill, service), "read the case: sdcwatch-remediation show CASE")
    return asked


def _not_asked(name: str) -> Finding:
    option = {
        "agent": "start the agent",
        "scrape": "start the agent",
        "prometheus": "give --prometheus URL",
        "alert": "give --prometheus URL",
        "alertmanager": "give --alertmanager URL",
        "service": "give --service URL",
        "refused": "give --service URL with --service-token-file (a token that may read cases)",
    }
    return Finding(f"drill_{name}", "unknown", "nobody was asked", option[name])


def _on_agent(drill: Drill, agent: Client) -> str | None:
    return f"{agent.base} serves it" if _has(agent.get("/metrics").text, METRIC, drill) is not None else None


def _scraped(drill: Drill, view: NodeView) -> str | None:
    state = read_state(view.root)
    later = [when for when in (state.scrapes if state else ()) if when >= drill.time + drill.written]
    return f"a scrape read it {later[0] - drill.time:.1f} s after it was sent" if later else None


def _in_prometheus(drill: Drill, prometheus: Client) -> str | None:
    answer = prometheus.json("/api/v1/query", {"query": f'{METRIC}{{drill="{drill.id}"}}'})
    return "the series is there" if answer["data"]["result"] else None


def _alert(drill: Drill, prometheus: Client) -> str | None:
    for alert in prometheus.json("/api/v1/alerts")["data"]["alerts"]:
        labels = alert["labels"]
        if labels.get("alertname") == ALERT and labels.get("drill") == drill.id and alert["state"] == "firing":
            return f"{ALERT} fires"
    return None


def _in_alertmanager(drill: Drill, alertmanager: Client) -> str | None:
    alerts = alertmanager.json("/api/v2/alerts", {"filter": f'drill="{drill.id}"'})
    receivers = sorted({receiver["name"] for alert in alerts for receiver in alert["receivers"]})
    return f"for {', '.join(receivers)}" if alerts else None


def _at_service(drill: Drill, service: Client) -> str | None:
    answer = service.get("/metrics")
    if answer.status != 200:
        raise Unreachable(f"{service.base}/metrics answered {answer.status}")
    when = _has(answer.text, ARRIVED, drill)
    return None if when is None else f"recorded it {when - drill.time:.1f} s after it was sent, by its own clock"


def _refused(drill: Drill, service: Client) -> str | None:
    if _at_service(drill, service) is None:
        return None
    cases = [case for case in service.json("/v1/cases")["cases"] if case["job"] == JOB]
    if cases:
        raise Unreachable(f"a drill opened case {cases[0]['id']}")
    return "no case was opened for it"


def _has(text: str, metric: str, drill: Drill) -> float | None:
    for sample in parse(text):
        if isinstance(sample, Sample) and sample.name == metric and ("drill", drill.id) in sample.labels:
            return sample.value
    return None


def _in_order(labels: dict[str, str]) -> list[tuple[str, str]]:
    order = ("training_job", "training_cluster", "training_node", "training_instance", "drill")
    return [(name, labels[name]) for name in order]


def _event(view: NodeView, epoch: str, gpu: str, now: float) -> events.Event:
    node = view.node
    rank = events.RankIdentity(0, 0, node.node, node.instance, node.host, gpu, node.cluster, "drill")
    return events.Event(
        id=events.event_id(JOB, epoch, 0, "replay", "attributed", [0], [0]),
        training_job=JOB,
        training_cluster=node.cluster,
        epoch=epoch,
        step=0,
        check="replay",
        kind="attributed",
        persistence="transient",
        time=now,
        suspects=(0,),
        differing=(0,),
        candidates=(0,),
        path="backward compute",
        sentence="A drill: nothing was computed, and nothing is wrong with this node.",
        evidence={},
        action="observe",
        drill=True,
        world_size=1,
        last_clean_step=None,
        trust_needed="checked",
        ranks=(rank,),
    )
