"""deploy/remediation/: what roles and manifests grant, and that the threat model's tests exist."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import tomllib
import yaml
from botocore import xform_name
from sdcwatch_remediation.cli import main
from sdcwatch_remediation.config import check, parse

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "remediation"


MANIFESTS = {
    name: list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))
    for name in ("kubernetes", "kubernetes-postgres", "kubernetes-eks")
}
EITHER = pytest.mark.parametrize("name", ["kubernetes", "kubernetes-postgres"])


def one(name: str, kind: str) -> dict[str, Any]:
    found = [document for document in MANIFESTS[name] if document["kind"] == kind]
    assert len(found) == 1, kind
    return dict(found[0])


def pod(name: str) -> dict[str, Any]:
    return dict(one(name, "Deployment")["spec"]["template"]["spec"])


def statements(name: str, effect: str) -> list[dict[str, Any]]:
    policy = json.loads((FOLDER / "iam" / name).read_text())
    return [statement for statement in policy["Statement"] if statement["Effect"] == effect]


def actions(name: str, effect: str) -> set[str]:
    found: set[str] = set()
    for statement in statements(name, effect):
        found |= {statement["Action"]} if isinstance(statement["Action"], str) else set(statement["Action"])
    return found


def test_both_roles_grant_exactly_what_the_code_calls() -> None:
    """The observer reads and may become the actor; the actor replaces; nothing is granted that is not called."""
    model = botocore.session.get_session().get_service_model("sagemaker")
    methods = {xform_name(operation): operation for operation in model.operation_names}
    tree = ast.parse((ROOT / "remediation/sdcwatch_remediation/actions/hyperpod.py").read_text())
    words = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    words |= {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    called = {f"sagemaker:{methods[word]}" for word in words & set(methods)}
    assert "assume_role" in words
    assert actions("actor.json", "Allow") == {"sagemaker:BatchReplaceClusterNodes"}
    assert actions("observer.json", "Allow") == {*called, "sts:AssumeRole"} - actions("actor.json", "Allow")
    assert actions("actor.json", "Allow") < called
    for name in ("observer.json", "actor.json"):
        for statement in statements(name, "Allow"):
            assert "*" not in json.dumps(statement)


def test_both_roles_deny_whatever_deletes_or_updates_a_cluster() -> None:
    """Every such operation that botocore knows is denied by name on every resource, also where another policy allows
    it."""
    model = botocore.session.get_session().get_service_model("sagemaker")
    destroys = re.compile(r"(BatchDelete|BatchReboot|Delete|Detach|Move|Update)Cluster\w*")
    forbidden = {f"sagemaker:{operation}" for operation in model.operation_names if destroys.fullmatch(operation)}
    assert len(forbidden) > 8
    assert actions("actor.json", "Deny") == forbidden
    assert actions("observer.json", "Deny") == {*forbidden, "sagemaker:BatchReplaceClusterNodes"}
    for name in ("observer.json", "actor.json"):
        assert all(statement["Resource"] == "*" for statement in statements(name, "Deny"))


def test_the_actor_trusts_one_role_in_sessions_of_cases_only() -> None:
    """Not the account, not a service, and no session of another name."""
    (trust,) = statements("actor-trust.json", "Allow")
    assert trust["Principal"] == {"AWS": "arn:aws:iam::ACCOUNT:role/sdcwatch-observer"}
    assert trust["Action"] == "sts:AssumeRole"
    assert trust["Condition"] == {"StringLike": {"sts:RoleSessionName": "case-*"}}


@EITHER
def test_the_pod_is_hardened_and_off_the_accelerator_nodes(name: str) -> None:
    """No root, no writable image, no capability, no token of the Kubernetes API, no role unless it is asked for."""
    spec = pod(name)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert {"key": "nvidia.com/gpu.present", "operator": "DoesNotExist"} in terms[0]["matchExpressions"]
    kinds = {document["kind"] for document in MANIFESTS[name]}
    assert not kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}


def test_one_replica_has_the_volume_and_several_have_the_database() -> None:
    """SQLite: never two pods at once. PostgreSQL: no volume, a budget that keeps one, the URL from a Secret alone."""
    spec = one("kubernetes", "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert one("kubernetes", "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteOnce"]
    spec = one("kubernetes-postgres", "Deployment")["spec"]
    assert spec["replicas"] > one("kubernetes-postgres", "PodDisruptionBudget")["spec"]["minAvailable"] >= 1
    assert one("kubernetes-postgres", "PodDisruptionBudget")["spec"]["selector"] == spec["selector"]
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert not [volume for volume in pod("kubernetes-postgres")["volumes"] if "persistentVolumeClaim" in volume]
    config = parse(tomllib.loads(one("kubernetes-postgres", "ConfigMap")["data"]["remediation.toml"]))
    (volume,) = [v for v in pod("kubernetes-postgres")["volumes"] if v["name"] == "database"]
    assert volume["secret"]["secretName"] == "sdcwatch-remediation-database"
    assert config.database.url_file == "/etc/sdcwatch/database/url"


@EITHER
def test_the_network_policy_lets_in_one_namespace_and_out_what_is_needed(name: str) -> None:
    """In: the monitoring namespace at one port. Out: agents, AWS, names, the database; no other port."""
    spec = one(name, "NetworkPolicy")["spec"]
    assert spec["podSelector"]["matchLabels"] == one(name, "Service")["spec"]["selector"]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    (rule,) = spec["ingress"]
    assert rule["ports"] == [{"port": 9479, "protocol": "TCP"}]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    database = {5432} if name == "kubernetes-postgres" else set()
    assert {port["port"] for rule in spec["egress"] for port in rule["ports"]} == {9478, 443, 53, *database}


@EITHER
def test_the_settings_in_the_manifest_are_settings_that_only_observe(name: str) -> None:
    """The service itself accepts them, and they do nothing to a node until somebody changes the mode."""
    text = one(name, "ConfigMap")["data"]["remediation.toml"]
    config = check(parse(tomllib.loads(text)))
    assert config.policy.mode == "observe"
    mounts = pod(name)["containers"][0]["volumeMounts"]
    mounted = {mount["mountPath"] for mount in mounts}
    assert {mount["name"] for mount in mounts} == {volume["name"] for volume in pod(name)["volumes"]}
    paths = re.findall(r'"(/[^"]+)"', text)
    assert paths
    assert all(any(path.startswith(f"{folder}/") for folder in mounted) for path in paths)


def test_every_command_line_of_the_service_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Unit and manifests start `serve` with options that exist: only their configuration is missing here."""
    text = (ROOT / "deploy" / "systemd" / "sdcwatch-remediation.service").read_text()
    (started,) = re.findall(r"^ExecStart=(.+)$", text, re.MULTILINE)
    lines = [
        started.split(),
        *(pod(name)["containers"][0]["command"] for name in ("kubernetes", "kubernetes-postgres")),
    ]
    for words in lines:
        assert Path(words[0]).name == "sdcwatch-remediation"
        assert main(words[1:]) == 2
        assert f"{words[-1]} does not exist" in capsys.readouterr().err


def test_every_test_that_the_threat_model_names_exists() -> None:
    """A row without its test is a promise that nobody holds."""
    rows = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "docs" / "threat-model.md").read_text())
    assert len(rows) >= 10
    for file, name in rows:
        (path,) = (ROOT / "tests").rglob(file)
        names = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
        assert name in names, f"{file}::{name}"
