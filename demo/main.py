"""`make demo`: a wrong bit in a real DDP run ends as a replaced node, and the model equals that of a clean run.

Starts everything on loopback, injects one fault into data, watches, writes `report.json` and `timeline.png`, and ends
all that it started. Exits 0 only when everything held that this fault must lead to.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stage import picture, plan, render, report, steplog, web
from stage.cluster import QUIET, Cluster, Training, service_command
from stage.facts import Facts, Reader
from stage.pager import Pager
from stage.processes import DemoError, Processes, Started, check_port
from stage.screen import Screen

MARKER = ".sdcwatch-demo"
#: Seconds that a run without a fault is watched after its end, so that an alert could still fire.
QUIET_SECONDS = 12.0


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line; ports fall back to `DEMO_<NAME>_PORT` and then to the fixed defaults."""
    parser = argparse.ArgumentParser(prog="demo/main.py", description=__doc__)
    parser.add_argument("--fault", choices=tuple(plan.SCENARIOS), default="compute")
    parser.add_argument("--out", type=Path, default=plan.ROOT / "demo" / "out", help="replaced by each run")
    parser.add_argument("--steps", type=int, default=40, help="training steps (default 40, at least 30)")
    parser.add_argument("--pace", type=float, default=0.1, help="least seconds a step takes (default 0.1)")
    parser.add_argument("--timeout", type=float, default=plan.MOST_SECONDS, help="seconds for the whole run")
    parser.add_argument(
        "--then",
        metavar="COMMAND",
        help="run this at the end, before everything is ended; DEMO_OUT and DEMO_<NAME>_PORT say where things are",
    )
    defaults = plan.Ports()
    for name in plan.PORT_NAMES:
        variable = f"DEMO_{name.upper()}_PORT"
        default = os.environ.get(variable, str(getattr(defaults, name)))
        parser.add_argument(f"--{name}-port", type=int, default=default, metavar="N", help=f"default {default}")
    arguments = parser.parse_args(argv)
    if arguments.steps < 30:
        parser.error("--steps must be at least 30: the fault is seen at step 21")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """0: everything held; 1: something did not; 2: wrong use or a part is missing; 130: interrupted."""
    arguments = parse(argv)
    scenario = plan.SCENARIOS[arguments.fault]
    ports = plan.Ports(**{name: getattr(arguments, f"{name}_port") for name in plan.PORT_NAMES})
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    with Screen(f"FAULT={scenario.name}, {scenario.title}") as screen:
        try:
            out = prepare(arguments.out)
            tools = {name: find_tool(name) for name in ("prometheus", "alertmanager")}
            check_ports(ports)
            return Demo(scenario, out, ports, tools, arguments, screen).run()
        except DemoError as error:
            screen.stop()
            print(f"demo: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            screen.stop()
            print("demo: interrupted; everything it started has been ended", file=sys.stderr)
            return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def prepare(out: Path) -> Path:
    """Empties the output folder of an earlier run; refuses a folder that is not the demo's own."""
    out = out.resolve()
    if out.exists():
        if any(out.iterdir()) and not (out / MARKER).exists():
            raise DemoError(f"{out} is not empty and no earlier run's; give another folder with --out")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / MARKER).touch()
    return out


def find_tool(name: str) -> str:
    """A program in .tools/bin or on PATH."""
    path = os.pathsep.join([str(plan.ROOT / ".tools" / "bin"), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    if found is None:
        raise DemoError(f"{name} is missing: run `make setup`, or put it on PATH")
    return found


def check_ports(ports: plan.Ports) -> None:
    """Refuses a busy port before anything starts."""
    if not sys.platform.startswith("linux"):
        raise DemoError("the demo gives each node an address of its own in 127.0.0.0/8, which only Linux answers on")
    for address in (*plan.NODES, plan.SPARE):
        check_port(address, ports.agent, "agent")
    for name in ("remediation", "pager", "simulator", "prometheus", "alertmanager"):
        check_port("127.0.0.1", getattr(ports, name), name)
    check_port(plan.NODES[0], ports.rendezvous, "rendezvous")


class Demo:
    """One run, from the first process to the report."""

    def __init__(
        self,
        scenario: plan.Scenario,
        out: Path,
        ports: plan.Ports,
        tools: dict[str, str],
        arguments: argparse.Namespace,
        screen: Screen,
    ) -> None:
        self.scenario = scenario
        self.out = out
        self.ports = ports
        self.tools = tools
        self.screen = screen
        self.steps, self.pace = arguments.steps, arguments.pace
        self.deadline = time.monotonic() + arguments.timeout
        self.processes = Processes(out / "logs")
        self.rendered = render.render(out, ports)
        self.services: list[Started] = []
        self.afterwards: list[str] = shlex.split(arguments.then or "")
        self.status_afterwards = 0

    def run(self) -> int:
        """Plays all acts; ends everything that was started, whatever happens."""
        began = time.monotonic()
        try:
            with Pager(self.ports.pager, self.out / "pages.jsonl") as pager:
                self.start_services()
                clean = self.reference()
                facts = self.faulty(pager)
                if self.afterwards:
                    self.screen.stop()
                    self.status_afterwards = self.then()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave half of it behind
            self.screen.say("ending everything that was started")
            self.processes.end_all()
        return self.finish(facts, clean, time.monotonic() - began)

    def start_services(self) -> None:
        """Simulator, Prometheus, Alertmanager and the remediation service, all with this run's files."""
        self.screen.say("starting simulator, Prometheus, Alertmanager and the remediation service")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "SDCWATCH_"))}
        keys = {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo", "AWS_EC2_METADATA_DISABLED": "true"}
        ports, files = self.ports, self.rendered
        simulate = ("simulate", "--config", str(files.simulator), "--port", str(ports.simulator))
        self.services = [
            self.processes.start("simulator", service_command(*simulate), environment),
            self.processes.start(
                "alertmanager",
                [
                    self.tools["alertmanager"],
                    f"--config.file={files.alertmanager}",
                    f"--storage.path={self.out / 'alertmanager'}",
                    f"--web.listen-address=127.0.0.1:{ports.alertmanager}",
                    "--cluster.listen-address=",
                ],
                environment,
            ),
            self.processes.start(
                "prometheus",
                [
                    self.tools["prometheus"],
                    f"--config.file={files.prometheus}",
                    f"--storage.tsdb.path={self.out / 'prometheus'}",
                    f"--web.listen-address=127.0.0.1:{ports.prometheus}",
                ],
                environment,
            ),
            self.processes.start(
                "remediation", service_command("serve", "--config", str(files.remediation)), environment | keys
            ),
        ]
        waiting = {
            "simulator": f"http://127.0.0.1:{ports.simulator}/_simulator/state",
            "alertmanager": f"http://127.0.0.1:{ports.alertmanager}/-/ready",
            "prometheus": f"http://127.0.0.1:{ports.prometheus}/-/ready",
            "remediation": f"http://127.0.0.1:{ports.remediation}/healthz",
        }
        while waiting:
            self.check_alive()
            waiting = {name: url for name, url in waiting.items() if not web.is_up(url)}
            time.sleep(0.1)

    def check_alive(self) -> None:
        """Raises when a service died or the time is over."""
        for one in self.services:
            if one.status is not None:
                raise DemoError(f"{one.name} ended with status {one.status}; its last words ({one.log}):\n{one.tail()}")
        if time.monotonic() > self.deadline:
            raise DemoError(f"the time is over; logs lie in {self.out / 'logs'}; --timeout gives it more")

    def reference(self) -> str:
        """The run that never had a fault, without the monitor: what the weights must be in the end."""
        self.screen.say(f"reference run: {self.steps} steps, 4 ranks, no fault, sdcwatch off")
        folder = self.out / "reference"
        training = Training(self.steps, 0.0, folder / "checkpoints", folder / "steps", {})
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SDCWATCH_")}
        started = self.processes.start(
            "reference", training.reference(), environment | QUIET | {"SDCWATCH_DISABLE": "1"}
        )
        while started.status is None:
            self.check_alive()
            time.sleep(0.1)
        hashes = {e["sha256"] for e in steplog.read(folder / "steps") if e["kind"] == "done"}
        if started.status != 0 or len(hashes) != 1:
            raise DemoError(f"the reference run failed (status {started.status}):\n{started.tail()}")
        return str(hashes.pop())

    def faulty(self, pager: Pager) -> Facts:
        """The run with the fault, on four named nodes and a spare; returns when it is over, or its time is."""
        training = Training(
            self.steps,
            self.pace,
            self.out / "checkpoints",
            self.out / "steps",
            QUIET | self.scenario.environment(self.out),
        )
        training.checkpoints.mkdir()
        cluster = Cluster(self.out, self.ports, self.rendered, self.processes, training)
        reader = Reader(self.scenario, self.out, self.ports, self.rendered.cases_token, cluster, pager)
        self.screen.say("training on four nodes, watched by sdcwatch")
        facts = Facts()
        while time.monotonic() < self.deadline:
            self.check_alive()
            cluster.tick()
            facts = reader.read()
            self.screen.show(facts, cluster)
            if self.is_over(facts, cluster):
                break
            time.sleep(0.25)
        return facts

    def then(self) -> int:
        """Runs what the caller asked for on everything that still stands; returns its exit status."""
        where = {f"DEMO_{name.upper()}_PORT": str(getattr(self.ports, name)) for name in plan.PORT_NAMES}
        try:
            return subprocess.run(
                self.afterwards, env={**os.environ, **where, "DEMO_OUT": str(self.out)}, check=False
            ).returncode
        except OSError as error:
            raise DemoError(f"--then {self.afterwards[0]}: {error.strerror or error}") from error

    def is_over(self, facts: Facts, cluster: Cluster) -> bool:
        """Whether there is nothing left to wait for."""
        runs = [n.run for n in cluster.nodes.values() if n.run is not None]
        if len(runs) < len(plan.NODES) or any(r.status is None for r in runs):
            return False
        if "finished" not in facts.moments:
            return True  # every run ended and the training did not
        rest = time.time() - facts.moments["finished"]
        if self.scenario.fault is None:
            return rest > QUIET_SECONDS
        closed = not self.scenario.expected.named or (facts.case or {}).get("closed_at") is not None
        return (closed and "paged" in facts.moments) or rest > 3 * QUIET_SECONDS

    def finish(self, facts: Facts, clean: str, seconds: float) -> int:
        """Writes report and picture, prints table and outcome."""
        written = report.build(self.scenario, facts, clean)
        wrong = report.problems(self.scenario, written, facts)
        (self.out / "report.json").write_text(json.dumps(written, indent=2) + "\n")
        self.screen.say("drawing")
        picture.draw(self.out / "timeline.png", self.scenario, facts)
        self.screen.stop()
        self.screen.timeline(facts)
        self.screen.outcome(report.sentence(self.scenario, written, facts, wrong), not wrong)
        print(f"{seconds:.0f} s; report: {self.out / 'report.json'}; picture: {self.out / 'timeline.png'}")
        if self.status_afterwards:
            print(f"demo: {self.afterwards[0]} ended with status {self.status_afterwards}", file=sys.stderr)
        return 1 if wrong or self.status_afterwards else 0


if __name__ == "__main__":
    sys.exit(main())
