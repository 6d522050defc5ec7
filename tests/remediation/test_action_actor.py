"""The actor's role: taken once for one act, in a session named after the case; and the bundle kept before any act."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from sdcwatch_remediation.actions.hyperpod import HyperPod
from sdcwatch_remediation.records import Outcome
from sdcwatch_remediation.settings import Actions
from sdcwatch_remediation.simulator import Simulator, SimulatorConfig
from sdcwatch_remediation.testing.provider import fleet
from sdcwatch_remediation.testing.rig import make_rig

ROLE = "arn:aws:iam::123456789012:role/sdcwatch-actor"
CASE = "case-0123456789ab"
TAKEN = """<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult><Credentials>
<AccessKeyId>ASIAACTOR</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>actor-session</SessionToken>
<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleResult></AssumeRoleResponse>"""


class Sts:
    """A loopback STS that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []
        self.status = 200
        sts = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                """Keep quiet."""

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                sts.asked.append({key: values[0] for key, values in parse_qs(body).items()})
                answer = (
                    TAKEN
                    if sts.status == 200
                    else "<ErrorResponse><Error><Code>AccessDenied</Code></Error></ErrorResponse>"
                )
                self.send_response(sts.status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer.encode())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def sts() -> Iterator[Sts]:
    made = Sts()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join(5)
    made.server.server_close()


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    with Simulator(SimulatorConfig.of_size("demo", nodes=3, spares=1, clock_factor=0.0)) as running:
        yield running


def provider(simulator: Simulator, sts: Sts) -> HyperPod:
    return HyperPod(
        "demo",
        region="us-west-2",
        endpoint_url=simulator.url,
        access_key_id="observer",
        secret_access_key="s",
        actor_role_arn=ROLE,
        sts_endpoint_url=sts.url,
    )


def test_the_role_is_taken_once_in_a_session_named_after_the_case(simulator: Simulator, sts: Sts) -> None:
    """Reading takes no role; one replace call takes it for its shortest time."""
    made = provider(simulator, sts)
    instance = made.inventory().members[0].instance_id
    assert sts.asked == []
    assert made.acting_for(CASE).replace(instance).outcome is Outcome.ACCEPTED
    assert [(a["Action"], a["RoleArn"], a["RoleSessionName"], a["DurationSeconds"]) for a in sts.asked] == [
        ("AssumeRole", ROLE, CASE, "900")
    ]
    made.close()


@pytest.mark.parametrize("status", [403, 500, 503])
def test_a_role_that_is_not_given_is_a_definite_refusal_asked_for_once(
    simulator: Simulator, sts: Sts, status: int
) -> None:
    """No retry by boto3, and SageMaker was not asked: another instance cannot have gone."""
    made = provider(simulator, sts)
    instance = made.inventory().members[0].instance_id
    sts.status = status
    result = made.acting_for(CASE).replace(instance)
    assert (result.outcome, result.retryable, len(sts.asked)) == (Outcome.REFUSED, True, 1)
    assert {member.status for member in made.inventory().members} == {"Running"}
    made.close()


def test_a_session_name_that_is_no_case_id_sends_nothing(simulator: Simulator, sts: Sts) -> None:
    """What goes to STS is of a strict form."""
    made = provider(simulator, sts)
    assert made.acting_for("case 1&x=y").replace(f"i-{0:017x}").outcome is Outcome.REFUSED
    assert sts.asked == []
    made.close()


def test_the_bundle_stands_on_disk_before_the_node_is_touched(tmp_path: Path) -> None:
    """Each file as its digest in the manifest says, each copy of the event in it, and the skips with their reasons."""
    with make_rig(tmp_path, fleet(4)) as rig:
        rig.service.worker.context = replace(
            rig.service.worker.context, config=replace(rig.config, actions=Actions(evidence_dir=str(tmp_path / "kept")))
        )
        seen: list[bool] = []
        rig.provider.on_replace = lambda _: seen.append(
            (tmp_path / "kept" / rig.case()["id"] / "manifest.json").exists()
        )
        rig.fault(1)
        rig.rounds(4)
        case = rig.case()
        folder = tmp_path / "kept" / case["id"]
        manifest = json.loads((folder / "manifest.json").read_text())
        assert seen == [True]
        for name, about in manifest["files"].items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == about["sha256"]
        assert sum(name.startswith("events/") for name in manifest["files"]) == 3
        assert "gpu serial numbers" in manifest["skipped"]
        kept = next(line for line in case["timeline"] if line["step"] == "evidence_kept")
        assert kept["detail"]["bundle"]["files"] == len(manifest["files"])


def test_a_bundle_that_cannot_be_written_is_a_recorded_skip(tmp_path: Path) -> None:
    """A file where the folder should be: the case goes on, and says what is missing."""
    (tmp_path / "full").write_text("")
    with make_rig(tmp_path, fleet(4)) as rig:
        rig.service.worker.context = replace(
            rig.service.worker.context, config=replace(rig.config, actions=Actions(evidence_dir=str(tmp_path / "full")))
        )
        rig.fault(1)
        rig.rounds(4)
        kept = next(line for line in rig.case()["timeline"] if line["step"] == "evidence_kept")
        assert kept["detail"]["bundle"]["skipped"]["bundle"]
        assert len(rig.provider.calls) == 1
