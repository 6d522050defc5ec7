"""The configuration files of one run, made from the ones that ship: same rules and routes, this run's ports and paths.

Writes below the output folder only. Tokens are fresh for each run and lie in files of mode 0600.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stage import plan

RULES = plan.ROOT / "alert_rules"
TOKENS = ("events", "latch", "webhook", "cases", "approve", "admin")


@dataclass(frozen=True, slots=True)
class Rendered:
    """Where the files of this run lie."""

    prometheus: Path
    alertmanager: Path
    targets: Path
    simulator: Path
    remediation: Path
    events_token: Path
    latch_token: Path
    webhook_token: Path
    cases_token: Path
    approve_token: Path
    admin_token: Path


def render(out: Path, ports: plan.Ports) -> Rendered:
    """Writes all configuration files of a run."""
    folder = out / "config"
    (folder / "targets").mkdir(parents=True)
    (folder / "secrets").mkdir(mode=0o700)
    tokens = {name: folder / "secrets" / f"{name}.token" for name in TOKENS}
    for path in tokens.values():
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(24) + "\n")
    for rules in RULES.glob("*.rules.yaml"):
        shutil.copy(rules, folder / rules.name)
    rendered = Rendered(
        prometheus=_yaml(folder / "prometheus.yaml", _prometheus(ports)),
        alertmanager=_yaml(folder / "alertmanager.yaml", _alertmanager(ports)),
        targets=folder / "targets" / "agents.yaml",
        simulator=folder / "simulator.json",
        remediation=folder / "remediation.toml",
        events_token=tokens["events"],
        latch_token=tokens["latch"],
        webhook_token=tokens["webhook"],
        cases_token=tokens["cases"],
        approve_token=tokens["approve"],
        admin_token=tokens["admin"],
    )
    rendered.simulator.write_text(json.dumps(_simulator(), indent=1) + "\n")
    rendered.remediation.write_text(_remediation(out, ports, rendered))
    write_targets(rendered.targets, [], ports)
    return rendered


def write_targets(path: Path, addresses: Iterable[str], ports: plan.Ports) -> None:
    """Says which agents Prometheus scrapes now: a provisioner's or service discovery's part."""
    beside = path.with_suffix(".partial")
    beside.write_text(yaml.safe_dump([{"targets": [f"{a}:{ports.agent}" for a in addresses]}]))
    os.replace(beside, path)


def _yaml(path: Path, tree: Any) -> Path:
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def _prometheus(ports: plan.Ports) -> Any:
    tree = yaml.safe_load((RULES / "prometheus.yaml").read_text())
    tree["alerting"]["alertmanagers"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{ports.alertmanager}"]}]
    for job in tree["scrape_configs"]:
        if job["job_name"] == "sdcwatch-remediation":
            job["static_configs"] = [{"targets": [f"127.0.0.1:{ports.remediation}"]}]
    return tree


def _alertmanager(ports: plan.Ports) -> Any:
    tree = yaml.safe_load((RULES / "alertmanager.yaml").read_text())
    moved = {":9479/": f":{ports.remediation}/", ":9480/": f":{ports.pager}/"}
    for receiver in tree["receivers"]:
        for hook in receiver.get("webhook_configs", ()):
            for old, new in moved.items():
                hook["url"] = hook["url"].replace(old, new)
    return tree


def _simulator() -> Any:
    nodes = [{"address": a, "instance_id": plan.instance_id(n)} for n, a in enumerate(plan.NODES)]
    return {
        "cluster": plan.CLUSTER,
        "region": plan.REGION,
        "orchestrator": "eks",
        "groups": [{"name": plan.GROUP, "nodes": nodes}],
        "spares": [plan.SPARE],
        "shutdown_seconds": 2.0,
        "provision_seconds": 2.0,
        "boot_seconds": 3.0,
    }


def _remediation(out: Path, ports: plan.Ports, rendered: Rendered) -> str:
    sections: dict[str, dict[str, Any]] = {
        "server": {
            "host": "127.0.0.1",
            "port": ports.remediation,
            "alerts_token_file": str(rendered.webhook_token),
            "cases_token_file": str(rendered.cases_token),
            "approve_token_file": str(rendered.approve_token),
            "admin_token_file": str(rendered.admin_token),
        },
        "database": {"url": f"sqlite:///{out / 'remediation.sqlite3'}"},
        "cluster": {
            "name": plan.CLUSTER,
            "region": plan.REGION,
            "endpoint_url": f"http://127.0.0.1:{ports.simulator}",
        },
        "agents": {
            "port": ports.agent,
            "events_token_file": str(rendered.events_token),
            "latch_token_file": str(rendered.latch_token),
        },
        # `first` acts on one attributed verdict, as the AWS post does. The product's default is `persistent`.
        "policy": {"mode": "auto", "confirm": "first", "groups": [plan.GROUP], "settle_seconds": 2.0},
        "worker": {"poll_seconds": 0.5},
    }
    lines: list[str] = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)
