"""deploy/remediation/: what roles and manifests grant, and that the threat model's tests exist."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import tomllib
import yaml
from sdcwatch_remediation.config import check, parse

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "remediation"
DOCUMENTS = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))


def one(kind: str) -> dict[str, Any]:
    found = [document for document in DOCUMENTS if document["kind"] == kind]
    assert len(found) == 1, kind
    return dict(found[0])


def statements(name: str, effect: str) -> list[dict[str, Any]]:
    policy = json.loads((FOLDER / "iam" / name).read_text())
    return [statement for statement in policy["Statement"] if statement["Effect"] == effect]


def actions(name: str, effect: str) -> set[str]:
    found: set[str] = set()
    for statement in statements(name, effect):
        found |= {statement["Action"]} if isinstance(statement["Action"], str) else set(statement["Action"])
    return found


def test_both_roles_grant_what_they_need_and_deny_the_rest() -> None:
    """The observer reads and may become the actor; the actor replaces; no wildcard, and an explicit Deny in both."""
    reads = {"sagemaker:DescribeCluster", "sagemaker:DescribeClusterNode", "sagemaker:ListClusterNodes"}
    assert actions("observer.json", "Allow") == {*reads, "sts:AssumeRole"}
    assert actions("actor.json", "Allow") == {"sagemaker:BatchReplaceClusterNodes"}
    forbidden = {
        "sagemaker:BatchDeleteClusterNodes",
        "sagemaker:BatchRebootClusterNodes",
        "sagemaker:DeleteCluster",
        "sagemaker:UpdateCluster",
        "sagemaker:UpdateClusterSoftware",
    }
    assert actions("actor.json", "Deny") == forbidden
    assert actions("observer.json", "Deny") == {*forbidden, "sagemaker:BatchReplaceClusterNodes"}
    for name in ("observer.json", "actor.json"):
        for statement in statements(name, "Allow"):
            assert "*" not in json.dumps(statement)
        assert all(statement["Resource"] == "*" for statement in statements(name, "Deny"))


def test_the_actor_trusts_one_role_in_sessions_of_cases_only() -> None:
    """Not the account, not a service, and no session of another name."""
    (trust,) = statements("actor-trust.json", "Allow")
    assert trust["Principal"] == {"AWS": "arn:aws:iam::ACCOUNT:role/sdcwatch-observer"}
    assert trust["Action"] == "sts:AssumeRole"
    assert trust["Condition"] == {"StringLike": {"sts:RoleSessionName": "case-*"}}


def test_the_pod_is_hardened_and_off_the_accelerator_nodes() -> None:
    """No root, no writable image, no capability, no token of the Kubernetes API, one replica at a time on SQLite."""
    deployment = one("Deployment")
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]) == (1, {"type": "Recreate"})
    pod = deployment["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert {"key": "nvidia.com/gpu.present", "operator": "DoesNotExist"} in terms[0]["matchExpressions"]
    assert not [d for d in DOCUMENTS if d["kind"] in ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")]


def test_the_network_policy_lets_in_one_namespace_and_out_what_is_needed() -> None:
    """In: the monitoring namespace at one port. Out: agents, AWS and names, and no other port."""
    spec = one("NetworkPolicy")["spec"]
    assert spec["podSelector"]["matchLabels"] == one("Service")["spec"]["selector"]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    (rule,) = spec["ingress"]
    assert rule["ports"] == [{"port": 9479, "protocol": "TCP"}]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert {port["port"] for rule in spec["egress"] for port in rule["ports"]} == {9478, 443, 53}


def test_the_settings_in_the_manifest_are_settings_that_only_observe() -> None:
    """The service itself accepts them, and they do nothing to a node until somebody changes the mode."""
    config = check(parse(tomllib.loads(one("ConfigMap")["data"]["remediation.toml"])))
    assert config.policy.mode == "observe"
    mounted = {
        mount["mountPath"] for mount in one("Deployment")["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    }
    paths = re.findall(r'"(/[^"]+)"', one("ConfigMap")["data"]["remediation.toml"])
    assert paths
    assert all(any(path.startswith(f"{folder}/") for folder in mounted) for path in paths)


def test_every_test_that_the_threat_model_names_exists() -> None:
    """A row without its test is a promise that nobody holds."""
    rows = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "docs" / "threat-model.md").read_text())
    assert len(rows) >= 10
    for file, name in rows:
        (path,) = (ROOT / "tests").rglob(file)
        names = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
        assert name in names, f"{file}::{name}"
