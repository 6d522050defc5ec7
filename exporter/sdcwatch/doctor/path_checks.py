"""What the doctor asks of Prometheus, Alertmanager and the service: is this node's alert on its way to a receiver?

It only reads: no silence, no alert, no reload. A question that cannot be asked is unknown, never passed.
Flow: http, config_text, routes -> **path_checks** -> finding -> command.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from sdcwatch.agent.node import Node
from sdcwatch.doctor import config_text, routes
from sdcwatch.doctor.finding import Finding, failed, passed, unknown
from sdcwatch.doctor.http import Client, Unreachable

#: Alerts without which the path does not work, whatever else is loaded.
NEEDED = ("SDCReplicaMismatch", "SDCUnattributedMismatch", "SDCWatchdog", "SDCDrill", "SDCDrillLost")
SCRAPE_JOB = "sdcwatch"
#: Seconds between two clocks from which on evidence is doubted (SDCClockSkew).
CLOCK_SECONDS = 30.0
#: Reserved for examples (RFC 2606): no page can be read there.
_NOBODYS_HOSTS = ("example.com", "example.net", "example.org", "example", "invalid", "test")
_RULES = "load alert_rules/*.rules.yaml (rule_files), or the PrometheusRule of alert_rules/kubernetes"
_ROUTE = "take the routes from alert_rules/alertmanager.yaml"


def check_prometheus(client: Client, node: Node) -> list[Finding]:
    """Reachable, scrapes this node, has the rules, knows an Alertmanager."""
    try:
        client.json("/api/v1/query", {"query": "time()"})
    except Unreachable as error:
        return [failed("prometheus", str(error), "is --prometheus the URL that Grafana uses?")]
    return [
        passed("prometheus", f"{client.base} answers"),
        _asked("target", lambda: _target(client, node)),
        _asked("rules", lambda: _rules(client)),
        _asked("runbooks", lambda: _runbooks(client)),
        _asked("alertmanagers", lambda: _alertmanagers(client)),
    ]


def check_alertmanager(client: Client, node: Node, service: Client | None) -> list[Finding]:
    """Reachable, receives the watchdog, and routes the page, the doorbell and the drill."""
    try:
        status = client.json("/api/v2/status")
        config = config_text.parse(status["config"]["original"])
        page = routes.resolve(config, example(node))
        drill = routes.resolve(config, drill_labels(node))
    except Unreachable as error:
        return [failed("alertmanager", str(error), "is --alertmanager its URL, with its path prefix if it has one?")]
    except (KeyError, TypeError, ValueError) as error:
        return [
            passed("alertmanager", f"{client.base} answers"),
            unknown("route", f"its configuration is not understood: {error}", "ask amtool config routes test"),
        ]
    return [
        passed("alertmanager", f"{client.base} answers"),
        _asked("watchdog", lambda: _watchdog(client)),
        _page_route(page),
        _doorbell(config, page, service),
        _drill_route(page, drill),
    ]


def check_service(client: Client) -> list[Finding]:
    """Reachable and ready."""
    try:
        alive = client.get("/healthz")
        ready = client.get("/readyz")
    except Unreachable as error:
        return [failed("service", str(error), "start sdcwatch-remediation serve, and open the port to Alertmanager")]
    if alive.status != 200:
        return [failed("service", f"{client.base}/healthz answered {alive.status}", "is --service the service's URL?")]
    if ready.status != 200:
        return [failed("service", f"not ready: {ready.text.strip()[:300]}", "see its log; docs/remediation.md, readyz")]
    return [passed("service", f"{client.base} is ready")]


def check_clocks(clients: dict[str, Client]) -> list[Finding]:
    """One finding for all clocks that can be read from here."""
    seen: list[str] = []
    wrong: list[str] = []
    for name, client in clients.items():
        try:
            answer = client.get("/-/ready" if name in ("prometheus", "alertmanager") else "/healthz")
        except Unreachable:
            continue
        if answer.clock is None:
            continue
        text = f"{name} {answer.clock:+.1f} s"
        seen.append(text)
        if abs(answer.clock) - answer.doubt > CLOCK_SECONDS:
            wrong.append(text)
    if wrong:
        return [failed("clocks", f"against this node's clock: {', '.join(wrong)}", "let chrony keep time on all sides")]
    if not seen:
        return [unknown("clocks", "no clock could be read", "give --prometheus, --alertmanager or --service")]
    return [passed("clocks", f"against this node's clock: {', '.join(seen)}")]


def example(node: Node) -> dict[str, str]:
    """Labels of a page about this node."""
    return {
        "alertname": "SDCReplicaMismatch",
        "category": "sdc",
        "severity": "critical",
        "training_job": "any",
        "rank": "0",
        "gpu_uuid": "GPU-0",
        "check": "replay",
        **node.labels(),
    }


def drill_labels(node: Node) -> dict[str, str]:
    """Labels of a drill from this node."""
    return {
        "alertname": "SDCDrill",
        "category": "sdc",
        "severity": "none",
        "training_job": "sdcwatch-drill",
        "drill": "00000000",
        **node.labels(),
    }


def _asked(name: str, question: Callable[[], Finding]) -> Finding:
    try:
        return question()
    except Unreachable as error:
        return unknown(name, str(error), "ask again")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        return unknown(name, f"the answer is not understood: {error!r}", "is that URL what it should be?")


def _target(client: Client, node: Node) -> Finding:
    quoted = node.node.replace("\\", "\\\\").replace('"', '\\"')
    found = client.json("/api/v1/query", {"query": f'sdc_build_info{{training_node="{quoted}"}}'})["data"]["result"]
    if not found:
        return failed(
            "target",
            f"Prometheus has no series of node {node.node}",
            f"add this agent to a scrape job called {SCRAPE_JOB} (docs/deploying.md); its targets page says why not",
        )
    jobs = sorted({series["metric"].get("job", "") for series in found})
    if jobs != [SCRAPE_JOB]:
        return failed(
            "target",
            f"this node is scraped as job {', '.join(jobs)}",
            f"SDCAgentDown looks for job {SCRAPE_JOB}: rename the job, or set names.agent_job in settings.toml",
        )
    age = time.time() - min(float(series["value"][0]) for series in found)
    return passed("target", f"Prometheus has series of node {node.node} ({max(age, 0):.0f} s old)")


def _our_rules(client: Client) -> list[dict[str, Any]]:
    groups = client.json("/api/v1/rules", {"type": "alert"})["data"]["groups"]
    return [rule for group in groups for rule in group["rules"] if str(rule.get("name", "")).startswith("SDC")]


def _rules(client: Client) -> Finding:
    rules = _our_rules(client)
    missing = [name for name in NEEDED if name not in {rule["name"] for rule in rules}]
    if missing:
        return failed("rules", f"not loaded: {', '.join(missing)}", _RULES)
    bad = [f"{rule['name']}: {rule.get('lastError', '')}" for rule in rules if rule.get("health") == "err"]
    if bad:
        return failed("rules", f"evaluation fails: {'; '.join(bad)}"[:400], "see Prometheus's rules page")
    return passed("rules", f"{len({rule['name'] for rule in rules})} alerts are loaded")


def _runbooks(client: Client) -> Finding:
    """Unknown, as a warning: a page without a runbook still pages."""
    bases = {rule["annotations"]["runbook_url"].rpartition("/")[0] for rule in _our_rules(client)}
    if not bases:
        return unknown("runbooks", "none of our alerts is loaded", _RULES)
    hosts = {urlsplit(base).hostname or "" for base in bases}
    if any(host == name or host.endswith(f".{name}") for host in hosts for name in _NOBODYS_HOSTS):
        return unknown(
            "runbooks",
            f"pages link to the placeholder {', '.join(sorted(bases))}: whoever is woken finds nothing there",
            "publish alert_rules/runbooks, set names.runbook_base in alert_rules/settings.toml, and run its build.py",
        )
    return passed("runbooks", f"pages link to {', '.join(sorted(bases))}")


def _alertmanagers(client: Client) -> Finding:
    active = client.json("/api/v1/alertmanagers")["data"]["activeAlertmanagers"]
    if not active:
        return failed("alertmanagers", "Prometheus sends alerts nowhere", "set alerting.alertmanagers in its config")
    return passed("alertmanagers", ", ".join(urlsplit(each["url"]).netloc for each in active))


def _watchdog(client: Client) -> Finding:
    alerts = client.json("/api/v2/alerts", {"filter": 'alertname="SDCWatchdog"'})
    if not alerts:
        return failed(
            "watchdog",
            "Alertmanager does not have SDCWatchdog, so no alert of these rules arrives",
            "see whether Prometheus sends here: rules and alertmanagers above; one that started less than two minutes "
            "ago may not have sent it yet: ask again",
        )
    receivers = sorted({receiver["name"] for alert in alerts for receiver in alert["receivers"]})
    return passed("watchdog", f"SDCWatchdog arrives, for {', '.join(receivers)}")


def _page_route(page: list[routes.Landing]) -> Finding:
    names = ", ".join(landing.receiver for landing in page)
    if all(landing.timed for landing in page):
        return failed("route", f"SDCReplicaMismatch reaches {names} at certain times only", _ROUTE)
    return passed("route", f"SDCReplicaMismatch reaches {names}")


def _doorbell(config: Any, page: list[routes.Landing], service: Client | None) -> Finding:
    urls = {landing.receiver: routes.webhooks(config, landing.receiver) for landing in page}
    if service is None:
        return unknown("doorbell", "whether the service hears of it", "give --service URL")
    hidden = False
    for receiver, found in urls.items():
        for url in found:
            hidden = hidden or "secret" in url
            parts = urlsplit(url)
            if (parts.hostname, parts.port) == (service.host, service.port):
                if parts.path != "/v1/alerts":
                    return failed("doorbell", f"{receiver} posts to {parts.path}", "the path is /v1/alerts")
                return passed("doorbell", f"{receiver} posts to {url}")
    if hidden:
        return unknown("doorbell", "Alertmanager hides its webhooks' URLs", "run sdcwatch doctor --drill")
    return failed(
        "doorbell",
        f"no webhook of {', '.join(urls)} goes to {service.base}",
        f"{_ROUTE}, receiver automation; if it knows the service by another address, --drill tells",
    )


def _drill_route(page: list[routes.Landing], drill: list[routes.Landing]) -> Finding:
    names = [landing.receiver for landing in drill]
    if len(names) == 1 and names[0] in {landing.receiver for landing in page}:
        return passed("drill_route", f"SDCDrill reaches {names[0]}, as SDCReplicaMismatch does")
    return failed(
        "drill_route",
        f"SDCDrill reaches {', '.join(names)}: it must take the doorbell's road, and page nobody",
        f"{_ROUTE}: alertname SDCDrill to the receiver of the service, before every route by severity",
    )
