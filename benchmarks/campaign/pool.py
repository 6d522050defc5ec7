"""Persistent ranks: one set of forked gloo processes a world size, fed one job at a time.

A job is a function's name and its arguments; every rank of the pool runs it and answers. A job that raises on a rank,
or takes too long, ends its pool: the next job gets a fresh one. Flow: main -> **pool** -> training, healthy.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

#: Seconds that one job may take before its pool is given up.
JOB_SECONDS = 150.0
_GLOO_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Job:
    """One thing for all ranks of a pool to do. `run(rank, size, scratch, *arguments)` gives a rank's answer."""

    key: str
    run: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a job: each rank's value in rank order, or the error that ended it. CPU seconds of all ranks."""

    job: Job
    values: tuple[Any, ...] = ()
    error: str = ""
    cpu: float = 0.0


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join_group(rank: int, size: int, port: int) -> None:
    """Makes the default gloo group of this process."""
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=_GLOO_SECONDS))


def _next_job(pipe: Connection, parent: int) -> Job | None:
    """Waits for work. A parent that was killed closes no pipe, since the other ranks hold copies of its ends."""
    while not pipe.poll(2.0):
        if os.getppid() != parent:
            return None
    job: Job | None = pipe.recv()
    return job


def _serve(rank: int, size: int, port: int, scratch: str, pipe: Connection) -> None:
    log = os.open(f"{scratch}/rank-{size}-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    import torch

    torch.set_num_threads(1)
    join_group(rank, size, port)
    parent = os.getppid()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while (job := _next_job(pipe, parent)) is not None:
            begin = time.process_time()
            try:
                answer: tuple[str, Any] = ("value", job.run(rank, size, scratch, *job.arguments))
            except BaseException as error:
                answer = ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
            pipe.send((*answer, time.process_time() - begin))
            os.ftruncate(log, 0)
            os.lseek(log, 0, os.SEEK_SET)
    sys.stdout.flush()
    os._exit(0)


@dataclass
class Pool:
    """The ranks of one world size."""

    size: int
    scratch: Path
    waiting: deque[Job] = field(default_factory=deque)
    running: Job | None = None
    _pipes: list[Connection] = field(default_factory=list)
    _processes: list[Any] = field(default_factory=list)
    _got: dict[int, tuple[str, Any, float]] = field(default_factory=dict)
    _since: float = 0.0

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        port = free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, port, str(self.scratch), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def stop(self) -> None:
        """Ends the processes: politely where idle, at once where a job runs."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=5 if self.running is None else 0)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes.clear()
        self._processes.clear()

    def next(self) -> None:
        """Starts the next waiting job."""
        if not self._processes:
            self._start()
        self.running, self._since = self.waiting.popleft(), time.monotonic()
        self._got.clear()
        for pipe in self._pipes:
            pipe.send(self.running)

    @property
    def pipes(self) -> Sequence[Connection]:
        """Where answers come from."""
        return [pipe for rank, pipe in enumerate(self._pipes) if rank not in self._got]

    def receive(self) -> Answer | None:
        """Takes what has arrived; the answer once it is whole, or the pool had to be given up."""
        job = self.running
        assert job is not None
        for rank, pipe in enumerate(self._pipes):
            if rank in self._got or not pipe.poll():
                continue
            try:
                self._got[rank] = pipe.recv()
            except (EOFError, OSError):
                return self._give_up(job, f"rank {rank} died")
        if len(self._got) == self.size:
            errors = [f"rank {r}: {value}" for r, (kind, value, _) in sorted(self._got.items()) if kind == "error"]
            if errors:
                return self._give_up(job, "\n".join(errors))
            self.running = None
            values = tuple(self._got[rank][1] for rank in range(self.size))
            return Answer(job, values, cpu=sum(cpu for _, _, cpu in self._got.values()))
        if time.monotonic() - self._since > JOB_SECONDS:
            return self._give_up(job, f"no answer of ranks {sorted(set(range(self.size)) - set(self._got))} in time")
        return None

    def _give_up(self, job: Job, error: str) -> Answer:
        self.stop()
        self.running = None
        return Answer(job, error=error)


def run_all(pools: Sequence[Pool], at_once: int) -> Iterator[Answer]:
    """Runs all waiting jobs, `at_once` pools side by side, and gives each answer as it comes."""
    try:
        while any(pool.running or pool.waiting for pool in pools):
            busy = [pool for pool in pools if pool.running]
            for pool in sorted(pools, key=lambda p: -len(p.waiting) * p.size):
                if len(busy) < at_once and pool.waiting and not pool.running:
                    pool.next()
                    busy.append(pool)
            wait([pipe for pool in busy for pipe in pool.pipes], timeout=1.0)
            for pool in busy:
                answer = pool.receive()
                if answer is not None:
                    yield answer
    finally:
        for pool in pools:
            pool.stop()
