"""What a person sees: live progress where there is a terminal, plain lines where there is none, and the final table."""

from __future__ import annotations

from datetime import datetime

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stage import plan
from stage.cluster import Cluster
from stage.facts import Facts

#: Moments in the order of the flow, with what each of them means to a reader.
MOMENTS = {
    "fault": "the fault begins on one node",
    "detection": "the ranks' exchange shows it",
    "event durable": "event on disk on every reporter",
    "scraped": "Prometheus has scraped an agent that knows it",
    "alert firing": "the rule fires",
    "paged": "the page (or the note to the job's owner) is out",
    "webhook": "the service has the alert, durably",
    "proof": "two other nodes' agents agree",
    "isolated": "the node is quarantined",
    "replacement asked": "one replace call",
    "proven": "another instance runs in its place",
    "released": "the latch is released",
    "resumed": "the first step after the halt begins",
    "finished": "all ranks are done",
}


class Screen:
    """The terminal of one run; usable as a context manager."""

    def __init__(self, title: str) -> None:
        self.console = Console(highlight=False)
        self._title = title
        self._words = "setting the stage"
        self._said: set[str] = set()
        self._live: Live | None = None

    def __enter__(self) -> Screen:
        self.console.print(f"[bold]sdcwatch demo[/bold]: {self._title}")
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4, transient=True).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends live progress; what is printed afterwards stays."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def say(self, words: str) -> None:
        """What the demo does now."""
        self._words = words
        if self._live is None:
            self.console.print(f"{datetime.now():%H:%M:%S} {words}", markup=False)  # noqa: DTZ005 (a wall clock to read)
        else:
            self._live.update(Text(words))

    def show(self, facts: Facts, cluster: Cluster) -> None:
        """Draws the nodes and what has happened; prints each new moment once."""
        for name in sorted(set(facts.moments) - self._said, key=lambda n: facts.moments[n]):
            self._said.add(name)
            when = f"{datetime.fromtimestamp(facts.moments[name]):%H:%M:%S}"  # noqa: DTZ006 (a wall clock to read)
            self.console.print(f"{when} {name}: {MOMENTS[name]}", markup=False)
            if name == "detection":
                self.console.print(f"         {facts.events[0].sentence}", markup=False)
        if self._live is not None:
            self._live.update(Group(_nodes(facts, cluster), Text(self._words, style="dim")))

    def timeline(self, facts: Facts) -> None:
        """The table of moments, with seconds since the verdict (or the first step, where there is none)."""
        zero = facts.moments.get("detection", min((e["time"] for e in facts.log), default=0.0))
        table = Table(title="timeline", title_justify="left")
        table.add_column("moment")
        table.add_column("seconds", justify="right")
        table.add_column("what")
        for name, what in MOMENTS.items():
            if name in facts.moments:
                table.add_row(name, f"{facts.moments[name] - zero:+.1f}", what)
        self.console.print(table)

    def outcome(self, text: str, good: bool) -> None:
        """The last sentence."""
        self.console.print(Panel(text, style="green" if good else "bold red", expand=False))


def _nodes(facts: Facts, cluster: Cluster) -> Table:
    newest = {e["instance"]: e for e in facts.log}
    table = Table(expand=False)
    for heading in ("address", "instance", "state", "rank", "step", "loss"):
        table.add_column(heading)
    for node in cluster.nodes.values():
        entry = newest.get(node.instance, {})
        loss = next(
            (e["loss"] for e in reversed(facts.log) if e["kind"] == "step" and e["instance"] == node.instance), None
        )
        bad = any(node.instance in event.instances() for event in facts.events)
        table.add_row(
            node.address,
            node.instance,
            node.describe(),
            str(entry.get("rank", "")),
            str(entry.get("step", "")),
            f"{loss:.3f}" if loss is not None else "",
            style="red" if bad else ("cyan" if node.address == plan.SPARE else None),
        )
    return table
