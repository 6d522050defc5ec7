"""Where a machine's name comes from: pods, HyperPod's file, EC2's metadata, devices; each real, each on loopback."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from sdcwatch import node_sources
from sdcwatch.agent.node import take as agent_take
from sdcwatch.device_name import DeviceName, device_name, normalised, serial_number
from sdcwatch.errors import IdentityError
from sdcwatch.identity import take
from sdcwatch.settings import Settings

MINE, OTHER = "i-0123456789abcdef0", "i-0fedcba9876543210"
POD = {"KUBERNETES_SERVICE_HOST": "10.100.0.1"}


def identity(root: Path, environ: dict[str, str], **settings: Any) -> Any:
    given = Settings(job="job", spool_dir=str(root), **settings)
    return take(given, rank=0, local_rank=0, device_uuid=None, environ=environ)


def resource_config(path: Path, *entries: tuple[str, str], cluster: str = "ml-cluster") -> Path:
    """As HyperPod's guide shows it; the fields that nobody here reads included."""
    instances = [
        {"InstanceName": f"worker-{n}", "AgentIpAddress": f"172.16.0.{n}", "CustomerIpAddress": ip, "InstanceId": name}
        for n, (name, ip) in enumerate(entries)
    ]
    arn = "arn:aws:sagemaker:us-west-2:111122223333:cluster/abcdefghij12"
    content = {
        "ClusterConfig": {"ClusterArn": arn, "ClusterName": cluster},
        "InstanceGroups": [{"Name": "workers", "InstanceType": "ml.p5.48xlarge", "Instances": instances}],
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture
def hyperpod_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "resource_config.json"
    monkeypatch.setattr(node_sources, "RESOURCE_CONFIG", path)
    monkeypatch.setattr(node_sources.hyperpod, "__defaults__", (path, None))
    monkeypatch.setattr(node_sources, "own_addresses", lambda: ["127.0.0.1", "10.1.0.7"])
    return path


class Metadata(BaseHTTPRequestHandler):
    """IMDSv2: a token by PUT, then the instance id for who shows it."""

    asked: ClassVar[list[str]] = []
    delay = threading.Event()

    def do_PUT(self) -> None:
        self.asked.append("PUT " + self.path)
        self.delay.wait(0 if not getattr(self.server, "slow", False) else 5)
        self._answer(200 if self.headers.get("X-aws-ec2-metadata-token-ttl-seconds") else 400, "token-1")

    def do_GET(self) -> None:
        self.asked.append("GET " + self.path)
        allowed = self.headers.get("X-aws-ec2-metadata-token") == "token-1"
        self._answer(200 if allowed else 401, getattr(self.server, "says", MINE))

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Silent."""


@pytest.fixture
def imds() -> Iterator[Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    server.daemon_threads = True
    Metadata.asked.clear()
    Metadata.delay.clear()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    Metadata.delay.set()
    server.shutdown()
    server.server_close()
    thread.join()


def at(server: Any) -> dict[str, str]:
    return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{server.server_port}/"}


def test_a_pod_is_told_its_node_and_hyperpods_name_holds_the_instance(tmp_path: Path) -> None:
    """The downward API's `spec.nodeName` under the names that people give it; outside a pod these are common words."""
    me = identity(tmp_path, POD | {"NODE_NAME": f"hyperpod-{MINE}"})
    assert (me.node, me.instance) == (f"hyperpod-{MINE}", MINE)
    assert identity(tmp_path, POD | {"K8S_NODE_NAME": "ip-10-0-0-1.ec2.internal"}).instance == ""
    assert identity(tmp_path, {"NODE_NAME": "my-laptop-env"}).node != "my-laptop-env"
    assert identity(tmp_path, {}, node=f"hyperpod-{MINE}").instance == MINE
    assert identity(tmp_path, {}, node="hyperpod-i-xyz").instance == ""


def test_hyperpods_file_speaks_for_the_own_entry_only(tmp_path: Path, hyperpod_file: Path) -> None:
    """The entry with an address of this machine; peers' entries may be of instances that were replaced since."""
    resource_config(hyperpod_file, (OTHER, "10.1.0.6"), (MINE, "10.1.0.7"))
    me = identity(tmp_path, {"SLURMD_NODENAME": "ip-10-1-0-7"})
    assert (me.node, me.instance, me.cluster) == ("ip-10-1-0-7", MINE, "ml-cluster")
    assert agent_take(Settings(), {}).instance == MINE
    resource_config(hyperpod_file, (OTHER, "10.1.0.6"))
    assert identity(tmp_path, {}).instance == ""


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"InstanceGroups": 3}', '{"InstanceGroups":[{"Instances":[3]}]}']
)
def test_a_file_that_says_nothing_is_passed_over(tmp_path: Path, hyperpod_file: Path, content: str) -> None:
    """HyperPod's file is another program's: a broken one must not keep a job from training."""
    hyperpod_file.write_text(content)
    assert identity(tmp_path, {}).instance == ""
    resource_config(hyperpod_file, (MINE, "10.1.0.7"), (OTHER, "10.1.0.7"))
    assert identity(tmp_path, {}).instance == "", "two entries with one address name nobody"


@pytest.mark.parametrize(
    ("environ", "settings", "said"),
    [
        (POD | {"NODE_NAME": f"hyperpod-{OTHER}"}, {}, [f"the node name hyperpod-{OTHER} says {OTHER}"]),
        (POD | {"NODE_NAME": "n1"}, {"node": "n2"}, ["the pod's NODE_NAME says n1", "SDCWATCH_NODE says n2"]),
        (POD | {"NODE_NAME": "n1", "SLURMD_NODENAME": "n2"}, {}, ["NODE_NAME says n1", "SLURMD_NODENAME says n2"]),
        ({}, {"instance": OTHER}, [f"SDCWATCH_INSTANCE says {OTHER}", f"resource_config.json says {MINE}"]),
        ({}, {"cluster": "mine"}, ["SDCWATCH_CLUSTER says mine", "resource_config.json says ml-cluster"]),
    ],
)
def test_sources_that_contradict_each_other_are_named(
    tmp_path: Path, hyperpod_file: Path, environ: Any, settings: Any, said: list[str]
) -> None:
    """A page must never name the wrong machine: the start is refused, with both sources in the message."""
    resource_config(hyperpod_file, (MINE, "10.1.0.7"))
    with pytest.raises(IdentityError) as error:
        identity(tmp_path, environ, **settings)
    assert all(part in str(error.value) for part in [*said, "correct one of them"])


def test_the_agents_file_is_one_of_the_sources(tmp_path: Path, hyperpod_file: Path) -> None:
    """A `node.json` of the machine that had this address before refuses the start."""
    resource_config(hyperpod_file, (MINE, "10.1.0.7"))
    (tmp_path / str(os.getuid())).mkdir()
    (tmp_path / str(os.getuid()) / "node.json").write_text(json.dumps({"instance": OTHER}))
    with pytest.raises(IdentityError, match=rf"node\.json says {OTHER}.*resource_config\.json says {MINE}"):
        identity(tmp_path, {})


def test_ec2_is_asked_with_a_token_and_only_where_nothing_else_names_the_instance(tmp_path: Path, imds: Any) -> None:
    """IMDSv2 on loopback: PUT, then GET with the token; a proxy of the job's is not used."""
    proxies = {"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    assert identity(tmp_path, at(imds) | proxies).instance == MINE
    assert Metadata.asked == ["PUT /latest/api/token", "GET /latest/meta-data/instance-id"]
    assert identity(tmp_path, at(imds), instance=OTHER).instance == OTHER
    assert identity(tmp_path, at(imds) | {"AWS_EC2_METADATA_DISABLED": "true"}).instance == ""
    assert len(Metadata.asked) == 2
    imds.says = "<html>a captive portal"
    assert identity(tmp_path, at(imds)).instance == ""


def test_a_laptop_is_never_delayed(tmp_path: Path, imds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Firmware of another maker: no packet leaves. An EC2 machine whose service hangs: a second at most."""
    vendor = tmp_path / "sys_vendor"
    vendor.write_text("LENOVO\n")
    monkeypatch.setattr(node_sources, "IMDS", f"http://127.0.0.1:{imds.server_port}")
    assert node_sources.imds_instance({}, vendor) is None
    assert Metadata.asked == []
    vendor.write_text("Amazon EC2\n")
    assert node_sources.imds_instance({}, vendor) == MINE
    imds.slow = True
    began = time.monotonic()
    assert node_sources.imds_instance({}, vendor) is None
    assert time.monotonic() - began < 3


class FakeNvml:
    """NVML's Python binding, as far as it is used: one GPU, one slice on it."""

    GPU, MIG = "GPU-11111111-2222-3333-4444-555555555555", "MIG-99999999-2222-3333-4444-555555555555"

    def nvmlInit(self) -> None:
        """Ready."""

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index != 3:
            raise RuntimeError("no such device")
        return "gpu"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return "mig" if uuid == self.MIG else "gpu"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        if handle != "mig":
            raise RuntimeError("no slice")
        return "gpu"

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:
        return self.GPU.encode()

    def nvmlDeviceGetSerial(self, handle: str) -> str:
        if handle != "gpu":
            raise RuntimeError("a slice has no serial number")
        return "1650522003820"


def test_a_device_is_called_what_dcgm_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's UUID, NVML's for a torch without one, a slice with its parent beside it; a CPU has none."""
    bare = FakeNvml.GPU.removeprefix("GPU-")
    properties = type("Properties", (), {"uuid": bare.upper()})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    gpu, nvml = torch.device("cuda", 0), FakeNvml()
    assert device_name(torch.device("cpu")) is None
    assert device_name(gpu, {}, nvml) == DeviceName(FakeNvml.GPU)
    assert device_name(gpu, {"CUDA_VISIBLE_DEVICES": FakeNvml.MIG}, nvml) == DeviceName(FakeNvml.MIG, FakeNvml.GPU)
    assert device_name(gpu, {"CUDA_VISIBLE_DEVICES": FakeNvml.MIG}, object()) == DeviceName(FakeNvml.MIG)
    del properties.uuid
    assert device_name(gpu, {"CUDA_VISIBLE_DEVICES": "3,4"}, nvml) == DeviceName(FakeNvml.GPU)
    assert device_name(gpu, {"CUDA_VISIBLE_DEVICES": "5"}, nvml) is None
    assert (normalised("gpu-" + bare), normalised("GPU-1"), normalised("")) == (FakeNvml.GPU, "", "")


def test_a_boards_serial_number_is_nvmls_also_for_a_slice_of_it() -> None:
    """A slice has the board's; without NVML, or on a board without one, there is none and no error."""
    nvml = FakeNvml()
    assert serial_number(DeviceName(FakeNvml.GPU), nvml) == "1650522003820"
    assert serial_number(DeviceName(FakeNvml.MIG, FakeNvml.GPU), nvml) == "1650522003820"
    assert serial_number(DeviceName(FakeNvml.MIG), nvml) == ""
    assert serial_number(DeviceName(FakeNvml.GPU), object()) == ""


def test_a_slices_parent_stands_in_the_spool_and_in_no_label(tmp_path: Path) -> None:
    """Two slices of one GPU stay two devices; who looks for the card finds it."""
    given = Settings(job="job", spool_dir=str(tmp_path))
    names = {"device_uuid": FakeNvml.MIG, "device_parent": FakeNvml.GPU}
    me = take(given, rank=0, local_rank=0, environ={}, **names)  # type: ignore[arg-type]
    assert me.record()["gpu_parent"] == FakeNvml.GPU
    assert me.labels()["gpu_uuid"] == FakeNvml.MIG
    assert "gpu_parent" not in me.labels()
