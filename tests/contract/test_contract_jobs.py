"""examples/kubernetes: the job manifests against the fields of their operators, Kubernetes' schema and our statuses.

Neither operator's schema is part of this repository. The names below come from kubeflow/training-operator,
`pkg/apis/kubeflow.org/v1/common_types.go` and `pytorch_types.go`; and for HyperPodPyTorchJob from "Using the training
operator to run jobs" in the SageMaker developer guide, with the template of aws/sagemaker-hyperpod-cli (`v1_1`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from sdcwatch.cli import COMMANDS, main
from sdcwatch.errors import EXIT_HALTED

ROOT = Path(__file__).parents[2]
JOBS = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / "examples" / "kubernetes").glob("*.yaml")}
KUBEFLOW, HYPERPOD = JOBS["pytorchjob.yaml"], JOBS["hyperpod-pytorchjob.yaml"]

#: Names of fields; a leaf is the type, or the only values, that it may have.
KUBEFLOW_FIELDS: dict[str, Any] = {
    "nprocPerNode": str,
    "runPolicy": {
        "cleanPodPolicy": ("All", "Running", "None"),
        "ttlSecondsAfterFinished": int,
        "activeDeadlineSeconds": int,
        "backoffLimit": int,
        "schedulingPolicy": dict,
    },
    "elasticPolicy": {
        "minReplicas": int, "maxReplicas": int, "rdzvBackend": str, "rdzvPort": int, "rdzvHost": str, "rdzvId": str,
        "rdzvConf": list, "standalone": bool, "nProcPerNode": int, "maxRestarts": int, "metrics": list,
    },
    "pytorchReplicaSpecs": {
        role: {"replicas": int, "restartPolicy": ("Always", "OnFailure", "Never", "ExitCode"), "template": dict}
        for role in ("Master", "Worker")
    },
}  # fmt: skip
HYPERPOD_FIELDS: dict[str, Any] = {
    "nprocPerNode": str,
    "replicaSpecs": list,
    "runPolicy": {
        "jobMaxRetryCount": int,
        "restartPolicy": {
            "numRestartBeforeFullJobRestart": int, "evalPeriodSeconds": int, "maxFullJobRestarts": int,
        },
        "cleanPodPolicy": ("All", "OnlyComplete", "None"),
        "logMonitoringConfiguration": list,
    },
}  # fmt: skip
REPLICA_FIELDS: dict[str, Any] = {"name": str, "replicas": int, "template": dict}


def slips(value: Any, fields: Any, where: str) -> list[str]:
    """Keys that the operator does not know, and values that it would refuse."""
    if isinstance(fields, dict):
        found = [f"{where}.{key}: unknown" for key in value.keys() - fields.keys()]
        return found + [s for key in value.keys() & fields.keys() for s in slips(value[key], fields[key], key)]
    if isinstance(fields, tuple):
        return [] if value in fields else [f"{where}: {value!r} is none of {fields}"]
    return [] if isinstance(value, fields) else [f"{where}: {value!r} is no {fields.__name__}"]


def template(job: dict[str, Any]) -> dict[str, Any]:
    if job is KUBEFLOW:
        (replicas,) = job["spec"]["pytorchReplicaSpecs"].values()
    else:
        (replicas,) = job["spec"]["replicaSpecs"]
    return replicas["template"]  # type: ignore[no-any-return]


def test_every_field_is_one_that_the_operator_knows() -> None:
    """A misspelt policy would be dropped by the API server without a word, and its default would hold."""
    assert (KUBEFLOW["apiVersion"], KUBEFLOW["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert slips(KUBEFLOW["spec"], KUBEFLOW_FIELDS, "spec") == []
    assert (HYPERPOD["apiVersion"], HYPERPOD["kind"]) == ("sagemaker.amazonaws.com/v1", "HyperPodPyTorchJob")
    assert slips(HYPERPOD["spec"], HYPERPOD_FIELDS, "spec") == []
    assert [slip for one in HYPERPOD["spec"]["replicaSpecs"] for slip in slips(one, REPLICA_FIELDS, "replica")] == []
    wrong = {**KUBEFLOW["spec"], "runPolicy": {"cleanPodPolicy": "OnlyComplete", "backOffLimit": 3}}
    assert len(slips(wrong, KUBEFLOW_FIELDS, "spec")) == 2


@pytest.mark.parametrize("job", JOBS.values(), ids=list(JOBS))
def test_pods_follow_the_kubernetes_schemas(job: dict[str, Any], require: Callable[[str], Path]) -> None:
    """Strictly: a misspelt key in the pod is an error. Operators set the pod's restart policy themselves."""
    require("module:kubernetes_validate")
    import kubernetes_validate

    pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template(job)}
    for version in ("1.29", "1.34"):
        kubernetes_validate.validate(pod, version, strict=True)
    assert "restartPolicy" not in template(job)["spec"]


def test_status_86_neither_fails_the_job_nor_spends_its_restarts() -> None:
    """Under `ExitCode` Kubeflow takes 1 to 127 for permanent; a `backoffLimit` counts every restart of a container."""
    assert 1 <= EXIT_HALTED <= 127
    (workers,) = KUBEFLOW["spec"]["pytorchReplicaSpecs"].values()
    assert workers["restartPolicy"] == "OnFailure"
    assert "backoffLimit" not in KUBEFLOW["spec"]["runPolicy"]
    assert HYPERPOD["spec"]["runPolicy"]["jobMaxRetryCount"] >= HYPERPOD["spec"]["runPolicy"]["restartPolicy"][
        "numRestartBeforeFullJobRestart"
    ]  # fmt: skip


@pytest.mark.parametrize("job", JOBS.values(), ids=list(JOBS))
def test_sdcwatch_run_is_the_parent_of_the_launcher(job: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """With options that exist, and more time to end than torchrun gives its ranks (30 s)."""
    spec = template(job)["spec"]
    (container,) = spec["containers"]
    program, command, *words = container["command"]
    assert (program, words[-1]) == ("sdcwatch", "--")
    assert command in COMMANDS
    with pytest.raises(SystemExit):
        main([command, "--help"])
    known = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out))
    assert {word for word in words[:-1] if word.startswith("--")} <= known
    assert container["args"][0] == ("torchrun" if job is KUBEFLOW else "hyperpodrun")
    assert spec["terminationGracePeriodSeconds"] > 30


@pytest.mark.parametrize("job", JOBS.values(), ids=list(JOBS))
def test_ranks_find_spool_agent_and_node_as_the_daemonset_has_them(job: dict[str, Any]) -> None:
    """The same user, the same folder on the host, an agent that outlives the pod, and the node's name."""
    daemons = (ROOT / "deploy" / "kubernetes" / "agent-daemonset.yaml").read_text()
    agent = next(d for d in yaml.safe_load_all(daemons) if d["kind"] == "DaemonSet")["spec"]["template"]["spec"]
    spec = template(job)["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsUser"] == agent["securityContext"]["runAsUser"]
    values = {one["name"]: one for one in container["env"]}
    assert values["NODE_NAME"]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert values["SDCWATCH_AGENT"]["value"] == "external"
    spool = values["SDCWATCH_SPOOL_DIR"]["value"]
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in spec["volumes"]}
    hosts = {one["hostPath"]["path"] for one in agent["volumes"] if "hostPath" in one}
    assert volumes[mounts[spool]]["hostPath"]["path"] in hosts
    shared = values["SDCWATCH_CHECKPOINT_DIR"]["value"]
    assert any(
        shared.startswith(f"{path}/") and "persistentVolumeClaim" in volumes[name] for path, name in mounts.items()
    )
