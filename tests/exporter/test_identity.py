"""Identity: every source has its turn, sources that contradict each other refuse the start, odd names are refused."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from sdcwatch.errors import ConfigurationError, IdentityError
from sdcwatch.identity import Identity, job_name, take
from sdcwatch.settings import Settings


def identity(root: Path, environ: dict[str, str] | None = None, device: str | None = None, **settings: Any) -> Identity:
    given = Settings(**{"job": "job", "spool_dir": str(root), **settings})
    return take(given, rank=5, local_rank=1, device_uuid=device, environ=environ or {})


def agent_says(root: Path, content: Any) -> None:
    folder = root / str(os.getuid())
    folder.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps({"schema": 1, **content})
    (folder / "node.json").write_text(text, encoding="utf-8")


def test_without_any_source_the_host_names_the_node(tmp_path: Path) -> None:
    """A laptop: no agent, no cloud, no GPU; nothing of the identity is guessed from a network."""
    me = identity(tmp_path)
    assert (me.node, me.host, me.instance, me.cluster) == (socket.gethostname(), socket.gethostname(), "", "")
    assert me.gpu_uuid == f"CPU-{me.node}-1"
    assert me.node_key == f"{me.node}/{me.host}"


def test_the_agents_file_names_the_machine(tmp_path: Path) -> None:
    """What the operator told the agent holds for each rank on its node."""
    agent_says(tmp_path, {"cluster": "c", "node": "n1", "instance": "i-1", "host": "h", "time": 1.0})
    me = identity(tmp_path)
    assert (me.cluster, me.node, me.instance) == ("c", "n1", "i-1")
    assert me.gpu_uuid == "CPU-i-1-1"
    assert me.node_key == "i-1"
    assert me.labels() == {
        "training_job": "job",
        "training_cluster": "c",
        "training_node": "n1",
        "training_instance": "i-1",
        "gpu_uuid": "CPU-i-1-1",
        "rank": "5",
    }


def test_slurms_name_comes_before_the_hosts(tmp_path: Path) -> None:
    """Slurm's NodeName is what its inventory calls the machine."""
    assert identity(tmp_path, {"SLURMD_NODENAME": "ip-10-0-0-1"}).node == "ip-10-0-0-1"


def test_sources_that_agree_are_no_contradiction(tmp_path: Path) -> None:
    """The same name from three sources, and empty ones that say nothing."""
    agent_says(tmp_path, {"cluster": "", "node": "n1", "instance": "i-1"})
    me = identity(tmp_path, {"SLURMD_NODENAME": "n1"}, node="n1", instance="i-1", cluster="c")
    assert (me.node, me.instance, me.cluster) == ("n1", "i-1", "c")


@pytest.mark.parametrize(
    ("agent", "settings", "environ", "named"),
    [
        ({"node": "n1"}, {"node": "n2"}, {}, ["node.json says n1", "SDCWATCH_NODE says n2"]),
        ({"node": "n1"}, {}, {"SLURMD_NODENAME": "n2"}, ["node.json says n1", "SLURMD_NODENAME says n2"]),
        ({}, {"node": "n1"}, {"SLURMD_NODENAME": "n2"}, ["SDCWATCH_NODE says n1", "SLURMD_NODENAME says n2"]),
        ({"instance": "i-1"}, {"instance": "i-2"}, {}, ["node.json says i-1", "SDCWATCH_INSTANCE says i-2"]),
        ({"cluster": "a"}, {"cluster": "b"}, {}, ["node.json says a", "SDCWATCH_CLUSTER says b"]),
    ],
)
def test_contradicting_sources_refuse_the_start_and_are_named(
    tmp_path: Path, agent: Any, settings: Any, environ: Any, named: list[str]
) -> None:
    """A page must never name the wrong machine: a stale file, a copied variable (field case 38)."""
    agent_says(tmp_path, agent)
    with pytest.raises(IdentityError) as error:
        identity(tmp_path, environ, **settings)
    assert all(text in str(error.value) for text in [*named, "correct one of them"])


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"n1"', "\ud800".encode("utf-8", "surrogatepass").hex()])
def test_a_broken_agent_file_refuses_the_start(tmp_path: Path, content: str) -> None:
    """Never passed over: the host's name could be the wrong one then."""
    agent_says(tmp_path, content)
    with pytest.raises(IdentityError, match=r"node\.json .*restart the node agent or remove the file"):
        identity(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["-h", "n[1-64]", "a,b", "x;reboot", "../x", "n1\n", " n1", "n 1", "n" * 512, "nоde", "n1/", "$(id)", "_n", "n\0"],
)
@pytest.mark.parametrize("what", ["node", "instance", "cluster"])
def test_odd_names_are_refused(tmp_path: Path, what: str, name: str) -> None:
    """Nothing that a command or a URL could read otherwise reaches a label (field case 42)."""
    with pytest.raises(ConfigurationError, match="letters, digits"):
        identity(tmp_path, **{what: name})


def test_the_devices_uuid_stands_unless_overridden(tmp_path: Path) -> None:
    """Settings, then the device, then a name made for CPU runs."""
    assert identity(tmp_path, device="GPU-1").gpu_uuid == "GPU-1"
    assert identity(tmp_path, device="GPU-1", gpu_uuid="GPU-2").gpu_uuid == "GPU-2"


@pytest.mark.parametrize(
    ("job", "environ", "expected"),
    [
        ("mine", {"SLURM_JOB_NAME": "slurm", "TORCHELASTIC_RUN_ID": "run"}, "mine"),
        (None, {"SLURM_JOB_NAME": "slurm", "TORCHELASTIC_RUN_ID": "run"}, "slurm"),
        (None, {"TORCHELASTIC_RUN_ID": "run"}, "run"),
    ],
)
def test_the_jobs_name_has_one_order(job: str | None, environ: dict[str, str], expected: str) -> None:
    """Ours, Slurm's, torchrun's."""
    assert job_name(Settings(job=job), environ) == expected


@pytest.mark.parametrize("environ", [{}, {"TORCHELASTIC_RUN_ID": "none"}, {"SLURM_JOB_NAME": ""}])
def test_a_job_without_a_name_is_told_what_to_set(environ: dict[str, str]) -> None:
    """torchrun's `none` is the default that all jobs would share."""
    with pytest.raises(ConfigurationError, match=r"set SDCWATCH_JOB=<name>.*--rdzv-id"):
        job_name(Settings(), environ)
