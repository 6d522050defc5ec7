"""`sdcwatch-remediation simulate`: the HyperPod simulator as a process of its own.

What it does: reads a configuration or a few numbers, serves until SIGTERM or SIGINT, and says where it listens.
What it never does: listen beyond loopback unless told so in as many words, since whoever reaches it controls it.
Its place: one subcommand of the service's command line; the demo and compose.yaml start it.
"""

from __future__ import annotations

import argparse
import ipaddress
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from sdcwatch_remediation.simulator.config import ORCHESTRATORS, SimulatorConfig, SimulatorConfigError
from sdcwatch_remediation.simulator.simulator import Simulator

_DURATIONS = ("shutdown_seconds", "provision_seconds", "boot_seconds", "deep_check_seconds", "clock_factor")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `simulate` to a parser."""
    parser.add_argument("--config", type=Path, help="JSON or TOML file that describes the cluster (docs/simulator.md)")
    parser.add_argument("--cluster", help="name of the cluster, where there is no --config")
    parser.add_argument("--nodes", type=int, help="instances in the group `workers`, at 127.0.10.1 and up (default 4)")
    parser.add_argument("--spares", type=int, help="replacements that there is capacity for, at 127.0.200.1 and up")
    parser.add_argument("--orchestrator", choices=ORCHESTRATORS, help="default slurm")
    parser.add_argument("--region", help="default us-west-2")
    for name in _DURATIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, help="overrides the configuration")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one, printed)")
    parser.add_argument(
        "--beyond-loopback",
        action="store_true",
        help="allow a --host that is not loopback, as a container network needs; anybody there controls the simulator",
    )


def main(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT.

    Returns:
        0 after a clean end, 2 when an argument, the configuration or the port is wrong.
    """
    try:
        simulator = Simulator(_config(args), host=_host(args), port=args.port)
        simulator.start()
    except (SimulatorConfigError, OverflowError) as error:
        print(f"sdcwatch-remediation simulate: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{args.host}:{args.port}"
        print(f"sdcwatch-remediation simulate: cannot listen on {where}: {error}; choose --port", file=sys.stderr)
        return 2
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    state = simulator.state()
    about = f"cluster={state['cluster']} orchestrator={state['orchestrator']}"
    print(f"{simulator.url} {about} nodes={len(state['nodes'])} spares={len(state['spares'])}", flush=True)
    print("simulator ready", flush=True)
    ended.wait()
    simulator.stop()
    print("simulator stopped", flush=True)
    return 0


def _config(args: argparse.Namespace) -> SimulatorConfig:
    names = ("cluster", "orchestrator", "region", *_DURATIONS)
    given: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.config is not None:
        if args.nodes is not None or args.spares is not None or args.cluster is not None:
            raise SimulatorConfigError("--config says the cluster, its nodes and spares; leave those arguments out")
        return SimulatorConfig.from_file(args.config, **given)
    if args.cluster is None:
        raise SimulatorConfigError("give --config FILE, or --cluster NAME with --nodes and --spares")
    nodes = 4 if args.nodes is None else args.nodes
    spares = 1 if args.spares is None else args.spares
    if nodes < 1 or spares < 0:
        raise SimulatorConfigError("--nodes must be 1 or more and --spares 0 or more")
    return SimulatorConfig.of_size(given.pop("cluster"), nodes=nodes, spares=spares, **given)


def _host(args: argparse.Namespace) -> str:
    try:
        address = ipaddress.ip_address(args.host)
    except ValueError as error:
        raise SimulatorConfigError(f"--host {args.host!r} is not an IP address") from error
    if not address.is_loopback and not args.beyond_loopback:
        raise SimulatorConfigError(f"--host {args.host} is not loopback; add --beyond-loopback if that is meant")
    return str(address)
