"""deploy/: units, manifests and snippets against the programs, schemas and rules that they speak of."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from sdcwatch.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
UNITS = sorted(p for p in DEPLOY.rglob("*") if p.suffix in (".service", ".timer"))
SERVICES = [path for path in UNITS if path.suffix == ".service"]
MANIFESTS = [
    (path, document)
    for path in sorted([*KUBERNETES.glob("*.yaml"), *(DEPLOY / "remediation").glob("*.yaml")])
    for document in yaml.safe_load_all(path.read_text())
]
#: The operator's own kinds have no schema here; a test below holds them against the DaemonSet.
BUILT_IN = [(path, document) for path, document in MANIFESTS if not document["apiVersion"].startswith("monitoring.")]
Require = Callable[[str], Path]


def containers(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    spec = document.get("spec", {})
    spec = spec.get("template", {}).get("spec", spec)
    yield from spec.get("initContainers", [])
    yield from spec.get("containers", [])


def unit(path: Path) -> dict[str, list[str]]:
    """Directives of a unit, continuation lines joined."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if line and line[0] not in "#[;":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """(where, words after `sdcwatch`) of every command line in deploy/."""
    for path in SERVICES:
        for value in unit(path).get("ExecStart", []):
            words = shlex.split(value)
            if words[0].endswith("/sdcwatch"):
                yield path.name, words[1:]
    for path, document in MANIFESTS:
        for container in containers(document):
            for text in container.get("args", []):
                words = shlex.split(text)
                if "sdcwatch" in words:
                    yield f"{path.name}:{container['name']}", words[words.index("sdcwatch") + 1 :]


LINES = list(command_lines())


def test_there_is_a_command_line_in_each_place() -> None:
    """The tests below see what they are meant to see."""
    assert {where.split(":")[0] for where, _ in LINES} == {
        "agent-daemonset.yaml", "agent-sidecar.yaml", "sdcwatch-agent@.service", "sdcwatch-drill@.service",
        "sdcwatch-discover.service",
    }  # fmt: skip


@pytest.mark.parametrize(("where", "words"), LINES, ids=[where for where, _ in LINES])
def test_every_option_exists(where: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A renamed option is found here, and not by a pod that restarts for ever."""
    assert words[0] in COMMANDS
    named = words[: 2 if words[0] == "discover" else 1]
    with pytest.raises(SystemExit):
        main([*named, "--help"])
    known = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out))
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize(("where", "words"), [line for line in LINES if line[1][0] == "agent"])
def test_an_agent_beyond_loopback_has_tls_and_all_three_tokens(where: str, words: list[str]) -> None:
    """It would refuse to start without TLS and a metrics token, and nobody could fetch its proof without the others."""
    wanted = {"--tls-cert", "--tls-key", "--metrics-token-file", "--events-token-file", "--latch-token-file"}
    assert wanted <= set(words)


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_units_have_no_privileges(path: Path) -> None:
    """Not root, no new privileges, no capabilities, and a file system that can be written in named places only."""
    found = unit(path)
    assert found["User"][0] in ("%i", "prometheus", "sdcwatch")
    assert found["NoNewPrivileges"] == ["yes"]
    assert found["CapabilityBoundingSet"] == [""]
    assert found["ProtectSystem"] == ["strict"]
    assert "ReadWritePaths" in found or "StateDirectory" in found
    assert found["PrivateTmp"] == ["yes"]


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """systemd-analyze, where it is installed, reads them without a warning, and rates agent and service as low."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed here")
    for path in UNITS:
        text = re.sub(r"/opt/[a-z-]+/bin/[a-z-]+", "/bin/true", path.read_text())
        (tmp_path / path.name).write_text(text)
    names = [path.name.replace("@.", "@root.") for path in UNITS]
    done = subprocess.run(
        [analyze, "verify", "--man=no", "--recursive-errors=no", *names],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if "sdcwatch" in line]
    assert (done.returncode, ours) == (0, [])
    for name in ("sdcwatch-agent@root.service", "sdcwatch-remediation.service"):
        done = subprocess.run(
            [analyze, "security", "--offline=true", name],
            cwd=tmp_path, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        rating = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
        if rating is not None:  # older ones know no --offline
            assert float(rating.group(1)) <= 2.5


@pytest.mark.parametrize(("path", "document"), BUILT_IN, ids=[f"{p.stem}-{d['kind']}" for p, d in BUILT_IN])
def test_manifests_follow_the_kubernetes_schemas(path: Path, document: dict[str, Any], require: Require) -> None:
    """The strict ones of 1.29 (the first with native sidecars) and of a current release: a misspelt key is an error."""
    require("module:kubernetes_validate")
    import kubernetes_validate

    for version in ("1.29", "1.34"):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_would_notice_a_slip(require: Require) -> None:
    """A misspelt probe is refused, so the test above means something."""
    require("module:kubernetes_validate")
    import kubernetes_validate

    document = next(d for _, d in MANIFESTS if d["kind"] == "DaemonSet")
    wrong = json.loads(json.dumps(document).replace('"livenessProbe"', '"livelinessProbe"'))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.34", strict=True)


def test_containers_run_without_root_and_without_privileges() -> None:
    """All but the init container that opens the spool's root, which keeps one capability."""
    for _, document in MANIFESTS:
        spec = document.get("spec", {})
        pod = spec.get("template", {}).get("spec", spec)
        for container in containers(document):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            if container["name"] == "training":
                continue
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"]["drop"] == ["ALL"]
            if container["name"] != "spool":
                assert pod["securityContext"]["runAsNonRoot"] is True
                assert "runAsUser" not in context
                assert "add" not in context["capabilities"]
        if "containers" in pod:
            assert pod["automountServiceAccountToken"] is False


def test_the_daemonset_and_its_monitor_fit_together() -> None:
    """Selector, port name, secrets and the job name that the rules look for."""
    monitor = next(d for _, d in MANIFESTS if d["kind"] == "PodMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    pods = next(d for _, d in MANIFESTS if d["kind"] == "DaemonSet")["spec"]["template"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    (agent,) = pods["spec"]["containers"]
    assert [port["name"] for port in agent["ports"]] == [endpoint["port"]]
    assert (pods["spec"]["hostNetwork"], endpoint["scheme"]) == (True, "https")
    secrets = {v["name"]: v["secret"]["secretName"] for v in pods["spec"]["volumes"] if "secret" in v}
    assert endpoint["authorization"]["credentials"]["name"] == secrets["tokens"]
    assert endpoint["tlsConfig"]["ca"]["secret"]["name"] == secrets["tls"]
    job = {r["replacement"] for r in endpoint["relabelings"] if r.get("targetLabel") == "job"}
    names = re.search(r'^agent_job = "(.+)"$', (ROOT / "alert_rules" / "settings.toml").read_text(), re.MULTILINE)
    assert names is not None
    assert job == {names.group(1)}
    known = {"port", "path", "scheme", "interval", "scrapeTimeout", "honorLabels", "authorization", "tlsConfig"}
    assert set(endpoint) <= known | {"relabelings"}


def test_the_sidecar_says_that_it_dies_with_the_job() -> None:
    """So that a halting rank waits for a scrape; and it is a native one, which ends last."""
    pod = next(d for _, d in MANIFESTS if d["kind"] == "Pod")
    (agent,) = pod["spec"]["initContainers"]
    assert agent["restartPolicy"] == "Always"
    assert "--started-by-rank" in agent["args"][0]
    wait = int(agent["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > wait
    spools = {
        next(e["value"] for e in pod["spec"]["containers"][0]["env"] if e["name"] == "SDCWATCH_SPOOL_DIR"),
        shlex.split(agent["args"][0])[shlex.split(agent["args"][0]).index("--spool-dir") + 1],
    }
    assert len(spools) == 1


@pytest.mark.parametrize("name", ["prometheus-scrape.yaml", "hyperpod-collector-scrape.yaml"])
def test_scrape_snippets_are_jobs_that_prometheus_accepts(name: str, require: Require, tmp_path: Path) -> None:
    """promtool loads them, and the job has the name that the rules look for."""
    tree = yaml.safe_load((DEPLOY / "slurm" / name).read_text())
    config = tree.get("receivers", {}).get("prometheus", {}).get("config", tree)
    assert [job["job_name"] for job in config["scrape_configs"]] == ["sdcwatch"]
    text = yaml.safe_dump(config).replace("/etc/prometheus", str(tmp_path))
    for file in ("secrets/sdcwatch-metrics.token", "secrets/sdcwatch-ca.crt", "targets/sdcwatch.json"):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text("[]")
    (tmp_path / "prometheus.yaml").write_text(text)
    done = subprocess.run(
        [require("promtool"), "check", "config", "--syntax-only", tmp_path / "prometheus.yaml"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def node_env() -> Any:
    path = DEPLOY / "slurm" / "hyperpod_node_env.py"
    spec = importlib.util.spec_from_file_location("hyperpod_node_env", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def instance(number: int) -> dict[str, str]:
    """One instance as HyperPod's resource file has it."""
    return {
        "InstanceName": f"w-{number}",
        "InstanceId": f"i-{number:017x}",
        "AgentIpAddress": "172.16.0.1",
        "CustomerIpAddress": f"10.1.0.{number}",
    }


RESOURCES = {
    "ClusterConfig": {"ClusterName": "blue", "ClusterArn": "arn:aws:sagemaker:us-west-2:111122223333:cluster/abc"},
    "InstanceGroups": [{"Name": "controller", "Instances": [instance(4)]}, {"Name": "w", "Instances": [instance(5)]}],
}


def test_a_hyperpod_node_learns_who_it_is() -> None:
    """From HyperPod's own resource file, by its address."""
    text = node_env().environment(RESOURCES, ["10.1.0.5", "127.0.0.1"], "ip-10-1-0-5")
    assert text.splitlines() == [
        "SDCWATCH_AGENT_HOST=10.1.0.5",
        "SDCWATCH_NODE=ip-10-1-0-5",
        f"SDCWATCH_INSTANCE=i-{5:017x}",
        "SDCWATCH_CLUSTER=blue",
    ]


@pytest.mark.parametrize(
    ("resources", "addresses", "node"),
    [
        (RESOURCES, ["10.9.9.9"], "ip-10-1-0-5"),
        (RESOURCES, ["10.1.0.4", "10.1.0.5"], "ip-10-1-0-5"),
        (RESOURCES, ["10.1.0.5"], "x\nSDCWATCH_INSTANCE=i-0"),
        ({"InstanceGroups": []}, ["10.1.0.5"], "n"),
        ([], ["10.1.0.5"], "n"),
    ],
)
def test_a_node_that_is_not_clearly_in_the_file_gets_no_name(resources: Any, addresses: list[str], node: str) -> None:
    """A wrong instance id would have the wrong machine replaced."""
    module = node_env()
    with pytest.raises(module.UnknownNode):
        module.environment(resources, addresses, node)
