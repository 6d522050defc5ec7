"""Draws the dashboards without a Grafana: runs each query against a Prometheus over a time range, one PNG a dashboard.

    python dashboards/preview.py http://127.0.0.1:9090 --start 1764630000 --end 1764630600 --out dashboards/out
    python dashboards/preview.py --demo

With `--demo` it starts a Prometheus of its own, on a copy of what the demo's Prometheus kept (demo/out/prometheus), and
draws the demo's time range. Prints every panel without data: its reason where it may be empty, else it is a fault, and
with --strict that is exit status 1.
What it never does: write to the Prometheus it is given. Flow: *.json -> queries -> ask -> draw, by **preview**.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ask import PreviewError, Source, recorded
from draw import draw
from queries import load

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
DEMO = ROOT / "demo" / "out" / "prometheus"
START_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Drawn:
    """One picture, the titles of panels without data that should have some, and title -> reason of the others."""

    picture: Path
    missing: Sequence[str]
    excused: Mapping[str, str]


def preview(path: Path, source: Source, out: Path, given: Mapping[str, str]) -> Drawn:
    """Draws one dashboard.

    Raises:
        PreviewError: Prometheus does not answer, or a variable has no value.
    """
    document = load(path)
    variables = source.variables(document, given)
    answers = source.answers(document, variables)
    out.mkdir(parents=True, exist_ok=True)
    picture = out / f"{path.stem}.png"
    draw(document, answers, source.marks(document, variables), source, picture)
    empty = {title: found[0].target.empty for title, found in answers.items() if not any(a.lines for a in found)}
    missing = [title for title, reason in empty.items() if not reason]
    return Drawn(picture, missing, {title: reason for title, reason in empty.items() if reason})


def find_program(name: str) -> str:
    """A program in .tools/bin or on PATH.

    Raises:
        PreviewError: it is in neither.
    """
    tool = ROOT / ".tools" / "bin" / name
    program = str(tool) if tool.exists() else shutil.which(name)
    if program is None:
        raise PreviewError(f"{name} is missing: run `make setup`, or put it on PATH")
    return program


@contextlib.contextmanager
def kept(data: Path) -> Iterator[str]:
    """URL of a Prometheus on a copy of a data folder, which is left as it is, even while its own Prometheus runs.

    Raises:
        PreviewError: there is no data, or no prometheus, or it does not start.
    """
    if not (data / "wal").is_dir():
        raise PreviewError(f"{data} holds no Prometheus data; run `make demo` first")
    with tempfile.TemporaryDirectory(prefix="sdcwatch-preview-") as folder:
        copy = Path(folder) / "data"
        shutil.copytree(data, copy, ignore=shutil.ignore_patterns("lock", "queries.active"))
        with serving(copy) as url:
            yield url


@contextlib.contextmanager
def serving(data: Path) -> Iterator[str]:
    """URL of a Prometheus on a data folder that scrapes nothing and ends with the block.

    Raises:
        PreviewError: no prometheus, or it does not start.
    """
    program = find_program("prometheus")
    with tempfile.TemporaryDirectory(prefix="sdcwatch-preview-") as folder:
        config = Path(folder) / "prometheus.yaml"
        config.write_text("global: {}\n")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        command = [program, f"--config.file={config}", f"--storage.tsdb.path={data}", f"--web.listen-address={url[7:]}"]
        # What was recorded must not expire while it is looked at, however old it is.
        command.append("--storage.tsdb.retention.time=100y")
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                _await(url, process, Path(folder) / "log")
                yield url
            finally:
                process.terminate()
                process.wait(START_SECONDS)


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=1.0):
            return
        time.sleep(0.1)
    raise PreviewError(f"Prometheus did not start on the kept data:\n{log.read_text()[-2000:]}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Draw the dashboards from a Prometheus, without a Grafana.")
    parser.add_argument("prometheus", nargs="?", help="URL, such as http://127.0.0.1:9090")
    parser.add_argument("--demo", nargs="?", type=Path, const=DEMO, metavar="FOLDER", help="data that `make demo` kept")
    parser.add_argument("--start", type=float, help="unix seconds (default: all that Prometheus's head holds)")
    parser.add_argument("--end", type=float, help="unix seconds")
    parser.add_argument("--out", type=Path, default=FOLDER / "out", help="folder for the PNG files")
    parser.add_argument("--var", action="append", default=[], metavar="NAME=VALUE", help="value of a variable")
    parser.add_argument("--strict", action="store_true", help="exit 1 where a panel is empty that must not be")
    arguments = parser.parse_args(argv)
    if (arguments.prometheus is None) == (arguments.demo is None):
        parser.error("give either the URL of a Prometheus or --demo")
    if (arguments.start is None) != (arguments.end is None) or any("=" not in pair for pair in arguments.var):
        parser.error("--start and --end go together, and each --var must be NAME=VALUE")
    if arguments.start is not None and arguments.end <= arguments.start:
        parser.error("--end must be after --start")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """0: drawn; 1: with --strict a panel is empty, or Prometheus did not answer."""
    arguments = parse(argv)
    given = dict(pair.split("=", 1) for pair in arguments.var)
    asked = kept(arguments.demo) if arguments.demo else contextlib.nullcontext(arguments.prometheus)
    faults = 0
    try:
        with asked as url:
            source = recorded(url) if arguments.start is None else Source(url, arguments.start, arguments.end)
            for path in sorted(FOLDER.glob("*.json")):
                drawn = preview(path, source, arguments.out, given)
                faults += len(drawn.missing)
                print(f"{drawn.picture}: {len(drawn.missing)} panels without data, {len(drawn.excused)} rightly empty")
                for title, reason in drawn.excused.items():
                    print(f"  empty: {title}: {reason}")
                for title in drawn.missing:
                    print(f"  no data: {title}", file=sys.stderr)
    except PreviewError as error:
        print(f"preview: {error}", file=sys.stderr)
        return 1
    return 1 if faults and arguments.strict else 0


if __name__ == "__main__":
    sys.exit(main())
