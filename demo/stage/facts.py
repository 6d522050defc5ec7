"""What happened, read from where it was written: event journals, latches, the trainer's step log, the service's API,
the simulator's call log, Prometheus and the pager. Nothing is remembered from what the demo itself did.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stage import plan, steplog, web
from stage.cluster import Cluster
from stage.pager import Page, Pager


@dataclass(frozen=True, slots=True)
class Event:
    """One distinct event of the job, from all journals. Times are unix seconds."""

    id: str
    step: int
    check: str
    kind: str
    time: float
    suspects: tuple[int, ...]
    differing: tuple[int, ...]
    candidates: tuple[int, ...]
    path: str
    sentence: str
    ranks: dict[int, dict[str, str]]
    durable: float

    def instances(self) -> set[str]:
        """Instance ids of the ranks it names."""
        return {self.ranks[r]["instance"] for r in self.suspects}


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that report, table and picture are made from. A time that never came is absent from `moments`."""

    events: tuple[Event, ...] = ()
    log: tuple[dict[str, Any], ...] = ()
    moments: dict[str, float] = field(default_factory=dict)
    case: dict[str, Any] | None = None
    latch: dict[str, Any] | None = None
    released: dict[str, Any] | None = None
    preflight: dict[str, str] = field(default_factory=dict)
    replace_calls: int = 0
    replacements: dict[str, str] = field(default_factory=dict)
    alerts: frozenset[str] = frozenset()
    pages: tuple[Page, ...] = ()

    def done(self) -> dict[int, str]:
        """Rank -> SHA-256 of its final weights, for ranks that finished."""
        return {e["rank"]: e["sha256"] for e in self.log if e["kind"] == "done"}


class Reader:
    """Reads all facts afresh; `alerts` and `scraped` are kept, since their sources forget."""

    def __init__(
        self, scenario: plan.Scenario, out: Path, ports: plan.Ports, token: Path, cluster: Cluster, pager: Pager
    ):
        self._scenario = scenario
        self._out = out
        self._ports = ports
        self._token = token.read_text().strip()
        self._cluster = cluster
        self._pager = pager
        self._alerts: set[str] = set()
        self._kept: dict[str, float] = {}

    def read(self) -> Facts:
        """One look at everything."""
        events = self._events()
        log = tuple(steplog.read(self._out / "steps"))
        case = self._case()
        latch, released = self._latches()
        calls = web.get_json(f"http://127.0.0.1:{self._ports.simulator}/_simulator/calls") or {"calls": []}
        replaces = [c for c in calls["calls"] if c["operation"] == "BatchReplaceClusterNodes"]
        self._watch_alerts(events)
        facts = Facts(
            events=events,
            log=log,
            moments={},
            case=case,
            latch=latch,
            released=released,
            preflight=self._preflight(latch or released),
            replace_calls=len(replaces),
            replacements={n.replaces: i for i, n in self._cluster.nodes.items() if n.replaces},
            alerts=frozenset(self._alerts | {p.alert for p in self._pager.pages}),
            pages=tuple(self._pager.pages),
        )
        facts.moments.update(self._moments(facts, replaces))
        return facts

    def _events(self) -> tuple[Event, ...]:
        found: dict[str, Event] = {}
        for path in sorted(self._out.glob(f"nodes/*/spool/*/{plan.JOB}/*/rank-*.events.jsonl")):
            durable = path.stat().st_mtime
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                if not line.endswith("\n"):
                    continue
                event = json.loads(line)["event"]
                if event["drill"] or event["id"] in found:
                    continue
                found[event["id"]] = Event(
                    **{name: event[name] for name in ("id", "step", "check", "kind", "time", "path", "sentence")},
                    **{name: tuple(event[name]) for name in ("suspects", "differing", "candidates")},
                    ranks={r["rank"]: r for r in event["ranks"]},
                    durable=durable,
                )
        return tuple(sorted(found.values(), key=lambda e: e.time))

    def _case(self) -> dict[str, Any] | None:
        base = f"http://127.0.0.1:{self._ports.remediation}/v1/cases"
        listed = web.get_json(base, self._token)
        if not listed or not listed["cases"]:
            return None
        found = web.get_json(f"{base}/{listed['cases'][-1]['id']}", self._token)
        return found if isinstance(found, dict) else None

    def _latches(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        folder = self._out / "checkpoints"
        released = sorted(folder.glob("HALTED-*.released.json"))
        standing = folder / "HALTED.json"
        try:
            return (
                json.loads(standing.read_text()) if standing.exists() else None,
                json.loads(released[-1].read_text()) if released else None,
            )
        except (OSError, ValueError):
            return None, None  # caught between two states; the next look sees one of them

    def _preflight(self, latch: dict[str, Any] | None) -> dict[str, str]:
        if latch is None:
            return {}
        folder = self._out / "checkpoints" / "preflight" / latch["latch_id"]
        results = [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]
        return {r["node"]: r["result"] for r in results}

    def _watch_alerts(self, events: tuple[Event, ...]) -> None:
        prometheus = f"http://127.0.0.1:{self._ports.prometheus}/api/v1"
        answer = web.get_json(f"{prometheus}/alerts") or {"data": {"alerts": []}}
        for alert in answer["data"]["alerts"]:
            if alert["state"] == "firing":
                self._alerts.add(alert["labels"]["alertname"])
                since = _unix(alert["activeAt"])
                self._kept.setdefault(f"alert {alert['labels']['alertname']}", since)
        if events and "scraped" not in self._kept:
            for node in self._cluster.nodes.values():
                state = node.spool / str(os.getuid()) / "agent.json"
                scrapes = json.loads(state.read_text())["scrapes"] if state.exists() else []
                after = [float(s) for s in scrapes if float(s) >= events[0].durable]
                if after:
                    self._kept["scraped"] = min([*after, self._kept.get("scraped", after[0])])

    def _moments(self, facts: Facts, replaces: list[dict[str, Any]]) -> dict[str, float]:
        found: dict[str, float | None] = {}
        fault = self._scenario.fault
        if fault is not None:
            struck = [
                e["time"]
                for e in facts.log
                if e["kind"] == "begin" and e["step"] >= fault["step"] and e["instance"] == plan.instance_id(plan.BAD)
            ]
            found["fault"] = min(struck, default=None)
        if facts.events:
            event = facts.events[0]
            name = "SDCReplicaMismatch" if event.kind == "attributed" else "SDCUnattributedMismatch"
            found |= {
                "detection": event.time,
                "event durable": event.durable,
                "scraped": self._kept.get("scraped"),
                "alert firing": self._kept.get(f"alert {name}"),
                "paged": min((p.time for p in facts.pages if p.alert == name), default=None),
            }
        times = (facts.case or {}).get("times", {})
        found |= {
            "webhook": times.get("signal_received"),
            "proof": times.get("proven"),
            "isolated": times.get("quarantined"),
            "replacement asked": replaces[0]["real_time"] if replaces else None,
            "proven": times.get("replacement_proven"),
        }
        if facts.released is not None:
            released = float(facts.released["released"]["time"])
            found["released"] = released
            found["resumed"] = min(
                (e["time"] for e in facts.log if e["kind"] == "begin" and e["time"] > released), default=None
            )
        if len(facts.done()) == len(plan.NODES):
            found["finished"] = max(e["time"] for e in facts.log if e["kind"] == "done")
        return {name: when for name, when in found.items() if when is not None}


def _unix(text: str) -> float:
    """Prometheus's RFC 3339 time (nanoseconds) as unix seconds."""
    from datetime import datetime

    whole, _, rest = text.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}.{(rest + '000000')[:6]}+00:00").timestamp()
