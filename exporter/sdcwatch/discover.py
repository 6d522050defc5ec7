"""`sdcwatch discover slurm`: the cluster's agents as Prometheus file_sd targets, from what Slurm says of its nodes.

It asks Slurm with an argument vector, believes no name that is not of a strict form, and never writes an empty list:
a controller that is away must not blind Prometheus. Standard library only. Flow: Slurm ~> **discover** ~> Prometheus.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdcwatch.errors import ConfigurationError, SdcwatchError

SCONTROL = ("scontrol", "show", "nodes", "--json")
SINFO = ("sinfo", "--Node", "--noheader", "--all", "--format=%N|%o|%T|%P")
_SECONDS = 30.0
_BYTES = 256 << 20
_NODE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?", re.ASCII)
_ADDRESS = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f:]{2,39}", re.ASCII)
#: Nodes that do not run now. Drained and down nodes stay: a suspect's agent is asked for its evidence.
_AWAY = frozenset({"FUTURE", "POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN", "UNKNOWN"})
#: What sinfo and old releases append to a state word to say that a node is powered down or going there.
_AWAY_MARKS = ("~", "%")


class DiscoveryError(SdcwatchError):
    """Slurm gave no nodes that can be used; the message says what to do."""


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """One node as Slurm describes it; `states` in capitals."""

    name: str
    address: str
    states: tuple[str, ...]
    partitions: tuple[str, ...]

    @property
    def is_away(self) -> bool:
        return bool(_AWAY & set(self.states))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sdcwatch discover`."""
    sources = parser.add_subparsers(dest="source", metavar="SOURCE", required=True)
    slurm = sources.add_parser("slurm", help="ask scontrol, or sinfo where scontrol writes no JSON")
    slurm.add_argument("--port", type=int, action="append", required=True, help="port of the agents; one for each user")
    slurm.add_argument("--partition", action="append", default=[], metavar="NAME", help="only nodes of this partition")
    slurm.add_argument("--output", type=Path, metavar="FILE", help="replace this file whole instead of printing")
    slurm.add_argument(
        "--input", type=Path, metavar="FILE", help="read Slurm's answer from this file instead of asking"
    )


def main(arguments: argparse.Namespace) -> int:
    """0: all nodes are listed; 1: none, or some with a name that is refused (the others are listed).

    Raises:
        ConfigurationError: wrong use.
    """
    if any(not 1 <= port <= 65535 for port in arguments.port):
        raise ConfigurationError("--port must be 1 to 65535")
    try:
        text = arguments.input.read_text(encoding="utf-8") if arguments.input else ask()
        found = parse(text)
        kept, refused = choose(found, arguments.partition)
        if not kept:
            raise DiscoveryError(f"none of Slurm's {len(found)} nodes can be listed; the targets stay as they are")
        write(json.dumps(targets(kept, arguments.port), indent=1) + "\n", arguments.output)
    except (DiscoveryError, OSError, UnicodeDecodeError) as error:
        print(f"sdcwatch discover: {error}", file=sys.stderr)
        return 1
    for node in refused:
        print(f"sdcwatch discover: node {node.name!r} at {node.address!r} is no name to scrape", file=sys.stderr)
    return 1 if refused else 0


def ask() -> str:
    """Slurm's answer: scontrol's JSON, or sinfo's table where this Slurm was built without JSON.

    Raises:
        DiscoveryError: neither program answers.
    """
    problems = []
    for command in (SCONTROL, SINFO):
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=_SECONDS, check=False, stdin=subprocess.DEVNULL,
                env={**os.environ, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            problems.append(f"{command[0]}: {error}")
            continue
        text = done.stdout[:_BYTES].decode("utf-8", errors="replace")
        if done.returncode == 0 and (command is SINFO or text.lstrip().startswith("{")):
            return text
        problems.append(f"{command[0]}: status {done.returncode}: {done.stderr[:200].decode(errors='replace').strip()}")
    raise DiscoveryError(f"Slurm does not answer; run this where scontrol works. {'; '.join(problems)}")


def parse(text: str) -> list[SlurmNode]:
    """Nodes in scontrol's JSON or sinfo's table, each once, by name.

    Raises:
        DiscoveryError: neither.
    """
    nodes = _from_json(text) if text.lstrip().startswith("{") else _from_table(text)
    merged: dict[str, SlurmNode] = {}
    for node in nodes:
        known = merged.get(node.name)
        partitions = (*known.partitions, *node.partitions) if known else node.partitions
        merged[node.name] = SlurmNode(node.name, node.address, node.states, tuple(dict.fromkeys(partitions)))
    return [merged[name] for name in sorted(merged)]


def choose(nodes: Sequence[SlurmNode], partitions: Sequence[str]) -> tuple[list[SlurmNode], list[SlurmNode]]:
    """(nodes to list, nodes whose name or address is refused); nodes that are powered down are in neither."""
    here = [n for n in nodes if not n.is_away and (not partitions or set(partitions) & set(n.partitions))]
    fine = [n for n in here if _NODE.fullmatch(n.name) and _ADDRESS.fullmatch(n.address)]
    return fine, [n for n in here if n not in fine]


def targets(nodes: Iterable[SlurmNode], ports: Sequence[int]) -> list[dict[str, Any]]:
    """file_sd groups, one a node. The labels are for relabelling only: Prometheus drops `__meta_*`."""
    return [
        {
            "targets": [f"{_host(node.address)}:{port}" for port in ports],
            "labels": {
                "__meta_slurm_node": node.name,
                "__meta_slurm_state": ",".join(node.states),
                "__meta_slurm_partitions": ",".join(node.partitions),
            },
        }
        for node in nodes
    ]


def write(text: str, output: Path | None) -> None:
    """Prints, or replaces the file whole, so that Prometheus never reads half a list."""
    if output is None:
        print(text, end="")
        return
    beside = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.chmod(0o644)  # Prometheus runs as another user
        beside.replace(output)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _from_json(text: str) -> list[SlurmNode]:
    try:
        record = json.loads(text)
        found = record["nodes"]
        return [
            SlurmNode(
                str(node["name"]),
                str(node.get("address") or node.get("hostname") or node["name"]),
                tuple(_states(node)),
                tuple(str(partition) for partition in node.get("partitions") or []),
            )
            for node in found
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DiscoveryError(f"scontrol's JSON is not understood ({error!r}); is its Slurm 21.08 or newer?") from error


def _states(node: dict[str, Any]) -> list[str]:
    # A text with flags beside it before 23.02, a list of words since then.
    state = node.get("state") or []
    words = [state] if isinstance(state, str) else list(state)
    return [str(word).upper() for word in (*words, *(node.get("state_flags") or []))]


def _from_table(text: str) -> list[SlurmNode]:
    nodes = []
    for line in text.splitlines():
        if not line.strip():
            continue
        fields = line.strip().split("|")
        if len(fields) != 4:
            raise DiscoveryError(f"sinfo's line is not understood: {line[:80]!r}")
        name, address, state, partition = (field.strip() for field in fields)
        states = [state.rstrip("*~#!%$@^+-").upper()]
        if state.endswith(_AWAY_MARKS):
            states.append("POWERED_DOWN")
        nodes.append(SlurmNode(name, address, tuple(states), (partition.rstrip("*"),)))
    return nodes
