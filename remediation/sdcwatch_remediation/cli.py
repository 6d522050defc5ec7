"""The command `sdcwatch-remediation`.

What it does: writes and checks the configuration, serves, lets a person look, approve, reject, hold, cancel, pause
and resume.
What it never does: touch the database or a node itself; all but `init`, `serve` and `simulate` talk to a running
service.
Exit status: 0 done, 1 a problem that it says, 2 wrong use.
"""

from __future__ import annotations

import argparse
import getpass
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sdcwatch_remediation import display, doctor
from sdcwatch_remediation._version import __version__
from sdcwatch_remediation.client import Client
from sdcwatch_remediation.config import load, read
from sdcwatch_remediation.errors import ConfigError, RemediationError, ServiceError
from sdcwatch_remediation.install import install

DEFAULT_CONFIG = "sdcwatch-remediation.toml"
#: A page knows the instance and not the case, so what it tells people to type takes either.
BY_INSTANCE = ("show", "hold", "unhold", "cancel")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["simulate"]:
        return _simulate(words[1:])
    arguments = _parser().parse_args(words)
    try:
        return int(arguments.run(arguments))
    except RemediationError as error:
        for line in str(error).splitlines():
            print(f"sdcwatch-remediation: {line}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sdcwatch-remediation", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, text: str, run: Any) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("--config", type=Path, default=Path(DEFAULT_CONFIG), help=f"default: {DEFAULT_CONFIG}")
        added.set_defaults(run=run)
        return added

    init = command("init", "write a commented configuration and its token files", _init)
    init.add_argument("--cluster", default="", metavar="NAME", help="the cluster's name, as the job reports it")
    init.add_argument("--force", action="store_true", help="write the configuration anew; token files are kept")
    command("migrate", "make the database, or take an older one to this version's schema", _migrate)
    serve = command("serve", "run the service", _serve)
    serve.add_argument("--check", action="store_true", help="only check the configuration")
    for name, text, run in (
        ("doctor", "tell why nothing would happen now, and what to do", _doctor),
        ("cases", "list the cases", _cases),
        ("show", "show one case whole", _show),
        ("approve", "approve the request that a case shows", _approve),
        ("reject", "say no to a case: its latch is released, its scheduler gets the node back", _reject),
        ("hold", "keep the service from acting on one case until `unhold`", _decide),
        ("unhold", "let the service act on a held case again", _decide),
        ("cancel", "end a case: its scheduler gets the node back, latch and quarantine mark stay", _decide),
        ("pause", "stop every action at its next step", _pause),
        ("resume", "end the pause", _resume),
    ):
        added = command(name, text, run)
        added.add_argument("--url", help="the service's URL; default: from the configuration")
        added.add_argument("--token-file", help="default: the one that the configuration names for this")
        added.add_argument("--ca-file", help="PEM certificates to trust, for TLS")
        added.add_argument("--json", action="store_true", help="print the answer as JSON")
        if name in BY_INSTANCE:
            added.add_argument("case", nargs="?", help="case id")
            added.add_argument("--instance", metavar="ID", help="instead of a case id: the instance's newest case")
        elif name in ("approve", "reject"):
            added.add_argument("case", help="case id")
        if name in ("hold", "unhold", "cancel"):
            added.set_defaults(decision=name)
        if name == "doctor":
            doctor.add_arguments(added)
        elif name not in ("cases", "show"):
            added.add_argument("--by", help="who decides; default: the login name")
            added.add_argument("--reason", default="", help="why")
        if name == "approve":
            added.add_argument("--yes", action="store_true", help="do not ask")
    commands.add_parser("simulate", help="run the HyperPod simulator on loopback")
    return parser


def _simulate(words: Sequence[str]) -> int:
    # Imported only when asked for: the service needs none of it. Its options are its own.
    from sdcwatch_remediation.simulator import command

    parser = argparse.ArgumentParser(prog="sdcwatch-remediation simulate", description="A HyperPod on loopback.")
    command.add_arguments(parser)
    return command.main(parser.parse_args(words))


def _init(arguments: argparse.Namespace) -> int:
    print(install(arguments.config, cluster=arguments.cluster, force=arguments.force))
    return 0


def _migrate(arguments: argparse.Namespace) -> int:
    settings = load(arguments.config).database
    from sdcwatch_remediation.database import Database

    database = Database(settings.url, migrates=True, new_id=settings.id)
    print(f"the database {database.id} has this version's schema" + (" and is new" if database.created else ""))
    database.close()
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    config = load(arguments.config)
    from sdcwatch_remediation.service import make_provider

    make_provider(config)
    if arguments.check:
        print(f"{arguments.config} is fine: cluster {config.cluster.name}, mode {config.policy.mode}")
        return 0
    from sdcwatch_remediation.server import serve

    return serve(config)


def _client(arguments: argparse.Namespace, scope: str) -> Client:
    url, token_file = arguments.url, arguments.token_file
    if not (url and token_file):
        server = read(arguments.config).server
        scheme = "https" if server.tls_cert_file else "http"
        host = f"[{server.host}]" if ":" in server.host else server.host
        url = url or f"{scheme}://{host}:{server.port}"
        token_file = token_file or getattr(server, f"{scope}_token_file")
    return Client(url, token_file, ca_file=arguments.ca_file)


def _cases(arguments: argparse.Namespace) -> int:
    with _client(arguments, "cases") as client:
        answer = client.get("/v1/cases")
    if arguments.json:
        return _print_json(answer)
    with _understood():
        display.cases(display.console(), answer["cases"])
    return 0


def _show(arguments: argparse.Namespace) -> int:
    with _client(arguments, "cases") as client:
        case = client.get(_case_path(arguments, client))
    if arguments.json:
        return _print_json(case)
    with _understood():
        display.case(display.console(), case)
    return 0


def _case_path(arguments: argparse.Namespace, client: Client) -> str:
    if (arguments.case is None) == (arguments.instance is None):
        raise ConfigError("give a case id, or --instance with the instance id that the page names")
    if arguments.instance is not None:
        arguments.case = _newest_of(client, arguments.instance)
    return f"/v1/cases/{_case_id(arguments)}"


def _newest_of(client: Client, instance: str) -> str:
    answer = client.get("/v1/cases")
    with _understood():
        found = next((str(case["id"]) for case in answer["cases"] if case["instance_id"] == instance), None)
    if found is None:
        raise ServiceError(f"no case names the instance {instance}; `cases` lists all")
    return found


def _doctor(arguments: argparse.Namespace) -> int:
    try:
        client = _client(arguments, "cases")
    except ConfigError as error:
        if arguments.url or arguments.token_file or arguments.ca_file:
            raise
        # The findings say the same about the file itself; here it only means that the service cannot be asked.
        del error
        return doctor.run(arguments, None)
    with client:
        return doctor.run(arguments, client)


def _approve(arguments: argparse.Namespace) -> int:
    path = f"/v1/cases/{_case_id(arguments)}"
    person = _person(arguments)
    with _client(arguments, "approve") as client:
        case = client.get(path)
        with _understood():
            request, node, digest = case["request"], case["node_name"], case["request_sha256"]
        if not arguments.json:
            print(json.dumps(request, indent=2))
        elif not arguments.yes:
            raise ConfigError("--json asks nobody; look at the request with `show --json` and add --yes")
        if not arguments.yes and not _agreed(f"{node}: approve exactly this? [y/N] "):
            return 1
        body = {**person, "request_sha256": digest}
        return _done(arguments, client.post(f"{path}/approve", body))


def _agreed(question: str) -> bool:
    try:
        agreed = input(question).strip().lower() == "y"
    except (EOFError, RuntimeError, ValueError):
        # Nobody can answer: standard input is at its end, was closed before the start, or holds no text.
        print("\nnot approved; use --yes")
        return False
    if not agreed:
        print("not approved")
    return agreed


def _reject(arguments: argparse.Namespace) -> int:
    return _post(arguments, "approve", f"/v1/cases/{_case_id(arguments)}/reject")


def _decide(arguments: argparse.Namespace) -> int:
    """`hold`, `unhold` and `cancel`: the last word of the route is the command's own name."""
    person = _person(arguments)
    with _client(arguments, "approve") as client:
        return _done(arguments, client.post(f"{_case_path(arguments, client)}/{arguments.decision}", person))


def _pause(arguments: argparse.Namespace) -> int:
    return _post(arguments, "admin", "/v1/pause")


def _resume(arguments: argparse.Namespace) -> int:
    return _post(arguments, "admin", "/v1/resume")


def _post(arguments: argparse.Namespace, scope: str, path: str) -> int:
    person = _person(arguments)
    with _client(arguments, scope) as client:
        return _done(arguments, client.post(path, person))


def _person(arguments: argparse.Namespace) -> dict[str, str]:
    by = arguments.by
    if by is None:
        try:
            by = getpass.getuser()
        except (KeyError, ImportError, OSError):
            # A container's uid often has no entry in the password database.
            by = ""
    if not by.strip():
        raise ConfigError("nobody to name as the one who decides; give a name with --by")
    return {"by": by, "reason": arguments.reason}


@contextmanager
def _understood() -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise ServiceError(f"the answer is not one of this service ({error!r}); check --url") from error


def _case_id(arguments: argparse.Namespace) -> str:
    case_id = str(arguments.case)
    if not case_id.replace("-", "").isalnum() or not case_id.isascii():
        raise ConfigError(f"{case_id!r} is not a case id; `cases` lists them")
    return case_id


def _done(arguments: argparse.Namespace, answer: dict[str, Any]) -> int:
    if arguments.json:
        return _print_json(answer)
    with _understood():
        if "id" in answer:
            display.decided(display.console(), answer)
        else:
            stopped = f"; still stopped: {answer['stopped']}" if answer.get("stopped") else ""
            display.console().print(display.clean(f"paused: {answer['paused']}{stopped}"))
    return 0


def _print_json(answer: dict[str, Any]) -> int:
    print(json.dumps(answer, indent=2, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
