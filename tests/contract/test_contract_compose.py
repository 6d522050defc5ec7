"""compose.yaml against the Compose specification, the files that it mounts, and the programs that it starts."""

from __future__ import annotations

import http.server
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from sdcwatch.cli import COMMANDS
from sdcwatch_remediation import cli

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
ENDS = {"trainer-image", "state"}


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return document


SERVICES = compose()["services"]


def test_it_follows_the_compose_specification(require: Callable[[str], Path]) -> None:
    """Held against the schema that check-jsonschema ships, since no Docker engine is needed for that."""
    require("module:check_jsonschema")
    schema = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.validate(compose(), json.loads(schema.read_text()))


def test_the_schema_would_notice_a_slip(require: Callable[[str], Path]) -> None:
    """A misspelt key is an error and not ignored."""
    require("module:check_jsonschema")
    schema = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    wrong = compose()
    wrong["services"]["grafana"]["helthcheck"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, json.loads(schema.read_text()))


def test_docker_compose_itself_reads_it() -> None:
    """Where the compose plugin is installed, its own parser agrees; no engine is asked."""
    try:
        known = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60).returncode == 0
    except OSError:
        known = False
    if not known:
        pytest.skip("docker compose is not installed; the specification's schema has been held against the file")
    done = subprocess.run(
        ["docker", "compose", "-f", ROOT / "compose.yaml", "config", "-q"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_whole_topology_is_there() -> None:
    """Trainers and agents of four nodes and a spare, and everything on the path from a metric to a new node."""
    nodes = {f"{kind}-{number}" for kind in ("agent", "trainer") for number in range(1, 6)}
    path = {"prometheus", "alertmanager", "grafana", "remediation", "simulator", "pager"}
    assert set(SERVICES) == nodes | path | ENDS


def test_every_mounted_file_exists() -> None:
    """Docker would silently create a folder where a file is missing."""
    for name, service in SERVICES.items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (ROOT / source).exists(), f"{name}: {source}"
            else:
                assert source in compose()["volumes"], f"{name}: {source}"
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_is_pinned_watched_and_reachable_from_this_machine_only(name: str) -> None:
    """Images by tag, ports on loopback, and a health check for everything that is meant to stay."""
    service = SERVICES[name]
    image, _, tag = service["image"].rpartition(":")
    assert image
    assert tag != "latest"
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:")
    assert name in ENDS or "healthcheck" in service
    assert name in ENDS or name == "simulator" or service["network_mode"] == "service:simulator"


def test_dockerfiles_pin_their_base_and_copy_what_exists() -> None:
    """What a Dockerfile copies is in the repository and not left out by its ignore file."""
    for path in DOCKER.glob("*.Dockerfile"):
        text = path.read_text()
        assert re.search(r"(?m)^FROM \S+:\d[\w.-]+$", text)
        kept = {line[1:] for line in (path.parent / f"{path.name}.dockerignore").read_text().split() if line[0] == "!"}
        for words in re.findall(r"(?m)^COPY (.+) \S+$", text):
            for source in words.split():
                assert (ROOT / source).exists(), source
                assert source.split("/")[0] in kept


def test_commands_are_ones_that_exist() -> None:
    """A renamed command would end its container at once."""
    for service in SERVICES.values():
        words = service.get("command", [])
        for first, second in itertools.pairwise(words):
            if first == "sdcwatch":
                assert second in COMMANDS
            if first == "sdcwatch-remediation":
                assert second in {"serve", "simulate"}


def test_prometheus_scrapes_the_nodes_that_the_simulator_has() -> None:
    """Inventory, scrape targets, containers and the demo's own nodes speak of the same addresses."""
    simulated = json.loads((DOCKER / "simulator.json").read_text())
    addresses = [node["address"] for node in simulated["groups"][0]["nodes"]] + simulated["spares"]
    targets = yaml.safe_load((ROOT / "alert_rules" / "targets" / "agents.yaml").read_text())[0]["targets"]
    assert targets == [f"{address}:9478" for address in addresses]
    assert [SERVICES[f"agent-{n}"]["command"][2] for n in range(1, 6)] == addresses
    assert [SERVICES[f"trainer-{n}"]["command"][2] for n in range(1, 6)] == addresses


def test_the_service_accepts_its_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`serve --check` on docker/remediation.toml, with the state that docker/state.py lays out."""
    runpy.run_path(str(DOCKER / "state.py"))["lay_out"](tmp_path, os.getuid())
    copy = tmp_path / "remediation.toml"
    copy.write_text((DOCKER / "remediation.toml").read_text().replace("/state/", f"{tmp_path}/"))
    assert cli.main(["serve", "--check", "--config", str(copy)]) == 0, capsys.readouterr().err


def test_state_keeps_its_tokens_at_a_second_start(tmp_path: Path) -> None:
    """A restart must not lock Alertmanager out; nobody else may read a token."""
    lay_out = runpy.run_path(str(DOCKER / "state.py"))["lay_out"]
    lay_out(tmp_path, os.getuid())
    before = (tmp_path / "secrets" / "webhook.token").read_text()
    lay_out(tmp_path, os.getuid())
    token = tmp_path / "secrets" / "webhook.token"
    assert token.read_text() == before
    assert token.stat().st_mode & 0o077 == 0


def test_a_node_takes_its_identity_from_the_inventory(tmp_path: Path) -> None:
    """docker/node.py waits for the running instance at its address, and runs its command as that instance."""
    asked = []

    class Inventory(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status = "Pending" if len(asked) == 1 else "Running"
            node = {"address": "127.0.1.5", "status": status, "instance_id": "i-5", "node_name": "hyperpod-i-5"}
            body = json.dumps({"nodes": [{**node, "address": "127.0.1.4", "instance_id": "i-4"}, node]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are no news."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Inventory)
    address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        done = subprocess.run(
            [sys.executable, DOCKER / "node.py", "127.0.1.5", "env"],
            env={**os.environ, "INVENTORY_URL": f"http://{address}/", "SPOOLS": str(tmp_path)},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
        thread.join(20)
    assert len(asked) == 2
    assert "SDCWATCH_INSTANCE=i-5\n" in done.stdout
    assert "SDCWATCH_NODE=hyperpod-i-5\n" in done.stdout
    assert f"SDCWATCH_SPOOL_DIR={tmp_path / 'i-5'}\n" in done.stdout
