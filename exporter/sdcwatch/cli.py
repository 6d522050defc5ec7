"""The `sdcwatch` command: one table of subcommands, each living in the module that does the work.

A command module offers `add_arguments(parser)` and `main(arguments) -> int` (an exit status of docs/contracts.md).
Modules are imported only when their command is asked for, so that `sdcwatch agent` never imports torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from sdcwatch._version import __version__
from sdcwatch.errors import SdcwatchError

#: name -> (module, one line of help)
COMMANDS = {
    "agent": ("sdcwatch.agent.command", "serve this node's metrics and events"),
    "checkpoints": ("sdcwatch.checkpoints.command", "list, verify and choose checkpoints by their manifests"),
    "discover": ("sdcwatch.discover", "print this cluster's agents as Prometheus targets"),
    "doctor": ("sdcwatch.doctor.command", "say what of this node's path to a replaced node is wired, or try it"),
    "evidence": (
        "sdcwatch.evidence.command",
        "weigh the evidence of a replay verdict, or run it again here",
    ),
    "latch": ("sdcwatch.latch.command", "show or release the latch of a halted job"),
    "preflight": ("sdcwatch.preflight.command", "known-answer test of this machine's devices"),
    "report": ("sdcwatch.run_report.command", "draw what happened in a run as one HTML file"),
    "run": ("sdcwatch.launch.run", "stay the parent of a launcher; wait out a halt and start it afresh"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; wrong use is 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="sdcwatch", description="Silent data corruption in PyTorch training.")
    parser.add_argument("--version", action="version", version=f"sdcwatch {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((w for w in words if w in COMMANDS), None)
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if name == asked:
            importlib.import_module(module).add_arguments(sub)
    arguments = parser.parse_args(words)
    try:
        return int(importlib.import_module(COMMANDS[arguments.command][0]).main(arguments))
    except SdcwatchError as error:
        print(f"sdcwatch {arguments.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
