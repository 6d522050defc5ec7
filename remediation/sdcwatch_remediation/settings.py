"""Every setting of the service: one frozen tree, with help text, unit and default beside each field.

What it does: declares the sections of the TOML file.
What it never does: read a file or the environment (`config` reads the file; nothing reads the environment).
Its place: `config` fills it, everything else receives it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MODES = ("observe", "recommend", "approve", "auto")
"""What the service may do by itself, weakest first."""

GIVE_BACK = ("rejected", "cancelled", "expired")
"""Ends of a case after which a node can be given back to its scheduler."""

ACTIONS = ("quarantine", "replace")
"""Outside actions that have a mode of their own; a node is quarantined before it is replaced."""


def _setting(default: Any, help_text: str, *, choices: tuple[str, ...] = (), minimum: float | None = None) -> Any:
    return field(default=default, metadata={"help": help_text, "choices": choices, "minimum": minimum})


@dataclass(frozen=True, slots=True)
class Server:
    """Where the service listens and who may ask what."""

    host: str = _setting("127.0.0.1", "Address to listen on. Beyond loopback, tls_* or behind_proxy is required.")
    port: int = _setting(9479, "TCP port; 0 lets the system choose.", minimum=0)
    tls_cert_file: str = _setting("", "PEM certificate chain; with tls_key_file it turns TLS on.")
    tls_key_file: str = _setting("", "PEM private key.")
    behind_proxy: bool = _setting(False, "True: something in front ends TLS, so a wider address without it is meant.")
    client_ca_file: str = _setting("", "PEM authorities of clients' certificates (mTLS); with client_names.")
    client_names: tuple[str, ...] = _setting(
        (), "Certificates that may deliver alerts, and nothing else: 'DNS:name', 'URI:spiffe://...' or 'CN:name'."
    )
    alerts_token_file: str = _setting("", "Tokens Alertmanager uses, at most two at once. Required without mTLS.")
    cases_token_file: str = _setting("", "Tokens that may read cases. Empty: nobody reads cases with one.")
    approve_token_file: str = _setting("", "Tokens that may approve and reject. Empty: nobody can.")
    admin_token_file: str = _setting("", "Tokens that may pause and resume. Empty: nobody can.")
    body_limit_bytes: int = _setting(1_048_576, "Largest accepted request body, in bytes.", minimum=1024)


@dataclass(frozen=True, slots=True)
class Database:
    """Where the state lives."""

    url: str = _setting("sqlite:///remediation.sqlite3", "SQLAlchemy URL; a relative SQLite path starts at this file.")
    url_file: str = _setting("", "File whose one line is the URL, with its password, instead of url.")
    busy_timeout_seconds: float = _setting(5.0, "How long a write waits for a locked SQLite file.", minimum=0)
    id: str = _setting("", "The database's id, as `migrate` and `readyz` tell it. Another one is frozen. Empty: any.")
    mark_file: str = _setting("", "Keeps how far the database had come. Empty: beside a SQLite file, as `.mark`.")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The one cluster that this service looks after."""

    name: str = _setting("", "Cluster name, as the training job reports it (SDCWATCH_CLUSTER). Required.")
    provider: str = _setting("hyperpod", "Who owns the instances.", choices=("hyperpod",))
    region: str = _setting("us-east-1", "AWS region.")
    own_node: str = _setting("", "Node that the service runs on (name, address or id), beside its host name.")
    endpoint_url: str = _setting("", "Another endpoint for the provider's API: the simulator's. Empty: AWS itself.")


@dataclass(frozen=True, slots=True)
class Agents:
    """How the node agents are asked for the proof."""

    port: int = _setting(9478, "Port of every node agent.", minimum=1)
    scheme: str = _setting("http", "http or https.", choices=("http", "https"))
    ca_file: str = _setting("", "PEM authorities that may vouch for https agents. Empty: the system's.")
    server_name: str = _setting("", "Name in the agents' certificates (sdcwatch-agent). Empty: each node's address.")
    events_token_file: str = _setting("", "First line: bearer token for GET /events. Required.")
    latch_token_file: str = _setting("", "First line: bearer token for POST /latch/release. Required unless observe.")
    timeout_seconds: float = _setting(5.0, "Longest wait for one answer of one agent.", minimum=0.05)
    parallel: int = _setting(16, "How many agents are asked at the same time.", minimum=1)
    answer_limit_bytes: int = _setting(16_777_216, "Largest answer that is read, in bytes.", minimum=1024)


@dataclass(frozen=True, slots=True)
class GroupModes:
    """Modes of one instance group; empty means the default above it."""

    quarantine: str = _setting("", "Mode of quarantine in this group.", choices=("", *MODES))
    replace: str = _setting("", "Mode of replace in this group.", choices=("", *MODES))


@dataclass(frozen=True, slots=True)
class Policy:
    """What may be done, when, and how often."""

    mode: str = _setting("observe", "observe, recommend, approve or auto, for every action.", choices=MODES)
    quarantine: str = _setting("", "Mode of quarantine. Empty: `mode`.", choices=("", *MODES))
    replace: str = _setting("", "Mode of replace; never above quarantine's. Empty: `mode`.", choices=("", *MODES))
    confirm: str = _setting(
        "persistent", "persistent: a repeated or lasting fault. first: one verdict.", choices=("persistent", "first")
    )
    groups: tuple[str, ...] = _setting((), "Instance groups that may be acted on. Empty: none.")
    forbidden_groups: tuple[str, ...] = _setting(
        ("controller", "controller-machine", "login", "login-group"), "Groups never acted on, whatever else is set."
    )
    handover_groups: tuple[str, ...] = _setting(
        (), "Groups, of those above, whose nodes are handed over to their owner instead of being replaced."
    )
    settle_seconds: float = _setting(90.0, "Wait after the newest case of the cluster, in seconds.", minimum=0)
    max_settle_seconds: float = _setting(600.0, "Longest wait in all, in seconds.", minimum=0)
    concurrent: int = _setting(1, "Replacements under way at once.", minimum=0)
    per_day: int = _setting(2, "Replacements in 24 hours.", minimum=0)
    group_share: float = _setting(0.1, "Share of a group under replacement at once; one is always allowed.", minimum=0)
    evidence_max_age_seconds: float = _setting(3600.0, "Older events prove nothing any more.", minimum=1)
    test_wait_seconds: float = _setting(
        180.0, "How long after its event a halted suspect's known-answer test is waited for; 0: not at all.", minimum=0
    )
    suspected_days: float = _setting(30.0, "How long a first transient fault is remembered, in days.", minimum=0)
    clock_doubt_seconds: float = _setting(120.0, "An instance launched later than this before its fault is not it.")
    approval_seconds: float = _setting(14_400.0, "How long a case waits for a person.", minimum=1)
    replacement_seconds: float = _setting(14_400.0, "How long a replacement may take (deep checks: hours).", minimum=1)
    handover_seconds: float = _setting(
        14_400.0, "How long the owner of a node that was handed over may take; then a person is asked.", minimum=1
    )
    cooldown_seconds: float = _setting(600.0, "Pause after a proven replacement.", minimum=0)
    min_running: int = _setting(1, "Others of the group that must run, or a person is asked first.", minimum=0)
    shared_nodes: bool = _setting(False, "True: nodes may run other people's work; a person is asked unless none does.")
    windows: tuple[str, ...] = _setting(
        (), "When a node may be replaced unasked, such as 'Mon-Fri 08:00-18:00' (UTC). Empty: always."
    )
    breaker_instances: int = _setting(4, "So many instances with proven events freeze every new case.", minimum=2)
    breaker_seconds: float = _setting(86_400.0, "For how long such instances are counted.", minimum=1)
    give_back: tuple[str, ...] = _setting(
        ("rejected", "cancelled"),
        "After which ends a node's scheduler gets it back: rejected, cancelled, expired (nobody answered).",
    )
    attempts: int = _setting(3, "Attempts after definite, retryable refusals.", minimum=1)
    backoff_seconds: float = _setting(30.0, "Wait before the second attempt; doubled for each one after.", minimum=0)
    group_modes: dict[str, GroupModes] = field(
        default_factory=dict, metadata={"help": "[policy.group_modes.<group>] quarantine, replace: modes of one group."}
    )

    def mode_of(self, action: str, group: str) -> str:
        """Return the mode of an action (`quarantine`, `replace`) for one instance group."""
        special = self.group_modes.get(group)
        chosen = getattr(special, action) if special else ""
        return chosen or getattr(self, action) or self.mode


@dataclass(frozen=True, slots=True)
class Actions:
    """Which roads an action takes besides the suspect's own agent; whether it may is `policy`'s."""

    isolate: str = _setting(
        "", "Who is told to keep work off a quarantined node. Empty: its agent alone.", choices=("", "slurm", "eks")
    )
    replace: str = _setting(
        "api", "api: BatchReplaceClusterNodes. slurm: state=fail, Action:Replace.", choices=("api", "slurm")
    )
    slurm_bin_dir: str = _setting("", "Folder of scontrol, squeue and scancel. Empty: looked up on PATH.")
    slurm_stop: str = _setting("requeue", "What is done to the training job.", choices=("requeue", "cancel"))
    slurm_timeout_seconds: float = _setting(30.0, "Longest wait for one command of Slurm.", minimum=0.1)
    eks_kubeconfig_file: str = _setting(
        "", "Kubeconfig, to isolate by 'eks' or hand over. Empty: the pod's service account."
    )
    eks_job_label: str = _setting("", "Pod label that holds the training job's name, besides SDCWATCH_JOB.")
    eks_timeout_seconds: float = _setting(30.0, "Longest wait for one answer of the Kubernetes API.", minimum=0.1)
    evidence_dir: str = _setting("", "Folder for a bundle of each acted-on case. Empty: evidence in the database only.")
    actor_role_arn: str = _setting("", "IAM role taken for one replacement at a time. Empty: the service's own.")


@dataclass(frozen=True, slots=True)
class KillSwitch:
    """A stop outside the process."""

    file: str = _setting("", "While this file exists, or cannot be looked at, nothing is done. Empty: no such file.")


@dataclass(frozen=True, slots=True)
class Worker:
    """How the cases are moved."""

    poll_seconds: float = _setting(5.0, "Pause between two rounds, in seconds.", minimum=0.01)
    lease_seconds: float = _setting(
        60.0, "How long a worker that died keeps others of the same PostgreSQL database waiting.", minimum=1
    )


@dataclass(frozen=True, slots=True)
class Tracing:
    """Where the trace of each case that has ended goes; needs the extra `otlp`."""

    endpoint: str = _setting("", "OTLP/HTTP base URL, such as http://127.0.0.1:4318. Empty: no traces.")
    headers_file: str = _setting("", "Headers for the collector, one `Name: value` a line; read at each request.")
    ca_file: str = _setting("", "PEM authorities that may vouch for an https collector. Empty: the system's.")
    timeout_seconds: float = _setting(10.0, "Longest wait for one answer.", minimum=0.05)


@dataclass(frozen=True, slots=True)
class Notify:
    """Who is told when a case moves."""

    url: str = _setting("", "Webhook that gets each notice as a JSON POST. Empty: nothing is ever sent.")
    secret_file: str = _setting("", "First line: key of the HMAC-SHA256 in X-Sdcwatch-Signature. Required with url.")
    states: tuple[str, ...] = _setting(
        ("awaiting_approval", "recommended", "frozen", "not_given_back", "failed", "expired"),
        "A notice is sent when a case comes into one of these.",
    )
    ca_file: str = _setting("", "PEM authorities that may vouch for an https receiver. Empty: the system's.")
    timeout_seconds: float = _setting(5.0, "Longest wait for one answer.", minimum=0.05)
    attempts: int = _setting(6, "Attempts for one notice, with waits of 5, 10, 20, ... seconds.", minimum=1)
    max_age_seconds: float = _setting(3600.0, "A notice that is older than this is not sent any more.", minimum=1)


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration; section names are field names."""

    server: Server = field(default_factory=Server)
    database: Database = field(default_factory=Database)
    cluster: Cluster = field(default_factory=Cluster)
    agents: Agents = field(default_factory=Agents)
    policy: Policy = field(default_factory=Policy)
    actions: Actions = field(default_factory=Actions)
    kill_switch: KillSwitch = field(default_factory=KillSwitch)
    worker: Worker = field(default_factory=Worker)
    tracing: Tracing = field(default_factory=Tracing)
    notify: Notify = field(default_factory=Notify)
