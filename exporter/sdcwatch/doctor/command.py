"""`sdcwatch doctor`: what of this installation is wired, line by line, and `--drill`, which tries it.

Run it on a training node, as the user whose jobs train there. It changes nothing; `--drill` writes one synthetic
event into this user's spool and follows it. Standard library only, and never longer than its time limits.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence

from sdcwatch.doctor import drill as drills
from sdcwatch.doctor import node_checks, path_checks
from sdcwatch.doctor.finding import Finding, unknown
from sdcwatch.doctor.http import Client
from sdcwatch.errors import ConfigurationError, SpoolError
from sdcwatch.settings import Settings

SCHEMA = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sdcwatch doctor`."""
    add = parser.add_argument
    add("--spool-dir", help="root of this node's spool (SDCWATCH_SPOOL_DIR, /tmp/sdcwatch)")
    add("--agent", metavar="URL", help="this node's agent (default: what its agent.json says)")
    add("--prometheus", metavar="URL", help="the Prometheus that scrapes this node")
    add("--alertmanager", metavar="URL", help="the Alertmanager that it sends to")
    add("--service", metavar="URL", help="the remediation service")
    add("--metrics-token-file", metavar="FILE", help="token of the agent's /metrics")
    add("--metrics-user", metavar="NAME", help="user of the agent's /metrics, where it asks for a password")
    add("--metrics-password-file", metavar="FILE", help="password of --metrics-user")
    add("--prometheus-token-file", metavar="FILE", help="bearer token for Prometheus, where it asks for one")
    add("--alertmanager-token-file", metavar="FILE", help="bearer token for Alertmanager, where it asks for one")
    add("--service-token-file", metavar="FILE", help="token of the service that may read cases")
    add("--ca-file", metavar="FILE", help="PEM certificates to trust, for all of them")
    add("--drill", action="store_true", help="send a synthetic event through the whole path, and time each hop")
    add("--drill-timeout", type=float, default=300.0, metavar="SECONDS", help="how long a drill may take (300)")
    add("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    """0: nothing failed (what could not be asked is no failure); 1: something did, each with its fix.

    Raises:
        ConfigurationError: wrong use.
    """
    if arguments.drill_timeout <= 0:
        raise ConfigurationError("--drill-timeout must be more than 0 seconds")
    if bool(arguments.metrics_user) != bool(arguments.metrics_password_file):
        raise ConfigurationError("--metrics-user and --metrics-password-file belong together")
    settings = Settings.load({"spool_dir": arguments.spool_dir})
    ca_file = arguments.ca_file
    secret = arguments.metrics_password_file or arguments.metrics_token_file
    view = node_checks.look(settings, arguments.agent, secret, ca_file, user=arguments.metrics_user)
    prometheus = _client(arguments.prometheus, arguments.prometheus_token_file, ca_file)
    alertmanager = _client(arguments.alertmanager, arguments.alertmanager_token_file, ca_file)
    service = _client(arguments.service, arguments.service_token_file, ca_file)
    findings = node_checks.check(view, settings, os.environ)
    findings += path_checks.check_prometheus(prometheus, view.node) if prometheus else [_not_given("prometheus")]
    findings += (
        path_checks.check_alertmanager(alertmanager, view.node, service)
        if alertmanager
        else [_not_given("alertmanager")]
    )
    findings += path_checks.check_service(service) if service else [_not_given("service")]
    clients = {"prometheus": prometheus, "alertmanager": alertmanager, "service": service, "agent": view.client}
    findings += path_checks.check_clocks({name: client for name, client in clients.items() if client})
    sent = None
    if arguments.drill:
        if not arguments.json:
            _print(findings)
        way = drills.Way(view, prometheus, alertmanager, service, bool(arguments.service_token_file))
        sent, hops = _drill(settings, way, arguments.drill_timeout, quiet=arguments.json)
        if not arguments.json:
            _print(hops)
        findings += hops
    elif not arguments.json:
        _print(findings)
    if arguments.json:
        print(json.dumps(_record(view, findings, sent)))
    else:
        print(_sum(findings))
    return 1 if any(finding.status == "fail" for finding in findings) else 0


def _drill(
    settings: Settings, way: drills.Way, limit: float, *, quiet: bool
) -> tuple[drills.Drill | None, list[Finding]]:
    if way.view.client is None:
        # Without an agent the drill would lie in the spool and go off when somebody starts one.
        return None, [Finding("drill_spool", "fail", "not sent: no agent serves this spool", "start the agent first")]
    try:
        sent = drills.send(settings, way.view)
    except SpoolError as error:
        return None, [Finding("drill_spool", "fail", str(error), "see the finding `spool` above")]
    if not quiet:
        print(f"\ndrill {sent.id} is on its way (up to {limit:.0f} s) ...", flush=True)
    return sent, drills.follow(sent, way, limit)


def _client(url: str | None, token_file: str | None, ca_file: str | None) -> Client | None:
    return Client(url, token_file, ca_file) if url else None


def _not_given(name: str) -> Finding:
    return unknown(name, "not asked", f"give --{name} URL")


def _print(findings: Sequence[Finding]) -> None:
    print("\n".join(finding.line() for finding in findings), flush=True)


def _sum(findings: Sequence[Finding]) -> str:
    counts = {status: sum(finding.status == status for finding in findings) for status in ("pass", "fail", "unknown")}
    return f"\n{counts['pass']} passed, {counts['fail']} failed, {counts['unknown']} unknown"


def _record(view: node_checks.NodeView, findings: Sequence[Finding], sent: drills.Drill | None) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "time": round(time.time(), 3),
        "node": view.node.node,
        "instance": view.node.instance,
        "cluster": view.node.cluster,
        "drill": None if sent is None else {"id": sent.id, "event": sent.event_id, "time": round(sent.time, 3)},
        "findings": [finding.record() for finding in findings],
    }
