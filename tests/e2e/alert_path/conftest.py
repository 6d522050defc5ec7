"""A whole alert path of real programs around a simulated cluster: agents, Prometheus, Alertmanager, pager, service."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sdcwatch_remediation.actions.hyperpod import HyperPod
from sdcwatch_remediation.records import Member
from sdcwatch_remediation.simulator import Simulator, SimulatorConfig

sys.path.insert(0, str(Path(__file__).parent))

from alertpath.job import Job, Node, make_event, node
from alertpath.programs import RULES, Program, alertmanager, alertmanager_tree, fetch, free_port, prometheus, wait
from alertpath.receiver import Receiver

CLUSTER = "demo"
TOKENS = ("alerts", "cases", "events", "latch")


class World:
    """Everything between a rank and a replaced node, with one-second scrapes; nothing runs until it is started."""

    def __init__(self, folder: Path, simulator: Simulator, pager: Receiver) -> None:
        self.folder, self.simulator, self.pager = folder, simulator, pager
        self._started: list[Program] = []
        self._jobs: list[Job] = []
        for name in TOKENS:
            (folder / f"{name}.token").write_text(f"{name}-token-of-this-test\n")
        self.members = self._inventory()
        agent_port = free_port(*(m.address for m in self.members), "127.0.200.1")
        tokens = ("--events-token-file", str(folder / "events.token"))
        tokens += ("--latch-token-file", str(folder / "latch.token"))
        self.nodes: list[Node] = [
            node(folder, m.node_name, m.instance_id, m.address, agent_port, CLUSTER, *tokens) for m in self.members
        ]
        self.service_port, self.alertmanager_port, self.prometheus_port = free_port(), free_port(), free_port()
        self.service = self._service(agent_port)
        tree = alertmanager_tree({"service": self.service_url, "pager": pager.url}, folder / "alerts.token")
        self.tree, self.rules = tree, RULES
        self.alertmanager = self.new_alertmanager("alertmanager", tree, self.alertmanager_port)
        self.prometheus = self.new_prometheus("prometheus", self.prometheus_port, [self.alertmanager_port])

    def _inventory(self) -> tuple[Member, ...]:
        provider = HyperPod(
            CLUSTER, region="us-west-2", endpoint_url=self.simulator.url, access_key_id="any", secret_access_key="thing"
        )
        members = provider.inventory().members
        provider.close()
        return members

    @property
    def service_url(self) -> str:
        return f"http://127.0.0.1:{self.service_port}"

    def _service(self, agent_port: int) -> Program:
        config = self.folder / "service.toml"
        policy = {
            "mode": "auto", "confirm": "first", "groups": ["workers"], "settle_seconds": 1.0, "per_day": 9,
            "concurrent": 9,
        }  # fmt: skip
        config.write_text(
            f'[server]\nport = {self.service_port}\nalerts_token_file = "alerts.token"\n'
            'cases_token_file = "cases.token"\n'
            f'[cluster]\nname = "{CLUSTER}"\nregion = "us-west-2"\nendpoint_url = "{self.simulator.url}"\n'
            f'[agents]\nport = {agent_port}\nevents_token_file = "events.token"\nlatch_token_file = "latch.token"\n'
            "timeout_seconds = 1.0\n[worker]\npoll_seconds = 0.2\n[policy]\n"
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in policy.items())
        )
        command = [sys.executable, "-m", "sdcwatch_remediation.cli", "serve", "--config", str(config)]
        variables = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "thing", "AWS_EC2_METADATA_DISABLED": "true"}
        url = f"{self.service_url}/readyz"
        return Program("service", command, self.folder / "service.log", lambda: fetch(url), **variables)

    def new_alertmanager(self, name: str, tree: Any, port: int, **more: Any) -> Program:
        return alertmanager(self.folder, name, tree, port=port, **more)

    def new_prometheus(self, name: str, port: int, alertmanagers: list[int], **more: Any) -> Program:
        more = {"scrape": "1s", "evaluation": "1s", "agents": [one.target for one in self.nodes], **more}
        # Prometheus sends a firing alert again once a minute; here it may not take a test that long.
        return prometheus(
            self.folder, name, port=port, alertmanagers=alertmanagers, more=["--rules.alert.resend-delay=3s"], **more
        )

    def start(self, *programs: Program) -> None:
        """Starts programs side by side; without any: all of the path."""
        chosen = programs or (*(n.agent for n in self.nodes), self.alertmanager, self.prometheus, self.service)
        self._started += [one for one in chosen if one not in self._started]
        for one in chosen:
            one.start(await_ready=False)
        for one in chosen:
            one.await_ready()

    def scraped(self) -> None:
        """Waits until Prometheus has seen every node."""
        url = f"http://127.0.0.1:{self.prometheus_port}/api/v1/query?query=sum(up)"
        wait("every agent is scraped", lambda: f"'{len(self.nodes)}'" in str(fetch(url)), 40)

    def event(self, suspect: int = 2, *, job: str = "gpt", after: float = 2.0, **how: Any) -> Job:
        """A job on all nodes that sees one event, and dies 0.2 s later."""
        when = time.time() + after
        made = Job(make_event(job, self.nodes, suspect, when, CLUSTER), self.nodes)
        self._jobs.append(made)
        return made.start(born=how.pop("born", when - 0.5), dies=how.pop("dies", 0.2), **how)

    def replacements(self) -> int:
        return len(self.simulator.calls("BatchReplaceClusterNodes"))

    def cases(self) -> list[dict[str, Any]]:
        answer = fetch(f"{self.service_url}/v1/cases", token="cases-token-of-this-test")
        return list(answer["cases"]) if isinstance(answer, dict) else []

    def case(self, outcome: str, seconds: float = 120.0) -> dict[str, Any]:
        """Waits for the one case of this world to end so."""
        wait(
            f"a case ends as {outcome}; cases: {self.cases()}; the service says:\n{self.service.tail()}",
            lambda: any(case["outcome"] == outcome for case in self.cases()), seconds, 0.2,
        )  # fmt: skip
        (case,) = self.cases()
        return case

    def end(self) -> None:
        for job in self._jobs:
            job.end()
        for program in reversed(self._started):
            program.end()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A world of four nodes and a spare; replacing one takes half a second."""
    config = SimulatorConfig.of_size(
        CLUSTER, nodes=4, spares=2, shutdown_seconds=0.1, provision_seconds=0.1, boot_seconds=0.3
    )
    with contextlib.ExitStack() as stack:
        simulator = stack.enter_context(Simulator(config))
        pager = stack.enter_context(Receiver())
        made = World(tmp_path, simulator, pager)
        stack.callback(made.end)
        yield made


@pytest.fixture
def routed(tmp_path: Path) -> Iterator[Callable[[Any], tuple[str, Receiver]]]:
    """`routed(tree)` starts an Alertmanager whose every receiver is one pager; gives its URL and the pager."""
    started: list[Program] = []

    def start(tree: Any) -> tuple[str, Receiver]:
        for receiver in tree["receivers"]:
            for hook in receiver.get("webhook_configs", ()):
                hook.pop("http_config", None)
                hook["url"] = f"{pager.url}/{receiver['name']}"
            if "webhook_configs" not in receiver and receiver["name"] != "null":
                receiver["webhook_configs"] = [{"url": f"{pager.url}/{receiver['name']}"}]
        port = free_port()
        started.append(alertmanager(tmp_path, f"alertmanager-{len(started)}", tree, port=port).start())
        return f"http://127.0.0.1:{port}", pager

    with Receiver() as pager:
        try:
            yield start
        finally:
            for program in started:
                program.end()
