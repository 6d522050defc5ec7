"""`sdcwatch agent`: serves one node's spool until it is told to stop.

One process a node and user (the lock in the spool decides), no torch, no outgoing connection but OTLP's where that is
asked for. It outlives ranks, and all that it must remember lies in the spool, so it can be killed at any time.
Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import math
import os
import select
import signal
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from sdcwatch.agent import node as nodes
from sdcwatch.agent import otlp_options
from sdcwatch.agent.collector import Collector
from sdcwatch.agent.expiry import Expiry
from sdcwatch.agent.handler import AgentHandler, Routes
from sdcwatch.agent.rank_file import RankFileReader
from sdcwatch.agent.server import AgentServer, tls_context
from sdcwatch.agent.state import AgentLock, StateFile
from sdcwatch.agent.tally import Tally
from sdcwatch.agent.tokens import Credential, Password, Token
from sdcwatch.errors import ConfigurationError, SpoolError
from sdcwatch.settings import Settings
from sdcwatch.spool.folders import prepare_user_root
from sdcwatch.spool.reader import iter_ranks

_TEXTFILE_SECONDS = 5.0
_TICK_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sdcwatch agent`; those that are settings too fall back to `SDCWATCH_*`."""
    add = parser.add_argument
    add("--spool-dir", help="root of this node's spool (SDCWATCH_SPOOL_DIR, /tmp/sdcwatch)")
    add("--host", help="address to listen on (SDCWATCH_AGENT_HOST, 127.0.0.1)")
    add("--port", type=int, help="port to listen on, 0 for any free one (SDCWATCH_AGENT_PORT, 9478)")
    add("--events-token-file", help="opens GET /events to bearers of the token in this file")
    add("--latch-token-file", help="opens POST /latch/release to bearers of the token in this file")
    add("--metrics-token-file", help="asks for the token in this file on GET /metrics")
    add("--metrics-user", metavar="NAME", help="admits this user on GET /metrics too (HTTP basic)")
    add("--metrics-password-file", metavar="FILE", help="password of --metrics-user")
    add("--tls-cert", help="certificate chain (PEM); with --tls-key turns TLS on")
    add("--tls-key", help="private key (PEM)")
    add("--node", help="name of this node (SDCWATCH_NODE, Slurm's, the host name)")
    add("--instance", help="instance id of this node (SDCWATCH_INSTANCE)")
    add("--cluster", help="HyperPod cluster name (SDCWATCH_CLUSTER)")
    add("--keep", type=float, default=3600.0, metavar="SECONDS", help="how long series of dead ranks stay (3600)")
    add("--linger", type=float, metavar="SECONDS", help="exit this long after the last rank ended (default: never)")
    add("--textfile", type=Path, metavar="PATH", help="write the metrics here too, for node_exporter")
    otlp_options.add_arguments(parser)
    add("--started-by-rank", action="store_true", help="this agent belongs to the job that started it")


def main(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT, or until `--linger` ran out.

    Returns:
        0 after an end that was asked for; 1 when this agent cannot serve, with a sentence on stderr.

    Raises:
        ConfigurationError: wrong use.
    """
    _check_options(arguments)
    any_port = arguments.port == 0
    settings = Settings.load(
        {
            "spool_dir": arguments.spool_dir,
            "agent_host": arguments.host,
            "agent_port": None if any_port else arguments.port,
            "events_token_file": arguments.events_token_file,
            "latch_token_file": arguments.latch_token_file,
            "node": arguments.node,
            "instance": arguments.instance,
            "cluster": arguments.cluster,
        }
    )
    events, latch, metrics, context = _secrets(arguments, settings)
    otlp = otlp_options.take(arguments)
    address = (settings.agent_host, 0 if any_port else settings.agent_port)
    node = nodes.take(settings)
    tally = Tally()
    try:
        with contextlib.ExitStack() as opened:
            asked = opened.enter_context(_stop_signals())
            root = prepare_user_root(settings.spool_dir)
            opened.callback(AgentLock(root).release)
            server = _bind(address, tally, context)
            opened.callback(server.server_close)
            nodes.write(root, node)
            if arguments.started_by_rank:  # a later job on this machine may be told another identity
                opened.callback((root / nodes.NODE_FILE).unlink, missing_ok=True)
            port = server.server_address[1]
            state = StateFile(
                root, host=address[0], port=port, outlives_ranks=not (arguments.started_by_rank and dies_with_job())
            )
            collector = Collector(root, node, state, tally)
            server.routes = Routes(root, node, collector, state, tally, metrics, events, latch)
            scheme = "http" if context is None else "https"
            where = f"{scheme}://{address[0]}:{port}/metrics"
            if otlp is not None:
                opened.enter_context(_pushing(otlp, root, node, collector))
            print(f"sdcwatch agent: {where} serves node {node.node}, spool {root}", flush=True)
            _serve(server, _Housekeeping(arguments, root, node, collector, tally), asked)
    except SpoolError as error:
        print(f"sdcwatch agent: {error}", file=sys.stderr)
        return 1
    return 0


def _check_options(arguments: argparse.Namespace) -> None:
    for name in ("keep", "linger"):
        seconds: float | None = getattr(arguments, name)
        if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
            raise ConfigurationError(f"--{name} {seconds:g} must be a number of seconds, 0 or more")
    path: Path | None = arguments.textfile
    if path is None:
        return
    if path.is_dir() or not path.name:
        raise ConfigurationError(f"--textfile {path} is a folder; name a file in it, as {path / 'sdcwatch.prom'}")
    if not path.parent.is_dir():
        raise ConfigurationError(f"--textfile {path}: there is no folder {path.parent}; create it, or name another")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"--textfile {path}: this user may not write into {path.parent}; let it, or name another"
        )


def dies_with_job() -> bool:
    """True where what a rank starts is ended together with its job, however detached it is."""
    return any(name in os.environ for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"))


def _secrets(
    arguments: argparse.Namespace, settings: Settings
) -> tuple[Token | None, Token | None, tuple[Credential, ...], ssl.SSLContext | None]:
    if bool(arguments.tls_cert) != bool(arguments.tls_key):
        raise ConfigurationError("--tls-cert and --tls-key belong together")
    if bool(arguments.metrics_user) != bool(arguments.metrics_password_file):
        raise ConfigurationError("--metrics-user and --metrics-password-file belong together")
    asks = arguments.metrics_token_file or arguments.metrics_user
    if not _is_loopback(settings.agent_host) and not (asks and arguments.tls_cert):
        raise ConfigurationError(
            f"--host {settings.agent_host} can be reached from other machines: give --metrics-token-file (or "
            "--metrics-user with --metrics-password-file) and --tls-cert with --tls-key too, or stay on 127.0.0.1"
        )
    events, latch = (
        Token(path, purpose) if path else None
        for path, purpose in ((settings.events_token_file, "events"), (settings.latch_token_file, "latch"))
    )
    metrics: list[Credential] = []
    if arguments.metrics_token_file:
        metrics.append(Token(arguments.metrics_token_file, "metrics"))
    if arguments.metrics_user:
        metrics.append(Password(arguments.metrics_user, arguments.metrics_password_file))
    context = tls_context(arguments.tls_cert, arguments.tls_key) if arguments.tls_cert else None
    return events, latch, tuple(metrics), context


def _pushing(
    options: otlp_options.OtlpOptions, root: Path, node: nodes.Node, collector: Collector
) -> contextlib.AbstractContextManager[None]:
    from sdcwatch.agent import otlp  # a rank imports this module too, to start an agent, and needs none of it

    return otlp.pushing(options, root, node, collector)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bind(address: tuple[str, int], tally: Tally, context: ssl.SSLContext | None) -> AgentServer:
    try:
        return AgentServer(address, AgentHandler, None, tally, context)
    except (OSError, OverflowError) as error:
        what = getattr(error, "strerror", None) or error
        raise SpoolError(
            f"cannot listen on {address[0]}:{address[1]}: {what}; choose another with --port or SDCWATCH_AGENT_PORT"
        ) from error


class _Housekeeping:
    """What happens between scrapes: expiry, the text file, and whether it is time to go."""

    def __init__(
        self, arguments: argparse.Namespace, root: Path, node: nodes.Node, collector: Collector, tally: Tally
    ) -> None:
        self._root = root
        self._collector = collector
        self._tally = tally
        self._expiry = Expiry(keep=arguments.keep)
        # A reader of its own: the collector's is busy with scrapes, and must count each dropped series once.
        self._reader = RankFileReader(node, Tally())
        self._expiry_every = min(30.0, max(arguments.keep / 4, _TICK_SECONDS))
        self._linger: float | None = arguments.linger
        self._textfile: Path | None = arguments.textfile
        self._expired = self._written = 0.0
        self._alive = time.monotonic()

    def is_over(self) -> bool:
        """Does what is due; True when the last rank ended `--linger` seconds ago."""
        now = time.monotonic()
        if now - self._expired >= self._expiry_every:
            self._expired = now
            try:
                self._tally.expire(self._expiry.run(self._root, self._reader, time.time()))
            except SpoolError as error:
                print(f"sdcwatch agent: nothing expires: {error}", file=sys.stderr, flush=True)
            self._reader.forget_all_but(set())
        if self._textfile is not None and now - self._written >= _TEXTFILE_SECONDS:
            self._written = now
            self._write_textfile(self._textfile)
        if self._linger is None:
            return False
        if any(files.alive for files in iter_ranks(self._root)):
            self._alive = now
        return now - self._alive >= self._linger

    def _write_textfile(self, path: Path) -> None:
        beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            beside.write_text(self._collector.collect().text, encoding="utf-8", errors="replace")
            beside.chmod(0o644)  # node_exporter runs as another user
            beside.replace(path)
        except OSError as error:
            print(f"sdcwatch agent: cannot write {path}: {error}", file=sys.stderr, flush=True)


def _serve(server: AgentServer, housekeeping: _Housekeeping, asked: int) -> None:
    thread = threading.Thread(target=server.serve_forever, name="accept", daemon=True)
    thread.start()
    try:
        while not housekeeping.is_over():
            if select.select([asked], [], [], _TICK_SECONDS)[0]:
                break
    finally:
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def _stop_signals() -> Iterator[int]:
    """A descriptor that becomes readable on SIGTERM or SIGINT; unlike an Event it takes no lock in the handler."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)

    def handle(number: int, frame: object) -> None:
        with contextlib.suppress(OSError):
            os.write(writable, b"x")

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield readable
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
        os.close(readable)
        os.close(writable)
