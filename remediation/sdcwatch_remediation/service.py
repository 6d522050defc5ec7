"""Put the service together: database, provider, agents, worker, health, and what `/metrics` computes at each scrape.

What it does: builds everything from one `Config`; `start` and `stop` the worker.
What it never does: listen (`app` and `server` do).
Its place: `cli serve` makes one; tests make one with a provider and a clock of their own.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sdcwatch_remediation import notify, trace_export
from sdcwatch_remediation.actions.eks import Eks
from sdcwatch_remediation.actions.eks_client import EksClient
from sdcwatch_remediation.actions.handover import Handover
from sdcwatch_remediation.actions.scheduler import Scheduler
from sdcwatch_remediation.actions.slurm import Slurm, SlurmReplace
from sdcwatch_remediation.agents import AgentClient
from sdcwatch_remediation.context import Context
from sdcwatch_remediation.database import Database
from sdcwatch_remediation.errors import ConfigError, StoreUnavailable
from sdcwatch_remediation.highwater import HighWater
from sdcwatch_remediation.lease import Lease
from sdcwatch_remediation.ledger import Ledger
from sdcwatch_remediation.records import Orchestrator, Provider
from sdcwatch_remediation.settings import ACTIONS, MODES, Config
from sdcwatch_remediation.states import STATES
from sdcwatch_remediation.store import AuditLine, Store
from sdcwatch_remediation.telemetry import Telemetry
from sdcwatch_remediation.tokens import Tokens
from sdcwatch_remediation.worker import Worker

PROVIDER_CACHE_SECONDS = 10.0
"""How long one look at the provider serves `/readyz`."""


class Service:
    """One running service without its listener."""

    def __init__(
        self,
        config: Config,
        *,
        provider: Provider | None = None,
        schedulers: tuple[Scheduler, ...] | None = None,
        clock: Callable[[], float] = time.time,
        sink: Callable[[AuditLine], None] | None = None,
        database: Database | None = None,
        agents: AgentClient | None = None,
        orchestrator: Orchestrator | None = None,
        handover: Handover | None = None,
    ) -> None:
        """Open the database and everything else; nothing is asked of the outside yet.

        Args:
            config: a checked configuration.
            provider: who owns the instances; built from the configuration by default.
            schedulers: who keeps work off a node; built from the configuration by default.
            clock: returns unix seconds.
            sink: receives audit lines; by default each goes to stdout as one JSON line.
            database: an open database; opened as the configuration says by default.
            agents: the way to the node agents; made from the configuration by default.
            orchestrator: who schedules work onto the nodes; built from the configuration by default.
            handover: how nodes are handed over; built from the configuration by default.

        Raises:
            ConfigError: a token file or the database does not fit.
            StoreUnavailable: the database cannot be opened.
        """
        self.config = config
        self.tokens = Tokens(config.server)
        self.telemetry = Telemetry()
        self.clock = clock
        database = database or Database(config.database.url, busy_timeout_seconds=config.database.busy_timeout_seconds)
        self.database = database
        self.store = Store(database, config.policy, clock, sink or print_line)
        self.ledger = Ledger(self.store)
        self.agents = agents or AgentClient(config.agents, clock)
        lease = Lease(database, clock, seconds=config.worker.lease_seconds)
        high_water = HighWater(config.database.mark_file)
        frozen = _frozen(config, database, high_water, self.store.newest_line())
        fenced = Store(
            database,
            config.policy,
            clock,
            sink or print_line,
            fence=lease.check,
            # A database that was not meant must not become the one that is known.
            high_water=None if frozen else high_water,
        )
        self.provider = provider or make_provider(config)
        self.context = Context(
            config=config,
            store=fenced,
            ledger=Ledger(fenced),
            lease=lease,
            provider=self.provider,
            agents=self.agents,
            telemetry=self.telemetry,
            clock=clock,
            schedulers=make_schedulers(config) if schedulers is None else schedulers,
            orchestrator=orchestrator or make_orchestrator(config),
            handover=handover or make_handover(config, clock),
            frozen=frozen,
        )
        fenced.remember()
        self.worker = Worker(self.context)
        self.traces = trace_export.make(
            config.tracing,
            self.store,
            pause_seconds=config.worker.poll_seconds,
            failed=lambda: self.telemetry.count("sdc_remediation_errors_total", "traces"),
        )
        # Not from a database that was not meant: what it holds may be long over.
        self.notices = (
            None
            if frozen or not config.notify.url
            else notify.Notifier(
                config.notify,
                fenced,
                lease,
                cluster=config.cluster.name,
                pause_seconds=config.worker.poll_seconds,
                failed=lambda: self.telemetry.count("sdc_remediation_errors_total", "notify"),
            )
        )
        self.telemetry.watch(self._snapshot)
        self._provider_lock = threading.Lock()
        self._provider_seen = (-PROVIDER_CACHE_SECONDS, False)

    def start(self) -> None:
        """Start the worker, and the senders of traces and notices where there are some."""
        self.worker.start()
        for sender in (self.traces, self.notices):
            if sender is not None:
                sender.start()

    def close(self) -> None:
        """Stop the worker and close everything."""
        if self.worker.stop():
            with suppress(StoreUnavailable):  # then the lease runs out by itself
                self.context.lease.give_up()
        for sender in (self.traces, self.notices):
            if sender is not None:
                sender.stop()
        self.store.intake.close()
        self.agents.close()
        self.database.close()

    def ready(self) -> dict[str, Any]:
        """Return what `/readyz` shows: each part, whether it works, the database's id, and why it is frozen, if so.

        A frozen service is ready: deliveries are kept, and cases are shown.
        """
        try:
            self.ledger.paused()
            database = True
        except StoreUnavailable:
            database = False
        parts = {"database": database, "worker": self.worker_lives(), "provider": self._provider_answers()}
        return {"ready": all(parts.values()), **parts, "database_id": self.database.id, "frozen": self.context.frozen}

    def worker_lives(self) -> bool:
        """Whether the worker ended a round lately."""
        patience = max(60.0, 10 * self.config.worker.poll_seconds)
        return self.clock() - self.telemetry.last_round < patience

    def _provider_answers(self) -> bool:
        with self._provider_lock:
            seen, answered = self._provider_seen
            if time.monotonic() - seen > PROVIDER_CACHE_SECONDS:
                answered = self.context.inventory() is not None
                self._provider_seen = (time.monotonic(), answered)
            return answered

    def _snapshot(self) -> dict[str, dict[tuple[str, ...], float]]:
        policy = self.config.policy
        settings: dict[str, dict[tuple[str, ...], float]] = {
            "sdc_remediation_mode": {
                (action, mode): float(policy.mode_of(action, "") == mode) for action in ACTIONS for mode in MODES
            },
            "sdc_remediation_settle_seconds": {(): policy.settle_seconds},
            "sdc_remediation_frozen": {(): float(bool(self.context.frozen))},
        }
        try:
            cases, closed = self.store.cases(open_only=True), self.store.outcomes()
            usage = self.ledger.usage(self.config.cluster.name, "", besides="")
            stopped = float(bool(self.context.stop()))
            drills = self.store.drills()
        except StoreUnavailable:
            # Gauges that cannot be computed are absent; readyz says why.
            return settings
        now = self.clock()
        by_state = Counter(case.state for case in cases)
        since: dict[str, float] = {}
        for case in cases:
            since[case.state] = max(since.get(case.state, 0.0), now - case.state_since)
        states = [name for name, state in STATES.items() if state.kind != "terminal"]
        return {
            "sdc_remediation_cases": {(name,): float(by_state[name]) for name in states},
            "sdc_remediation_closed_cases": {(name,): float(count) for name, count in closed.items()},
            "sdc_remediation_state_seconds": {(name,): since.get(name, 0.0) for name in states},
            "sdc_remediation_overdue_cases": {
                (): float(sum(case.deadline is not None and now > case.deadline for case in cases))
            },
            "sdc_remediation_budget_left": {
                ("concurrent",): float(max(0, policy.concurrent - usage.in_flight)),
                ("per_day",): float(max(0, policy.per_day - usage.last_day)),
            },
            "sdc_remediation_stopped": {(): stopped},
            "sdc_remediation_drill_timestamp_seconds": {(drill,): when for drill, when in drills.items()},
            **settings,
        }


def _frozen(config: Config, database: Database, high_water: HighWater, newest_line: int) -> str:
    pinned = config.database.id
    if pinned in ("", database.id):
        return high_water.differs(database.id, newest_line, pinned=bool(pinned))
    what = "new and empty" if database.created else "another one"
    return (
        f"the database {database.id} is {what}, database.id says {pinned}: bring that one back; if its loss is "
        f"understood, set database.id to {database.id} and restart"
    )


def make_provider(config: Config) -> Provider:
    """Build the configured provider; boto3 is imported only here.

    Raises:
        ConfigError: the cluster's name cannot be one of the provider's.
    """
    from sdcwatch_remediation.actions.hyperpod import HyperPod

    cluster, actions = config.cluster, config.actions
    try:
        provider = HyperPod(
            cluster.name,
            region=cluster.region,
            endpoint_url=cluster.endpoint_url or None,
            actor_role_arn=actions.actor_role_arn,
        )
    except ValueError as error:
        raise ConfigError(f"cluster.name: {error}") from error
    return SlurmReplace(provider, _slurm(config)) if actions.replace == "slurm" else provider


def make_schedulers(config: Config) -> tuple[Scheduler, ...]:
    """Build whoever the configuration wants told to keep work off a quarantined node.

    Raises:
        ConfigError: the extra `eks` is missing, or the Kubernetes API's configuration cannot be used.
    """
    isolate = config.actions.isolate
    return (_slurm(config),) if isolate == "slurm" else (_eks(config),) if isolate == "eks" else ()


def make_orchestrator(config: Config) -> Orchestrator | None:
    """Return who can say what else runs on a node, and who took it out of service; None where nobody is configured."""
    isolate = config.actions.isolate
    return _slurm(config) if isolate == "slurm" else _eks(config) if isolate == "eks" else None


def make_handover(config: Config, clock: Callable[[], float]) -> Handover | None:
    """Return how nodes are handed over; None where no group's are.

    Raises:
        ConfigError: the extra `eks` is missing, or the Kubernetes API's configuration cannot be used.
    """
    return Handover(_eks_client(config), clock) if config.policy.handover_groups else None


def _eks(config: Config) -> Eks:
    return Eks(_eks_client(config), job_label=config.actions.eks_job_label)


def _eks_client(config: Config) -> EksClient:
    actions = config.actions
    return EksClient.connect(actions.eks_kubeconfig_file, timeout_seconds=actions.eks_timeout_seconds)


def _slurm(config: Config) -> Slurm:
    actions = config.actions
    return Slurm(bin_dir=actions.slurm_bin_dir, stop=actions.slurm_stop, timeout_seconds=actions.slurm_timeout_seconds)


def print_line(line: AuditLine) -> None:
    """Write one audit line to stdout as JSON."""
    sys.stdout.write(json.dumps(line, sort_keys=True) + "\n")
    sys.stdout.flush()
