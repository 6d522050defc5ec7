"""Load on the remediation service: ten thousand deliveries of a thousand distinct alerts, fifty at a time.

What it does: starts the real `serve` before a simulated HyperPod, on SQLite with one process or on a PostgreSQL of our
own with two, delivers from a process of its own as Alertmanager does, and measures how long each was waited for, what
the service's memory did, and whether every acknowledged delivery is kept, each alert judged and a case there for each
instance.
What it never does: count a delivery that was not acknowledged as done: a 503 is sent again, and its wait goes on.
Its place: `make load-remediation`; docs/remediation-proof.md holds its table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sdcwatch_remediation import schema
from sdcwatch_remediation.database import Database
from sdcwatch_remediation.records import Member
from sdcwatch_remediation.testing.events import alert, delivery
from sdcwatch_remediation.testing.postgres import PostgresServer, programs
from sdcwatch_remediation.testing.processes import Serve, Site
from sdcwatch_remediation.testing.schedule_report import write_block
from sqlalchemy import func, select

from benchmarks.load_bare import bare

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "out" / "remediation"
DOCUMENT = ROOT / "docs" / "remediation-proof.md"


@dataclass(slots=True)
class Load:
    """What one load came to."""

    database: str
    processes: int
    deliveries: int
    distinct: int
    in_flight: int
    seconds: float = 0.0
    milliseconds: list[float] = field(default_factory=list)
    """How long each delivery was waited for, until its 200."""
    again: int = 0
    """Answers other than 200, each followed by another try."""
    kept: int = 0
    signals: int = 0
    cases: int = 0
    """Instances with a case."""
    results: dict[str, int] = field(default_factory=dict)
    memory_mib: list[list[float]] = field(default_factory=list)
    """Resident memory of each process, a sample a tenth of the load."""
    cpu_seconds: float = 0.0
    """Processor time of the service."""
    sender_seconds: float = 0.0
    """Processor time of the one process that delivers."""
    others: float = 0.0
    """Processors that everything else on the machine kept busy meanwhile, on average."""
    bare_milliseconds: list[float] = field(default_factory=list)
    """Waits of the same sender, right afterwards, at an endpoint that only commits."""

    def percentile(self, share: float, *, bare: bool = False) -> float:
        """Return a percentile of the waits, in milliseconds."""
        ordered = sorted(self.bare_milliseconds if bare else self.milliseconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def lost(self) -> int:
        """Deliveries that were acknowledged and are not kept."""
        return max(0, len(self.milliseconds) - self.kept)

    @property
    def grown_mib(self) -> float:
        """How much the largest process grew from a third of the load to its end."""
        return max(samples[-1] - samples[len(samples) // 3] for samples in zip(*self.memory_mib, strict=True))


def bodies(deliveries: int, distinct: int) -> list[bytes]:
    """Return the bodies in a shuffled order: each alert about an instance of its own, all equally often."""
    made = []
    for number in range(distinct):
        member = Member(f"i-{number:017x}", "workers", f"node-{number}", "Running", 0.0, "127.0.0.1", "")
        made.append(delivery(alert(member, number, training_job=f"job-{number % 40}")))
    chosen = [made[number % distinct] for number in range(deliveries)]
    random.Random(0).shuffle(chosen)
    return chosen


class Connection:
    """One kept-alive connection of a sender, written by hand: a client library's own work would be most of the wait."""

    def __init__(self, url: str) -> None:
        """Remember where to; it is opened when it is needed."""
        place = urlsplit(url)
        self._host, self._port = str(place.hostname), place.port
        self._head = (
            f"POST {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer alerts-token\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: bytes) -> int:
        """Deliver one body and return the status; 0 where the connection broke or nobody answered in time."""
        try:
            async with asyncio.timeout(30.0):
                if self._streams is None:
                    self._streams = await asyncio.open_connection(self._host, self._port)
                reader, writer = self._streams
                writer.write(b"%s%d\r\n\r\n%s" % (self._head, len(body), body))
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
                return int(head.split(b" ", 2)[1])
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            self.close()
            return 0

    def close(self) -> None:
        """Close it, where it is open."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def send(urls: list[str], sent: list[bytes], in_flight: int, out: Any) -> None:
    """Deliver everything from one process, `in_flight` at a time; puts waits, tries that failed, CPU time."""

    async def work() -> tuple[list[float], int]:
        waits: list[float] = []
        again, todo = 0, iter(sent)

        async def sender(connection: Connection) -> None:
            nonlocal again
            for body in todo:
                began = time.perf_counter()
                while await connection.post(body) != 200:
                    again += 1
                    await asyncio.sleep(0.05)
                waits.append((time.perf_counter() - began) * 1000)
            connection.close()

        await asyncio.gather(*(sender(Connection(urls[number % len(urls)])) for number in range(in_flight)))
        return waits, again

    out.put((*asyncio.run(work()), time.process_time()))


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / 100


def measure(load: Load, url: str) -> Load:
    """Put one load on the service over one empty database."""
    with tempfile.TemporaryDirectory() as made, Site(Path(made)) as site:
        url = url or f"sqlite:///{Path(made) / 'state.sqlite3'}"
        # One after the other: of two that find an empty database at once, one would wait for the other's tables.
        serves = []
        for number in range(load.processes):
            serves.append(Serve(site.config(f"serve{number}", database=url)))
            serves[-1].url()
        try:
            _measure(load, serves, Path(made))
        finally:
            for serve in serves:
                serve.end()
        database = Database(url, exclusive=False)
        try:
            with database.read() as connection:

                def count(column: Any) -> int:
                    return int(connection.execute(select(func.count(column))).scalar() or 0)

                load.kept, load.signals = count(schema.deliveries.c.id), count(schema.signals.c.id)
                load.cases = count(schema.cases.c.instance_id.distinct())
                table = schema.signals
                rows = connection.execute(select(table.c.result, func.count()).group_by(table.c.result))
                load.results = {str(result): int(number) for result, number in rows}
        finally:
            database.close()
    return load


def machine_seconds() -> tuple[float, float]:
    """Return the processor time of the whole machine, and of this process with children that ended."""
    words = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(words) - words[3] - words[4]) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


def deliver(urls: list[str], sent: list[bytes], in_flight: int) -> tuple[list[float], int, float]:
    """Deliver everything from a process of its own; return the waits, the tries that failed, and its processor time."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    sender = context.Process(target=send, args=(urls, sent, in_flight, answer))
    sender.start()
    try:
        waits, again, seconds = answer.get(timeout=900)
    finally:
        sender.join(10)
    return waits, again, seconds


def _measure(load: Load, serves: list[Serve], folder: Path) -> None:
    urls = [f"{serve.url()}/v1/alerts" for serve in serves]
    sent = bodies(load.deliveries, load.distinct)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            load.memory_mib.append([round(resident_mib(serve.pid), 1) for serve in serves])

    def used() -> float:
        return sum(cpu_seconds(serve.pid) for serve in serves)

    watcher = threading.Thread(target=watch)
    before, (all_before, own_before), began = used(), machine_seconds(), time.monotonic()
    watcher.start()
    try:
        load.milliseconds, load.again, load.sender_seconds = deliver(urls, sent, load.in_flight)
    finally:
        over.set()
        watcher.join()
    load.seconds = round(time.monotonic() - began, 1)
    load.cpu_seconds = round(used() - before, 1)
    all_now, own_now = machine_seconds()
    ours = load.cpu_seconds + own_now - own_before
    load.others = round((all_now - all_before - ours) / load.seconds, 2)
    with bare(folder) as url:
        load.bare_milliseconds, _, _ = deliver([url], sent[: max(1, len(sent) // 5)], load.in_flight)


def table(loads: list[Load]) -> str:
    """Return what the loads came to, as Markdown."""
    rows = [
        "| database | processes | deliveries | alerts | in flight | p50 | p99 | longest | bare p99 | sent again | lost "
        "| a second | service's CPU each | memory grew | others' CPUs |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for load in loads:
        rows.append(
            f"| {load.database} | {load.processes} | {load.deliveries:,} | {load.distinct:,} | {load.in_flight} "
            f"| {load.percentile(0.5):.0f} ms | {load.percentile(0.99):.0f} ms | {load.percentile(1.0):.0f} ms "
            f"| {load.percentile(0.99, bare=True):.0f} ms | {load.again} | {load.lost} "
            f"| {load.deliveries / load.seconds:.0f} | {load.cpu_seconds / load.deliveries * 1000:.1f} ms "
            f"| {load.grown_mib:.1f} MiB | {load.others:.1f} |"
        )
    return "\n".join(rows)


def main() -> int:
    """Put the loads on, print and keep what they came to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deliveries", type=int, default=10_000)
    parser.add_argument("--distinct", type=int, default=1_000)
    parser.add_argument("--in-flight", type=int, default=50)
    parser.add_argument("--database", choices=("both", "sqlite", "postgresql"), default="both")
    parser.add_argument("--document", action="store_true", help="write the table in docs/remediation-proof.md")
    arguments = parser.parse_args()
    size = (arguments.deliveries, arguments.distinct, arguments.in_flight)
    loads = []
    if arguments.database in ("both", "sqlite"):
        loads.append(measure(Load("SQLite", 1, *size), ""))
        print(table(loads[-1:]), Counter(loads[-1].results), flush=True)
    found = programs(ROOT / ".tools" / "postgresql" / "bin")
    if arguments.database in ("both", "postgresql") and found is not None:
        with PostgresServer(found) as server:
            loads.append(measure(Load("PostgreSQL", 2, *size), server.new_database()))
        print(table(loads[-1:]), Counter(loads[-1].results), flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    names = ("milliseconds", "bare_milliseconds")
    kept = [
        {**asdict(load), **{name: [round(one, 1) for one in getattr(load, name)] for name in names}} for load in loads
    ]
    (OUT / "load.json").write_text(json.dumps(kept) + "\n")
    if arguments.document:
        write_block(DOCUMENT, "load", table(loads))
    wrong = [load for load in loads if load.lost or load.cases != load.distinct or load.signals != load.kept]
    slow = [load for load in loads if load.percentile(0.99) >= 250.0]
    for load in wrong:
        print(f"{load.database}: {load.kept} kept, {load.signals} judged, {load.cases} cases of {load.distinct}")
    for load in slow:
        print(f"{load.database}: p99 is {load.percentile(0.99):.0f} ms, 250 ms are promised on two quiet cores")
    return 1 if wrong or slow else 0


if __name__ == "__main__":
    sys.exit(main())
