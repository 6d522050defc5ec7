"""The event that is seen once: every rank dies 0.2 s after it, and the page must still arrive.

    python tests/e2e/alert_path/campaign.py [--runs 20] [--folder DIR]

One real Prometheus and Alertmanager at 5 s scrape and evaluation, one real agent a node, and so many jobs one after the
other, each with a name, three ranks and a suspect's node of its own. Event times are spread evenly over the scrape's
phases. Half of the jobs are scraped before their event, half are born with it. It prints a table, and exits 1 when a
page is missing, came twice, or took 12 s or longer to the webhook.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from alertpath.job import Job, Node, make_event, node, running
from alertpath.programs import alertmanager, alertmanager_tree, fetch, free_port, prometheus, wait
from alertpath.receiver import Receiver

CLUSTER = "campaign"
#: Most seconds from the event to the webhook at 5 s scrape and evaluation.
MOST = 12.0
#: Seconds between two events: twenty of them fall on twenty different phases of a scrape of 5 s.
BETWEEN = 3.25


@dataclass
class Run:
    """One job, its event, and when what arrived."""

    job: Job
    scraped_before: bool
    died: float = 0.0
    webhook: float | None = None
    page: float | None = None
    deliveries: int = 0

    @property
    def good(self) -> bool:
        return (
            self.died > 0
            and self.webhook is not None
            and self.webhook < MOST
            and self.page is not None
            and self.deliveries == 1
        )

    def row(self) -> str:
        event = self.job.event
        verdict = "ok" if self.good else "FAILED"
        took = [" none" if one is None else f"{one:5.1f}" for one in (self.webhook, self.page)]
        return (
            f"{event.training_job}   {event.time % 5:5.2f}   {'yes' if self.scraped_before else 'no ':<6}"
            f"   {self.died - event.time:5.2f}   {took[0]}   {took[1]}   {self.deliveries}   {verdict}"
        )


def play(runs: int, folder: Path) -> list[Run]:
    """All jobs, one after the other; returns when each has paged or its time is over."""

    def place(name: str, number: int) -> Node:
        return node(folder, name, f"i-{number:017x}", "127.0.0.1", free_port(), CLUSTER)

    reporters = [place("r0", 1), place("r1", 2)]
    suspects = [place(f"s{n}", 16 + n) for n in range(runs)]
    with Receiver() as pager, contextlib.ExitStack() as ends:
        port, web = free_port(), free_port()
        tree = alertmanager_tree({"service": pager.url, "pager": pager.url})
        targets = [one.target for one in (*reporters, *suspects)]
        programs = [one.agent for one in (*reporters, *suspects)]
        # Agents first and few at a time: two cores start some twenty interpreters slowly.
        for at in range(0, len(programs), 4):
            ends.enter_context(running(*programs[at : at + 4]))
        ends.enter_context(running(alertmanager(folder, "alertmanager", tree, port=port)))
        ends.enter_context(running(prometheus(folder, "prometheus", port=web, agents=targets, alertmanagers=[port])))
        query = f"http://127.0.0.1:{web}/api/v1/query?query=sum(up)"
        up = len(targets)
        wait("every agent is scraped", lambda: f'"{up}"' in str(fetch(query)).replace("'", '"'), 40, 0.5)
        began = time.time() + 9.0
        played: list[Run] = []
        for number, suspect in enumerate(suspects):
            when = began + BETWEEN * number
            before = number % 2 == 0
            time.sleep(max(0.0, when - 7.0 - time.time()))
            event = make_event(f"once-{number:02d}", [*reporters, suspect], 2, when, CLUSTER)
            job = Job(event, [*reporters, suspect]).start(born=when - 5.5 if before else when, dies=0.2)
            ends.callback(job.end)
            played.append(Run(job, before))
            threading.Thread(target=_watch, args=[played[-1]], daemon=True).start()
            for run in played:
                _look(run, pager)
        last = played[-1].job.event.time
        deadline = last + MOST + 6.0
        while time.time() < deadline or (time.time() < deadline + 10 and any(r.page is None for r in played)):
            for run in played:
                _look(run, pager)
            time.sleep(0.2)
    return played


def _watch(run: Run) -> None:
    run.died = run.job.await_end()


def _look(run: Run, pager: Receiver) -> None:
    event = run.job.event
    rung = pager.firing("v1/alerts", training_job=event.training_job)
    paged = pager.firing("page", training_job=event.training_job)
    run.deliveries = len(rung)
    run.webhook = rung[0].time - event.time if rung else None
    run.page = paged[0].time - event.time if paged else None


def main(arguments: list[str] | None = None) -> int:
    """Plays the campaign and prints its table. Status 1: a run failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="keep logs and data here (default: a temporary folder)")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="sdcwatch-once-") as temporary:
        played = play(chosen.runs, chosen.folder or Path(temporary))
    print("job       phase   scraped  dead    webhook  page   delivered")
    print("          s       before   after s s        s      times")
    for run in played:
        print(run.row())
    good = sum(run.good for run in played)
    took = sorted(run.webhook for run in played if run.webhook is not None)
    print(f"{good} of {len(played)} pages arrived once and in time;", end=" ")
    print(
        f"event to webhook: median {took[len(took) // 2]:.1f} s, worst {took[-1]:.1f} s" if took else "no webhook came"
    )
    return 0 if good == len(played) else 1


if __name__ == "__main__":
    sys.exit(main())
