"""`sdcwatch-remediation doctor`: why nothing would happen now, with what to do, one line each.

What it does: checks the configuration and its secrets from here, asks the running service for what it finds
(`GET /v1/doctor`), and, where it is given one, Alertmanager for the receiver.
What it never does: act, write, or open the database.
Its place: `cli` runs it. Status 0: a proven fault would be acted on as configured; 1: something keeps it from that.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import httpx

from sdcwatch_remediation import display
from sdcwatch_remediation.client import Client
from sdcwatch_remediation.config import is_url, load
from sdcwatch_remediation.errors import ConfigError, ServiceError
from sdcwatch_remediation.finding import Finding

ROUTE = "sdcwatch doctor --alertmanager URL (from a training node) resolves the route itself"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    parser.add_argument("--alertmanager", metavar="URL", help="the Alertmanager that posts here")
    parser.add_argument("--receiver", default="remediation", help="its receiver for this service; default: %(default)s")


def run(arguments: argparse.Namespace, client: Client | None) -> int:
    """Look, print and return the exit status.

    Args:
        arguments: the command's.
        client: the way to the service with a token that may read cases; None where there is no such token.
    """
    found = [asdict(finding) for finding in _local(arguments)]
    found += _of_service(client)
    if arguments.alertmanager:
        found += [asdict(finding) for finding in _alertmanager(arguments.alertmanager, arguments.receiver)]
    if arguments.json:
        print(display.clean_json({"schema": 1, "findings": found}).plain)
    else:
        display.findings(display.console(), found)
    return int(any(finding["status"] == "fail" for finding in found))


def _local(arguments: argparse.Namespace) -> Iterator[Finding]:
    try:
        config = load(arguments.config)
    except ConfigError as error:
        for line in str(error).splitlines():
            said, _, fix = line.rpartition("; ")
            yield Finding("configuration", "fail", said or line, fix if said else "correct the file and restart")
        return
    yield Finding("configuration", "pass", f"{arguments.config}: cluster {config.cluster.name}", "")


def _of_service(client: Client | None) -> list[dict[str, Any]]:
    if client is None:
        fix = "set server.cases_token_file, or give --token-file"
        return [asdict(Finding("service", "fail", "no token that may read cases, so it cannot be asked", fix))]
    try:
        findings = client.get("/v1/doctor")["findings"]
        read = [{name: str(one[name]) for name in ("name", "status", "detail", "fix")} for one in findings]
    except ServiceError as error:
        fix = "start `sdcwatch-remediation serve`; without it nothing happens at all"
        return [asdict(Finding("service", "fail", str(error), fix))]
    except (KeyError, TypeError) as error:
        return [asdict(Finding("service", "fail", f"the answer is not one of this service ({error!r})", "check --url"))]
    return [asdict(Finding("service", "pass", "it answers", "")), *read]


def _alertmanager(url: str, receiver: str) -> Iterator[Finding]:
    if not is_url(url):
        raise ConfigError(f"--alertmanager {url!r} is no URL such as http://127.0.0.1:9093")
    try:
        answer = httpx.get(f"{url.rstrip('/')}/api/v2/receivers", timeout=10.0, trust_env=False)
        names = [str(one["name"]) for one in answer.raise_for_status().json()]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        fix = "is --alertmanager its URL, with its path prefix if it has one?"
        yield Finding("alertmanager", "fail", f"{url} does not say its receivers: {error}", fix)
        return
    if receiver in names:
        yield Finding("alertmanager", "pass", f"it has the receiver {receiver}; {ROUTE}", "")
    else:
        said = f"it has no receiver {receiver}, only {', '.join(names) or 'none'}"
        yield Finding("alertmanager", "fail", said, "alert_rules/build.py --into puts it in; or give --receiver")
