"""What the doctor sees on this node without asking anybody else: spool, agent, identity, scrapes.

It creates no folder and changes no file. Flow: **node_checks** -> finding -> command.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sdcwatch import durable
from sdcwatch.agent import node as nodes
from sdcwatch.agent.state import AgentState, read_state
from sdcwatch.doctor.finding import Finding, failed, passed, unknown
from sdcwatch.doctor.http import Client, Unreachable, is_loopback
from sdcwatch.errors import SpoolError
from sdcwatch.settings import Settings
from sdcwatch.spool.folders import prepare_user_root, user_root
from sdcwatch.spool.reader import iter_jobs

#: A scrape interval of a minute, three times.
SCRAPE_SECONDS = 180.0
#: Less free space than this, in bytes, and events may not fit.
FREE_BYTES = 64 << 20
_START = "start it: systemctl start sdcwatch-agent@$USER, or `sdcwatch agent` (docs/deploying.md)"


@dataclass(frozen=True, slots=True)
class NodeView:
    """What was found on this node.

    Attributes:
        root: `<root>/<uid>`.
        node: identity from the agent's `node.json`, else from the settings.
        state: the agent's `agent.json`, None where none was ever written.
        client: how to ask the agent; None where none runs.
    """

    root: Path
    node: nodes.Node
    state: AgentState | None
    client: Client | None


def look(
    settings: Settings,
    agent_url: str | None = None,
    token_file: str | None = None,
    ca_file: str | None = None,
    *,
    user: str | None = None,
) -> NodeView:
    """Reads what stands in the spool.

    Raises:
        ConfigurationError: a setting, URL or file that cannot be used.
    """
    root = user_root(settings.spool_dir)
    state = read_state(root)
    url = agent_url
    if url is None and state is not None and state.alive:
        # Beyond loopback an agent has TLS, always.
        host = f"[{state.host}]" if ":" in state.host else state.host
        url = f"{'http' if is_loopback(state.host) else 'https'}://{host}:{state.port}"
    client = Client(url, token_file, ca_file, user=user) if url else None
    return NodeView(root, written_node(root) or nodes.take(settings), state, client)


def written_node(root: Path) -> nodes.Node | None:
    """The identity in the agent's `node.json`; None where none can be read."""
    with contextlib.suppress(SpoolError, KeyError, TypeError):
        record = durable.read_json(root / nodes.NODE_FILE)
        if record is not None and record["schema"] == nodes.SCHEMA:
            return nodes.Node(*(str(record[name]) for name in ("cluster", "node", "instance", "host")))
    return None


def check(view: NodeView, settings: Settings, environ: Mapping[str, str]) -> list[Finding]:
    """Spool, quota, identity, agent, scrapes."""
    findings = [_spool(view, settings)]
    if findings[0].status == "pass":
        findings.append(_space(view, settings))
    return [*findings, _identity(view, settings, environ), *_agent(view), _scraped(view)]


def _spool(view: NodeView, settings: Settings) -> Finding:
    if not view.root.is_dir():
        return failed("spool", f"{view.root} does not exist: no rank and no agent of this user has run here", _START)
    try:
        prepare_user_root(settings.spool_dir)  # everything stands already, so this only checks
    except SpoolError as error:
        return failed("spool", str(error), "or name another place for ranks and agent alike: SDCWATCH_SPOOL_DIR")
    if not os.access(view.root, os.W_OK | os.X_OK):
        return failed("spool", f"{view.root} cannot be written", "mount it for writing, for ranks and agent alike")
    return passed("spool", f"{view.root}, {sum(1 for _ in iter_jobs(view.root))} jobs")


def _space(view: NodeView, settings: Settings) -> Finding:
    facts = os.statvfs(view.root)
    free = facts.f_bavail * facts.f_frsize
    if free < FREE_BYTES or (facts.f_files and not facts.f_favail):
        return failed(
            "space", f"{free >> 20} MiB are left for {view.root}", "free some, or move the spool: SDCWATCH_SPOOL_DIR"
        )
    quota = settings.spool_quota_mb << 20
    for job, folder in iter_jobs(view.root):
        used = sum(path.lstat().st_size for path in folder.glob("*/*"))
        if used > 0.9 * quota:
            return failed(
                "space",
                f"job {job} holds {used >> 20} of {quota >> 20} MiB: its next event may be refused",
                f"remove old epochs in {folder}, or raise SDCWATCH_SPOOL_QUOTA_MB",
            )
    return passed("space", f"{free >> 20} MiB free, every job under its quota")


def _identity(view: NodeView, settings: Settings, environ: Mapping[str, str]) -> Finding:
    written = written_node(view.root)
    if written is None:
        return unknown("identity", f"no {nodes.NODE_FILE}: ranks name this node themselves", _START)
    said = {
        "SDCWATCH_NODE": (settings.node, written.node),
        "SLURMD_NODENAME": (environ.get("SLURMD_NODENAME"), written.node),
        "SDCWATCH_INSTANCE": (settings.instance, written.instance),
        "SDCWATCH_CLUSTER": (settings.cluster, written.cluster),
    }
    for name, (ours, agents) in said.items():
        if ours and ours != agents:
            return failed(
                "identity",
                f"{name} says {ours!r}, the agent's {nodes.NODE_FILE} says {agents!r}: ranks would refuse to start",
                f"give the agent the same name, or unset {name}",
            )
    if not written.cluster or not written.instance:
        return unknown(
            "identity",
            f"node {written.node}, without {'a cluster name' if not written.cluster else 'an instance id'}",
            "a cloud's node needs both to be replaced: sdcwatch agent --cluster NAME --instance ID",
        )
    return passed("identity", f"node {written.node}, instance {written.instance}, cluster {written.cluster}")


def _agent(view: NodeView) -> list[Finding]:
    state = view.state
    if view.client is None:
        was = "none has run yet" if state is None else f"the last one (process {state.pid}) is gone"
        return [failed("agent", f"no agent serves {view.root}: {was}", _START)]
    try:
        alive = view.client.get("/healthz")
        served = view.client.get("/metrics")
    except Unreachable as error:
        return [failed("agent", str(error), "is --agent its address? A certificate of your own needs --ca-file")]
    if alive.status != 200:
        return [failed("agent", f"{view.client.base}/healthz answered {alive.status}", "is that an sdcwatch agent?")]
    if served.status == 401:
        return [
            unknown("agent", f"{view.client.base} runs and asks for its metrics token", "give --metrics-token-file")
        ]
    if served.status != 200 or "sdc_build_info" not in served.text:
        return [failed("agent", f"{view.client.base}/metrics answered {served.status}", "see the agent's log")]
    findings = [passed("agent", f"{view.client.base} serves node {view.node.node}")]
    if state is not None and state.alive and not state.outlives_ranks:
        findings.append(
            failed(
                "agent_lifetime",
                "this agent was started by a rank and ends with its job",
                "run it as a service on every node: docs/deploying.md",
            )
        )
    return findings


def _scraped(view: NodeView) -> Finding:
    where = view.client.base if view.client else "the agent"
    wire = f"add {where} to a scrape job called sdcwatch (docs/deploying.md)"
    if view.state is None or not view.state.scrapes:
        return failed("scrape", "no Prometheus has ever scraped this agent", wire)
    age = time.time() - view.state.scrapes[-1]
    if age > SCRAPE_SECONDS:
        return failed("scrape", f"the newest scrape is {age:.0f} s old", wire)
    return passed("scrape", f"the newest scrape is {max(age, 0.0):.0f} s old")
