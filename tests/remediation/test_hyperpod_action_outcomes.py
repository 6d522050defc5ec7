"""What `HyperPod.replace` says about each way in which a replace call can end."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.stub import Stubber
from sdcwatch_remediation.actions.hyperpod import HyperPod, InventoryUnreadable
from sdcwatch_remediation.records import Outcome, Provider
from sdcwatch_remediation.simulator import Simulator, SimulatorConfig

REPLACE = "BatchReplaceClusterNodes"
UNKNOWN_ID = "i-" + "f" * 17


@pytest.fixture(scope="module")
def simulator() -> Iterator[Simulator]:
    """One started simulator of four workers and two spares, its clock frozen."""
    config = SimulatorConfig.of_size("demo", nodes=4, spares=2, clock_factor=0.0, clock_start=1_790_000_000.0)
    with Simulator(config) as running:
        yield running


@pytest.fixture(scope="module")
def provider(simulator: Simulator) -> Iterator[HyperPod]:
    """One provider for the module, since building a SageMaker client is slow."""
    made = hyperpod(simulator.url)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _fresh(simulator: Simulator) -> None:
    simulator.reset()


@pytest.fixture
def victim(simulator: Simulator) -> str:
    """The id of a Running instance."""
    return str(simulator.state()["nodes"][0]["instance_id"])


def hyperpod(url: str, **settings: Any) -> HyperPod:
    settings = {"access_key_id": "any", "secret_access_key": "thing", "read_timeout_seconds": 10.0} | settings
    return HyperPod("demo", region="us-west-2", endpoint_url=url, **settings)


def test_is_a_provider(provider: HyperPod) -> None:
    """The type checker and the worker may rely on the protocol."""
    as_provider: Provider = provider
    assert as_provider.replace_request(UNKNOWN_ID) == {"ClusterName": "demo", "NodeIds": [UNKNOWN_ID]}


def test_accepted_replacement_sends_exactly_the_announced_request(
    simulator: Simulator, provider: HyperPod, victim: str
) -> None:
    """A good call is accepted, once, with the request that the intent recorded."""
    result = provider.replace(victim)
    assert (result.outcome, result.code, result.retryable) == (Outcome.ACCEPTED, "", False)
    assert [call.request for call in simulator.calls(REPLACE)] == [provider.replace_request(victim)]
    assert simulator.replacements() == {victim: 1}


def test_second_call_is_refused_and_replaces_nothing(simulator: Simulator, provider: HyperPod, victim: str) -> None:
    """While the first replacement runs, a second call gets InstanceIdInUse; after it, InstanceIdNotFound."""
    provider.replace(victim)
    assert provider.replace(victim).code == "InstanceIdInUse"
    simulator.advance(10_000)
    result = provider.replace(victim)
    assert (result.outcome, result.code, result.retryable) == (Outcome.REFUSED, "InstanceIdNotFound", False)
    assert simulator.replacements() == {victim: 1}


@pytest.mark.parametrize(
    ("fault", "outcome", "code", "retryable", "effects"),
    [
        ({"kind": "error_before"}, Outcome.UNKNOWN, "InternalFailure", False, 0),
        ({"kind": "error_after"}, Outcome.UNKNOWN, "InternalFailure", False, 1),
        ({"kind": "drop_before"}, Outcome.UNKNOWN, "ConnectionClosedError", False, 0),
        ({"kind": "drop_after"}, Outcome.UNKNOWN, "ConnectionClosedError", False, 1),
        ({"kind": "empty_answer"}, Outcome.UNKNOWN, "AnswerWithoutOutcome", False, 1),
        ({"kind": "throttle"}, Outcome.REFUSED, "ThrottlingException", True, 0),
        ({"kind": "expired_token"}, Outcome.REFUSED, "ExpiredTokenException", True, 0),
        ({"kind": "access_denied"}, Outcome.REFUSED, "AccessDeniedException", False, 0),
        ({"kind": "node_failed"}, Outcome.REFUSED, "InternalServerError", True, 0),
        ({"kind": "node_failed", "code": "InstanceIdNotFound"}, Outcome.REFUSED, "InstanceIdNotFound", False, 0),
        ({"kind": "node_failed", "code": "InvalidInstanceStatus"}, Outcome.REFUSED, "InvalidInstanceStatus", True, 0),
        ({"kind": "instance_in_use"}, Outcome.REFUSED, "InstanceIdInUse", True, 0),
        ({"kind": "replaced_by_others"}, Outcome.REFUSED, "InstanceIdInUse", True, 1),
        ({"kind": "no_capacity"}, Outcome.ACCEPTED, "", False, 1),
        ({"kind": "bad_replacement"}, Outcome.ACCEPTED, "", False, 1),
    ],
    ids=lambda value: value.get("code", value["kind"]) if isinstance(value, dict) else None,
)
def test_each_fault_has_its_outcome(
    simulator: Simulator,
    provider: HyperPod,
    victim: str,
    fault: dict[str, Any],
    outcome: Outcome,
    code: str,
    retryable: bool,
    effects: int,
) -> None:
    """Refused only where nothing happened by this call, unknown where it may have, and never a second request."""
    simulator.order(**fault)
    result = provider.replace(victim)
    assert (result.outcome, result.code, result.retryable) == (outcome, code, retryable)
    assert len(simulator.calls(REPLACE)) == 1
    assert simulator.replacements().get(victim, 0) == effects


def test_late_answer_leaves_the_outcome_unknown(simulator: Simulator, victim: str) -> None:
    """When the answer does not come in time the call may have had its effect, and here it had; it is not repeated."""
    provider = hyperpod(simulator.url, read_timeout_seconds=0.3)
    try:
        simulator.order("slow_answer", operation=REPLACE, seconds=1.0)
        result = provider.replace(victim)
    finally:
        provider.close()
    assert (result.outcome, result.code) == (Outcome.UNKNOWN, "ReadTimeoutError")
    assert simulator.replacements() == {victim: 1}
    assert len(simulator.calls(REPLACE)) == 1


def test_unreachable_endpoint_is_a_refusal_that_may_be_tried_again() -> None:
    """Where not even a connection came about nothing can have happened."""
    with socket.create_server(("127.0.0.1", 0)) as closed_soon:
        port = closed_soon.getsockname()[1]
    provider = hyperpod(f"http://127.0.0.1:{port}")
    result = provider.replace(UNKNOWN_ID)
    assert (result.outcome, result.code, result.retryable) == (Outcome.REFUSED, "EndpointConnectionError", True)
    with pytest.raises(InventoryUnreadable, match="describe_cluster on demo"):
        provider.inventory()


def test_unusable_endpoint_and_profile_send_nothing() -> None:
    """A client that cannot even be built refuses with the reason, and an inventory says so too."""
    provider = hyperpod("no url")
    assert provider.replace(UNKNOWN_ID).outcome is Outcome.REFUSED
    with pytest.raises(InventoryUnreadable, match="no url"):
        provider.inventory()
    result = HyperPod("demo", region="us-west-2", profile="nobody-has-this").replace(UNKNOWN_ID)
    assert (result.outcome, result.code) == (Outcome.REFUSED, "ProfileNotFound")


@pytest.mark.parametrize(
    "instance_id",
    [
        "",
        "all",
        "-h",
        "i-01234567",
        "i-0123456789abcdef",
        "i-0123456789abcdef00",
        "i-0123456789ABCDEF0",
        "i-0123456789abcdef0\n",
        "i-0123456789abcdef0,i-0123456789abcdef1",
        "../i-0123456789abcdef0",
        "hyperpod-i-0123456789abcdef0",
        "ⅰ-0123456789abcdef0",
        "i-" + "٠" * 17,
    ],
)
def test_nothing_is_sent_for_what_is_no_instance_id(simulator: Simulator, provider: HyperPod, instance_id: str) -> None:
    """An id that is not i- and 17 hex digits is refused before any call."""
    result = provider.replace(instance_id)
    assert (result.outcome, result.code, result.retryable) == (Outcome.REFUSED, "InvalidInstanceId", False)
    with pytest.raises(ValueError, match="nothing was sent"):
        provider.replace_request(instance_id)
    assert simulator.calls() == []


@pytest.mark.parametrize("cluster", ["", "a b", "demo\n", "../demo", "-demo", "x" * 64, "arn:aws:sagemaker:x"])
def test_cluster_name_is_checked_at_once(cluster: str) -> None:
    """A name that cannot be a cluster's is an error before anything is sent."""
    with pytest.raises(ValueError, match="neither the name nor the ARN"):
        HyperPod(cluster, region="us-west-2")


def test_expired_credentials_are_looked_up_again(
    simulator: Simulator, victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ExpiredToken the next attempt signs with the credentials that stand in the file by then."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    file.write_text("[default]\naws_access_key_id = OLD\naws_secret_access_key = x\n")
    provider = hyperpod(simulator.url, access_key_id=None, secret_access_key=None)
    try:
        simulator.order("expired_token", operation=REPLACE)
        assert provider.replace(victim).code == "ExpiredTokenException"
        file.write_text("[default]\naws_access_key_id = NEW\naws_secret_access_key = y\n")
        assert provider.replace(victim).outcome is Outcome.ACCEPTED
        simulator.order("expired_token", operation="DescribeCluster")
        assert len(provider.inventory().members) == 4
    finally:
        provider.close()
    assert [call.access_key_id for call in simulator.calls(REPLACE)] == ["OLD", "NEW"]


def test_expired_credentials_that_stay_expired_are_said(simulator: Simulator, provider: HyperPod) -> None:
    """An inventory asks once more with new credentials and then gives up, bounded."""
    simulator.order("expired_token", count=None)
    with pytest.raises(InventoryUnreadable, match="ExpiredToken"):
        provider.inventory()
    assert len(simulator.calls()) == 2


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ({"Successful": ["i-0123456789abcdef0"]}, Outcome.ACCEPTED),
        ({"Successful": ["i-0123456789abcdef1"]}, Outcome.UNKNOWN),
        ({}, Outcome.UNKNOWN),
        ({"Failed": []}, Outcome.UNKNOWN),
        ({"Failed": [{"NodeId": "i-0123456789abcdef0", "ErrorCode": "Novel", "Message": "m"}]}, Outcome.REFUSED),
        ({"Failed": [{"NodeId": "i-0123456789abcdef1", "ErrorCode": "Novel", "Message": "m"}]}, Outcome.UNKNOWN),
        (
            {
                "Successful": ["i-0123456789abcdef0"],
                "Failed": [{"NodeId": "i-0123456789abcdef0", "ErrorCode": "InstanceIdInUse", "Message": "m"}],
            },
            Outcome.UNKNOWN,
        ),
    ],
)
def test_answers_are_read_to_the_end(provider: HyperPod, answer: dict[str, Any], outcome: Outcome) -> None:
    """botocore's own Stubber agrees on the shapes; only the id that was asked for counts."""
    with Stubber(provider._get_client()) as stubber:
        stubber.add_response("batch_replace_cluster_nodes", answer, provider.replace_request("i-0123456789abcdef0"))
        assert provider.replace("i-0123456789abcdef0").outcome is outcome


MANY = [f"i-{number:017x}" for number in range(26)]


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ({"Successful": MANY}, Outcome.ACCEPTED),
        ({"Successful": MANY[1:]}, Outcome.UNKNOWN),
        (
            {"Failed": [{"NodeId": one, "ErrorCode": "InstanceIdInUse", "Message": "m"} for one in MANY]},
            Outcome.REFUSED,
        ),
        (
            {
                "Successful": MANY[1:],
                "Failed": [{"NodeId": MANY[0], "ErrorCode": "InstanceIdInUse", "Message": "m"}],
            },
            Outcome.REFUSED,
        ),
        (
            {
                "Successful": MANY[:1],
                "Failed": [{"NodeId": one, "ErrorCode": "InternalServerError", "Message": "m"} for one in MANY[1:]],
            },
            Outcome.ACCEPTED,
        ),
        (
            {"Failed": [{"NodeId": one, "ErrorCode": "InternalServerError", "Message": "m"} for one in MANY[1:]]},
            Outcome.UNKNOWN,
        ),
    ],
)
def test_of_an_answer_about_26_ids_only_the_one_that_was_asked_for_counts(
    provider: HyperPod, answer: dict[str, Any], outcome: Outcome
) -> None:
    """One id goes out however many stand in the answer; what it says of the others makes nothing done or refused."""
    with Stubber(provider._get_client()) as stubber:
        stubber.add_response("batch_replace_cluster_nodes", answer, {"ClusterName": "demo", "NodeIds": [MANY[0]]})
        assert provider.replace(MANY[0]).outcome is outcome


def test_26_ids_in_one_call_are_never_sent(simulator: Simulator, provider: HyperPod) -> None:
    """The API takes 25; of ours a call has one, and a text that holds 26 is no instance id."""
    for text in (" ".join(MANY), ",".join(MANY), "\n".join(MANY), str(MANY)):
        assert provider.replace(text).code == "InvalidInstanceId"
        with pytest.raises(ValueError, match="nothing was sent"):
            provider.replace_request(text)
    assert simulator.calls() == []


@pytest.mark.parametrize(
    ("code", "status", "outcome", "retryable"),
    [
        ("ValidationException", 400, Outcome.REFUSED, False),
        ("ResourceNotFound", 400, Outcome.REFUSED, False),
        ("UnrecognizedClientException", 400, Outcome.REFUSED, False),
        ("TooManyRequestsException", 429, Outcome.REFUSED, True),
        ("ThrottlingException", 503, Outcome.UNKNOWN, False),
        ("ServiceUnavailable", 503, Outcome.UNKNOWN, False),
        ("RequestTimeout", 408, Outcome.UNKNOWN, False),
        ("SomethingNew", 400, Outcome.UNKNOWN, False),
        ("", 502, Outcome.UNKNOWN, False),
    ],
)
def test_only_known_client_errors_are_definite(
    provider: HyperPod, code: str, status: int, outcome: Outcome, retryable: bool
) -> None:
    """A code that is not known to mean "not carried out", and every 5xx, leaves the outcome unknown."""
    with Stubber(provider._get_client()) as stubber:
        stubber.add_client_error("batch_replace_cluster_nodes", code, "said", status)
        result = provider.replace(UNKNOWN_ID)
    assert (result.outcome, result.retryable) == (outcome, retryable)
    assert result.code == (code or "HTTP 502")
